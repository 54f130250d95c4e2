"""Represent the objects that are consistent with all answers as a bit mask, in which bit i stands for object i."""

from __future__ import annotations

from collections.abc import Sequence

from agentsgym.envs.TwentyQuestions.knowledge import VALUES, KnowledgeBase


class Candidates:
    """The objects and properties of one game as bit masks."""

    def __init__(self, knowledge: KnowledgeBase, objects: Sequence[str], properties: Sequence[str]) -> None:
        self.objects = tuple(objects)
        self.properties = tuple(properties)
        self.all = (1 << len(self.objects)) - 1
        self.bit = {name: 1 << i for i, name in enumerate(self.objects)}
        self.mask_by_value = {key: self._masks(knowledge, key) for key in self.properties}

    def mask(self, knowledge: KnowledgeBase, key: str, value: str) -> int:
        """Return the objects with a value of a property, or of a question that is derived from names or sizes."""
        if key not in self.mask_by_value:
            self.mask_by_value[key] = self._masks(knowledge, key)
        return self.mask_by_value[key][value]

    def _masks(self, knowledge: KnowledgeBase, key: str) -> dict[str, int]:
        masks: dict[str, int] = dict.fromkeys(VALUES, 0)
        for name, bit in self.bit.items():
            value = knowledge.value(name, key)
            if value is not None:
                masks[value] |= bit
        return masks

    def names(self, mask: int) -> list[str]:
        """Return the objects of a mask, in order."""
        return [name for name in self.objects if mask & self.bit[name]]

    def indistinguishable_pair(self) -> tuple[str, str] | None:
        """Return two objects with the same properties; None if all differ."""
        seen: dict[tuple[bool, ...], str] = {}
        for name in self.objects:
            row = tuple(
                bool(self.mask_by_value[key][value] & self.bit[name]) for key in self.properties for value in VALUES
            )
            if row in seen:
                return seen[row], name
            seen[row] = name
        return None
