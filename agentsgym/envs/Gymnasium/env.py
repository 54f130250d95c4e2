"""Run a Gymnasium environment through text."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.boundary import system_messages
from agentsgym.envs.contract import Stepped
from agentsgym.envs.Gymnasium import SPEC
from agentsgym.envs.Gymnasium.actions import ActionTable, action_table, is_actions
from agentsgym.envs.Gymnasium.creation import is_bare, make_env, render_modes, spec_of
from agentsgym.envs.Gymnasium.descriptions import RENDERERS, EnvDescription, Renderer, check_small, find_description
from agentsgym.envs.Gymnasium.exact import ValueTable, legal_outcomes, value_table
from agentsgym.envs.Gymnasium.tasks import DatasetOptions, check_map, task_dataset
from agentsgym.errors import ConfigError, EnvError, TaskError
from agentsgym.fields import Field, has_str_keys, is_str, one_of, require
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

NEW_GAME = "A new game begins.\n"

_MAX_CACHED_MAPS = 256  # maps whose environments and exact values are cached
_SUCCESS = ("reward", "terminated")
_PER_PROCESS = frozenset({"_prototypes", "_tables", "_lock"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactValues:
    """The exact values of an environment with a known state space.

    Attributes:
        values: The value of each state.
        frames: The state number of each frame; empty if the rendering is custom.
    """

    values: ValueTable
    frames: Mapping[str, int]


class GymnasiumEnv(MultistepEnv):
    """Any Gymnasium environment with discrete actions.

    A task is ``{"seed": int}``; for FrozenLake it may also have a ``"map"``, such as ``["SFFF", "FHFH", "FFFH",
    "HFFG"]``. The environment is reset with a seed drawn from the session's generator, and uses no other randomness.

    Keys of ``env_config`` in addition to the common ones:

    - ``id``: a registered id, ``"FrozenLake-v1"`` by default, or a callable that creates the environment.
    - ``make_kwargs``: the arguments of its constructor, such as ``{"is_slippery": False}``.
    - ``actions``: a dict from names to action numbers, a list of names in the order of the numbers, or a callable that
      returns the number of the action in the agent's text, or None if there is none. By default, supported environments
      have built-in names, and the actions of others are named by their numbers.
    - ``render``: ``"auto"`` (the built-in rendering if there is one, otherwise ``"ansi"`` if supported, otherwise
      ``"observation"``), ``"ansi"`` (the render mode), ``"observation"`` (its numbers), or a callable ``(env,
      observation) -> str``.
    - ``success``: ``"auto"`` (the built-in definition if there is one, otherwise unknown), ``"reward"`` (terminated
      with a reward above 0), ``"terminated"`` (terminated rather than truncated by a limit), or a callable ``(env,
      reward, terminated) -> bool``.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = {
        "id": Field(
            default="FrozenLake-v1",
            expected="an id or a callable that returns a gymnasium.Env",
            valid=lambda value: callable(value) or (is_str(value) and value != ""),
        ),
        "make_kwargs": Field(default={}, expected="a dict of arguments", valid=has_str_keys),
        "actions": Field(
            default=None,
            expected="a dict from names to action numbers, a list of names, a callable (text) -> int | None, or None",
            valid=is_actions,
        ),
        "render": Field(
            default="auto",
            expected="'auto', 'ansi', 'observation', or a callable (env, observation) -> str",
            valid=lambda value: callable(value) or value in ("auto", *RENDERERS),
        ),
        "success": Field(
            default="auto",
            expected="'auto', 'reward', 'terminated', or a callable (env, reward, terminated) -> bool",
            valid=lambda value: callable(value) or value in ("auto", *_SUCCESS),
        ),
    }

    task_fields: ClassVar[Collection[str] | None] = ("map",)

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None = None, env_config: dict[str, Any] | None = None
    ) -> None:
        """Create the Gymnasium environment once to inspect its spaces; the arguments are those of every environment.

        Raises:
            ConfigError: The configuration is invalid, or the Gymnasium environment cannot be created, has no discrete
                actions, or cannot be rendered as text.
            MissingDependencyError: ``gymnasium``, or a package that the environment needs, is not installed.
        """
        super().__init__(tokenizer, env_config)
        config = self.env_config
        env_id = config["id"]
        self._kwargs = self._constructor_kwargs()
        env = make_env(env_id, self._kwargs)
        self.actions: ActionTable = action_table(
            config["actions"], env.action_space, self._description.actions if self._description else None
        )
        render: Any = config["render"]
        renderers = {**RENDERERS}
        if self._description is not None:
            renderers["auto"] = self._description.show
        elif render == "auto":
            render = "ansi" if getattr(env, "render_mode", None) == "ansi" else "observation"
        if render == "observation":
            check_small(env.observation_space)
        self.show: Renderer = cast("Renderer", render) if callable(render) else renderers[render]
        self.horizon: int = config["max_steps_per_episode"]
        registered_limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
        if isinstance(registered_limit, int) and registered_limit > 0:
            self.horizon = min(self.horizon, registered_limit)
        self._is_bare = is_bare(env)
        self._tables: dict[str, ExactValues | None] = {}
        self._prototypes: dict[str, Any] = {}
        self._lock = threading.Lock()
        env.close()

    def __getstate__(self) -> dict[str, Any]:
        """Omit the Gymnasium environments, which each process creates itself."""
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
                "env_config['make_kwargs']['map_name'] = None would draw a map that does not depend on the seed: use "
                "tasks with a 'map', such as those of get_train_dataset(random_maps=True)"
            )
        if config["render"] == "ansi" and "ansi" not in modes:
            raise ConfigError(
                f"env_config['render'] must be 'observation' or a callable for {config['id']!r}, which does not "
                f"support the render mode 'ansi', only {shown(list(modes))}"
            )
        mode = kwargs.get("render_mode", "ansi")
        require("env_config['make_kwargs']['render_mode']", mode, one_of("ansi"), "'ansi' or omitted")
        if "ansi" in modes:
            kwargs["render_mode"] = "ansi"
        return kwargs

    @property
    def _description(self) -> EnvDescription | None:
        env_id = self.env_config["id"]
        return find_description(env_id) if isinstance(env_id, str) else None

    @property
    def has_maps(self) -> bool:
        """Whether a task may define a custom map."""
        return self._description is not None and self._description.has_maps

    def _new_env(self, desc: list[str] | None) -> Any:
        """Create the environment; a supported one is copied, since a seeded reset determines its entire state."""
        if self._description is None:
            return make_env(self.env_config["id"], self._kwargs)
        key = json.dumps(desc)
        with self._lock:
            env = self._prototypes.get(key)
        if env is None:
            kwargs = self._kwargs if desc is None else {**self._kwargs, "desc": desc}
            env = make_env(self.env_config["id"], kwargs)
            self._cache(self._prototypes, key, env)
        # The transition table is by far the largest part, and is read-only, so it is shared.
        table = getattr(env.unwrapped, "P", None)
        return copy.deepcopy(env, {id(table): table})

    def _cache(self, cache: dict[str, Any], key: str, value: Any) -> None:
        """Cache a value for a map; the oldest maps are evicted."""
        with self._lock:
            while len(cache) >= _MAX_CACHED_MAPS:
                cache.pop(next(iter(cache)))
            cache[key] = value

    def exact_values(self, desc: list[str] | None = None) -> ExactValues | None:
        """Return the exact values, on the custom map ``desc`` if it is not None; None if they are unknown.

        They are known for supported environments that are created from their id, without wrappers that change
        observations, actions or rewards.
        """
        key = json.dumps(desc)
        with self._lock:
            if key in self._tables:
                return self._tables[key]
        exact, description = None, self._description
        if description is not None and self._is_bare:
            env = self._new_env(desc)
            transitions = description.transitions(env)
            if transitions is not None:
                env.reset(seed=0)
                values = value_table(legal_outcomes(transitions, self.actions.values), self.horizon)
                frames = description.frames(env, self.show) if self.show is description.show else {}
                env.close()
                exact = ExactValues(values=values, frames=frames)
        self._cache(self._tables, key, exact)
        return exact

    # The hooks

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        desc = task_data.get("map")
        if desc is None:
            return
        if not self.has_maps:
            raise TaskError(
                f"task_data['map'] is only valid for FrozenLake, but env_config['id'] is {shown(self.env_config['id'])}"
            )
        check_map(desc)

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        self._check_task(task_data)
        desc: list[str] | None = task_data.get("map")
        env = self._new_env(desc)
        state: dict[str, Any] = {"env": env, "map": desc, "num_steps": 0, "done": False}
        observation, _ = env.reset(seed=self.rng(session_id).getrandbits(31))
        config = self.env_config
        # The final reward of several scored episodes is a sum over different starts, for which no anchors are known.
        is_sum = config["keep_history"] and config["episodes_per_trial"] - config["free_shots"] > 1
        exact = None if is_sum else self.exact_values(desc)
        info: dict[str, float] = {}
        if exact is not None and self._description is not None:
            start = self._description.state(env, observation)
            values = {"random_reward": exact.values.random, "optimal_reward": exact.values.optimal}
            info = {name: float(own[-1, start]) for name, own in values.items()}
        return {**state, "anchors": info, "observation": observation, "shown": self._shown(env, observation)}

    def _shown(self, env: Any, observation: Any) -> str:
        text: Any = self.show(env, observation)
        if not isinstance(text, str):
            raise EnvError(f"the callable env_config['render'] must return a str, got {shown(text)}")
        return text

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        config = self.env_config
        starts_episode = step == 0 and config["keep_history"] and config["episodes_per_trial"] > 1
        return f"{NEW_GAME}{state['shown']}" if starts_episode else state["shown"]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Stepped:
        number = self.actions.parse(action)
        if number is None:
            info = {**state["anchors"], "invalid": True, "success": self._success(state["env"], 0.0, False)}
            return {**state, "shown": f"Invalid action. {self._hint()}"}, 0.0, False, info
        env = state["env"]
        observation, reward, terminated, truncated, _ = env.step(number)
        done = bool(terminated or truncated)
        info = {**state["anchors"], "success": self._success(env, float(reward), bool(terminated)), "action": number}
        if truncated and not terminated:
            info["truncated"] = True
        next_state = {**state, "num_steps": state["num_steps"] + 1, "observation": observation}
        next_state["shown"] = "" if done else self._shown(env, observation)
        return next_state, float(reward), done, info

    def _success(self, env: Any, reward: float, terminated: bool) -> bool | None:
        success = self.env_config["success"]
        if callable(success):
            return bool(success(env, reward, terminated))
        if success == "auto":
            return self._description.won(env, reward, terminated) if self._description else None
        return terminated and (success == "terminated" or reward > 0)

    def _state_key(self, state: dict[str, Any]) -> Hashable | None:
        """The map and the number of the state, for supported environments."""
        if self._description is None:
            return None
        return (json.dumps(state["map"]), self._description.state(state["env"], state["observation"]))

    def _close_episode(self, session_id: str, state: dict[str, Any]) -> None:
        state["env"].close()

    def _system_prompt(self) -> str:
        unknown = f"You play {self._name()}. Earn as much reward as you can."
        return f"{self._description.rules if self._description else unknown} {self._hint()}"

    def _hint(self) -> str:
        if self.actions.parser is not None:
            return "Answer with an action."
        return f"Answer with one of these actions: {', '.join(f'[{name}]' for name in self.actions.by_name)}."

    def _name(self) -> str:
        env_id = self.env_config["id"]
        return env_id if isinstance(env_id, str) else getattr(env_id, "__name__", "a game")

    def vocabulary_texts(self) -> list[str]:
        """Return every message of the environment, and every action, for a word-level tokenizer.

        Raises:
            ConfigError: The environment's states are unknown.
        """
        exact = self.exact_values()
        if exact is None:
            raise ConfigError(
                f"the vocabulary of {self._name()} is unknown, since its states cannot be listed: build the tokenizer "
                "from recorded texts"
            )
        system = [message["content"] for message in system_messages(self)]
        messages = [*system, f"Invalid action. {self._hint()}", *exact.frames]
        if self.has_maps:  # the cells of any map, with the player's position
            cells = " ".join("SFHG" * 2)
            marked = [f"[{letter}]" for letter in "SFHG"]
            messages += [cells, *(f"{cell} {other}\n{other} {cell}" for cell in marked for other in (*"SFHG", *marked))]
        actions = [form for name in self.actions.by_name for form in (name, f"[{name}]")]
        return [text for text in (*messages, *(f"{NEW_GAME}{message}" for message in messages), *actions) if text]

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Return rows to train on; the options are those of :class:`~.tasks.DatasetOptions`."""
        return task_dataset(cls, env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Return rows to evaluate on, with other seeds and random maps; otherwise like :meth:`get_train_dataset`."""
        return task_dataset(cls, env_config, "eval", options)
