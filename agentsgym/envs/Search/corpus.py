"""Load passages, and find them by their words, with BM25 from ``bm25s``; large indexes are cached on disk.

A custom search engine is any callable ``(query, k) -> passages`` (``env_config["retriever"]``).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from agentsgym.cached_folders import cache_folder, is_intact, remove_damaged, write_folder
from agentsgym.envs.datasets.sources import Column, read_columns, read_rows
from agentsgym.envs.Search import SPEC
from agentsgym.envs.Search.world import GENERATED, World
from agentsgym.errors import ConfigError, EnvError
from agentsgym.fields import is_str
from agentsgym.texts import sentence_of, shown

logger = logging.getLogger(__name__)

_FORMAT = 1  # version of the format on disk
_MIN_CACHED_PASSAGES = 5_000  # indexing fewer is faster than loading an index
_WORD = r"(?u)\b\w+\b"
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


_lock = threading.Lock()
_corpora: dict[Hashable, tuple[Passage, ...]] = {}
_indexes: dict[Hashable, BM25Index] = {}


def _kept(cache: dict[Hashable, _Value], key: Hashable, make: Callable[[], _Value]) -> _Value:
    """Return the value of a key, which the first caller creates while others wait; the last used ones are kept."""
    with _lock:
        cache[key] = cache.pop(key) if key in cache else make()
        while len(cache) > _NUM_KEPT:
            del cache[next(iter(cache))]
        return cache[key]


def load_corpus(source: Any, columns: Mapping[str, str] | None, world: Mapping[str, Any]) -> Sequence[Passage]:
    """Load all passages; a file or a generated world is loaded once per process.

    Args:
        source: ``"generated"``, or any source that :func:`~agentsgym.envs.datasets.sources.read_rows` accepts.
        columns: The columns that contain ``text`` and ``title``, if their names differ.
        world: Options of the generated world.
    """
    if source == GENERATED:
        options = tuple(sorted(world.items()))
        return _kept(_corpora, (GENERATED, options), lambda: _passages(World(**world).passages, None))
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        try:
            found = path.stat()
        except OSError as error:
            raise ConfigError(f"the corpus cannot be read from {str(path)!r}: {error.strerror}") from error
        key = (str(source), found.st_mtime_ns, found.st_size, tuple(sorted((columns or {}).items())))
        return _kept(_corpora, key, lambda: _passages(read_rows(source, "the corpus"), columns))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    """Options of an index.

    Attributes:
        title_weight: The number of times that each word of the title counts, at least 0.
        stopwords: The language whose stop words are removed, as a ``bm25s`` code (``"en"``); None to keep all words.
    """

    title_weight: int = 2
    stopwords: str | None = "en"


class BM25Index:
    """Ranks passages by BM25 (Lucene's variant, k1 = 1.5, b = 0.75).

    It is immutable and thread-safe. Of passages with equal scores, the earlier one ranks higher.
    """

    def __init__(self, passages: Sequence[Passage], options: IndexOptions, ranker: Any) -> None:
        self._passages = passages
        self._options = options
        self._ranker = ranker

    @functools.cached_property
    def titles(self) -> frozenset[str]:
        """The titles of all passages."""
        return frozenset(one.title for one in self._passages)

    def __call__(self, query: str, k: int) -> list[Passage]:
        """Return at most ``k`` passages that share a word with the query, the best first."""
        import numpy as np  # noqa: PLC0415  # deferred to the first search

        [words] = _words([query], self._options)
        if not words:
            return []
        scores: Any = self._ranker.get_scores(words)  # (N,)
        if k < len(scores):
            least = np.partition(scores, len(scores) - k)[len(scores) - k]
            found = np.flatnonzero(scores >= least)
            found = found[scores[found] > 0]
        else:
            found = np.flatnonzero(scores > 0)
        best = found[np.argsort(-scores[found], kind="stable")][:k]
        return [self._passages[index] for index in best.tolist()]


def open_index(passages: Sequence[Passage], options: IndexOptions, cache_dir: str | None) -> BM25Index:
    """Return the index of these passages: from this process's cache, from disk, or newly built.

    Args:
        passages: The passages to search.
        options: The indexing options.
        cache_dir: The folder where indexes are cached; None for the user's cache folder, ``""`` for no cache on disk.

    Raises:
        MissingDependencyError: ``bm25s`` is not installed.
        ConfigError: The passages contain no words, or ``bm25s`` has no stop words for the language.
    """
    try:
        _words([""], options)
    except ValueError as error:
        raise ConfigError(
            f"env_config['stopwords'] must be a language that bm25s supports: {sentence_of(error)}"
        ) from error
    made_by = [_FORMAT, importlib.metadata.version("bm25s"), options.title_weight, options.stopwords, _WORD]
    digest = hashlib.blake2b(json.dumps(made_by).encode(), digest_size=16)
    for one in passages:
        digest.update(f"{len(one.title)} {len(one.text)} {one.title}{one.text}".encode(errors="surrogatepass"))
    key = digest.hexdigest()
    return _kept(_indexes, key, lambda: BM25Index(passages, options, _ranker(passages, options, key, cache_dir)))


def _words(texts: list[str], options: IndexOptions) -> list[list[str]]:
    return SPEC.load("bm25s").tokenize(
        texts, token_pattern=_WORD, stopwords=options.stopwords or [], return_ids=False, show_progress=False
    )


def _ranker(passages: Sequence[Passage], options: IndexOptions, key: str, cache_dir: str | None) -> Any:
    """Load an index from disk, or build and save it; small indexes are built without saving."""
    if cache_dir == "" or len(passages) < _MIN_CACHED_PASSAGES:
        return _new_ranker(passages, options)
    folder = cache_folder("bm25", cache_dir) / key
    if is_intact(folder, "the index"):
        try:
            return SPEC.load("bm25s").BM25.load(folder, mmap=True)
        except Exception as error:  # noqa: BLE001  # a damaged file may raise anything
            remove_damaged(folder, "the index", error)
    ranker = _new_ranker(passages, options)
    try:
        write_folder(folder, lambda unfinished: ranker.save(unfinished, show_progress=False))
    except OSError as error:
        logger.warning("the index cannot be cached in %s: %s", folder, sentence_of(error))
    return ranker


def _new_ranker(passages: Sequence[Passage], options: IndexOptions) -> Any:
    bm25s = SPEC.load("bm25s")
    titled = (" ".join([*[one.title] * options.title_weight, one.text]) for one in passages)
    words = _words([*titled], options)
    if not any(words):
        raise ConfigError(
            f"the corpus must contain at least one word that is not a stop word, got {len(words)} passages"
        )
    ranker = bm25s.BM25(backend="numpy")
    ranker.index(words, show_progress=False)
    return ranker
