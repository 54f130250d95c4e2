"""Load the passages to search."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentsgym.envs.datasets.sources import Column, read_columns, read_rows
from agentsgym.envs.Search.world import World
from agentsgym.errors import ConfigError
from agentsgym.fields import is_str

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
    """Keeps the few most recently used values, for all environments and threads of a process."""

    def __init__(self, num_kept: int = _NUM_KEPT) -> None:
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._num_kept = num_kept

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """Return the value of a key; the first caller makes it, and the others wait for it."""
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
            self._values.move_to_end(key)
            while len(self._values) > self._num_kept:
                self._values.popitem(last=False)
            return self._values[key]

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._values.clear()


_corpora = ProcessCache()


def load_corpus(source: Any, columns: Mapping[str, str] | None, world: Mapping[str, Any]) -> Sequence[Passage]:
    """Load all passages; those of a file or of the generated world are loaded once per process.

    Args:
        source: ``"generated"``, or what :func:`~agentsgym.envs.datasets.sources.read_rows` reads.
        columns: The names of the columns of ``text`` and ``title``, if they differ.
        world: Options of the generated world.

    Raises:
        ConfigError: The corpus cannot be read, is empty, or lacks a column.
    """
    if source == GENERATED:
        options = tuple(sorted(world.items()))
        return _corpora.get((GENERATED, options), lambda: _passages(World(**world).passages, None))
    if isinstance(source, str | Path):
        key = (str(source), _version(Path(source).expanduser()), tuple(sorted((columns or {}).items())))
        return _corpora.get(key, lambda: _passages(read_rows(source, "the corpus"), columns))
    return _passages(read_rows(source, "the corpus"), columns)


def _passages(rows: Any, columns: Mapping[str, str] | None) -> tuple[Passage, ...]:
    read = read_columns(rows, _COLUMNS, columns, "the corpus")
    return tuple(Passage(row.get("title", ""), row["text"]) for row in read)


def _version(path: Path) -> tuple[int, int]:
    """A value that changes when the file does."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"the corpus cannot be read from {str(path)!r}: {error.strerror}") from error
    return found.st_mtime_ns, found.st_size
