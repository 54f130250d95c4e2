"""Give each game a separate random stream, although TextArena draws from Python's and numpy's global generators.

The games call functions such as ``random.choice`` through the name ``random`` in their own modules. Here that name is
replaced with a stand-in, which draws from the generator of the game that this thread is playing and otherwise forwards
to the real module. The draws are those of the global generator after ``random.seed(seed)``, but the global state is
neither read nor changed. Word data, the gamemaster and ``print`` are replaced in the same way; see
:mod:`~agentsgym.envs.TextArena.words` and :mod:`~agentsgym.envs.TextArena.patches`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import random
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from agentsgym.envs.TextArena import SPEC
from agentsgym.errors import ConfigError

logger = logging.getLogger(__name__)

#: Functions that draw from Python's global generator, or set its state.
_PYTHON_DRAWS = tuple(
    name for name in dir(random.Random) if not name.startswith("_") and callable(getattr(random, name, None))
)


class GameContext:
    """The randomness and data that a game uses; every call into the game is made inside ``with context:``.

    Attributes:
        rng: The stand-in for Python's global generator.
        word_list: The source of words, ``"hunspell"`` or ``"nltk"``.
        gamemaster: The function that responds to a prompt, in games that use a language model; None for no gamemaster.
    """

    __slots__ = ("_numpy", "_outer", "gamemaster", "rng", "word_list")

    def __init__(
        self, rng: random.Random, *, word_list: str = "hunspell", gamemaster: Callable[[str], str] | None = None
    ) -> None:
        self.rng = rng
        self.word_list = word_list
        self.gamemaster = gamemaster
        self._numpy: Any = None
        self._outer: GameContext | None = None

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


class _NumpyRandomStandin(Standin):
    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        is_draw = hasattr(self._real.RandomState, name)
        return _late_draw(self._real, name, GameContext.numpy) if is_draw else real


def random_standin() -> Standin:
    """Make a stand-in for the module ``random``."""
    return Standin(random, **{name: _late_draw(random, name, lambda context: context.rng) for name in _PYTHON_DRAWS})


def numpy_standin(real: ModuleType) -> Standin:
    """Make a stand-in for the package ``numpy``, whose ``numpy.random`` draws from the game's own generator."""
    return Standin(real, random=_NumpyRandomStandin(real.random))


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
