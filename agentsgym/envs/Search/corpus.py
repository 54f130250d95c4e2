"""Load the passages that are searched."""

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
        title: What it is about; may be empty.
        text: What it says.
    """

    title: str
    text: str


_COLUMNS = {
    "text": Column(default="text", valid=is_str, expected="a str"),
    "title": Column(default="title", valid=is_str, expected="a str", is_optional=True),
}


class ProcessCache:
    """Keeps the few values that were used last, for all environments and threads of a process."""

    def __init__(self, num_kept: int = _NUM_KEPT) -> None:
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._num_kept = num_kept

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """Give the value of a key; it is made by the first who asks, and the others wait for it."""
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
            self._values.move_to_end(key)
            while len(self._values) > self._num_kept:
                self._values.popitem(last=False)
            return self._values[key]

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._values.clear()


_corpora = ProcessCache()


def load_corpus(source: Any, columns: Mapping[str, str] | None, world: Mapping[str, Any]) -> Sequence[Passage]:
    """Load all passages; those of a file or of the generated world once in a process.

    Args:
        source: ``"generated"``, or what :func:`~agentsgym.envs.datasets.sources.read_rows` reads.
        columns: Names of the columns of ``text`` and ``title``, where they have others.
        world: Options of the generated world.

    Raises:
        ConfigError: It cannot be read, is empty, or lacks a column.
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
    """What changes when the file does."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"the corpus cannot be read from {str(path)!r}: {error.strerror}") from error
    return found.st_mtime_ns, found.st_size
