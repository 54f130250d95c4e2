"""Parse searches and answers, and format results, in both formats of a turn: tool calls and Search-R1's tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from agentsgym.envs.Search.corpus import Passage
from agentsgym.types import Action

TOOL = "search"
MAX_QUERY_CHARS = 1000

#: The schema of the search tool, for the chat template.
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

NO_ANSWER_MESSAGE = "Call the search tool, or give the answer."

_BLOCK = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FORMAT_HINT = "Write <search>your query</search> to search, or <answer>your answer</answer> to answer."


def extract_answer(text: str) -> str:
    """Extract the answer from a turn without a call: its text, or the content of its last ``<answer>``."""
    tagged = _ANSWER.findall(text)
    return (tagged[-1] if tagged else text).strip()


def parse_tagged_turn(text: str) -> tuple[Literal["search", "answer", "invalid"], str]:
    """Parse a turn of the tag format; the first complete block counts.

    Returns:
        ``("search", query)``, ``("answer", text)``, or ``("invalid", message to the agent)``.
    """
    block = _BLOCK.search(text)
    if block is None:
        return "invalid", f"That was neither a search nor an answer. {_FORMAT_HINT}"
    content = block[2].strip()
    if not content:
        return "invalid", f"The block <{block[1]}> was empty. {_FORMAT_HINT}"
    if block[1] == "answer":
        return "answer", content
    if len(content) > MAX_QUERY_CHARS:
        return "invalid", f"A query may have {MAX_QUERY_CHARS} characters, got {len(content)}."
    return "search", content


def strip_queries(action: Action) -> Action:
    """Strip the queries of an action's searches, so that a query of only whitespace fails the tool's schema."""
    calls = [*action.tool_calls]
    for index, call in enumerate(calls):
        query = call.arguments.get("query") if call.name == TOOL and call.error is None else None
        if isinstance(query, str) and query != query.strip():
            calls[index] = replace(call, arguments={**call.arguments, "query": query.strip()})
    return replace(action, tool_calls=calls)


def format_passages(passages: Sequence[Passage], max_chars: int, *, in_tags: bool) -> str:
    """Format the passages that a search found as a tool result, or in Search-R1's format (arXiv:2503.09516).

    Args:
        passages: The passages, the best first.
        max_chars: The maximum number of characters per passage.
        in_tags: Whether to use Search-R1's format.
    """
    pieces: list[str] = []
    for number, one in enumerate(passages, 1):
        text = one.text if len(one.text) <= max_chars else f"{one.text[: max_chars - 1]}…"
        if in_tags:
            pieces.append(f"Doc {number}(Title: {one.title}) {text}")
        else:
            pieces.append(f"[{number}] {one.title}\n{text}" if one.title else f"[{number}] {text}")
    found = ("\n" if in_tags else "\n\n").join(pieces) or "No passage matches."
    return f"<information>{found}</information>" if in_tags else found
