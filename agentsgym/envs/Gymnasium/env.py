"""Play a Gymnasium environment through text."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

from agentsgym.envs.anchors import Anchors
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.Gymnasium import SPEC
from agentsgym.envs.Gymnasium.actions import ActionTable, action_table, is_actions
from agentsgym.envs.Gymnasium.creation import is_bare, make_game, render_modes, spec_of
from agentsgym.envs.Gymnasium.described import SHOWS, DescribedGame, described_game
from agentsgym.envs.Gymnasium.exact import legal_outcomes
from agentsgym.envs.Gymnasium.rendering import Show, check_small
from agentsgym.envs.Gymnasium.tasks import DatasetOptions, check_map, task_dataset
from agentsgym.envs.shared.exact_play import ValueTable, value_table
from agentsgym.errors import ConfigError, EnvError, TaskError
from agentsgym.fields import Field, has_str_keys, is_str
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

NEW_GAME = "A new game begins.\n"

_MOST_MAPS = 256  # with cached environments and values
_SUCCESS = ("reward", "terminated")
_PER_PROCESS = frozenset({"_prototypes", "_tables", "_lock"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactGame:
    """An environment with a known state space.

    Attributes:
        values: The value of each state.
        frames: The number of the state of each frame; empty for custom frames.
    """

    values: ValueTable
    frames: Mapping[str, int]


class GymnasiumEnv(MultistepEnv):
    """Any Gymnasium environment with discrete actions.

    A task is ``{"seed": int}``, and for FrozenLake optionally ``{"map": ["SFFF", "FHFH", "FFFH", "HFFG"]}``. The
    environment is reset with a seed drawn from the session's generator, and uses no other randomness.

    Keys of ``env_config`` beside the common ones:

    - ``id``: a registered id, ``"FrozenLake-v1"`` by default, or a callable that makes the environment.
    - ``make_kwargs``: arguments of its constructor, such as ``{"is_slippery": False}``.
    - ``actions``: a dict from names to action numbers, a list of names in the order of the numbers, or a callable that
      parses an action number from the agent's text and returns None for none; by default the built-in names for the
      supported environments, and the numbers for others.
    - ``render``: ``"auto"`` (the built-in rendering, then the mode ``ansi``, then the observation's numbers),
      ``"ansi"``, ``"observation"``, or a callable ``(game, observation) -> str``.
    - ``success``: ``"auto"`` (the built-in definition, else undefined), ``"reward"`` (terminated with a reward above
      0), ``"terminated"`` (terminated rather than truncated by a turn limit), or a callable ``(game, reward,
      terminated) -> bool``.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = {
        "id": Field(
            default="FrozenLake-v1",
            expected="an id or a callable that makes a gymnasium.Env",
            valid=lambda value: callable(value) or (is_str(value) and value != ""),
        ),
        "make_kwargs": Field(default={}, expected="a dict of arguments", valid=has_str_keys),
        "actions": Field(
            default=None,
            expected="a dict of names and action numbers, a list of names, a callable (text) -> int | None, or None",
            valid=is_actions,
        ),
        "render": Field(
            default="auto",
            expected="'auto', 'ansi', 'observation', or a callable (game, observation) -> str",
            valid=lambda value: callable(value) or value in ("auto", *SHOWS),
        ),
        "success": Field(
            default="auto",
            expected="'auto', 'reward', 'terminated', or a callable (game, reward, terminated) -> bool",
            valid=lambda value: callable(value) or value in ("auto", *_SUCCESS),
        ),
    }

    task_fields: ClassVar[Collection[str] | None] = ("map",)

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None = None, env_config: dict[str, Any] | None = None
    ) -> None:
        """Make the environment once to inspect its spaces; arguments as for every environment.

        Raises:
            ConfigError: As for every environment; or the Gymnasium environment cannot be made, has no discrete actions,
                or cannot be shown as text.
            MissingDependencyError: The package ``gymnasium``, or one that the environment needs, is not installed.
        """
        super().__init__(tokenizer, env_config)
        config = self.env_config
        given_id = config["id"]
        self._kwargs = self._constructor_kwargs()
        game = make_game(given_id, self._kwargs)
        self.actions: ActionTable = action_table(
            config["actions"], game.action_space, self._description.actions if self._description else None
        )
        render: Any = config["render"]
        shows = {**SHOWS}
        if self._description is not None:
            shows["auto"] = self._description.show
        elif render == "auto":
            render = "ansi" if getattr(game, "render_mode", None) == "ansi" else "observation"
        if render == "observation":
            check_small(game.observation_space)
        self.show: Show = cast("Show", render) if callable(render) else shows[render]
        self.horizon: int = config["max_steps_per_episode"]
        theirs = getattr(getattr(game, "spec", None), "max_episode_steps", None)  # set where it was registered
        if isinstance(theirs, int) and theirs > 0:
            self.horizon = min(self.horizon, theirs)
        self._is_bare = is_bare(game)
        self._tables: dict[str, ExactGame | None] = {}
        self._prototypes: dict[str, Any] = {}
        self._lock = threading.Lock()
        game.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the Gymnasium environments, which each process makes itself."""
        return {key: value for key, value in super().__getstate__().items() if key not in _PER_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_prototypes": {}, "_tables": {}, "_lock": threading.Lock(), **state})

    def _constructor_kwargs(self) -> dict[str, Any]:
        config = self.env_config
        kwargs: dict[str, Any] = dict(config["make_kwargs"])
        if not isinstance(config["id"], str):
            return kwargs
        modes = render_modes(spec_of(config["id"]))
        if self.has_maps and kwargs.get("map_name", "4x4") is None and "desc" not in kwargs:
            raise ConfigError(
                "env_config['make_kwargs']['map_name'] = None draws a map that does not depend on the seed: use "
                "tasks with a 'map', such as those of get_train_dataset(random_maps=True)"
            )
        if config["render"] == "ansi" and "ansi" not in modes:
            raise ConfigError(
                f"env_config['render'] must be 'observation' or a callable for {config['id']!r}: it renders in the "
                f"modes {shown(list(modes))}, but not in 'ansi'"
            )
        mode: Any = kwargs.get("render_mode", "ansi")
        if mode != "ansi":
            raise ConfigError(f"env_config['make_kwargs']['render_mode'] must be 'ansi' or left out, got {shown(mode)}")
        if "ansi" in modes:
            kwargs["render_mode"] = "ansi"
        return kwargs

    @property
    def _description(self) -> DescribedGame | None:
        """The description of a supported environment."""
        given_id = self.env_config["id"]
        return described_game(given_id) if isinstance(given_id, str) else None

    @property
    def has_maps(self) -> bool:
        """Whether a task may define a custom map."""
        return self._description is not None and self._description.has_maps

    # Supported environments are copied from one instance, since a seeded reset determines their whole state

    def _new_game(self, desc: list[str] | None) -> Any:
        if self._description is None:
            return make_game(self.env_config["id"], self._kwargs)
        key = json.dumps(desc)
        with self._lock:
            game = self._prototypes.get(key)
        if game is None:
            kwargs = self._kwargs if desc is None else {**self._kwargs, "desc": desc}
            game = make_game(self.env_config["id"], kwargs)
            self._cache(self._prototypes, key, game)
        # The table is by far the largest part, and is read-only.
        table = getattr(game.unwrapped, "P", None)
        return copy.deepcopy(game, {id(table): table})

    def _cache(self, cache: dict[str, Any], key: str, value: Any) -> None:
        """Cache a value for a map, among the most recent maps."""
        with self._lock:
            while len(cache) >= _MOST_MAPS:
                cache.pop(next(iter(cache)))
            cache[key] = value

    def exact(self, desc: list[str] | None = None) -> ExactGame | None:
        """Return the exact values, on a custom map if one is given; None if they are unknown.

        They are known for the supported environments, made by id without wrappers, with default rendering and rewards.
        """
        key = json.dumps(desc)
        with self._lock:
            if key in self._tables:
                return self._tables[key]
        exact, description = None, self._description
        if description is not None and self._is_bare:
            game = self._new_game(desc)
            transitions = description.transitions(game)
            if transitions is not None:
                game.reset(seed=0)
                values = value_table(legal_outcomes(transitions, self.actions.values), self.horizon)
                frames = description.frames(game, self.show) if self.show is description.show else {}
                game.close()
                exact = ExactGame(values=values, frames=frames)
        self._cache(self._tables, key, exact)
        return exact

    # The hooks

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        desc = task_data.get("map")
        if desc is None:
            return
        if not self.has_maps:
            raise TaskError(
                f"task_data['map'] is only valid for FrozenLake, but this is {shown(self.env_config['id'])}"
            )
        check_map(desc)

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        self._check_task(task_data)
        desc: list[str] | None = task_data.get("map")
        game = self._new_game(desc)
        state: dict[str, Any] = {"game": game, "map": desc, "num_steps": 0, "done": False}
        observation, _ = game.reset(seed=self.rng(session_id).getrandbits(31))
        config = self.env_config
        # The final reward of several episodes is a sum over different starts, without anchors.
        is_sum = config["keep_history"] and config["episodes_per_trial"] - config["free_shots"] > 1
        exact = None if is_sum else self.exact(desc)
        info: dict[str, float] = {}
        if exact is not None and self._description is not None:
            start = self._description.state(game, observation)
            random, optimal = (float(values[-1, start]) for values in (exact.values.random, exact.values.optimal))
            anchors = Anchors(random=random, optimal=optimal)
            info = {"random_reward": anchors.random, "optimal_reward": anchors.optimal}
        return {**state, "anchors": info, "observation": observation, "shown": self._shown(game, observation)}

    def _shown(self, game: Any, observation: Any) -> str:
        text: Any = self.show(game, observation)
        if not isinstance(text, str):
            raise EnvError(f"env_config['render'] must return a str, got {shown(text)}")
        return text

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        config = self.env_config
        is_next = step == 0 and config["keep_history"] and config["episodes_per_trial"] > 1
        return f"{NEW_GAME}{state['shown']}" if is_next else state["shown"]

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        number = self.actions.read(action)
        if number is None:
            info = {**state["anchors"], "invalid": True, "success": self._success(state["game"], 0.0, False)}
            return {**state, "shown": f"Invalid action. {self._hint()}"}, 0.0, False, info
        game = state["game"]
        observation, reward, terminated, truncated, _ = game.step(number)
        done = bool(terminated or truncated)
        info = {**state["anchors"], "success": self._success(game, float(reward), bool(terminated)), "action": number}
        if truncated and not terminated:
            info["truncated"] = True
        next_state = {**state, "num_steps": state["num_steps"] + 1, "observation": observation}
        next_state["shown"] = "" if done else self._shown(game, observation)
        return next_state, float(reward), done, info

    def _success(self, game: Any, reward: float, terminated: bool) -> bool | None:
        success = self.env_config["success"]
        if callable(success):
            return bool(success(game, reward, terminated))
        if success == "auto":
            return self._description.won(game, reward, terminated) if self._description else None
        return terminated and (success == "terminated" or reward > 0)

    def _state_key(self, state: dict[str, Any]) -> Hashable | None:
        """The environment's state, for the supported environments."""
        if self._description is None:
            return None
        return (json.dumps(state["map"]), self._description.state(state["game"], state["observation"]))

    def _close_episode(self, session_id: str, state: dict[str, Any]) -> None:
        state["game"].close()

    def _system_prompt(self) -> str:
        rules = (
            self._description.rules
            if self._description
            else f"You play {self._name()}. Earn as much reward as you can."
        )
        return f"{rules} {self._hint()}"

    def _hint(self) -> str:
        return self.actions.as_hint() if self.actions.parser is None else "Answer with an action."

    def _name(self) -> str:
        given_id = self.env_config["id"]
        return given_id if isinstance(given_id, str) else getattr(given_id, "__name__", "a game")

    def vocabulary_texts(self) -> list[str]:
        """Every message of the environment, and every action, for a word-level tokenizer.

        Raises:
            ConfigError: The environment's states are not all known.
        """
        exact = self.exact()
        if exact is None:
            raise ConfigError(f"{self._name()} has no list of all its states: build the tokenizer from recorded texts")
        own = self.env_config["system_prompt"]
        messages = [self._system_prompt() if own is None else own, f"Invalid action. {self._hint()}", *exact.frames]
        if self.has_maps:  # the cells of any map, with the player's position
            cells = " ".join(letter for letter in "SFHG" * 2)
            marked = [f"[{letter}]" for letter in "SFHG"]
            messages += [cells, *(f"{one} {two}\n{two} {one}" for one in marked for two in (*"SFHG", *marked))]
        actions = [form for name in self.actions.by_name for form in (name, f"[{name}]")]
        return [text for text in (*messages, *(f"{NEW_GAME}{one}" for one in messages), *actions) if text]

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Rows to train on; the options are those of :class:`~.tasks.DatasetOptions`.

        Raises:
            ConfigError: The configuration or an option is invalid.
        """
        return task_dataset(cls, env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Rows to evaluate on, which share no seed or random map with :meth:`get_train_dataset`; arguments as there."""
        return task_dataset(cls, env_config, "eval", options)
