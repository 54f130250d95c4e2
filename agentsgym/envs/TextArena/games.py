"""Make games of TextArena's and play them, each with a random stream of its own."""

from __future__ import annotations

import copy
import inspect
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from agentsgym.envs.TextArena.catalogue import catalogue
from agentsgym.envs.TextArena.isolation import GameContext, import_game_module, textarena
from agentsgym.envs.TextArena.move_rules import known_moves
from agentsgym.envs.TextArena.observations import GAME_ID, said_by, text_of
from agentsgym.envs.TextArena.outcomes import is_won, worth
from agentsgym.envs.TextArena.patches import GAMEMASTER_GAMES, JURY_GAMES, Jury, bind_mends, mended_class
from agentsgym.envs.TextArena.words import basic_words, bind_words, check_nltk, deep_copy, no_downloads
from agentsgym.errors import ConfigError, EnvError, did_you_mean
from agentsgym.interruptions import is_interruption
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of, shown

_SUFFIXES = ("-raw", "-train")
_PROGRESS = ("_get_percentage_completion", "_calculate_progress", "_progress")
_WORD_LISTS = ("dictionary", "word_list", "universal_word_list")
_lock = threading.RLock()


def base_id(game: str) -> str:
    """The id without the suffix of the form that observations have, ``-raw`` or ``-train``.

    Raises:
        ConfigError: There is no such game; the message names the nearest.
        MissingDependencyError: TextArena is not installed.
    """
    known: Mapping[str, Any] = textarena().envs.registration.ENV_REGISTRY
    for suffix in _SUFFIXES:
        shorter = game.removesuffix(suffix)
        if shorter != game and shorter in known:
            return shorter
    if game not in known:
        names = [name for name in known if not name.endswith(_SUFFIXES)]
        raise ConfigError(f"env_config['game'] {shown(game)} is not a game of TextArena{did_you_mean(game, names)}")
    return game


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one move led to.

    Attributes:
        done: Whether the game is over.
        invalid: Whether the move was invalid.
    """

    done: bool
    invalid: bool


class GameMaker:
    """Makes games of one kind: the first is built by its constructor, all others are copies of it.

    Args:
        game: A base id.
        options: Arguments of the game's constructor that replace the registered ones.
        word_list: ``"hunspell"`` or ``"nltk"``.
        has_gamemaster: Whether a gamemaster answers the game's prompts.

    Attributes:
        module: The module of the game's class.

    Raises:
        ConfigError: The game cannot be made: it is broken, or an option is unknown, or word data is missing.
    """

    def __init__(
        self,
        game: str,
        options: Mapping[str, Any] | None = None,
        *,
        word_list: str = "hunspell",
        has_gamemaster: bool = False,
    ) -> None:
        spec = textarena().envs.registration.ENV_REGISTRY[game]
        self.game = game
        self.word_list = word_list
        self.module, _, self._class = str(spec.entry_point).partition(":")
        self._world = self.module.split(".")[-2]
        self._given = options or {}
        self._options = {**spec.kwargs, **self._given}
        if self._world in JURY_GAMES and has_gamemaster:
            self._options["jury_class"] = Jury
        if word_list == "nltk" and getattr(catalogue().get(game), "status", "") == "words":
            check_nltk(game)
        self._has_gamemaster = has_gamemaster
        is_run_by_model = self._world in (*JURY_GAMES, *GAMEMASTER_GAMES)
        if is_run_by_model and not has_gamemaster and "OPENROUTER_API_KEY" not in os.environ:
            raise ConfigError(
                f"{game} requires a language model as gamemaster: pass TextArenaEnv(gamemaster=agent), or name one in "
                "env_config['gamemaster']"
            )
        self._prototype = self._cached_prototype()

    def __call__(self, context: GameContext) -> Any:
        """Make a game that has not begun."""
        if self._prototype is None:
            with context:
                return self._build()
        return deep_copy(self._prototype)

    def check_start(self, num_players: int) -> None:
        """Begin a game where that may fail: constructors accept options and missing files that their games do not.

        Raises:
            ConfigError: The game cannot begin.
        """
        entry = catalogue().get(self.game)
        if not self._given and (entry is None or entry.status != "broken"):
            return
        context = self._probe()
        try:
            PlayedGame(self(context), context, num_players=num_players, seed=0)
        except BaseException as error:  # foreign code
            if is_interruption(error):
                raise
            raise ConfigError(self._complaint(error)) from error

    def _probe(self) -> GameContext:
        gamemaster = _says_nothing if self._has_gamemaster else None
        return GameContext(random.Random(0), word_list=self.word_list, gamemaster=gamemaster)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a GameMaker cannot be pickled: create one in each process")

    def _build(self) -> Any:
        with _lock, no_downloads():
            module = import_game_module(self.module, bind_words, bind_mends)
        return mended_class(getattr(module, self._class))(**self._options)

    def _cached_prototype(self) -> Any:
        """The game to copy, equal for all environments of a process; None where its constructor draws."""
        key = (self.game, self.word_list, self._has_gamemaster, json.dumps(self._options, sort_keys=True, default=repr))
        with _lock:
            if key not in _prototypes:
                _prototypes[key] = self._first()
                while len(_prototypes) > _MOST_PROTOTYPES:
                    del _prototypes[next(iter(_prototypes))]
            return _prototypes[key]

    def _first(self) -> Any:
        context = self._probe()
        before = context.rng.getstate()
        try:
            with context:
                built = self._build()
                self._check_options(cast("type[Any]", type(built)))
                is_copied = deep_copy(built) is not built
        except BaseException as error:  # foreign code
            if is_interruption(error) or isinstance(error, ConfigError):
                raise
            raise ConfigError(self._complaint(error)) from error
        return built if is_copied and context.rng.getstate() == before else None

    def _check_options(self, built: type[Any]) -> None:
        known = [*inspect.signature(built.__init__).parameters][1:]
        for name in self._options:
            if name not in known:
                raise ConfigError(f"env_config['game_options'][{shown(name)}] is unknown{did_you_mean(name, known)}")

    def _complaint(self, error: BaseException) -> str:
        entry = catalogue().get(self.game)
        if isinstance(error, TypeError) and "unexpected keyword" in str(error):
            return f"env_config['game_options'] does not fit {self.game}: {sentence_of(error)}"
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        if entry is not None and entry.min_python:
            return f"{self.game} needs Python {entry.min_python} or newer, and this is {python}"
        what = f"{type(error).__name__}: {sentence_of(error)}"
        if self._given and (entry is None or entry.status != "broken"):
            return f"env_config['game_options'] {shown(self._given)} does not fit {self.game}: {what}"
        return f"{self.game} cannot be made by this version of TextArena: {what}"


def _says_nothing(_: str) -> str:
    return ""


_MOST_PROTOTYPES = 64
_prototypes: dict[Any, Any] = {}


class PlayedGame:
    """One game in play.

    Args:
        game: A game that has not begun.
        context: What it sees of the world.
        num_players: The number of players.
        seed: Seeds the game.
        max_moves: The most moves of all players, where the game takes a limit; None for its own. A limit is lowered,
            never raised.

    Attributes:
        num_players: The number of players.
    """

    def __init__(
        self, game: Any, context: GameContext, *, num_players: int, seed: int, max_moves: int | None = None
    ) -> None:
        self._game = game
        self._context = context
        self.num_players = num_players
        own = getattr(game, "max_turns", None)
        if max_moves is not None and isinstance(own, int) and own > max_moves:
            game.max_turns = max_moves  # what the prompt quotes
        with context:
            game.reset(num_players=num_players, seed=seed)
        limit = getattr(self.state, "max_turns", None)
        if max_moves is not None and isinstance(limit, int) and limit > max_moves - 1:
            self.state.max_turns = max_moves - 1  # it is compared before the move is counted

    @property
    def state(self) -> Any:
        """TextArena's own state."""
        return self._game.state

    @property
    def player(self) -> int:
        """Whose move it is."""
        return self.state.current_player_id

    @property
    def done(self) -> bool:
        """Whether the game is over."""
        return bool(self.state.done)

    def observe(self, *, shared: bool = False) -> str:
        """Write what is new to the player whose move it is, and count it as seen.

        Args:
            shared: Whether all players read one conversation: what one was shown is new to nobody.
        """
        with self._context:
            seat, messages = self._game.get_observation()
        state = self.state
        if shared:
            for other, waiting in state.observations.items():
                if other != seat:
                    state.observations[other] = [one for one in waiting if one[2].name == "PROMPT"]
        return text_of(messages, seat, state.role_mapping, shared=shared)

    def tell_what_was_said(self) -> None:
        """Make messages of the game of what players said and others have not seen yet, for all to read."""
        kinds = textarena().ObservationType
        for seat, waiting in self.state.observations.items():
            self.state.observations[seat] = [
                (GAME_ID, said_by(sender, message, self.state.role_mapping), kinds.GAME_MESSAGE)
                if kind is kinds.PLAYER_ACTION
                else (sender, message, kind)
                for sender, message, kind in waiting
            ]

    def move(self, action: str, error_allowance: int | None = None) -> Outcome:
        """Play a move of the player whose turn it is.

        Args:
            action: What the player says.
            error_allowance: How many invalid moves in a row the game forgives this time; None for its own rule.
        """
        seat = self.player
        with self._context, _allowing(self.state, error_allowance), _complaints(self.state) as complaints:
            done, _ = self._game.step(action=action)
        if getattr(self.state, "elimination_order", ()):
            self._end_if_stuck(seat)
        return Outcome(bool(done) or self.done, bool(complaints))

    def _end_if_stuck(self, mover: int) -> None:
        """End a game that eliminates a player for an invalid move and asks that player again, or leaves one player.

        Some games for several players ask the same player for ever. Who was eliminated loses, all others win.
        """
        state = self.state
        eliminated: Sequence[int] = state.elimination_order
        others = [seat for seat in range(self.num_players) if seat not in eliminated]
        out = [seat for seat in (self.player, mover) if seat in eliminated and self.info_of(seat).get("invalid_move")]
        if not self.done and out and (out[0] == self.player or len(others) <= 1):
            state.set_winners(others, reason=f"Player {out[0]} made too many invalid moves.")

    @property
    def num_errors(self) -> int:
        """The invalid moves in a row of the player whose move it is, as the game counts them."""
        return getattr(self.state, "error_count", 0)

    def rewards(self) -> dict[int, float]:
        """What each player is paid at the end.

        Raises:
            EnvError: The game says nothing of the kind.
        """
        with self._context:
            rewards: Any = self._game.close()[0]
        if not isinstance(rewards, Mapping):
            raise EnvError(f"a game of TextArena must end with rewards by player, got {shown(rewards)}")
        for seat, reward in cast("Mapping[Any, Any]", rewards).items():
            if not isinstance(reward, int | float):
                raise EnvError(f"a game's reward must be a number, got {shown(reward)} for player {seat}")
        paid = {int(seat): float(reward) for seat, reward in cast("Mapping[Any, Any]", rewards).items()}
        return paid if self.num_players > 1 else {seat: worth(self._game, reward) for seat, reward in paid.items()}

    def info_of(self, seat: int) -> dict[str, Any]:
        """What the game says of a player: ``reason``, ``invalid_move`` and more."""
        return self.state.game_info.get(seat, {})

    def is_won(self, seat: int) -> bool:
        """Whether a player won the game, which is over."""
        rewards = self.rewards()
        with self._context:
            return is_won(self._game, rewards, seat, self.info_of(seat))

    def words(self) -> Sequence[str]:
        """Common words, for a game that is played with words; empty for others."""
        return basic_words() if any(hasattr(self._game, name) for name in _WORD_LISTS) else ()

    def known_moves(self, rng: random.Random) -> list[str]:
        """Moves by the game's own rules, where they are written down: see :mod:`~.known_moves`; empty elsewhere."""
        return known_moves(self._game, rng)

    def progress(self) -> float:
        """How far a single player has come, in [0, 1], as the game itself pays it at its turn limit; 0.0 if unknown."""
        method: Callable[[], Any] | None = next(
            (found for name in _PROGRESS if callable(found := getattr(self._game, name, None))), None
        )
        if method is None or self.num_players > 1 or inspect.signature(method).parameters:
            return 0.0
        with self._context:
            value = method()
        return worth(self._game, float(value)) if isinstance(value, int | float) and 0 <= value <= 1 else 0.0

    def is_legal(self, action: str) -> bool:
        """Whether a move is valid now, tried on a copy of the game."""
        trial = copy.copy(self)
        trial._game = deep_copy(self._game)  # its own
        trial._context = GameContext(random.Random(0), word_list=self._context.word_list)
        try:
            return not trial.move(action, error_allowance=1).invalid
        except Exception:  # noqa: BLE001  # a game that breaks on a move does not allow it
            return False

    def __deepcopy__(self, memo: dict[int, Any]) -> PlayedGame:
        twin = copy.copy(self)
        twin._game = deep_copy(self._game)  # its own
        twin._context = copy.deepcopy(self._context, memo)
        return twin


@contextmanager
def _allowing(state: Any, error_allowance: int | None) -> Generator[None]:
    """Let a game forgive so many invalid moves in a row inside; None for its own rule."""
    own = getattr(state, "error_allowance", None)
    if error_allowance is None or own is None:
        yield
        return
    state.error_allowance = error_allowance
    try:
        yield
    finally:
        state.error_allowance = own


@contextmanager
def _complaints(state: Any) -> Generator[list[Any]]:
    """Note inside each invalid move that a game finds; what it counts of them starts anew at the last one."""
    noted: list[Any] = []
    complain: Callable[..., Any] | None = getattr(state, "set_invalid_move", None)
    if complain is None:
        yield noted
        return

    def noting(*args: Any, **kwargs: Any) -> Any:
        noted.append(args or kwargs)
        return complain(*args, **kwargs)

    state.set_invalid_move = noting
    try:
        yield noted
    finally:
        del state.set_invalid_move


def game_seed(rng: random.Random) -> int:
    """Draw a game's seed, unlike that of any sampler, in [0, 2**31)."""
    return derive_seed("textarena game", rng.getrandbits(63)) % 2**31
