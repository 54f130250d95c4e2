"""Find the call that caused a call, so that the calls of a program form a tree.

A call follows, by the first rule that applies:

1. the call whose conversation it continues,
2. the call that the program named,
3. the same call as an earlier one with the same prompt (a retry, or one of several answers),
4. the latest call whose answer its prompt contains (a history that was summarized, a result of another agent),
5. the latest call whose answer contains its last message (a task that was handed to another agent),
6. none: it is a root.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from agentsgym.tokens.tool_messages import strings_in
from agentsgym.types import Message

_SHORTEST: Final = 8  # characters of a text that identifies a call if it occurs elsewhere


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
    _prompts: dict[str, int] = field(default_factory=dict[str, int])
    _answers: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])

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
        key = json.dumps([*prompt], sort_keys=True, default=str)
        parent = continued
        if parent is None:
            self.num_conversations += 1
            parent = self._caused_by(key, prompt, named)
        self._ids[call_id] = self._prompts[key] = len(self.parents)
        self.parents.append(parent)
        self._answers.append(_texts(answer))
        return parent

    def index(self, call_id: str) -> int | None:
        """The index of a call; None for an unknown id."""
        return self._ids.get(call_id)

    def _caused_by(self, key: str, prompt: Sequence[Message], named: str | None) -> int | None:
        if named in self._ids:
            return self._ids[named]
        if key in self._prompts:
            return self.parents[self._prompts[key]]
        text = "\n".join(message["content"] for message in prompt)
        last = prompt[-1]["content"].strip()
        contained = [any(one in text for one in texts) for texts in self._answers]
        if not any(contained) and len(last) >= _SHORTEST:
            contained = [any(last in one for one in texts) for texts in self._answers]
        return max((index for index, is_contained in enumerate(contained) if is_contained), default=None)


def _texts(answer: Message) -> tuple[str, ...]:
    """The texts in an answer that are long enough to identify it: its text and the arguments of its calls."""
    texts = [
        answer["content"],
        *(text for call in answer.get("tool_calls", ()) for text in strings_in(call["function"]["arguments"])),
    ]
    return tuple(text.strip() for text in texts if len(text.strip()) >= _SHORTEST)
