"""The environment contract: a game writes three hooks, everyone calls ``rollout``, ``run_trial`` or ``generate``."""

from __future__ import annotations

import copy
import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from agentsgym.agents.base import Agent, as_agent
from agentsgym.batch.layouts import transitions
from agentsgym.batch.padding import loss_mask, pad_task_groups
from agentsgym.credit.rewards import check_credit, per_token_rewards
from agentsgym.envs.answers import is_conversation
from agentsgym.envs.config import COMMON_FIELDS, Field, check_trials, is_int, validated_config
from agentsgym.envs.trial import Budget, Trial, call_game
from agentsgym.errors import ConfigError, EnvironmentFault, TaskError
from agentsgym.rollouts.driver import drive
from agentsgym.rollouts.pools import Pool
from agentsgym.rollouts.transcript import ChatFormat
from agentsgym.seeding import derive_seed, episode_generator, fresh_seed
from agentsgym.types import Message, Trajectory

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

State = dict[str, Any]
TaskData = Mapping[str, Any]


class MultistepEnv(ABC):
    """A game that owns the whole interaction: prompts, steps, rewards, tokens.

    A game implements :meth:`_initialize_episode`, :meth:`_format_prompt` and :meth:`_step_episode`, and adds its own
    keys to ``env_config`` through ``config_fields``.

    Attributes:
        tokenizer: Turns text into the policy's ids; None plays with text alone.
        env_config: The validated configuration, defaults filled in.
        active_states: The state of each session in play, by ``session_id``.
        config_fields: The game's own keys of ``env_config``.
        default_config: The game's own defaults for the common keys.
    """

    config_fields: ClassVar[Mapping[str, Field]] = {}
    default_config: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None = None, env_config: dict[str, Any] | None = None
    ) -> None:
        """Check the configuration and learn how the tokenizer writes a conversation.

        Args:
            tokenizer: The policy's tokenizer, with a pad token; None for agents that only read and write text.
            env_config: Keys of :data:`agentsgym.envs.config.COMMON_FIELDS` and of the game's ``config_fields``.

        Raises:
            ConfigError: A key is unknown, a value is not valid, or the tokenizer has no pad token.
            TemplateError: The chat template does not allow exact tokens.
        """
        self.env_config = validated_config(env_config, {**COMMON_FIELDS, **self.config_fields}, self.default_config)
        check_trials(self.env_config)
        check_credit(self.env_config["turn_credit"], self.env_config["token_credit"])
        self._check_config(self.env_config)
        if tokenizer is not None and tokenizer.pad_token_id is None:
            raise ConfigError(
                "the tokenizer has no pad token, which padded rows need: "
                "set one, for example tokenizer.pad_token = tokenizer.eos_token"
            )
        self.tokenizer = tokenizer
        self.chat_format = self._find_chat_format()
        self.active_states: dict[str, State] = {}
        self._generators: dict[str, random.Random] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: not the sessions, which are played where they began."""
        return {**vars(self), "chat_format": None, "active_states": {}, "_generators": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.chat_format = self._find_chat_format()

    def _find_chat_format(self) -> ChatFormat | None:
        if self.tokenizer is None:
            return None
        return ChatFormat.of(self.tokenizer, append=self.env_config["history"] != "rerender")

    # What a game calls

    def rng(self, session_id: str) -> random.Random:
        """The session's private generator, seeded anew for each episode; no two sessions share draws by accident."""
        if session_id not in self._generators:
            self._generators[session_id] = random.Random(derive_seed("session", session_id))
        return self._generators[session_id]

    # What a game implements

    @abstractmethod
    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        """Make the state that an episode starts from; ``state["done"]`` is False."""

    @abstractmethod
    def _format_prompt(self, state: State, step: int) -> str | list[Message]:
        """Say only what is new before turn ``step``; a str is one user message."""

    @abstractmethod
    def _step_episode(self, session_id: str, state: State, action: str) -> tuple[State, float, bool, dict[str, Any]]:
        """Play one action and return (next state, reward, done, info).

        ``info["success"]`` tells whether the game is won (as of now), ``info["invalid"]`` marks an invalid action,
        ``info["random_reward"]`` and ``info["optimal_reward"]`` tell what random and optimal play are paid on average.
        """

    # What a game may override

    def _final_reward(self, state: State, turn_rewards: list[float]) -> float:
        """What the whole episode was worth; by default the sum of its turn rewards."""
        return float(sum(turn_rewards))

    def _calculate_rewards(self, trajectory: Trajectory) -> list[float]:
        """Per-token rewards, (T,); by default as ``turn_credit`` and ``token_credit`` say."""
        return per_token_rewards(
            trajectory, turn_credit=self.env_config["turn_credit"], token_credit=self.env_config["token_credit"]
        )

    def _state_key(self, state: State) -> Hashable | None:
        """Equal keys are the same decision problem (used by ``gigpo``); None if the game cannot say."""
        return None

    def _role(self, state: State) -> Hashable | None:
        """Who the agent is in this turn, a seat of the game for example; estimators keep a baseline for each role."""
        return None

    def _potential(self, state: State) -> float | None:
        """What the state is worth, the higher the nearer to success (potential-based shaping); None: cannot say."""
        return None

    def _check_task(self, task_data: TaskData) -> None:  # noqa: B027  # most games can play any task
        """Raise :class:`TaskError` for a task that cannot be played; run for every task before any episode starts."""

    def _check_config(self, config: dict[str, Any]) -> None:  # noqa: B027  # most keys are independent
        """Raise :class:`ConfigError` for values that do not go together."""

    def _system_prompt(self) -> str | None:
        """The game's own system message; ``env_config["system_prompt"]`` replaces it."""
        return None

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **kwargs: Any) -> Dataset:
        """Tasks to train on, as rows of ``env_class_path``, ``env_config`` and ``task_data``."""
        raise NotImplementedError(f"{cls.__name__} ships no training tasks; pass your own rows")

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **kwargs: Any) -> Dataset:
        """Tasks to evaluate on, rows as in :meth:`get_train_dataset`."""
        raise NotImplementedError(f"{cls.__name__} ships no evaluation tasks; pass your own rows")

    # What everyone calls

    def rollout(  # noqa: PLR0913  # keywords, most of them left out
        self,
        task_data_list: Sequence[TaskData],
        agent: Agent,
        num_rollouts: int = 1,
        *,
        max_concurrent: int | None = None,
        on_finish: Callable[[Trajectory], None] | None = None,
        pool: Pool | None = None,
        turn_timeout_s: float | None = None,
        episode_timeout_s: float | None = None,
        **limits: int | None,
    ) -> list[Trajectory]:
        """Play every task ``num_rollouts`` times, many episodes at once: see :func:`~agentsgym.rollouts.driver.drive`.

        Args:
            task_data_list: The tasks. Rollouts of one task share its seed; a task without one gets a fresh one.
            agent: An :class:`~agentsgym.agents.base.Agent` or any object with ``get_action``.
            num_rollouts: Rollouts of each task, at least 1.
            max_concurrent: How many episodes are live at most; None for all.
            on_finish: Called with each trajectory as soon as it is finished.
            pool: Where this environment's hooks run, in threads or processes; None for the calling thread.
            turn_timeout_s: Wall time of one call of the environment between two answers, and of one answer of an
                agent that answers with coroutines; None for no limit. Without a pool it is noticed afterwards.
            episode_timeout_s: Wall time of a whole trial; None for no limit.
            **limits: ``max_turn_tokens`` (one action) and ``max_completion_length`` (everything after the first
                prompt), each None for no limit; ``env_config["max_trajectory_tokens"]`` bounds the whole.

        Returns:
            The trajectories in task-major order: all rollouts of the first task, then of the second, and so on. An
            episode whose game or agent broke is among them with stop reason ``failed``.

        Raises:
            TaskError: There is no list, it is empty, or a task cannot be played; nothing has been played then.
            ConfigError: ``num_rollouts`` or a limit is no positive number, the agent is none, or this environment
                cannot be sent to the pool's processes.
            TemplateError: The chat template does not take a conversation's first prompt.
        """
        actor = as_agent(agent)
        trials = self.trials(task_data_list, num_rollouts, **limits)
        return drive(
            trials,
            actor,
            max_concurrent=max_concurrent,
            on_finish=on_finish,
            pool=pool,
            turn_timeout_s=turn_timeout_s,
            episode_timeout_s=episode_timeout_s,
        )

    def run_trial(
        self, task_data_list: Sequence[TaskData], agent: Agent, num_rollouts: int = 1, **kwargs: Any
    ) -> dict[str, Any]:
        """:meth:`rollout`, padded per task group.

        Returns:
            ``len(task_data_list) * num_rollouts`` rows, task-major: ``padded_full_token_ids``,
            ``padded_full_attention_mask``, ``padded_agent_token_mask``, ``padded_per_token_rewards`` (rows of one task
            padded on the right to that task's longest, ids with ``pad_token_id``, the rest with 0), ``final_rewards``,
            ``session_ids``, ``final_completion_messages`` (the conversation) and ``stop_reasons``.

        Raises:
            ConfigError: ``env_config["history"]`` rewrites the history, so that a rollout is no single row of tokens.
        """
        self._check_single_stream("run_trial")
        trajectories = self.rollout(task_data_list, agent, num_rollouts, **kwargs)
        pad_token_id = 0 if self.tokenizer is None else self.tokenizer.pad_token_id
        return pad_task_groups(trajectories, pad_token_id=pad_token_id)  # type: ignore[arg-type]  # checked at init

    def generate(
        self,
        task_data_list: Sequence[TaskData],
        agent: Agent,
        num_rollouts: int = 1,
        return_all_steps: bool = False,
        **kwargs: Any,
    ) -> dict[str, list[list[Any]]]:
        """:meth:`rollout`, as transitions: see :func:`agentsgym.batch.layouts.transitions`."""
        trajectories = self.rollout(task_data_list, agent, num_rollouts, **kwargs)
        return transitions(trajectories, turn_credit=self.env_config["turn_credit"], return_all_steps=return_all_steps)

    def _run_complete_episode(self, session_id: str, agent: Agent) -> dict[str, Any]:
        """Play one episode of the session whose state the caller put in ``active_states``.

        Returns:
            ``full_token_ids``, ``full_attention_mask``, ``agent_token_mask``, ``per_token_rewards`` (equally long,
            unpadded), ``final_reward``, ``final_completion_messages`` (the conversation) and ``session_id``.

        Raises:
            EnvironmentFault: The game broke, or there is no such session.
            AgentFault: The agent broke.
            ConfigError: As in :meth:`run_trial`.
        """
        self._check_single_stream("_run_complete_episode")
        if session_id not in self.active_states:
            raise EnvironmentFault(f"active_states has no session {session_id!r}: put its state there first")
        trial = Trial(
            env=self, session_id=session_id, budget=Budget(trajectory=self.env_config["max_trajectory_tokens"])
        )
        [trajectory] = drive([trial.play_one()], as_agent(agent))
        return {
            "full_token_ids": list(trajectory.token_ids),
            "full_attention_mask": [1] * len(trajectory.token_ids),
            "agent_token_mask": loss_mask(trajectory),
            "per_token_rewards": list(trajectory.per_token_rewards),
            "final_reward": trajectory.final_reward,
            "final_completion_messages": list(trajectory.messages),
            "session_id": session_id,
        }

    def _check_single_stream(self, caller: str) -> None:
        if self.tokenizer is not None and self.env_config["history"] != "append":
            raise ConfigError(
                f"{caller} gives one row of tokens a rollout, and env_config['history']="
                f"{self.env_config['history']!r} makes a new one wherever it rewrites the history: "
                "use generate(..., return_all_steps=True), which gives each turn its own prompt"
            )

    # What the trainer and a trial call

    def trials(
        self,
        task_data_list: Sequence[TaskData],
        num_rollouts: int = 1,
        *,
        max_turn_tokens: int | None = None,
        max_completion_length: int | None = None,
    ) -> list[Trial]:
        """Check every task and set up its trials, not started yet, task-major; arguments as in :meth:`rollout`."""
        if not is_int(1)(num_rollouts):
            raise ConfigError(f"num_rollouts must be a positive int, got {num_rollouts!r}")
        tasks = _as_list(task_data_list)
        budget = Budget(
            trajectory=self.env_config["max_trajectory_tokens"], completion=max_completion_length, turn=max_turn_tokens
        )
        for index, task in enumerate(tasks):
            self.check_task(task, f"task_data_list[{index}]")
        seeds = [fresh_seed() if task.get("seed") is None else task["seed"] for task in tasks]
        return [
            Trial(
                env=self,
                session_id=uuid.uuid4().hex,
                task_data={**task, "seed": seed},
                seed=seed,
                budget=budget,
                task_index=task_index,
                rollout_index=rollout_index,
            )
            for task_index, (task, seed) in enumerate(zip(tasks, seeds, strict=True))
            for rollout_index in range(num_rollouts)
        ]

    def check_task(self, task_data: TaskData, name: str = "task_data") -> None:
        """Raise :class:`TaskError` for a task that cannot be played, whose errors call it ``name``."""
        if not isinstance(task_data, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TaskError(f"{name} must be a dict, got {task_data!r}")
        seed = task_data.get("seed")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise TaskError(f"{name}['seed'] must be an int or None, got {seed!r}")
        self._check_task(task_data)

    def start_session(self, session_id: str, task_data: TaskData, seed: int, episode: int = 0) -> State:
        """Seed the session's generator for one episode and put its start state in ``active_states``."""
        self._generators[session_id] = episode_generator(seed, episode)
        state = call_game(self._initialize_episode, session_id, copy.deepcopy(dict(task_data)))
        if not isinstance(state, dict) or state.get("done"):  # pyright: ignore[reportUnknownMemberType]
            raise EnvironmentFault(f"_initialize_episode must return a dict whose 'done' is False, got {state!r}")
        self.active_states[session_id] = state
        return state  # pyright: ignore[reportUnknownVariableType]

    def drop_session(self, session_id: str) -> None:
        """Forget the session's state and generator."""
        self.active_states.pop(session_id, None)
        self._generators.pop(session_id, None)

    def prompt_messages(self, state: State, step: int, *, with_system: bool) -> list[Message]:
        """What the agent sees before turn ``step``, with the system message before the first prompt."""
        prompt = call_game(self._format_prompt, state, step)
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if messages is prompt and not is_conversation(messages):
            raise EnvironmentFault(
                f"_format_prompt must return a str or a list of at least one message, got {prompt!r}"
            )
        system = self.env_config["system_prompt"]
        if with_system and system is None:
            system = call_game(self._system_prompt)
            if not isinstance(system, str | None):
                raise EnvironmentFault(f"_system_prompt must return a str or None, got {system!r}")
        return [{"role": "system", "content": system}, *messages] if with_system and system else messages


def _as_list(task_data_list: Any) -> list[TaskData]:
    if isinstance(task_data_list, str | Mapping) or not isinstance(task_data_list, Iterable):
        raise TaskError(f"task_data_list must be a list of task_data dicts, got {task_data_list!r}")
    tasks: list[TaskData] = list(task_data_list)  # pyright: ignore[reportUnknownArgumentType]
    if not tasks:
        raise TaskError("task_data_list must hold at least one task, got an empty list")
    return tasks
