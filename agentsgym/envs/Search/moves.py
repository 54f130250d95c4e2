"""Parse the agent's moves: its answer, and in Search-R1's tags its search."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from agentsgym.envs.shared.numbers import without_thoughts
from agentsgym.types import Action, ToolCall

TOOL = "search"
MAX_QUERY_CHARS = 1000

#: The schema of the tool, for the chat template.
SEARCH_SCHEMA = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Find the passages that match a query best.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {
                    "type": "string",
                    "description": "What to look for, in a few words.",
                    "minLength": 1,
                    "maxLength": MAX_QUERY_CHARS,
                }
            },
            "required": ["query"],
        },
    },
}

NO_ANSWER = "Call the search tool, or give the answer."

_BLOCK = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SAY_WHAT = "Write <search>your query</search> to search, or <answer>your answer</answer> to answer."


@dataclass(frozen=True, slots=True)
class Search:
    """A search and its query."""

    query: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The final answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Mistake:
    """A turn that is neither, with an explanation for the agent: what was wrong and what would be right."""

    message: str


def answer_in(text: str) -> str:
    """Extract the answer from a turn without a call: its text, or the content of its last ``<answer>``."""
    said = without_thoughts(text)
    tagged = _ANSWER.findall(said)
    return (tagged[-1] if tagged else said).strip()


def move_in_tags(text: str) -> Search | Answer | Mistake:
    """Parse a turn of the tag format; the first complete block counts."""
    block = _BLOCK.search(without_thoughts(text))
    if block is None:
        return Mistake(f"That was neither a search nor an answer. {_SAY_WHAT}")
    content = block[2].strip()
    if not content:
        return Mistake(f"The block <{block[1]}> was empty. {_SAY_WHAT}")
    if block[1] == "answer":
        return Answer(content)
    if len(content) > MAX_QUERY_CHARS:
        return Mistake(f"A query may have {MAX_QUERY_CHARS} characters, got {len(content)}.")
    return Search(content)


def without_margins(action: Action) -> Action:
    """Strip the queries of an action's searches, so that a query of only white space does not fit the tool's schema."""
    return replace(action, tool_calls=[_without_margins(call) for call in action.tool_calls])


def _without_margins(call: ToolCall) -> ToolCall:
    query = call.arguments.get("query") if call.name == TOOL and call.error is None else None
    if not isinstance(query, str) or query == query.strip():
        return call
    return replace(call, arguments={**call.arguments, "query": query.strip()})
