"""Read what the agent does: searches and answers, as calls of a tool or in Search-R1's tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentsgym.envs.thoughts import without_thoughts
from agentsgym.errors import did_you_mean
from agentsgym.texts import shown
from agentsgym.types import Action, ToolCall

TOOL = "search"
MAX_QUERY_CHARS = 1000

#: The tool as the chat template shows it.
SEARCH_SCHEMA = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Find the passages that match a query best.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for, in a few words."}},
            "required": ["query"],
        },
    },
}

_BLOCK = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SAY_WHAT = "Write <search>your query</search> to search, or <answer>your answer</answer> to answer."


@dataclass(frozen=True, slots=True)
class Search:
    """A search.

    Attributes:
        query: What is looked for.
        call: The call that asks for it; None in tags.
    """

    query: str
    call: ToolCall | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The final answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Mistake:
    """Something that is neither, and what to tell the agent.

    Attributes:
        message: What was wrong and what would be right.
        call: The call that was wrong; None where there is none to answer.
    """

    message: str
    call: ToolCall | None = None


Move = Search | Answer | Mistake


def moves_of_calls(action: Action) -> Sequence[Move]:
    """Read an action of the tool format: a move for each call, in order; without calls its text is the answer."""
    if action.tool_calls:
        return [_move_of_call(call) for call in action.tool_calls]
    if action.finish_reason == "length":
        return [Mistake("Your last turn was cut off. Call the search tool, or give the bare answer, in fewer words.")]
    said = without_thoughts(action.text)
    tagged = _ANSWER.findall(said)
    answer = (tagged[-1] if tagged else said).strip()
    return [Answer(answer) if answer else Mistake("Call the search tool, or give the answer.")]


def moves_of_tags(action: Action) -> Sequence[Move]:
    """Read an action of the tag format, of which the first whole block counts: one move."""
    block = _BLOCK.search(without_thoughts(action.text))
    if block is None:
        return [Mistake(f"That was neither a search nor an answer. {_SAY_WHAT}")]
    content = block[2].strip()
    if not content:
        return [Mistake(f"The block <{block[1]}> was empty. {_SAY_WHAT}")]
    if block[1] == "answer":
        return [Answer(content)]
    error = _query_error(content)
    return [Mistake(error) if error else Search(content)]


def _move_of_call(call: ToolCall) -> Move:
    error = call.error or _call_error(call)
    return Mistake(f"Error: {error}", call) if error else Search(call.arguments["query"].strip(), call)


def _call_error(call: ToolCall) -> str | None:
    if call.name != TOOL:
        return f"there is no tool {shown(call.name)}{did_you_mean(call.name, [TOOL])}"
    for key in call.arguments:
        if key != "query":
            return f"{TOOL} takes 'query' alone, got {shown(key)}"
    query = call.arguments.get("query")
    if not isinstance(query, str) or not query.strip():
        return f"{TOOL} needs a 'query' (text), got {shown(query)}"
    return _query_error(query)


def _query_error(query: str) -> str | None:
    if len(query) > MAX_QUERY_CHARS:
        return f"A query may have {MAX_QUERY_CHARS} characters, got {len(query)}."
    return None
