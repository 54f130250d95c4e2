"""Find the call that caused a call, so that the calls of a program form a tree.

A call follows, by the first rule that applies:

1. the call whose conversation it continues,
2. the call that the program named,
3. the same call as an earlier one with the same prompt (a retry, or one of several answers),
4. the latest call of whose answer its prompt contains a line, or the id of a tool call (a history that was summarized,
   a task or a result of another agent, a handoff),
5. the latest call whose answer contains its last message (a part of a task for another agent),
6. none: it is a root.

Lines are those of an answer's text and of the arguments of its tool calls. A line that the call's own prompt contains
does not identify the answer: a label such as "very positive" stands in the instructions of every call that has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from agentsgym.tokens.tool_messages import strings_in
from agentsgym.types import Message

_SHORTEST: Final = 12  # characters of a line that identifies an answer if it occurs elsewhere
_MAX_LINES: Final = 8  # of an answer, the longest


@dataclass(slots=True)
class CallTree:
    """The calls so far.

    Attributes:
        parents: The index of each call's parent; None for a root.
        num_conversations: The number of calls that continue no other.
    """

    parents: list[int | None] = field(default_factory=list[int | None])
    num_conversations: int = 0
    _ids: dict[str, int] = field(default_factory=dict[str, int])
    _prompts: dict[int, int] = field(default_factory=dict[int, int])
    _lines: list[list[str]] = field(default_factory=list[list[str]])
    _answers: list[str] = field(default_factory=list[str])
    _tool_calls: list[frozenset[str]] = field(default_factory=list[frozenset[str]])

    def add(
        self, call_id: str, prompt: Sequence[Message], answer: Message, continued: int | None, named: str | None
    ) -> int | None:
        """Add an answered call, and return the index of its parent.

        Args:
            call_id: The id of the call.
            prompt: The complete prompt.
            answer: The answer, as it was returned.
            continued: The index of the call whose conversation it continues.
            named: The id of the call that the program named as the parent.
        """
        key = hash(tuple((one["role"], one["content"], str(one.get("tool_calls", ""))) for one in prompt))
        parent = continued
        if parent is None:
            self.num_conversations += 1
            parent = self._caused_by(key, prompt, named)
        self._ids[call_id] = self._prompts[key] = len(self.parents)
        self.parents.append(parent)
        self._answers.append(_text([answer]))
        self._tool_calls.append(_tool_calls([answer]))
        lines = {line.strip() for line in self._answers[-1].splitlines()}
        new = [line for line in lines if len(line) >= _SHORTEST and not any(line in one["content"] for one in prompt)]
        self._lines.append(sorted(new, key=len)[-_MAX_LINES:])
        return parent

    def index(self, call_id: str) -> int | None:
        """The index of a call; None for an unknown id."""
        return self._ids.get(call_id)

    def _caused_by(self, key: int, prompt: Sequence[Message], named: str | None) -> int | None:
        if named in self._ids:
            return self._ids[named]
        if key in self._prompts:
            return self.parents[self._prompts[key]]
        text, last = _text(prompt), prompt[-1]["content"].strip()
        latest = [*range(len(self.parents))][::-1]
        tool_calls = _tool_calls(prompt)
        found = next(
            (
                index
                for index in latest
                if self._tool_calls[index] & tool_calls or any(line in text for line in self._lines[index])
            ),
            None,
        )
        if found is None and len(last) >= _SHORTEST:
            found = next((index for index in latest if last in self._answers[index]), None)
        return found


def _tool_calls(messages: Sequence[Message]) -> frozenset[str]:
    """The ids of tool calls that messages make or answer."""
    made = [str(call.get("id")) for message in messages for call in message.get("tool_calls", ())]
    return frozenset(made) | {message["tool_call_id"] for message in messages if "tool_call_id" in message}


def _text(messages: Sequence[Message]) -> str:
    """The texts of messages, and the values in the arguments of their tool calls."""
    texts: list[str] = []
    for message in messages:
        texts.append(message["content"])
        for call in message.get("tool_calls", ()):
            texts += strings_in(_values(call["function"]["arguments"]))
    return "\n".join(texts)


def _values(arguments: Any) -> Any:
    """Arguments without the names of their fields."""
    if isinstance(arguments, Mapping):
        return [_values(one) for one in cast("Mapping[Any, Any]", arguments).values()]
    return [_values(one) for one in cast("list[Any]", arguments)] if isinstance(arguments, list) else arguments
