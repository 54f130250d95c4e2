"""An agent that explores any environment at random, with its tools and the words of the conversation."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentsgym.agents.base import Agent
from agentsgym.seeding import derive_seed
from agentsgym.types import Action, ToolCall, TurnRequest

# Text that a prompt marks as a possible answer, with brackets or quotes.
_MARKED = re.compile(r"\[[^\[\]\n]{1,40}\]|[\"'`“]([^\"'`“”\n]{1,40})[\"'`”]")
_WORD = re.compile(r"\w+(?:['\-]\w+)*")
_NUMBER = re.compile(r"-?\d+")
_MAX_CHARACTERS = 4000  # length of the end of the conversation from which words are drawn
_CALL_FRACTION = 0.8  # of the turns in which there are tools
_MAX_DEPTH = 4  # nesting depth of arguments


class ExploringAgent(Agent):
    """An agent that answers with a random well-formed tool call, or with a text drawn from the prompt.

    Such a text is a phrase that the environment marks (with brackets or quotes), a number between the smallest and the
    largest in the prompt, or one of its words. Each session has its own random stream, seeded by the agent's seed and
    the order in which sessions make their first request; its answers depend only on that stream and the conversation.
    """

    def __init__(self, *, seed: int = 0) -> None:
        """Set up; nothing is drawn.

        Args:
            seed: Seed of the random streams.
        """
        self._seed = seed
        self._streams: dict[str, random.Random] = {}
        self._num_sessions = 0

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Answer each session with a draw from its random stream."""
        actions: list[Action] = []
        for request in requests:
            stream = self._streams.get(request.session_id)
            if stream is None:
                stream = random.Random(derive_seed("exploring agent", self._seed, self._num_sessions))
                self._num_sessions += 1
                self._streams[request.session_id] = stream
            shown = "\n".join(message["content"] for message in request.messages if message["role"] != "assistant")
            shown = shown[-_MAX_CHARACTERS:]
            if request.tools and stream.random() < _CALL_FRACTION:
                call = random_call(stream.choice(list(request.tools)), shown, stream)
                actions.append(Action(text="", tool_calls=(call,)))
            else:
                actions.append(Action(text=random_phrase(shown, stream)))
        return actions

    def finish(self) -> None:
        """Drop the random streams of the sessions, which have ended."""
        self._streams.clear()


def random_call(tool: Mapping[str, Any], text: str, stream: random.Random) -> ToolCall:
    """Create a random well-formed call to a tool from its JSON schema; text arguments are drawn from ``text``."""
    function: Any = tool.get("function", tool)
    parameters: dict[str, Any] = {**(function.get("parameters") or {}), "type": "object"}
    return ToolCall(name=str(function.get("name", "")), arguments=_value(parameters, text, stream, 0))


def random_phrase(text: str, stream: random.Random) -> str:
    """Draw a marked phrase from a text, a number between its smallest and its largest number, or one of its words."""
    marked = [(match[0], match[1]) for match in _MARKED.finditer(text)]
    numbers = [int(number[:18]) for number in _NUMBER.findall(text)]
    words = _WORD.findall(text) or ["yes"]
    kinds = ["phrase"] * (2 if marked else 0) + ["number"] * (len(set(numbers)) > 1) + ["word"]
    kind = stream.choice(kinds)
    if kind == "phrase":
        whole, inner = stream.choice(marked)
        return inner or (whole if stream.random() < 0.5 else whole[1:-1])
    return str(stream.randint(min(numbers), max(numbers))) if kind == "number" else stream.choice(words)


def _value(schema: Any, text: str, stream: random.Random, depth: int) -> Any:
    """Draw a value that fits the usual keys of a JSON schema."""
    fields: dict[str, Any] = dict(cast("Mapping[str, Any]", schema)) if isinstance(schema, Mapping) else {}
    if "const" in fields:
        return fields["const"]
    if fields.get("enum"):
        return stream.choice(list(fields["enum"]))
    for name in ("anyOf", "oneOf"):
        if fields.get(name):
            return _value(stream.choice(list(fields[name])), text, stream, depth)
    kind = fields.get("type", "string")
    kind = stream.choice(cast("list[Any]", kind)) if isinstance(kind, list) else kind
    if kind in ("array", "object"):
        return _nested(kind, fields, text, stream, depth)
    return _scalar(kind, fields, text, stream)


def _nested(kind: str, fields: Mapping[str, Any], text: str, stream: random.Random, depth: int) -> Any:
    if kind == "array":
        low = int(fields.get("minItems", 0 if depth >= _MAX_DEPTH else 1))
        size = low if depth >= _MAX_DEPTH else stream.randint(low, min(int(fields.get("maxItems", low + 2)), low + 2))
        first = list(cast("list[Any]", fields.get("prefixItems") or ()))  # the item schemas of a tuple
        parts = [*first, *[fields.get("items")] * size][:size]
        return [_value(part, text, stream, depth + 1) for part in parts]
    required = set(fields.get("required") or ())
    return {
        name: _value(inner, text, stream, depth + 1)
        for name, inner in dict(fields.get("properties") or {}).items()
        if name in required or (depth < _MAX_DEPTH and stream.random() < 0.5)
    }


def _scalar(kind: Any, fields: Mapping[str, Any], text: str, stream: random.Random) -> Any:
    if kind in ("integer", "number"):
        numbers = [int(number[:9]) for number in _NUMBER.findall(text)] or [0, 9]
        low = fields.get("minimum", min(*numbers, fields.get("maximum", min(numbers))))
        high = max(low, fields.get("maximum", max(numbers)))
        drawn = stream.randint(int(low), int(high))
        return drawn if kind == "integer" else float(drawn)
    if kind == "boolean":
        return stream.random() < 0.5
    return None if kind == "null" else random_phrase(text, stream)
