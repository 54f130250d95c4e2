"""Load the passages to search, and check the results of custom retrievers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from agentsgym.envs.datasets.sources import Column, read_columns, read_rows
from agentsgym.envs.Search.world import World
from agentsgym.errors import ConfigError, EnvError
from agentsgym.fields import is_str
from agentsgym.texts import shown

GENERATED = "generated"
_NUM_KEPT = 4
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text that a search can find.

    Attributes:
        title: The passage's topic; may be empty.
        text: The passage's content.
    """

    title: str
    text: str


_COLUMNS = {
    "text": Column(default="text", valid=is_str, expected="a str"),
    "title": Column(default="title", valid=is_str, expected="a str", is_optional=True),
}


class ProcessCache:
    """A cache of the most recently used values, shared by all environments and threads of a process."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """Return the value of a key; the first caller creates it while the others wait."""
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
            self._values.move_to_end(key)
            while len(self._values) > _NUM_KEPT:
                self._values.popitem(last=False)
            return self._values[key]

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._values.clear()


_corpora = ProcessCache()


def load_corpus(source: Any, columns: Mapping[str, str] | None, world: Mapping[str, Any]) -> Sequence[Passage]:
    """Load all passages; a file or a generated world is loaded once per process.

    Args:
        source: ``"generated"``, or any source that :func:`~agentsgym.envs.datasets.sources.read_rows` accepts.
        columns: The columns that contain ``text`` and ``title``, if their names differ.
        world: Options of the generated world.
    """
    if source == GENERATED:
        options = tuple(sorted(world.items()))
        return _corpora.get((GENERATED, options), lambda: _passages(World(**world).passages, None))
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        try:
            found = path.stat()
        except OSError as error:
            raise ConfigError(f"the corpus cannot be read from {str(path)!r}: {error.strerror}") from error
        key = (str(source), found.st_mtime_ns, found.st_size, tuple(sorted((columns or {}).items())))
        return _corpora.get(key, lambda: _passages(read_rows(source, "the corpus"), columns))
    return _passages(read_rows(source, "the corpus"), columns)


def _passages(rows: Any, columns: Mapping[str, str] | None) -> tuple[Passage, ...]:
    read = read_columns(rows, _COLUMNS, columns, "the corpus")
    return tuple(Passage(row.get("title", ""), row["text"]) for row in read)


def as_passages(found: Any, k: int) -> list[Passage]:
    """Check a custom retriever's results, and return the first ``k`` as passages."""
    expected = "a list of passages (a str, a Passage, or a dict with 'text' and optionally 'title')"
    if isinstance(found, str | Mapping) or not isinstance(found, Sequence):
        raise EnvError(f"the retriever must return {expected}, got {shown(cast('object', found))}")
    passages: list[Passage] = []
    for value in cast("Sequence[Any]", found)[:k]:
        title, text = "", value
        if isinstance(value, Passage):
            title, text = value.title, value.text
        elif isinstance(value, Mapping):
            fields = cast("Mapping[str, Any]", value)
            title, text = fields.get("title") or "", fields.get("text")
        if not (isinstance(title, str) and isinstance(text, str)):
            raise EnvError(f"the retriever must return {expected}, got the item {shown(cast('object', value))}")
        passages.append(Passage(title, text))
    return passages
