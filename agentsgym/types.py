"""The values that flow through the library, each made once and never changed.

::

    TurnRequest ─▶ agent ─▶ Action ─▶ Turn (a span of tokens and its reward) ─▶ Trajectory
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, Literal, NotRequired, TypedDict, cast

from agentsgym._lazy import deferred
from agentsgym.texts import as_json, shown

if TYPE_CHECKING:
    from pandas import DataFrame

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length"]

MIN_LOGPROB: Final = -104.0  # of the smallest float32 above 0 it is -103.3, which bfloat16 rounds to -103.5
MAX_LOGPROB: Final = 1e-3  # 0 up to rounding: log-softmax adds up probabilities that half precision has rounded

READ_KEYS: Final = frozenset(
    ("success", "invalid", "rewards", "truncated", "random_reward", "optimal_reward", "answer", "action")
)
"""The keys of ``info`` with a fixed meaning: their values are not metrics, numbers or not."""

_SHORT: Final = 80  # characters of a field in a repr
_COUNTED: Final = {"messages", "token_ids", "logprobs", "tool_calls", "tools", "prompt_messages"}  # only how many

_html_of = deferred("agentsgym.reports.html", "trajectory_html")
_of_messages = deferred("agentsgym.recorded.messages", "trajectory_from_messages")
_of_training_trace = deferred("agentsgym.recorded.training_trace", "trajectory_from_training_trace")
_rollout_dict_of = deferred("agentsgym.batch.rollout_dict", "rollout_dict")
_frame_of = deferred("agentsgym.reports.frames", "trajectory_frame")


class Message(TypedDict):
    """One chat message, a plain dict as OpenAI, transformers and TRL use them.

    Attributes:
        role: Role of the author.
        content: The text; in an answer with tool calls, the text beside them.
        tool_calls: The calls of an answer, as ``{"type": "function", "id": …, "function": {"name", "arguments"}}``.
        tool_call_id: In a tool's result, the ``id`` of the call that it answers.
        name: In a tool's result, the tool's name.
        reasoning_content: Reasoning before an answer, where it is separate from the text.
    """

    role: str
    content: str
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]


class StopReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"  # the environment ended it
    MAX_TURNS = "max_turns"  # a budget ended it
    MAX_TOKENS = "max_tokens"
    INVALID = "invalid"  # the allowance for invalid actions is spent
    FAILED = "failed"  # the environment or the agent raised or took too long

    @property
    def truncated(self) -> bool:
        """Whether a budget, not the environment, ended the episode."""
        return self in {StopReason.MAX_TURNS, StopReason.MAX_TOKENS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool, as an agent wrote it.

    Attributes:
        name: The tool; empty where it could not be read.
        arguments: Its arguments by name.
        id: Identifier by which a result refers to the call; None if the agent set none.
        error: Why the call could not be read, for the agent; None for a well-formed call.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    id: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """The observation that an agent answers in one turn of one session.

    ``messages`` and ``token_ids`` are live views that grow with the episode: read them, do not keep or change them
    after the action is returned.

    Attributes:
        session_id: The session to answer.
        messages: The conversation so far, ending with the new observation.
        token_ids: The exact prompt; empty without a tokenizer.
        agent_state: The state that the agent returned with its last action; None in a conversation's first turn.
        max_new_tokens: The budget of this turn in tokens; None for no limit.
        tools: JSON schemas of the environment's tools, for agents that write the prompt themselves (``token_ids`` show
            them already); empty if it has none.
        seed: Seed of this conversation's draws, where the caller sets it, as an environment does for its players; None
            leaves them to the agent.
    """

    session_id: str
    messages: Sequence[Message]
    token_ids: Sequence[int]
    agent_state: Any = None
    max_new_tokens: int | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    seed: int | None = None

    def __repr__(self) -> str:
        return _brief(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """The agent's answer in one turn.

    Attributes:
        text: The answer as the environment reads it.
        token_ids: The sampled ids, end-of-turn token included, untouched; None if the agent only has text.
        logprobs: Their log-probabilities under the sampling policy, one an id (NaN: not known); None if none is known.
        agent_state: Handed back to the agent in its next turn.
        finish_reason: ``"stop"``: the agent ended its turn; ``"length"``: the budget cut it.
        tool_calls: The tool calls in it, in order. An agent that has them parsed (by a server) sets them; from
            sampled ids they are read before the environment sees the action.
        reasoning: Reasoning before the answer, where it is separate from the text.
        policy_version: The optimizer steps behind the oldest weights that sampled it; None if unknown.
    """

    text: str
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    agent_state: Any = None
    finish_reason: FinishReason = "stop"
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str | None = None
    policy_version: int | None = None

    def __post_init__(self) -> None:
        if self.logprobs is not None and (self.token_ids is None or len(self.logprobs) != len(self.token_ids)):
            given = "no token_ids" if self.token_ids is None else f"{len(self.token_ids)} token_ids"
            raise ValueError(f"an Action needs one log-probability per id, got {len(self.logprobs)} and {given}")

    def __repr__(self) -> str:
        return _brief(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One action: its place in the trajectory, its reward, and the environment's judgment of it.

    The exact prompt that the action was sampled from is ``token_ids[prompt_start:start]``.

    Attributes:
        start: Index of the action's first token in the trajectory's ``token_ids``.
        stop: Index after its last token; equal to ``start`` for an action without tokens.
        reward: Its reward from the environment; 0.0 in a practice episode. With rewards by role, the rewards of its
            role from this step up to the role's next turn.
        invalid: Whether the environment called it invalid.
        exact: Whether its tokens are the agent's own (not text that was encoded afterwards).
        episode: Index of the episode in its trial.
        message_index: Index of the action in the trajectory's ``messages``.
        state_key: Key of the decision problem, equal for equal ones; None if unknown.
        role: The agent's role in this turn, such as a player's seat; None without roles.
        potential: The state's value by the environment, for potential-based shaping; None if unknown.
        prompt_start: Index of the first token of its prompt: 0, or where the segment begins that a rewritten history
            opened.
        prompt_messages: The conversation that the prompt shows, where ``history`` changed it; None if it is the
            trajectory's own up to the action.
        role_rewards: The step's reward of each role (``info["rewards"]``); None without rewards by role.
        policy_version: The optimizer steps behind the oldest weights that sampled it; None if unknown.
    """

    start: int
    stop: int
    reward: float
    invalid: bool = False
    exact: bool = True
    episode: int = 0
    message_index: int = 0
    state_key: Hashable = None
    role: Hashable = None
    potential: float | None = None
    prompt_start: int = 0
    prompt_messages: Sequence[Message] | None = None
    role_rewards: Mapping[Hashable, float] | None = None
    policy_version: int | None = None

    def __repr__(self) -> str:
        return _brief(self)


def outcome_of(stop_reason: StopReason, success: bool | None) -> Literal["won", "lost", "failed", "played"]:
    """How a rollout ended, in a word; ``"played"`` if success is unknown."""
    if stop_reason is StopReason.FAILED:
        return "failed"
    return "played" if success is None else "won" if success else "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The token-level record of one rollout.

    Attributes:
        token_ids: Every token in order, prompts and observations included, (T,); empty without a tokenizer. Where a
            history was rewritten a new segment begins, with the whole new prompt: see :attr:`segments`. The tokens
            after the last action are the environment's last message.
        turns: The turns in order; their spans do not overlap.
        messages: The conversation, the agent's answers included.
        logprobs: (T,), the sampler's log-probability of each agent token and 0.0 elsewhere; None if unknown.
        per_token_rewards: (T,), the turn rewards placed on agent tokens; 0.0 elsewhere.
        final_reward: The sum over the trajectory's episodes that are not practice; with rewards by role, that
            of the role of the first turn.
        stop_reason: Why the last episode ended.
        session_id: The session that was played.
        task_index: Index of its task in the list given to ``rollout``.
        rollout_index: Index among the rollouts of that task.
        info: The environment's ``info`` of its last step; ``info["success"]`` is whether it was solved, and every
            number in it is a metric: see :attr:`metrics`.
        error: For a failed rollout, where and why it failed and the user's part of the traceback, the cause last. Else
            None.
        num_close_errors: How often the environment's ``_close_episode`` raised, which changes nothing else.
        num_retries: How often it was played before and failed, as ``FailurePolicy.max_retries`` allows.
        final_rewards: Total reward of each role, roles without a turn included; empty without rewards
            by role, and in a failed rollout.
        task_data: The task as it was played, its ``seed`` filled in; empty in a record made by hand.
    """

    token_ids: Sequence[int]
    turns: Sequence[Turn]
    messages: Sequence[Message]
    final_reward: float
    stop_reason: StopReason
    logprobs: Sequence[float] | None = None
    per_token_rewards: Sequence[float] = ()
    session_id: str = ""
    task_index: int = 0
    rollout_index: int = 0
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str | None = None
    num_close_errors: int = 0
    num_retries: int = 0
    final_rewards: Mapping[Hashable, float] = field(default_factory=dict[Hashable, float])
    task_data: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        edge = segment = 0
        for k, turn in enumerate(self.turns):
            if not edge <= turn.start <= turn.stop <= len(self.token_ids):
                raise ValueError(f"turn {k}: [{turn.start}, {turn.stop}) overlaps or leaves [0, {len(self.token_ids)})")
            if turn.prompt_start != segment and not edge <= turn.prompt_start <= turn.start:
                raise ValueError(f"turn {k}: its prompt begins at {turn.prompt_start}, inside an earlier segment")
            edge, segment = turn.stop, turn.prompt_start
        for name in ("logprobs", "per_token_rewards"):
            values = getattr(self, name)
            if values and len(values) != len(self.token_ids):
                raise ValueError(f"{name} needs one value per token, got {len(values)} for {len(self.token_ids)}")

    @classmethod
    def from_messages(cls, tokenizer: Any, messages: Any, rewards: Any, **options: Any) -> Trajectory:
        """Record a foreign conversation: see :func:`~agentsgym.recorded.messages.trajectory_from_messages`."""
        return _of_messages(tokenizer, messages, rewards, **options)

    @classmethod
    def from_training_trace(cls, trace: Any, rewards: Any, **options: Any) -> Trajectory:
        """Read OpenEnv's trace: see :func:`~agentsgym.recorded.training_trace.trajectory_from_training_trace`."""
        return _of_training_trace(trace, rewards, **options)

    def __repr__(self) -> str:
        num_agent_tokens = sum(turn.stop - turn.start for turn in self.turns)
        num_tokens = len(self.token_ids)
        tokens = f", {num_tokens} tokens, {num_agent_tokens} of them the agent's" if num_tokens else ""
        return f"<Trajectory of {self.headline}{tokens}>"

    def _repr_html_(self) -> str:
        """Draw it for a notebook."""
        return _html_of(self)

    @property
    def outcome(self) -> Literal["won", "lost", "failed", "played"]:
        """How it ended, in a word; ``"played"`` if success is unknown."""
        return outcome_of(self.stop_reason, self.success)

    @property
    def headline(self) -> str:
        """Which rollout it is and how it went, in a line.

        >>> Trajectory(token_ids=[], turns=[], messages=[], final_reward=0.5, stop_reason=StopReason.MAX_TURNS).headline
        'task 0, rollout 0: played after 0 turns (max_turns), reward 0.5'
        """
        turns = f"{self.num_turns} turn{'' if self.num_turns == 1 else 's'}"
        return (
            f"task {self.task_index}, rollout {self.rollout_index}: {self.outcome} after {turns} ({self.stop_reason}), "
            f"reward {self.final_reward:zg}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as plain JSON values, and ``success``, ``failed`` and ``agent_token_mask`` beside them.

        Unknown log-probabilities are None. Keys that are not text, as roles may be, are written as text; so are values
        without a form in JSON, in ``info`` for example (:func:`~agentsgym.texts.as_json`).
        """
        values = {one.name: as_json(getattr(self, one.name)) for one in fields(self) if one.name != "turns"}
        turns = [{one.name: as_json(getattr(turn, one.name)) for one in fields(turn)} for turn in self.turns]
        derived = {"success": self.success, "failed": self.failed, "agent_token_mask": self.agent_token_mask}
        return values | {"turns": turns} | derived

    def to_rollout(self) -> dict[str, Any]:
        """Return it as one entry for TRL's ``rollout_func``: see :func:`~agentsgym.batch.rollout_dict.rollout_dict`."""
        return _rollout_dict_of(self)

    def to_pandas(self, by: Literal["turn", "token"] = "turn") -> DataFrame:
        """Return it as a table with one row for each turn, or for each token.

        The columns are those of :func:`~agentsgym.reports.frames.turn_rows` and
        :func:`~agentsgym.reports.frames.token_rows`.

        Raises:
            ConfigError: ``by`` is neither.
        """
        return _frame_of(self, by)

    @property
    def agent_token_mask(self) -> list[int]:
        """1 on the agent's tokens, 0 elsewhere, (T,)."""
        mask = [0] * len(self.token_ids)
        for turn in self.turns:
            mask[turn.start : turn.stop] = [1] * (turn.stop - turn.start)
        return mask

    @property
    def segments(self) -> list[range]:
        """The parts of ``token_ids`` in which each token's context is everything before it, in order.

        One where history only grew; each rewriting of the history opens another.

        >>> turns = [Turn(start=2, stop=3, reward=0.0), Turn(start=5, stop=7, reward=1.0, prompt_start=3)]
        >>> Trajectory(
        ...     token_ids=[0] * 7, turns=turns, messages=[], final_reward=1.0, stop_reason=StopReason.DONE
        ... ).segments
        [range(0, 3), range(3, 7)]
        """
        starts = sorted({0, *(turn.prompt_start for turn in self.turns)})
        return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(self.token_ids)], strict=True)]

    @property
    def turn_rewards(self) -> list[float]:
        """The environment's reward of each turn, before ``turn_credit``, (K,)."""
        return [turn.reward for turn in self.turns]

    @property
    def roles(self) -> list[Hashable]:
        """The agent's role in each turn, (K,)."""
        return [turn.role for turn in self.turns]

    @property
    def num_turns(self) -> int:
        """The turns that were played."""
        return len(self.turns)

    @property
    def exact(self) -> bool:
        """Whether all agent tokens are the agent's own."""
        return all(turn.exact for turn in self.turns)

    @property
    def seed(self) -> Any:
        """The seed that its task was played with; None in a record without one."""
        return self.task_data.get("seed")

    @property
    def failed(self) -> bool:
        """Whether the environment or the agent failed: kept as a row, out of loss and baselines."""
        return self.stop_reason is StopReason.FAILED

    @property
    def success(self) -> bool | None:
        """Whether the task was solved; None if unknown."""
        value = self.info.get("success")
        return None if value is None else bool(value)

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers in ``info`` that the environment added: finite ones, and True and False as 1 and 0.

        Values of the last step: an environment counts in its state and puts the count in every ``info``. The keys of
        :data:`READ_KEYS` are left out.

        >>> trajectory = Trajectory(token_ids=[], turns=[], messages=[], final_reward=0.0, stop_reason=StopReason.DONE,
        ...     info={"success": True, "num_calls": 3, "was_polite": True, "tool": "search"})
        >>> trajectory.metrics
        {'num_calls': 3.0, 'was_polite': 1.0}
        """
        found: dict[str, float] = {}
        for key, value in self.info.items():
            is_numpy_bool = str(getattr(value, "dtype", "")) == "bool" and getattr(value, "shape", None) == ()
            if key in READ_KEYS or not (isinstance(value, Real) or is_numpy_bool):
                continue
            try:
                number = float(cast("Any", value))
            except Exception:  # noqa: BLE001  # foreign: an int too large for example
                continue
            if math.isfinite(number):
                found[str(key)] = number
        return found


def _brief(value: TurnRequest | Action | Turn) -> str:
    """Write a value by the fields that are not at their defaults, collections as how many items they hold."""
    written: list[str] = []
    for one in fields(value):
        item, default = getattr(value, one.name), one.default
        if default is MISSING or default is None:
            is_default = default is item
        else:
            is_default = not item if isinstance(default, tuple) else bool(item == default)
        if not is_default:
            written.append(f"{one.name}=" + (f"<{len(item)}>" if one.name in _COUNTED else shown(item, _SHORT)))
    return f"{type(value).__name__}({', '.join(written)})"
