"""Create TextArena games and play them, each with a separate random stream."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agentsgym.envs.TextArena.catalogue import catalogue
from agentsgym.envs.TextArena.isolation import (
    GameContext,
    basic_words,
    check_nltk,
    deep_copy,
    import_game_module,
    no_downloads,
    replace_word_data,
    textarena,
)
from agentsgym.envs.TextArena.moves import moves_by_rules
from agentsgym.envs.TextArena.observations import GAME_ID, is_won, text_of, with_sender, worth
from agentsgym.envs.TextArena.patches import GAMEMASTER_GAMES, JURY_GAMES, Jury, bind_patches, patched_class
from agentsgym.errors import ConfigError, EnvError, did_you_mean
from agentsgym.interruptions import is_interruption
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of, shown

_SUFFIXES = ("-raw", "-train")
_PROGRESS = ("_get_percentage_completion", "_calculate_progress", "_progress")
_WORD_LISTS = ("dictionary", "word_list", "universal_word_list")
_MAX_PROTOTYPES = 64
_prototypes: dict[Any, Any] = {}  # games to copy, shared by all environments of a process
_lock = threading.RLock()


def base_id(game: str | None) -> str:
    """Strip the suffix that selects the format of observations, ``-raw`` or ``-train``, from an id.

    Raises:
        ConfigError: The game is None or does not exist; the message suggests the closest name.
        MissingDependencyError: TextArena is not installed.
    """
    if game is None:
        raise ConfigError("env_config['game'] must be set to the id of a game, such as 'Wordle-v0'")
    known: Mapping[str, Any] = textarena().envs.registration.ENV_REGISTRY
    for suffix in _SUFFIXES:
        shorter = game.removesuffix(suffix)
        if shorter != game and shorter in known:
            return shorter
    if game not in known:
        names = [name for name in known if not name.endswith(_SUFFIXES)]
        raise ConfigError(f"env_config['game'] {shown(game)} is not a game of TextArena{did_you_mean(game, names)}")
    return game


class GameFactory:
    """Creates games of a base id: the factory builds a prototype, of which all games are copies.

    The options are arguments of the game's constructor that replace the registered ones.

    Attributes:
        module: The module of the game's class.

    Raises:
        ConfigError: The game cannot be created: it is broken, an option is unknown, or word data are missing.
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
        if has_gamemaster and not is_run_by_model:
            raise ConfigError(f"{game} is not run by a language model, so it has no gamemaster: omit it")
        if is_run_by_model and not has_gamemaster and "OPENROUTER_API_KEY" not in os.environ:
            raise ConfigError(
                f"{game} requires a language model as gamemaster: pass TextArenaEnv(gamemaster=agent), or name one in "
                "env_config['gamemaster']"
            )
        key = (game, word_list, has_gamemaster, json.dumps(self._options, sort_keys=True, default=repr))
        with _lock:
            if key not in _prototypes:
                _prototypes[key] = self._build_prototype()
                while len(_prototypes) > _MAX_PROTOTYPES:
                    del _prototypes[next(iter(_prototypes))]
            self._prototype = _prototypes[key]

    def __call__(self, context: GameContext) -> Any:
        """Create a game that has not started."""
        if self._prototype is None:
            with context:
                return self._build()
        return deep_copy(self._prototype)

    def check_start(self, num_players: int) -> None:
        """Start a game as a trial, since some invalid options and missing files only raise errors at the start.

        Raises:
            ConfigError: The game cannot start.
        """
        entry = catalogue().get(self.game)
        if not self._given and (entry is None or entry.status != "broken"):
            return
        context = self._probe()
        try:
            PlayedGame(self(context), context, num_players=num_players, seed=0)
        except BaseException as error:  # third-party code may raise anything
            if is_interruption(error):
                raise
            raise ConfigError(self._complaint(error)) from error

    def _probe(self) -> GameContext:
        """Return a context for a trial, in which a gamemaster returns empty replies."""
        gamemaster: Callable[[str], str] | None = (lambda _: "") if self._has_gamemaster else None
        return GameContext(random.Random(0), word_list=self.word_list, gamemaster=gamemaster)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process, in which games are built anew, make a factory from the same arguments."""
        options = {"word_list": self.word_list, "has_gamemaster": self._has_gamemaster}
        return functools.partial(GameFactory, self.game, self._given, **options), ()

    def _build(self) -> Any:
        with _lock, no_downloads():
            module = import_game_module(self.module, replace_word_data, bind_patches)
        return patched_class(getattr(module, self._class))(**self._options)

    def _build_prototype(self) -> Any:
        """Build the game to copy; None if it cannot be copied or its constructor uses randomness."""
        context = self._probe()
        before = context.rng.getstate()
        try:
            with context:
                built = self._build()
                known = [*inspect.signature(type(built).__init__).parameters][1:]
                for name in self._options:
                    if name not in known:
                        raise ConfigError(  # noqa: TRY301  # passed on unchanged below
                            f"env_config['game_options'][{shown(name)}] is unknown{did_you_mean(name, known)}"
                        )
                is_copied = deep_copy(built) is not built
        except BaseException as error:  # third-party code may raise anything
            if is_interruption(error) or isinstance(error, ConfigError):
                raise
            raise ConfigError(self._complaint(error)) from error
        return built if is_copied and context.rng.getstate() == before else None

    def _complaint(self, error: BaseException) -> str:
        entry = catalogue().get(self.game)
        if isinstance(error, TypeError) and "unexpected keyword" in str(error):
            return f"env_config['game_options'] does not fit {self.game}: {sentence_of(error)}"
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        if entry is not None and entry.min_python:
            return f"{self.game} needs Python {entry.min_python} or newer, but this is {python}"
        reason = f"{type(error).__name__}: {sentence_of(error)}"
        if self._given and (entry is None or entry.status != "broken"):
            return f"env_config['game_options'] {shown(self._given)} does not fit {self.game}: {reason}"
        return f"{self.game} cannot be created by the installed version of TextArena: {reason}"


class PlayedGame:
    """A game that has started.

    If the game limits the moves of all players together, ``max_moves`` lowers its limit.
    """

    def __init__(
        self, game: Any, context: GameContext, *, num_players: int, seed: int, max_moves: int | None = None
    ) -> None:
        self._game = game
        self._context = context
        self.num_players = num_players
        default_limit = getattr(game, "max_turns", None)
        if max_moves is not None and isinstance(default_limit, int) and default_limit > max_moves:
            game.max_turns = max_moves  # shown in the prompt
        with context:
            game.reset(num_players=num_players, seed=seed)
        limit = getattr(self.state, "max_turns", None)
        if max_moves is not None and isinstance(limit, int) and limit > max_moves - 1:
            self.state.max_turns = max_moves - 1  # the game checks the limit before it counts the move

    @property
    def state(self) -> Any:
        """TextArena's state object."""
        return self._game.state

    @property
    def player(self) -> int:
        """The player to move."""
        return self.state.current_player_id

    @property
    def done(self) -> bool:
        """Whether the game is over."""
        return bool(self.state.done)

    def observe(self, *, shared: bool = False) -> str:
        """Format what is new to the player to move, and mark it as seen.

        Args:
            shared: Whether all players share one conversation, so that a message shown to one is new to nobody.
        """
        with self._context:
            seat, messages = self._game.get_observation()
        state = self.state
        if shared:
            for other, waiting in state.observations.items():
                if other != seat:
                    state.observations[other] = [one for one in waiting if one[2].name == "PROMPT"]
        return text_of(messages, seat, state.role_mapping, shared=shared)

    def publish_actions(self) -> None:
        """Turn the players' messages that others have not seen yet into messages from the game to everyone."""
        kinds = textarena().ObservationType
        for seat, waiting in self.state.observations.items():
            self.state.observations[seat] = [
                (GAME_ID, with_sender(sender, message, self.state.role_mapping), kinds.GAME_MESSAGE)
                if kind is kinds.PLAYER_ACTION
                else (sender, message, kind)
                for sender, message, kind in waiting
            ]

    def move(self, action: str, error_allowance: int | None = None) -> bool:
        """Play a move for the player to move, and return whether it was valid.

        Args:
            action: The player's text.
            error_allowance: The number of consecutive invalid moves that the game allows, for this move; None for the
                game's default.
        """
        seat, state = self.player, self.state
        own_allowance = getattr(state, "error_allowance", None)
        is_allowance_given = error_allowance is not None and own_allowance is not None
        complain: Callable[..., Any] | None = getattr(state, "set_invalid_move", None)
        num_complaints = 0

        def count_complaint(*args: Any, **kwargs: Any) -> Any:  # the game's count restarts once its limit is exceeded
            nonlocal num_complaints
            num_complaints += 1
            return cast("Callable[..., Any]", complain)(*args, **kwargs)

        if is_allowance_given:
            state.error_allowance = error_allowance
        if complain is not None:
            state.set_invalid_move = count_complaint
        try:
            with self._context:
                self._game.step(action=action)
        finally:
            if complain is not None:
                del state.set_invalid_move
            if is_allowance_given:
                state.error_allowance = own_allowance
        self._end_if_stuck(seat)
        return num_complaints == 0

    def _end_if_stuck(self, mover: int) -> None:
        """End a game that would prompt an eliminated player forever, or in which only one player remains.

        This happens in some multiplayer games after invalid moves. The eliminated player loses, all others win.
        """
        state = self.state
        eliminated: Sequence[int] = getattr(state, "elimination_order", ())
        others = [seat for seat in range(self.num_players) if seat not in eliminated]
        out = [seat for seat in (self.player, mover) if seat in eliminated and self.info_of(seat).get("invalid_move")]
        if not self.done and out and (out[0] == self.player or len(others) <= 1):
            state.set_winners(others, reason=f"Player {out[0]} made too many invalid moves.")

    @property
    def num_errors(self) -> int:
        """The number of consecutive invalid moves of the player to move, as counted by the game."""
        return getattr(self.state, "error_count", 0)

    def rewards(self) -> dict[int, float]:
        """Return each player's final reward.

        Raises:
            EnvError: The game does not define rewards.
        """
        with self._context:
            rewards: Any = self._game.close()[0]
        if not isinstance(rewards, Mapping):
            raise EnvError(f"a TextArena game must end with rewards by player, got {shown(rewards)}")
        for seat, reward in cast("Mapping[Any, Any]", rewards).items():
            if not isinstance(reward, int | float):
                raise EnvError(f"a game's reward must be a number, got {shown(reward)} for player {seat}")
        final = {int(seat): float(reward) for seat, reward in cast("Mapping[Any, Any]", rewards).items()}
        return final if self.num_players > 1 else {seat: worth(self._game, reward) for seat, reward in final.items()}

    def info_of(self, seat: int) -> dict[str, Any]:
        """Return the game's info about a player: ``reason``, ``invalid_move`` and more."""
        return self.state.game_info.get(seat, {})

    def is_won(self, seat: int) -> bool:
        """Whether a player won the game, which must be over."""
        rewards = self.rewards()
        with self._context:
            return is_won(self._game, rewards, seat, self.info_of(seat))

    def words(self) -> Sequence[str]:
        """Return common words for a word game; empty for other games."""
        return basic_words() if any(hasattr(self._game, name) for name in _WORD_LISTS) else ()

    def moves_by_rules(self, rng: random.Random) -> list[str]:
        """Return moves by the game's rules, if they are implemented in :mod:`~.moves`; otherwise empty."""
        return moves_by_rules(self._game, rng)

    def progress(self) -> float:
        """Return a single player's progress in [0, 1], as the game rewards it at its turn limit; 0.0 if unknown."""
        method: Callable[[], Any] | None = next(
            (found for name in _PROGRESS if callable(found := getattr(self._game, name, None))), None
        )
        if method is None or self.num_players > 1 or inspect.signature(method).parameters:
            return 0.0
        with self._context:
            value = method()
        return worth(self._game, float(value)) if isinstance(value, int | float) and 0 <= value <= 1 else 0.0

    def is_legal(self, action: str) -> bool:
        """Return whether a move is currently valid, by trying it on a copy of the game."""
        trial = copy.copy(self)
        trial._game = deep_copy(self._game)  # not shared with the original
        trial._context = GameContext(random.Random(0), word_list=self._context.word_list)
        try:
            return trial.move(action, error_allowance=1)
        except Exception:  # noqa: BLE001  # a move that crashes the game is not legal
            return False

    def __deepcopy__(self, memo: dict[int, Any]) -> PlayedGame:
        twin = copy.copy(self)
        twin._game = deep_copy(self._game)  # not shared with the original
        twin._context = copy.deepcopy(self._context, memo)
        return twin


def game_seed(rng: random.Random) -> int:
    """Draw a game's seed in [0, 2**31), unrelated to the seeds of samplers."""
    return derive_seed("textarena game", rng.getrandbits(63)) % 2**31
