"""Check a retriever's results, and write them for the agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentsgym.envs.Search.corpus import Passage
from agentsgym.envs.Tools.results import ToolResult
from agentsgym.errors import EnvError
from agentsgym.texts import shown

NOTHING_FOUND = "No passage matches."
_EXPECTED = "a list of passages (a str, a Passage, or a dict with 'text' and perhaps 'title')"


def as_passages(found: Any, k: int) -> list[Passage]:
    """Parse a retriever's results; the first ``k`` passages are kept.

    Raises:
        EnvError: The result is not a list of passages.
    """
    if isinstance(found, str | Mapping) or not isinstance(found, Sequence):
        raise EnvError(f"the retriever must return {_EXPECTED}, got {shown(cast('object', found))}")
    return [_as_passage(one) for one in cast("Sequence[Any]", found)[:k]]


def _as_passage(value: Any) -> Passage:
    if isinstance(value, Passage):
        title, text = value.title, value.text
    elif isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        title, text = fields.get("title") or "", fields.get("text")
    else:
        title, text = "", value
    if not (isinstance(title, str) and isinstance(text, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise EnvError(f"the retriever must return {_EXPECTED}, got {shown(cast('object', value))} in it")
    return Passage(title, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(ToolResult):
    """The result of a search.

    Attributes:
        titles: The titles of the passages found.
    """

    titles: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ShownPassages:
    """The passages of a search, as text.

    Attributes:
        passages: The passages, the best first.
        max_chars: The maximum number of characters shown of each.
    """

    passages: Sequence[Passage]
    max_chars: int

    def numbered(self) -> str:
        """The passages with their titles, as a tool result."""
        if not self.passages:
            return NOTHING_FOUND
        return "\n\n".join(
            f"[{number}] {passage.title}\n{self._cut(passage.text)}"
            if passage.title
            else f"[{number}] {self._cut(passage.text)}"
            for number, passage in enumerate(self.passages, 1)
        )

    def in_tags(self) -> str:
        """The passages as Search-R1 shows them (2503.09516)."""
        lines = [
            f"Doc {number}(Title: {passage.title}) {self._cut(passage.text)}"
            for number, passage in enumerate(self.passages, 1)
        ]
        return f"<information>{chr(10).join(lines) or NOTHING_FOUND}</information>"

    def _cut(self, text: str) -> str:
        return text if len(text) <= self.max_chars else f"{text[: self.max_chars - 1]}…"
