"""Run any TextArena game: single-player, against players of any kind, or in self-play."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from agentsgym.agents.base import Agent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.config import validated_config
from agentsgym.envs.contract import State, Stepped
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.options import DrawnOptions, Part, checked_options, dataset_of, drawn_options, task_seed
from agentsgym.envs.opponents import AgentPlayer, Move, Player, is_player_name, named_agent, player_stream
from agentsgym.envs.TextArena import SPEC
from agentsgym.envs.TextArena.catalogue import GameEntry, catalogue
from agentsgym.envs.TextArena.games import GameFactory, PlayedGame, base_id, game_seed
from agentsgym.envs.TextArena.isolation import GameContext
from agentsgym.envs.TextArena.observations import with_header
from agentsgym.envs.TextArena.players import LegalPlayer
from agentsgym.errors import ConfigError, EnvError, TaskError
from agentsgym.fields import Field, choice_field, has_str_keys, is_bool, is_int, is_str, or_none, require
from agentsgym.texts import shown
from agentsgym.types import Message

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

MAX_ACTION_CHARACTERS = 100_000


class TextArenaEnv(MultistepEnv):
    """Any TextArena game; each observation contains only what is new since the last turn.

    A task is ``{"seed": int}``, and may specify the agent's ``"seat"``.

    Keys of ``env_config`` in addition to the common ones:

    - ``game``: a base id, such as ``"Wordle-v0"``; the suffixes ``-raw`` and ``-train`` select the same game.
    - ``game_options``: arguments of the game's constructor, such as ``{"max_number": 50}``.
    - ``num_players``: the number of players; None for the game's minimum.
    - ``seat``: the agent's seat; None draws one, the same for all rollouts of a task.
    - ``opponent``: the players of the other seats: ``"random"`` or ``"first"`` (legal moves), ``"self"`` (the agent
      plays all seats), a name registered with :func:`~.players.register_player`, or names by seat, such as ``{"1":
      "random"}``.
    - ``shared_conversation``: whether all seats of ``"self"`` read one conversation; None shares it if the game has no
      hidden information.
    - ``opening_moves``: the maximum number of random moves before the agent's first move; the actual number is drawn
      per task.
    - ``gamemaster``: the registered name of the gamemaster, for games that are run by a language model.
    - ``add_brackets``: whether an action without any bracket is wrapped in ``[…]``, as TextArena does by default.
    - ``word_list``: ``"hunspell"`` (the dictionary in TextArena's wheel) or ``"nltk"`` (nltk's corpora, which must be
      installed).
    - ``errors_in_a_row``: the number of consecutive invalid moves that the game allows, as counted by TextArena.

    The game determines the reward at its end; ``info["success"]`` is whether the agent won, ``info["reason"]`` the
    game's explanation. If ``max_steps_per_episode`` truncates a single-player game, the reward is the progress so far,
    if the game defines it.

    Args:
        tokenizer: The policy's tokenizer; None if only text is exchanged.
        env_config: The configuration, with the keys above and the common ones.
        opponent: An agent for the other seats, or agents by seat; replaces ``env_config["opponent"]``.
        gamemaster: The agent that is the gamemaster; replaces ``env_config["gamemaster"]``.

    Raises:
        ConfigError: The configuration is invalid, the game is unknown, or it cannot be played with these options.
        MissingDependencyError: TextArena is not installed.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = {
        "game": Field(default=None, expected="a game's id, as 'Wordle-v0'", valid=is_str),
        "game_options": Field(default={}, expected="a dict of the game's options", valid=has_str_keys),
        "num_players": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
        "seat": Field(default=None, expected="an int >= 0, or None to draw it", valid=or_none(is_int(0))),
        "opponent": Field(default="random", expected="a player's name, or names by seat", valid=is_player_name),
        "shared_conversation": Field(default=None, expected="True, False or None", valid=or_none(is_bool)),
        "opening_moves": Field(default=0, expected="an int >= 0", valid=is_int(0)),
        "gamemaster": Field(default=None, expected="a registered player's name or None", valid=or_none(is_str)),
        "add_brackets": Field(default=True, expected="True or False", valid=is_bool),
        "word_list": choice_field("hunspell", "nltk"),
        "errors_in_a_row": Field(default=1, expected="an int >= 0", valid=is_int(0)),
    }
    default_config: ClassVar[Mapping[str, Any]] = {"max_steps_per_episode": 100, "error_allowance": 1000}
    task_fields: ClassVar[Collection[str] | None] = ("seat",)
    role_key = "seat"
    own_opponents = ("random", "first")
    opponent_stream = "textarena player"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        env_config: dict[str, Any] | None = None,
        *,
        opponent: Agent | Mapping[Any, Agent] | None = None,
        gamemaster: Agent | None = None,
    ) -> None:
        super().__init__(tokenizer, env_config, opponent=opponent)
        config = self.env_config
        given: Any = config["gamemaster"] if gamemaster is None else gamemaster
        self._gamemaster: Player | None = None if given is None else named_agent(given, "env_config['gamemaster']")
        self._factory = GameFactory(
            self.game, config["game_options"], word_list=config["word_list"], has_gamemaster=given is not None
        )
        self._factory.check_start(self.num_players)
        if config["shared_conversation"] and not self.plays_itself:
            raise ConfigError("env_config['shared_conversation'] has no effect without env_config['opponent'] = 'self'")
        if self.opponents is not None and config["seat"] is not None and self.opponents.names(config["seat"]):
            raise ConfigError(
                f"env_config['opponent'] names a player for seat {config['seat']}, which is the agent's own"
            )

    def _check_config(self, config: dict[str, Any]) -> None:
        """Find the game, whose number of players determines the roles."""
        self.game = base_id(config["game"])
        self.entry = catalogue().get(self.game)
        self.num_players = _num_players(self.game, self.entry, config["num_players"])
        self._check_seat(config["seat"], "env_config['seat']", ConfigError)

    @property
    def roles(self) -> Sequence[Hashable]:  # type: ignore[override]
        """The seats."""
        return range(self.num_players)

    @property
    def shares_conversation(self) -> bool:  # type: ignore[override]
        """Whether the agent plays all seats in one conversation.

        Raises:
            ConfigError: One conversation would reveal hidden information.
        """
        is_public = self.entry is not None and not self.entry.hidden
        wanted = self.env_config["shared_conversation"]
        if wanted and self.plays_itself and not is_public:
            raise ConfigError(
                f"env_config['shared_conversation'] would reveal what the players of {self.game} hide from each "
                "other: omit it, so that each player sees only its own conversation"
            )
        return self.plays_itself and (is_public if wanted is None else wanted)

    def _check_seat(self, seat: Any, name: str, error: type[ConfigError | TaskError]) -> None:
        is_seat = or_none(lambda value: is_int(0)(value) and value < self.num_players)
        require(name, seat, is_seat, f"an int in [0, {self.num_players}) or None", error)

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        self._check_seat(task_data.get("seat"), "task_data['seat']", TaskError)

    # The hooks

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        rng = self.rng(session_id)
        seat = task_data.get("seat", self.env_config["seat"])
        if self.opponents is None or self.plays_itself:
            drawn = rng.randrange(self.num_players)
            seat = drawn if seat is None else seat
        config = self.env_config
        context = GameContext(random.Random(rng.getrandbits(63)), word_list=config["word_list"])
        if self._gamemaster is not None:
            stream = player_stream(rng, "textarena gamemaster")
            player = AgentPlayer(
                self._gamemaster, f"{session_id}/gamemaster", stream, self.chat_format, remembers=False
            )
            context.gamemaster = player.answer
        moves_per_turn = 1 if self.plays_itself else self.num_players
        most = config["opening_moves"]
        num_opening = rng.randint(0, most) if most else 0
        game = PlayedGame(
            self._factory(context),
            context,
            num_players=self.num_players,
            seed=game_seed(rng),
            max_moves=config["max_steps_per_episode"] * moves_per_turn + num_opening,
        )
        if num_opening:
            _play_opening(game, rng, num_opening, config["errors_in_a_row"])
        state: State = {"done": False, "game": game, "seat": seat, "num_invalid": 0, "num_turns": 0}
        self._observe(state)
        return state

    def _own_opponent(self, name: str, rng: random.Random) -> Move:
        return LegalPlayer(None if name == "first" else rng).act

    def _format_prompt(self, state: State, step: int) -> str | list[Message]:
        text: str = state["observation"]
        is_headed = self.plays_itself and (self.shares_conversation or step == 0)
        return with_header(state["game"].player, text) if is_headed else text

    def _step_episode(self, session_id: str, state: State, action: str) -> Stepped:
        game: PlayedGame = state["game"]
        seat = game.player
        config = self.env_config
        info: dict[str, Any] = {}
        if self.plays_itself or seat == state["seat"]:
            text = action.strip()[:MAX_ACTION_CHARACTERS]
            if config["add_brackets"] and "[" not in text and "]" not in text:
                text = f"[{text}]"
            # The rest of the episode's allowance; the game only counts consecutive errors.
            num_allowed = config["error_allowance"] - state["num_invalid"]
            is_valid = game.move(text, min(config["errors_in_a_row"], num_allowed + game.num_errors))
            state["num_invalid"] += not is_valid
            state["num_turns"] += 1
            info = {} if is_valid else {"invalid": True}
        else:
            game.move(action, config["errors_in_a_row"])
        self._observe(state)
        reward, outcome = self._result(state, seat)
        return state, reward, game.done, info | outcome

    def _observe(self, state: State) -> None:
        game: PlayedGame = state["game"]
        if not game.done:
            state["observation"] = game.observe(shared=self.shares_conversation)

    def _result(self, state: State, seat: int) -> tuple[float, dict[str, Any]]:
        game: PlayedGame = state["game"]
        if not game.done:
            is_last = state["num_turns"] >= self.env_config["max_steps_per_episode"]
            info: dict[str, Any] = {"success": False}
            if self.plays_itself:
                info = {"rewards": dict.fromkeys(self.roles, 0.0)}
            return game.progress() if is_last else 0.0, info
        rewards = game.rewards()
        own = seat if self.plays_itself else state["seat"]
        if own not in rewards:
            raise EnvError(f"{self.game} ended without a reward for player {own}, got {shown(rewards)}")
        outcome = game.info_of(own)
        info = {"reason": str(outcome.get("reason", "")), "num_moves": int(getattr(game.state, "turn", 0))}
        if self.num_players > 1:
            info["rewards"] = rewards
        return rewards[own], info if self.plays_itself else {**info, "success": game.is_won(own)}

    def _role(self, state: State) -> Hashable | None:
        """The agent's seat, in multiplayer games."""
        return None if self.num_players == 1 else state["game"].player

    def _close_episode(self, session_id: str, state: State) -> None:
        if len(self.active_states) <= 1 and isinstance(self._gamemaster, Agent):  # the last active session
            self._gamemaster.finish()

    # Datasets

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DrawnOptions]) -> Dataset:
        """Return rows to train on; the options are ``size`` (1000 by default) and ``seed``."""
        return cls._rows(env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DrawnOptions]) -> Dataset:
        """Return rows to evaluate on (100 by default), which share no task with :meth:`get_train_dataset`."""
        return cls._rows(env_config, "eval", options)

    @classmethod
    def _rows(cls, env_config: dict[str, Any] | None, part: Part, options: Mapping[str, Any]) -> Dataset:
        """Make rows; the players are not checked, since they may be passed as objects that a row cannot contain."""
        config = validated_config(cls, env_config)
        game = base_id(config["game"])
        _num_players(game, catalogue().get(game), config["num_players"])
        settings = checked_options(options, drawn_options(1000 if part == "train" else 100))
        seeds = (task_seed(part, "textarena task", settings["seed"], row) for row in range(settings["size"]))
        return dataset_of(({"seed": seed} for seed in seeds), class_path(cls), env_config)


def _play_opening(game: PlayedGame, rng: random.Random, num_moves: int, error_allowance: int) -> None:
    """Play random opening moves for all seats; the game shows them as messages, since no conversation has them."""
    player = LegalPlayer(random.Random(rng.getrandbits(63)))
    for _ in range(num_moves):
        if game.done:
            return
        move = player.answer(copy.deepcopy(game).observe(), game)  # on a copy, so that nothing is marked as seen
        game.move(move, error_allowance)
    game.publish_actions()


def _num_players(game: str, entry: GameEntry | None, given: int | None) -> int:
    if entry is None:
        if given is None:
            raise ConfigError(f"env_config['num_players'] must be set for {game}, which is not in the catalogue")
        return given
    few, many = entry.min_players, entry.max_players
    if given is None:
        return few
    if not few <= given <= many:
        wanted = str(few) if few == many else f"{few} to {many}"
        raise ConfigError(f"env_config['num_players'] must be {wanted} for {game}, got {given}")
    return given
