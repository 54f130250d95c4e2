"""Give each game a separate random stream, although TextArena draws from Python's and numpy's global generators.

The games call functions such as ``random.choice`` through the name ``random`` in their own modules. Here that name is
replaced with a stand-in, which draws from the generator of the game that this thread is playing and otherwise forwards
to the real module. The draws are those of the global generator after ``random.seed(seed)``, but the global state is
neither read nor changed. Word data and ``print`` are replaced in the same way, and the gamemaster in
:mod:`~agentsgym.envs.TextArena.patches`.

TextArena downloads nltk's corpora when it imports such a game, and reads its dictionary again (most of a second) for
every game. Here nothing is downloaded, and the games of a process share one dictionary.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.resources
import logging
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from agentsgym.envs.TextArena import SPEC
from agentsgym.errors import ConfigError

NLTK_COMMAND = "python -m nltk.downloader words averaged_perceptron_tagger_eng"
_TEXTS = {
    "Crosswords": ("words_clues.jsonl",),
    "Debate": ("topics.json",),
    "ScenarioPlanning": ("scenarios.json",),
    "Taboo": ("words.json",),
    "TruthAndDeception": ("facts.json",),
    "TwentyQuestions": ("twenty_questions_words.json",),
}
_MIN_OCCURRENCES = 3
_DICTIONARY_MODULE = "textarena.envs.utils.word_lists"


logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class GameContext:
    """The randomness and data that a game uses; every call into the game is made inside ``with context:``.

    Attributes:
        rng: The stand-in for Python's global generator.
        word_list: The source of words, ``"hunspell"`` or ``"nltk"``.
        gamemaster: The function that responds to a prompt, in games that use a language model; None for no gamemaster.
    """

    rng: random.Random
    word_list: str = "hunspell"
    gamemaster: Callable[[str], str] | None = None
    _numpy: Any = None
    _outer: GameContext | None = None

    def numpy(self) -> Any:
        """Return the stand-in for numpy's global generator, which is created at the game's first draw from it."""
        if self._numpy is None:
            import numpy as np  # noqa: PLC0415  # few games need it

            self._numpy = np.random.RandomState(self.rng.getrandbits(32))
        return self._numpy

    def __enter__(self) -> GameContext:
        self._outer, _playing.context = _playing.context, self
        return self

    def __exit__(self, *_: object) -> None:
        _playing.context, self._outer = self._outer, None


class _Playing(threading.local):
    context: GameContext | None = None


_playing = _Playing()
_lock = threading.RLock()
_bound: set[str] = set()


def current_context() -> GameContext | None:
    """Return the context of the game that this thread is playing; None outside a game."""
    return _playing.context


class Standin:
    """An object that stands in for the real one, except for the given attributes."""

    def __init__(self, real: Any, **attributes: Any) -> None:
        self._real = real
        self._attributes = attributes
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __reduce__(self) -> str | tuple[Any, ...]:
        return functools.partial(type(self), **self._attributes), (self._real,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Standin:
        return self


def random_standin() -> Standin:
    """Make a stand-in for the module ``random``."""
    return _with_late_draws(random, random.Random, lambda context: context.rng)


def numpy_standin(real: ModuleType) -> Standin:
    """Make a stand-in for the package ``numpy``, whose ``numpy.random`` draws from the game's own generator."""
    return Standin(real, random=_with_late_draws(real.random, real.random.RandomState, GameContext.numpy))


def _with_late_draws(real: Any, kind: type[Any], generator: Callable[[GameContext], Any]) -> Standin:
    """Make a stand-in for a module with the methods of a global generator of this kind: they draw, or set its state."""
    draws = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
    return Standin(real, **{name: _late_draw(real, name, generator) for name in draws})


def _late_draw(real: Any, name: str, generator: Callable[[GameContext], Any]) -> Callable[..., Any]:
    """Return a function that looks up the generator when called, since a game's constructor may store the function."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        context = _playing.context
        return getattr(real if context is None else generator(context), name)(*args, **kwargs)

    return draw


def _log_print(*values: object, **_: object) -> None:
    logger.info("%s", " ".join(map(str, values)))


def _bind_random(module: ModuleType) -> None:
    """Replace a module's random generators with stand-ins, and its ``print`` with logging."""
    names = vars(module)
    for name, value in list(names.items()):
        if value is random:
            names[name] = random_standin()
        elif isinstance(value, ModuleType) and value.__name__ == "numpy":
            names[name] = numpy_standin(value)
    if module.__name__.startswith("textarena.envs."):
        names.setdefault("print", _log_print)


def import_game_module(path: str, *binders: Callable[[ModuleType], None]) -> ModuleType:
    """Import a TextArena module and replace names with stand-ins, in it and in every TextArena module that it imports.

    The binders replace further names of a module; each is called once per module.

    Raises:
        Exception: Any exception that the import raises.
    """
    with _lock:
        module = importlib.import_module(path)
        if path not in _bound:
            for name in [name for name in sys.modules if name.startswith("textarena.") and name not in _bound]:
                for bind in (_bind_random, *binders):
                    bind(sys.modules[name])
                _bound.add(name)
        return module


def textarena() -> Any:
    """Import TextArena.

    Raises:
        MissingDependencyError: TextArena is not installed.
        ConfigError: A local file shadows the package.
    """
    package = SPEC.load("textarena")
    if not hasattr(package, "envs"):
        raise ConfigError(f"{package.__file__} shadows the package 'textarena': rename that file")
    return package


@functools.cache
def hunspell_words() -> tuple[str, ...]:
    """Return the lower-case words of at least two letters in TextArena's ``en_US.dic``, sorted.

    These are base words, without the plurals and other forms that the affix rules generate.
    """
    folder = importlib.resources.files("textarena.envs.utils.data")
    lines = folder.joinpath("en_US.dic").read_text(encoding="utf-8").splitlines()[1:]
    entries = {line.partition("/")[0].strip() for line in lines}
    return tuple(
        sorted(word for word in entries if len(word) > 1 and word.isascii() and word.islower() and word.isalpha())
    )


@functools.cache
def basic_words() -> tuple[str, ...]:
    """Return the words of :func:`hunspell_words` that occur at least three times in the texts of TextArena's games."""
    counts: Counter[str] = Counter()
    for file in importlib.resources.files("textarena.envs").iterdir():
        for name in _TEXTS.get(file.name, ()):
            text = file.joinpath(name).read_text(encoding="utf-8")
            counts.update(re.findall(r"[a-z]+", text.lower()))
    return tuple(word for word in hunspell_words() if counts[word] >= _MIN_OCCURRENCES)


def check_nltk(game: str) -> None:
    """Check that nltk's corpora are installed.

    Raises:
        ConfigError: The corpora are missing; the message contains the install command.
    """
    import nltk  # noqa: PLC0415  # slow to import; installed with TextArena

    try:
        nltk.data.find("corpora/words")  # pyright: ignore[reportUnknownMemberType]
        nltk.data.find("taggers/averaged_perceptron_tagger_eng")  # pyright: ignore[reportUnknownMemberType]
    except LookupError:
        raise ConfigError(
            f"env_config['word_list'] is 'nltk', but {game} needs corpora that are not installed: run {NLTK_COMMAND} "
            "once, or use word_list='hunspell', which needs no download"
        ) from None


def _uses_nltk() -> bool:
    context = current_context()
    return context is not None and context.word_list == "nltk"


class _Words(Standin):
    """Stands in for ``nltk.corpus.words``."""

    def words(self, fileids: Any = None) -> list[str]:
        if _uses_nltk():
            return list(self._real.words(fileids))
        return list(basic_words() if fileids == "en-basic" else hunspell_words())


class _PosTag(Standin):
    """Stands in for ``nltk.pos_tag``; without nltk's tagger, every word is tagged as a noun."""

    def __call__(self, tokens: Iterable[str], *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
        return self._real(tokens, *args, **kwargs) if _uses_nltk() else [(token, "NN") for token in tokens]


def _nltk(real: Any) -> Standin:
    """Create a stand-in for the package ``nltk`` that downloads nothing."""
    corpus = Standin(real.corpus, words=_Words(real.corpus.words))
    return Standin(real, pos_tag=_PosTag(real.pos_tag), corpus=corpus, download=lambda *_, **__: False)  # pyright: ignore[reportUnknownLambdaType]


class _AllWords:
    """Stands in for ``set(words.words())``, which a module computes at import."""

    def __contains__(self, word: object) -> bool:  # all that a game does with it
        return word in _word_set(_uses_nltk())


@functools.cache
def _word_set(uses_nltk: bool) -> frozenset[str]:
    if not uses_nltk:
        return frozenset(hunspell_words())
    from nltk.corpus import words  # noqa: PLC0415  # as above

    corpus: Any = words
    return frozenset(corpus.words())


_dictionaries: dict[tuple[Any, ...], Any] = {}


class _SharedDictionary(Standin):
    """Stands in for the class ``EnglishDictionary``; dictionaries with equal arguments are built once and shared."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = (_uses_nltk(), args, tuple(sorted(kwargs.items())))
        if key not in _dictionaries:
            _dictionaries[key] = self._real(*args, **kwargs)
        return _dictionaries[key]


_MIN_SHARED_SIZE = 1000


def deep_copy(game: Any) -> Any:
    """Copy a game, sharing its dictionary, large sets and the entries of its large word lists.

    Its messages, which are immutable tuples, are shared as well, since the game keeps all of them.
    """
    memo: dict[int, Any] = {id(one): one for one in _dictionaries.values()}
    state: Any = getattr(game, "state", None)
    if state is not None:
        memo.update((id(messages), [*messages]) for messages in (*state.observations.values(), state.logs))
    for value in [*cast("dict[str, Any]", vars(game)).values()]:
        if isinstance(value, set | frozenset | list) and len(cast("set[Any]", value)) >= _MIN_SHARED_SIZE:
            items = cast("set[Any] | list[Any]", value)
            if isinstance(next(iter(items)), str):
                memo[id(items)] = [*items] if isinstance(items, list) else items
    return copy.deepcopy(game, memo)


def replace_word_data(module: ModuleType) -> None:
    """Replace the names of a module that refer to word data with stand-ins."""
    names = vars(module)
    standins = {"nltk": _nltk, "words": _Words, "pos_tag": _PosTag, "EnglishDictionary": _SharedDictionary}
    for name, standin in standins.items():
        value = names.get(name)
        is_own = name == "EnglishDictionary" and module.__name__ == _DICTIONARY_MODULE
        if value is not None and not isinstance(value, Standin) and not is_own:
            names[name] = standin(value)
    if "en_uk_dict" in names:
        names["en_uk_dict"] = _AllWords()


@contextmanager
def no_downloads() -> Generator[None]:
    """Patch nltk so that importing a TextArena module neither reads nltk's corpora nor downloads anything.

    Not thread-safe.
    """
    import nltk  # noqa: PLC0415  # as above

    package: Any = nltk
    before = package.download, package.pos_tag, package.corpus.words
    package.download = lambda *_, **__: False  # pyright: ignore[reportUnknownLambdaType]
    package.pos_tag, package.corpus.words = _PosTag(before[1]), _Words(before[2])
    try:
        yield
    finally:
        package.download, package.pos_tag, package.corpus.words = before
