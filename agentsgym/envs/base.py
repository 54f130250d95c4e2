"""The environment contract: subclasses implement three hooks, and callers use ``rollout`` and similar methods.

``docs/contract.md`` shows the values that they return and what the trainer makes of them, on one page.
"""

from __future__ import annotations

import copy
import random
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from agentsgym.agents.base import Agent, as_agent
from agentsgym.batch.views import pad_task_groups, transitions, unpadded_row
from agentsgym.credit.components import GivenReward
from agentsgym.credit.rewards import per_token_rewards
from agentsgym.envs.boundary import as_bool, call_environment, warn_once
from agentsgym.envs.contract import Prompt, State, Stepped
from agentsgym.envs.conversation import VIEWS, Budget, chat_format_of
from agentsgym.envs.dataset_rows import TaskData, tasks_of_rows
from agentsgym.envs.exchange import Exchange
from agentsgym.envs.finished import RolloutHook, finished_alone
from agentsgym.envs.forks import fork
from agentsgym.envs.opponents import MAX_MOVES, MAX_STARTS, Move, Opponents, Table, opponents_of
from agentsgym.envs.play import EpisodeByHand, OnFinish, play
from agentsgym.envs.spec import EnvSpec
from agentsgym.envs.subclass import NEVER_CALLED, called_with, given_and_valid, prepare_class
from agentsgym.envs.tool_schemas import schemas_of
from agentsgym.envs.trial import SessionTrial, Trial
from agentsgym.envs.user_checks import (
    NOT_GIVEN,
    StartChecks,
    call_check,
    check_initialized,
    check_keywords,
    check_single_stream,
    check_task,
    check_tokenizer,
    check_vocabularies,
    warn_of_settings,
)
from agentsgym.errors import ConfigError, EnvError, TaskError, check_options
from agentsgym.failures import FailurePolicy, as_policy
from agentsgym.fields import Field, is_int, one_of, or_none, require
from agentsgym.rollouts.driver import drive
from agentsgym.rollouts.scheduler import Pool
from agentsgym.seeding import derive_seed, episode_generator, fresh_seed
from agentsgym.texts import shown
from agentsgym.tokens.transcript import ChatFormat
from agentsgym.tokens.unknown_words import warn_of_unknown_words
from agentsgym.types import Action, Message, Trajectory

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


class MultistepEnv(ABC):
    """An environment that owns the whole interaction: prompts, steps, rewards, tokens.

    A subclass implements :meth:`_initialize_episode`, :meth:`_format_prompt` and :meth:`_step_episode`, and adds its
    own keys to ``env_config`` through ``config_fields``. Hooks that are called during an episode may be coroutines.

    Attributes:
        has_coroutines: Whether a hook is a coroutine, so that sessions wait on the event loop (see
            :class:`~agentsgym.rollouts.loop_executor.OwnExecutor`).
        tokenizer: The policy's tokenizer; None if only text is exchanged.
        env_config: The validated configuration, defaults filled in.
        given_config: The JSON values of the ``env_config`` that was passed to the class, before any constructor removed
            a key; dataset rows are compared with it.
        active_states: The state of each live session, by ``session_id``.
        config_fields: Additional keys of ``env_config`` that the class defines.
        default_config: The class's defaults for the common keys.
        task_fields: The keys that a task may have in addition to ``seed``; None for any.
        role_key: The key of a task that names the agent's role.
        own_opponents: Names of opponents that :meth:`_own_opponent` creates.
        opponent_stream: Name of the random stream of each opponent.
        shares_conversation: Whether the agent has one conversation for all roles when it plays itself.
        roles: The roles that :meth:`_role` returns, in the order of play; needed only for opponents.
        opponents: Who plays the roles that the agent does not; None if the agent plays every role in one conversation.
        spec: The class's players, its games and the pip extra that it needs; inherited by subclasses.
        trial_class: How a session is played.
        never_called: The methods that nothing calls although a subclass might override them, with what to do instead.
        exchange_class: How its turns are played and recorded; for environments whose turns do not come from hooks.
        judges: The judges of its rollouts, whose scores are added to the rewards: of the class, or of one instance.

    Keys of ``env_config`` that every environment has:

    - ``max_steps_per_episode``: maximum number of turns of an episode.
    - ``episodes_per_trial``: number of episodes of one task that a session plays in sequence.
    - ``free_shots``: number of practice episodes at the start of a trial; less than ``episodes_per_trial``.
    - ``error_allowance``: number of invalid actions that do not end an episode.
    - ``system_prompt``: replaces the environment's system message.
    - ``max_trajectory_tokens``: maximum number of tokens of a trajectory, prompts included.
    - ``turn_credit``, ``token_credit``: which turn is rewarded, and which of its tokens; see
      :mod:`agentsgym.credit.rewards`.
    - ``keep_history``: whether the episodes of a trial share one conversation.
    - ``chat_template_kwargs``: additional variables of the chat template, for every prompt.
    - ``guard_added_tokens``: whether text in prompts that looks like an added token, such as ``<think>``, is tokenized
      as plain text.
    - ``unguarded_tokens``: exceptions to ``guard_added_tokens``: added tokens, such as ``<table>``, that prompts may
      contain.
    - ``score_discount``: the discount of returns for which ``"potential"`` scores are made (see the next key).
    - ``state_scores``: how changes of ``_score_state`` are rewarded: ``"change"``, or ``"potential"``, which leaves the
      best policies unchanged.
    - ``history``: how the agent sees earlier messages: ``"append"`` (the recorded tokens), ``"rerender"`` (rendered
      again by the template), ``"last"`` (the first observation and the last turns), ``"summarize"`` (replaced by notes
      that the agent writes), or a function that returns the messages to show.
    - ``history_turns``: with ``"last"``, the number of turns that the agent sees; None for nine.
    - ``summarize_over_tokens``: with ``"summarize"``, the number of tokens above which a note is requested.
    - ``summary_prompt``: the message that requests a note.
    - ``tool_calls``: ``"tolerant"``: a call that is not in the format of the chat template is repaired if it can be
      parsed without doubt; ``"strict"``: it is a malformed call.
    - ``opponent``: who plays the other roles, in an environment with ``roles``: a name registered with
      :func:`~agentsgym.envs.opponents.register_player`, names by role, or ``"self"``: the agent, with a separate
      conversation for each role. None: the agent, in one conversation. The agent's own role is the task's ``"role"``,
      or drawn, the same for all rollouts of a task; :meth:`_initialize_episode` gets it as ``task_data["role"]``.
    """

    config_fields: ClassVar[Mapping[str, Field]] = {}
    default_config: ClassVar[Mapping[str, Any]] = {}
    task_fields: ClassVar[Collection[str] | None] = None
    roles: Sequence[Hashable] = ()
    role_key: ClassVar[str] = "role"
    own_opponents: ClassVar[Collection[str]] = ()
    opponent_stream: ClassVar[str] = "opponent"
    shares_conversation: bool = False
    spec: ClassVar[EnvSpec] = EnvSpec()
    judges: Sequence[RolloutHook] | RolloutHook = ()
    trial_class: ClassVar[type[Trial]] = Trial
    exchange_class: ClassVar[type[Exchange]] = Exchange
    never_called: ClassVar[Mapping[str, str]] = NEVER_CALLED
    overrides_step_action: ClassVar[bool] = False
    overrides_final_reward: ClassVar[bool] = False
    overrides_score_state: ClassVar[bool] = False
    has_coroutines: bool = False
    _called_config: dict[str, Any] | None
    _unstorable_args: list[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        prepare_class(cls, MultistepEnv)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the arguments passed to the class, before any constructor removes a key."""
        check_keywords(cls, kwargs)
        env = super().__new__(cls)
        env._called_config, env._unstorable_args = called_with(cls, args, kwargs)
        return env

    if not TYPE_CHECKING:  # with it, no type checker would find a misspelled attribute

        def __getattr__(self, name: str) -> Any:
            check_initialized(self, name)
            return super().__getattribute__(name)  # raises the original error, even if it came from inside a property

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        env_config: dict[str, Any] | None = None,
        *,
        opponent: Agent | Mapping[Any, Agent] | None = None,
    ) -> None:
        """Check the configuration, and how the tokenizer formats a conversation.

        Args:
            tokenizer: The policy's tokenizer, with a pad token; None for agents that exchange only text.
            env_config: Values for keys of :data:`agentsgym.envs.config.COMMON_FIELDS` and of ``config_fields``.
            opponent: An agent for the other roles, such as a policy or a :class:`~agentsgym.League`, or agents by role;
                replaces ``env_config["opponent"]``.

        Raises:
            ConfigError: A key is unknown, a value is not valid, or the tokenizer has the wrong type or no pad token.
            TemplateError: Exact token ids cannot be recorded with this chat template.
        """
        self._starts = StartChecks()  # set only by this constructor: shows that it has run
        check_tokenizer(tokenizer, type(self))
        self.tokenizer = tokenizer
        self.given_config, self.env_config = given_and_valid(type(self), MultistepEnv, env_config, self._called_config)
        call_check(self._check_config, self.env_config, "ConfigError for incompatible values")
        self.opponents = opponents_of(self, opponent)
        if self.plays_itself and not self.shares_conversation:
            wanted = "'append' if the roles have separate conversations"
            require("env_config['history']", self.env_config["history"], one_of("append"), wanted)
            self.env_config["history"] = VIEWS
        self.tables: dict[str, Any] = {}
        self._tool_schemas: tuple[dict[str, Any], ...] | None = None
        self._chat_format: ChatFormat | None = None
        if type(self)._tools is MultistepEnv._tools:  # an override may use attributes that are set later
            _ = self.chat_format  # rejects an unsupported template
        self.active_states: dict[str, State] = {}
        self._generators: dict[str, random.Random | tuple[int, int]] = {}
        self._by_hand: EpisodeByHand | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without the live sessions, which cannot be moved."""
        check_initialized(self)
        no_sessions: dict[str, Any] = {"active_states": {}, "tables": {}, "_generators": {}, "_starts": StartChecks()}
        return {**vars(self), "_chat_format": None, "_by_hand": None, **no_sessions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    @property
    def plays_itself(self) -> bool:
        """Whether the agent plays every role, because ``env_config["opponent"]`` is ``"self"``."""
        return self.opponents is not None and self.opponents.is_self

    @property
    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        """The JSON schemas of :meth:`_tools`, created at first use; empty without tools."""
        if self._tool_schemas is None:
            self._tool_schemas = schemas_of(self._tools(), type(self).__name__)
        return self._tool_schemas

    @property
    def chat_format(self) -> ChatFormat | None:
        """The tokenizer's chat format with these tools, determined at first use; None without a tokenizer."""
        if self._chat_format is None and self.tokenizer is not None:
            self._chat_format = chat_format_of(self.tokenizer, self.env_config, self.tool_schemas)
        return self._chat_format

    # Called by subclasses

    def rng(self, session_id: str) -> random.Random:
        """The session's random generator, seeded anew for each episode; sessions use independent streams."""
        own = self._generators.get(session_id)
        if not isinstance(own, random.Random):  # made at first use: many environments draw nothing
            own = random.Random(derive_seed("session", session_id)) if own is None else episode_generator(*own)
            self._generators[session_id] = own
        return own

    # Implemented by subclasses

    @abstractmethod
    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State | Awaitable[State]:
        """Return the initial state of an episode, in which ``state["done"]`` is False."""

    @abstractmethod
    def _format_prompt(self, state: State, step: int) -> Prompt | Awaitable[Prompt]:
        """Return only the messages that are new since the previous action; a str stands for one user message."""

    @abstractmethod
    def _step_episode(self, session_id: str, state: State, action: str) -> Stepped | Awaitable[Stepped]:
        """Play one action and return (next state, reward, done, info).

        A reward is a number, or a dict of numbers by name, such as ``{"correct": 1.0, "format": 0.5}``, whose sum it
        is.

        The returned ``done`` is authoritative: it is written to ``state["done"]``, so the returned state may still
        contain False. A returned state with ``"done": True`` together with ``done=False`` fails the episode.

        ``info["success"]`` is whether the task is solved (so far), ``info["invalid"]`` marks an invalid action, and
        ``info["random_reward"]`` and ``info["optimal_reward"]`` are the mean rewards of random and optimal play.
        ``info["truncated"]`` marks a final step at which the environment's turn limit ended the episode.
        ``info["rewards"]`` has the reward of each role, if there are several roles (:meth:`_role`).
        """

    # Overridden by subclasses where needed

    def _step_action(self, session_id: str, state: State, action: Action) -> Stepped | Awaitable[Stepped]:
        """Play one action, including its tool calls, reasoning and finish reason; by default, pass on only its text.

        Override this instead of :meth:`_step_episode` to use them.
        """
        return self._step_episode(session_id, state, action.text)

    def _tools(self) -> Sequence[Callable[..., Any] | Mapping[str, Any]] | None:
        """Return the tools that the agent may call, the same in every episode: typed functions or full JSON schemas.

        The chat template renders them. Calls arrive as ``action.tool_calls`` in :meth:`_step_action`, and results are
        returned from :meth:`_format_prompt` as messages of the role ``"tool"``.
        """
        return None

    def _last_message(self, state: State) -> str | list[Message] | None:
        """Return the message that follows the last action of an episode, or None if there is none.

        Called after the last step of an episode unless a token budget or a failure ended it. The messages are appended
        to the conversation and its tokens, and no loss is computed on them; tokens that exceed the budget are omitted.
        If the episodes of a trial share a conversation (``keep_history``), the messages precede the next episode's
        first prompt, merged into one message if both are user messages.
        """
        return None

    def _final_reward(self, state: State, turn_rewards: list[float]) -> GivenReward:
        """Return the reward of the episode, a number or a dict by name; by default, the sum of its turn rewards."""
        return float(sum(turn_rewards))

    def _calculate_rewards(self, trajectory: Trajectory) -> list[float]:
        """Return per-token rewards, (T,); by default, according to ``turn_credit`` and ``token_credit``."""
        return per_token_rewards(
            trajectory, turn_credit=self.env_config["turn_credit"], token_credit=self.env_config["token_credit"]
        )

    def _state_key(self, state: State) -> Hashable | None:
        """Return a key that is equal for the same decision problem (used by ``gigpo``); None if unknown."""
        return None

    def _role(self, state: State) -> Hashable | None:
        """Return the role that moves in this turn, such as a player's seat; roles are rewarded and compared separately.

        The moves of opponents are not turns of the rollout, which has only the rewards of the agent's role.
        """
        return None

    def _agents_role(self, session_id: str, task_data: TaskData) -> Hashable:
        """Return the role that the agent plays against opponents: the task's, or else a drawn one."""
        roles = cast("Opponents", self.opponents).roles_of_agent
        drawn, given = roles[self.rng(session_id).randrange(len(roles))], task_data.get(self.role_key)
        given = self.env_config.get(self.role_key) if given is None else given
        return drawn if given is None else given

    def _own_opponent(self, name: str, rng: random.Random) -> Move:
        """Create the player of one role of one session for a name in ``own_opponents``."""
        raise NotImplementedError

    def _potential(self, state: State) -> float | None:
        """Return the state's value, higher when nearer to success (potential-based shaping); None if unknown."""
        return None

    def _score_state(self, state: State) -> GivenReward | Awaitable[GivenReward]:
        """Return how good a state is, a number or a dict by name; each turn is rewarded for the change.

        By default, states have no scores. An override is called for the first state and after each step;
        ``env_config["state_scores"]`` decides how the last state counts
        (:data:`~agentsgym.envs.state_scores.CREDITS`).
        A plain number is the named reward ``"progress"``.
        """
        return 0.0

    def _check_task(self, task_data: TaskData) -> None:  # noqa: B027  # most environments can play any task
        """Raise :class:`TaskError` for a task that cannot be played; run for every task before any episode starts."""

    def _check_config(self, config: dict[str, Any]) -> None:  # noqa: B027  # most keys are independent
        """Raise :class:`ConfigError` for incompatible values."""

    def _prepare_play(self, tasks: Sequence[TaskData], num_live: int) -> None:  # noqa: B027  # most need nothing
        """Raise :class:`ConfigError` if ``num_live`` episodes of these tasks cannot be live concurrently.

        Called in the process that plays, before the first episode starts, and again before failed ones are retried.
        """

    def _system_prompt(self) -> str | None:
        """Return the class's system message; ``env_config["system_prompt"]`` replaces it."""
        return None

    def _close_episode(self, session_id: str, state: State) -> Awaitable[None] | None:  # noqa: B027  # most hold no resources
        """Release resources of the episode outside of Python, such as a browser; ``state`` is its last state.

        Called once for every episode whose ``_initialize_episode`` returned, after all other hooks, whatever ended it.
        An exception here is logged and counted (``Trajectory.num_close_errors``) and changes no result. A step that
        timed out in a thread closes its episode when it returns. A worker process that exceeds its time limit has five
        seconds to close its episodes; a process that crashes closes none. Episodes replayed in another process are
        closed again there.
        """

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **kwargs: Any) -> Dataset:
        """Return training rows; when called on an instance, ``env_config`` defaults to its :attr:`given_config`.

        Raises:
            ConfigError: The configuration or an option is invalid.
            NotImplementedError: The environment comes without tasks.
        """
        raise NotImplementedError(f"{cls.__name__} ships no training tasks; pass your own rows")

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **kwargs: Any) -> Dataset:
        """Return evaluation rows; see :meth:`get_train_dataset`."""
        raise NotImplementedError(f"{cls.__name__} ships no evaluation tasks; pass your own rows")

    # Called by everyone

    def rollout(  # noqa: PLR0913  # keywords, most of them left out
        self,
        task_data_list: Sequence[TaskData],
        agent: Agent,
        num_rollouts: int = 1,
        *,
        max_concurrent: int | None = None,
        on_finish: OnFinish | None = None,
        failures: FailurePolicy | None = None,
        pool: Pool | None = None,
        turn_timeout_s: float | None = None,
        episode_timeout_s: float | None = None,
        **limits: int | None,
    ) -> list[Trajectory]:
        """Play every task ``num_rollouts`` times, many concurrently: see :func:`~agentsgym.rollouts.driver.drive`.

        Args:
            task_data_list: ``task_data`` dicts, or complete dataset rows; a task without a seed gets a fresh one.
            agent: An :class:`~agentsgym.agents.base.Agent` or any object with ``get_action``.
            num_rollouts: Rollouts of each task, at least 1.
            max_concurrent: Maximum number of live episodes; None for all.
            on_finish: Called with each trajectory as soon as it is finished.
            failures: Policy for failed rollouts; by default they are kept, and the others continue.
            pool: Pool of threads or processes that runs this environment's hooks; None for the calling thread.
            turn_timeout_s: Wall-clock limit for the environment's work between two actions, and for one answer of an
                async agent; None for no limit. Without a pool, only a coroutine is interrupted, and exceeding the
                limit is otherwise detected when the step returns.
            episode_timeout_s: Wall-clock limit for a trial; None for no limit.
            **limits: ``max_turn_tokens`` (one action) and ``max_completion_length`` (everything after the first
                prompt), each None for no limit; ``env_config["max_trajectory_tokens"]`` limits the whole trajectory.

        Returns:
            The trajectories in task-major order, including failed ones, but without task groups smaller than
            ``failures.min_group_size``.

        Raises:
            TaskError: ``task_data_list`` is not a list or is empty, or a task is not valid; nothing was played.
            ConfigError: ``num_rollouts`` or a limit is not a positive number, ``agent`` is not an agent or uses a
                different tokenizer, a row belongs to another class or configuration, or this environment cannot be
                sent to the pool's processes.
            TemplateError: The chat template rejects the first prompt of a conversation.
            TooManyFailuresError: More rollouts failed than ``failures`` allows, or no task group is large enough.
        """
        check_options(limits, self.rollout, self.trials, relatives=[self.generate])
        require("on_finish", on_finish, or_none(callable), "a function of the finished rollout, or None")
        actor, policy = as_agent(agent), as_policy(failures)
        check_vocabularies(self.tokenizer, actor)
        trials = self.trials(task_data_list, num_rollouts, **limits)
        policy.check_size(num_rollouts)
        times: dict[str, Any] = {"turn_timeout_s": turn_timeout_s, "episode_timeout_s": episode_timeout_s}
        trajectories = play(
            trials, actor, policy, on_finish=on_finish, max_concurrent=max_concurrent, pool=pool, **times
        )
        self.check_starts(trajectories)
        return policy.without_small_groups(trajectories)

    def fork(
        self, trajectory: Trajectory, turn: int, agent: Agent, num_forks: int = 1, **kwargs: Any
    ) -> list[Trajectory]:
        """Continue a rollout from one of its turns, by replaying the actions before it in new sessions.

        The turns before the fork are those of the rollout, bit for bit. The environment goes on drawing the random
        numbers of the recorded rollout, so forks differ by their actions alone.

        Args:
            trajectory: A rollout of this environment, with its seed.
            turn: Number of turns that are kept; 0 plays from the start.
            agent: The agent that plays the rest.
            num_forks: Number of forks.
            **kwargs: Other arguments of :meth:`rollout`.

        Returns:
            The forks, which begin with the turns that are kept, (num_forks,).

        Raises:
            ConfigError: ``turn`` is not one of the rollout's, or the trial has several episodes without a history.
            TaskError: The rollout has no seed.
            EnvError: A prompt or a reward differs from the recorded one.
        """
        check_options(kwargs, self.fork, self.rollout, MultistepEnv.rollout, self.trials)
        return fork(self, trajectory, turn, as_agent(agent), num_forks, **kwargs)

    def run_trial(
        self,
        task_data_list: Sequence[TaskData] = NOT_GIVEN,
        agent: Agent = NOT_GIVEN,
        num_rollouts: int = 1,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Play as :meth:`rollout` does, with its arguments, and pad the rollouts per task group.

        Returns:
            ``len(task_data_list) * num_rollouts`` rows, task-major: ``padded_full_token_ids``,
            ``padded_full_attention_mask``, ``padded_agent_token_mask``, ``padded_per_token_rewards``,
            ``padded_logprobs`` (each task's rows are padded on the right to the longest, ids with ``pad_token_id``, the
            rest with 0; None for a rollout whose log-probabilities are unknown),
            ``final_rewards``, ``session_ids``, ``final_completion_messages`` (the conversation) and ``stop_reasons``.

        Raises:
            ConfigError: ``env_config["history"]`` rewrites the history, so a rollout is not a single row of tokens.
        """
        functions = (self.run_trial, self.rollout, MultistepEnv.rollout, self.trials)
        check_options(kwargs, *functions, relatives=[self.generate])
        check_single_stream(self, "run_trial")
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
        """Play as :meth:`rollout` does, and return every turn of each rollout, or only the last one (if any).

        Returns:
            For rollout p (task-major) and turn k ``ids``, ``prompt_ids``, ``messages``, ``mask``, ``logprobs``,
            ``rewards``, ``per_token_rewards`` and ``session_ids``, each as ``result[key][p][k]``: see
            :func:`agentsgym.batch.views.transitions`.
        """
        check_options(kwargs, self.generate, self.rollout, MultistepEnv.rollout, self.trials)
        trajectories = self.rollout(task_data_list, agent, num_rollouts, **kwargs)
        return transitions(trajectories, turn_credit=self.env_config["turn_credit"], return_all_steps=return_all_steps)

    def _run_complete_episode(self, session_id: str, agent: Agent, **kwargs: Any) -> dict[str, Any]:
        """Play one episode of the session whose state the caller put in ``active_states``.

        Returns:
            ``full_token_ids``, ``full_attention_mask``, ``agent_token_mask``, ``per_token_rewards`` (unpadded, of the
            same length), ``final_reward``, ``final_completion_messages`` (the conversation) and ``session_id``.

        Raises:
            EnvError: The environment failed, or the session does not exist or is over.
            AgentError: The agent failed.
            JudgeError: A judge failed.
            ConfigError: See :meth:`run_trial`.
        """
        check_options(kwargs, self._run_complete_episode, relatives=[self.generate, self.rollout, self.trials])
        check_single_stream(self, "_run_complete_episode")
        if session_id not in self.active_states:
            raise EnvError(f"active_states has no session {session_id!r}: put its state there first")
        if as_bool("state['done']", call_environment(self.active_states[session_id].get, "done")):
            raise EnvError(f"the episode of session {session_id!r} is over: put the state of a new episode there first")
        budget = Budget(trajectory=self.env_config["max_trajectory_tokens"])
        [trajectory] = drive([SessionTrial(env=self, session_id=session_id, budget=budget)], as_agent(agent))
        return unpadded_row(finished_alone(self, trajectory))

    def reset(self, task_data: TaskData | None = None) -> list[Message]:
        """Start an episode to be played by hand with :meth:`step`, for example to try out an environment in a notebook.

        The episode is played in a separate session by the same rules as any other: random draws, the allowance for
        invalid actions, turn and token limits. An earlier episode that is still open is closed.

        Args:
            task_data: The task, or a complete dataset row; a task without a seed gets a fresh one. None for ``{}``.

        Returns:
            The messages of the first prompt.

        Raises:
            TaskError: The task cannot be played.
            EnvError: The environment failed.
            ConfigError: The environment cannot play this task now, or the first prompt uses up the token budget.
        """
        check_initialized(self)
        if self._by_hand is not None:
            self._by_hand.close()
            self._by_hand = None
        [trial] = self.trials([{} if task_data is None else task_data])
        self._by_hand = EpisodeByHand(trial)
        return self._by_hand.observation()

    def step(self, action: str | Action) -> tuple[list[Message], float, bool, dict[str, Any]]:
        """Play one action in the episode that :meth:`reset` started.

        Args:
            action: The agent's text, or an :class:`~agentsgym.types.Action`, for example for tool calls.

        Returns:
            (the environment's reply, the turn's reward, whether the episode is over, its ``info``). When it
            is over, ``info["stop_reason"]`` is the reason.

        Raises:
            ConfigError: No episode was started, it is over, or ``action`` is neither a str nor an Action.
            EnvError: The environment failed, or the action cannot be recorded; the episode is over then.
        """
        check_initialized(self)
        if self._by_hand is None:
            raise ConfigError("step needs an episode: call reset(task_data) first")
        return self._by_hand.step(action)

    # Called by the trainer and by trials

    def trials(
        self,
        task_data_list: Sequence[TaskData],
        num_rollouts: int = 1,
        *,
        max_turn_tokens: int | None = None,
        max_completion_length: int | None = None,
    ) -> list[Trial]:
        """Check every task and create its trials, in task-major order, without starting them: see :meth:`rollout`."""
        check_initialized(self)
        warn_of_settings(type(self), vars(self))
        require("num_rollouts", num_rollouts, is_int(1), "a positive int")
        tasks, most = tasks_of_rows(self, task_data_list), self.env_config["max_trajectory_tokens"]
        budget = Budget(trajectory=most, completion=max_completion_length, turn=max_turn_tokens)
        for index, task in enumerate(tasks):
            self.check_task(task, f"task_data_list[{index}]")
        if self.tokenizer is None and (budget.trajectory, budget.completion) != (None, None):
            warn_once("%s has no tokenizer, so that no episode ends at its token budget", type(self).__name__)
        seeds = [fresh_seed() if task.get("seed") is None else task["seed"] for task in tasks]
        return [
            self.trial_class(
                env=self,
                session_id=secrets.token_hex(16),
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
        """Raise :class:`TaskError` for a task that cannot be played; the error calls it ``name``."""
        fields, key = self.task_fields, self.role_key
        has_role = self.opponents is not None and not self.plays_itself
        check_task(task_data, name, fields if fields is None or not has_role else (*fields, key), self._check_task)
        if has_role:
            cast("Opponents", self.opponents).check_role(task_data.get(key), f"{name}[{key!r}]", TaskError)

    def start_session(self, session_id: str, task_data: TaskData, seed: int, episode: int = 0) -> State:
        """Seed the session's generator for one episode and put its initial state in ``active_states``.

        Raises:
            EnvError: The state is not a dict whose ``"done"`` is False.
        """
        self._generators[session_id] = seed, episode
        if self.opponents is None or self.plays_itself:
            return self._begin_session(session_id, task_data)
        task = {**task_data, self.role_key: self._agents_role(session_id, task_data)}
        table: Any = None
        for _ in range(MAX_STARTS):  # a forfeit can end a game before the agent's first turn
            table = Table(self, session_id, task[self.role_key])
            state, is_over = table.begin(self._begin_session(session_id, task), self.rng(session_id))
            self.tables[session_id] = table
            if not is_over:
                return state
            self.close_session(session_id, state)
        raise EnvError(
            f"the episode was over, or had {MAX_MOVES} moves, before the agent's first turn in {MAX_STARTS} attempts "
            f"(in the last one, _role returned {shown(dict(table.num_moves))} times), because _role does not change or "
            "an opponent found no valid move: use an opponent that can play, or the role that moves first"
        )

    def _begin_session(self, session_id: str, task_data: TaskData) -> State:
        """Put the initial state of an episode in ``active_states``, and return it."""
        task = call_environment(copy.deepcopy, dict(task_data))
        state = cast("State", call_environment(self._initialize_episode, session_id, task))
        is_state = isinstance(state, dict)  # pyright: ignore[reportUnnecessaryIsInstance]
        if is_state:
            self.active_states[session_id] = state  # even if it is invalid, so that the episode is closed
        if not is_state or as_bool("_initialize_episode's state['done']", call_environment(state.get, "done")):
            raise EnvError(f"_initialize_episode must return a dict whose 'done' is False, got {shown(state)}")
        self._starts.check_state(session_id, state)
        return state

    def close_session(self, session_id: str, state: State) -> None:
        """Close an episode, and notify its opponents; agents without another session are notified, too."""
        call_environment(self._close_episode, session_id, state)
        table = self.tables.pop(session_id, None)
        if table is not None:
            call_environment(table.finish, len(self.active_states) <= 1)

    def drop_session(self, session_id: str) -> None:
        """Forget the session's state and generator."""
        self.active_states.pop(session_id, None)
        self.tables.pop(session_id, None)
        self._generators.pop(session_id, None)
        self._starts.forget(session_id)

    def check_starts(
        self, trajectories: Iterable[Trajectory], group_of: Callable[[Trajectory], Hashable] | None = None
    ) -> None:
        """Warn about finished rollouts of one task group (by default, one ``task_index``) whose first prompts differ.

        Also warn about words that the tokenizer cannot encode. Each warning is logged once.
        """
        trajectories = [*trajectories]
        warn_of_unknown_words(self.tokenizer, trajectories)
        self._starts.check_rollouts(trajectories, group_of or (lambda trajectory: trajectory.task_index))
