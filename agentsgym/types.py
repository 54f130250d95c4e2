"""The immutable values that are passed through the library.

::

    TurnRequest ─▶ agent ─▶ Action ─▶ Turn (a span of tokens and its reward) ─▶ Trajectory
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, NotRequired, TypedDict, TypeVar, cast

from agentsgym._lazy import deferred
from agentsgym.removed import REMOVED
from agentsgym.texts import as_json, shown

if TYPE_CHECKING:
    from pandas import DataFrame

Value = TypeVar("Value")
Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length"]

# Just below the log of the smallest float32 above 0, -103.3, which bfloat16 rounds to -103.5.
MIN_LOGPROB: Final = -104.0
MAX_LOGPROB: Final = 1e-3  # 0 plus a tolerance: in half precision, log-softmax may round to slightly above 0

RESERVED_INFO_KEYS: Final = frozenset(
    ("success", "invalid", "not_understood", "rewards", "truncated", "answer", "action", "tool_calls")
) | {"random_reward", "optimal_reward"}
"""The keys of ``info`` with a fixed meaning: their values are never metrics, even if they are numbers."""

_SHORT: Final = 80  # characters of a field in a repr
# Shown only by their length.
_COUNTED: Final = {"messages", "token_ids", "logprobs", "tool_calls", "tools", "prompt_messages"}

_html_of = deferred("agentsgym.reports.html", "trajectory_html")
_of_messages = deferred("agentsgym.recorded.messages", "trajectory_from_messages")
_rollout_dict_of = deferred("agentsgym.batch.views", "rollout_dict")
_role_components_of = deferred("agentsgym.credit.components", "role_components")
_frame_of = deferred("agentsgym.reports.frames", "rollouts_frame")


class Message(TypedDict):
    """One chat message, a plain dict as OpenAI, transformers and TRL use them.

    Attributes:
        role: Role of the author.
        content: The text, without any tool calls.
        tool_calls: Tool calls of an answer, as ``{"type": "function", "id": …, "function": {"name", "arguments"}}``.
        tool_call_id: In a tool's result, the ``id`` of the call that it answers.
        name: In a tool's result, the tool's name.
        reasoning_content: Reasoning before an answer, where it is separate from the text.
        written: The text with the tags of its reasoning, if the chat template has no form for reasoning.
    """

    role: str
    content: str
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    written: NotRequired[str]


def with_fields(kind: type[Value], **values: Any) -> Value:
    """Make a frozen value of some of its fields, as unpickling does; the others have their defaults.

    Its constructor, which sets one field after another, takes several times as long.
    """
    value = object.__new__(kind)
    object.__setattr__(value, "__dict__", values)
    return value


class StopReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"  # the environment ended it
    MAX_TURNS = "max_turns"  # the turn limit was reached
    MAX_TOKENS = "max_tokens"
    INVALID = "invalid"  # there were too many invalid actions
    FAILED = "failed"  # the environment or the agent raised or took too long

    @property
    def truncated(self) -> bool:
        """Whether a budget, not the environment, ended the episode."""
        return self in {StopReason.MAX_TURNS, StopReason.MAX_TOKENS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call, as an agent wrote it.

    Attributes:
        name: The name of the tool; empty if the call could not be parsed.
        arguments: The arguments by name.
        id: The identifier by which a result refers to the call; None if the agent set none.
        error: Why the call could not be parsed, as a message to the agent; None for a well-formed call.
        repair: The kind of repair with which it could be parsed; None for a call in the format of its template.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    id: str | None = None
    error: str | None = None
    repair: str | None = None


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """The observation that an agent answers in one turn of one session.

    ``messages`` and ``token_ids`` are live views that grow with the episode: do not modify them, and do not keep them
    after returning the action.

    Attributes:
        session_id: The session that needs an action.
        messages: The conversation so far, ending with the new observation.
        token_ids: The exact prompt; empty without a tokenizer.
        agent_state: The state that the agent returned with its last action; None in a conversation's first turn.
        max_new_tokens: The token budget of this turn; None for no limit.
        tools: JSON schemas of the environment's tools, for agents that render the prompt themselves (``token_ids``
            already contain them); empty if there are none.
        seed: Random seed for this conversation, if the caller sets one (an environment does for its scripted players);
            if None, the agent chooses.
        answer_schema: The JSON schema that the answer must match, for agents whose server can enforce one; None if
            there is none.
    """

    session_id: str
    messages: Sequence[Message]
    token_ids: Sequence[int]
    agent_state: Any = None
    max_new_tokens: int | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    seed: int | None = None
    answer_schema: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return _brief(self)


@dataclass(frozen=True, kw_only=True, init=False)
class Action:
    """The agent's answer in one turn.

    Attributes:
        text: The text of the answer; an environment gets it without reasoning and without tool calls.
        token_ids: The sampled ids, end-of-turn token included, untouched; None if the agent only has text.
        logprobs: Log-probabilities under the sampling policy, one per id, NaN where unknown; None if all are unknown.
        agent_state: A value that the agent receives again in its next turn.
        finish_reason: ``"stop"``: the agent ended its turn; ``"length"``: the token budget truncated it.
        tool_calls: The tool calls, in order. An agent whose server has parsed the calls sets them; otherwise they are
            parsed from the sampled ids before the environment receives the action.
        reasoning: Reasoning before the answer; None if there is none. An agent whose server separates it sets it;
            otherwise it is parsed before the environment receives the action.
        policy_version: The number of optimizer steps of the oldest weights that sampled the action; None if unknown.
        written: The answer as the agent wrote it, with the tags of reasoning and calls; by default, the text.
    """

    text: str
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    agent_state: Any = None
    finish_reason: FinishReason = "stop"
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str | None = None
    policy_version: int | None = None
    written: str = ""

    def __init__(  # noqa: PLR0913  # the fields
        self,
        *,
        text: str,
        token_ids: Sequence[int] | None = None,
        logprobs: Sequence[float] | None = None,
        agent_state: Any = None,
        finish_reason: FinishReason = "stop",
        tool_calls: Sequence[ToolCall] = (),
        reasoning: str | None = None,
        policy_version: int | None = None,
        written: str = "",
    ) -> None:
        if logprobs is not None and (token_ids is None or len(logprobs) != len(token_ids)):
            given = "no token_ids" if token_ids is None else f"{len(token_ids)} token_ids"
            raise ValueError(f"an Action needs one log-probability per id, got {len(logprobs)} for {given}")
        # Frozen: a generated constructor would set one field after another, which takes several times as long.
        vars(self).update(
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            agent_state=agent_state,
            finish_reason=finish_reason,
            tool_calls=tool_calls,
            reasoning=reasoning,
            policy_version=policy_version,
            written=written or text,
        )

    def __repr__(self) -> str:
        return _brief(self)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One action: its place in the trajectory, its reward, and the environment's judgment of it.

    The exact prompt that the action was sampled from is ``token_ids[prompt_start:start]``.

    Attributes:
        start: Index of the action's first token in the trajectory's ``token_ids``.
        stop: Index after its last token; equal to ``start`` for an action without tokens.
        reward: The environment's reward for the action; 0.0 in a practice episode. With rewards by role, the sum of
            the role's rewards from this step up to the role's next turn. With named rewards, the sum of ``components``.
        invalid: Whether the environment marked the action as invalid.
        exact: Whether the tokens are those that the agent sampled (rather than an encoding of its text).
        episode: Index of the episode in its trial.
        message_index: Index of the action in the trajectory's ``messages``.
        state_key: A key that is equal for turns with the same decision problem; None if unknown.
        role: The agent's role in this turn, such as a player's seat; None without roles.
        potential: The environment's value of the state, for potential-based shaping; None if unknown.
        prompt_start: Index of the first token of the prompt: 0, or the start of the segment that a rewritten history
            opened.
        prompt_messages: The messages in the prompt, if ``history`` changed them; None if they are the trajectory's
            messages before the action.
        role_rewards: Each role's reward in this step (``info["rewards"]``); None without rewards by role.
        components: The numbers of ``reward`` by name; None if it was given as a plain number.
        role_components: The numbers of ``role_rewards`` by name, for each role whose reward was named; None without.
        policy_version: The number of optimizer steps of the oldest weights that sampled the action; None if unknown.
        parent: In a tree of calls, the index of the earlier turn that this turn follows: the one that it continues, or
            that started it. None for a root, and in rollouts whose turns are a sequence.
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
    components: Mapping[str, float] | None = None
    role_components: Mapping[Hashable, Mapping[str, float]] | None = None
    policy_version: int | None = None
    parent: int | None = None

    def __repr__(self) -> str:
        return _brief(self)


def outcome_of(stop_reason: StopReason, success: bool | None) -> Literal["won", "lost", "failed", "played"]:
    """Describe in one word how a rollout ended; ``"played"`` if success is unknown."""
    if stop_reason is StopReason.FAILED:
        return "failed"
    return "played" if success is None else "won" if success else "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The token-level record of one rollout.

    Attributes:
        token_ids: Every token in order, including prompts and observations, (T,); empty without a tokenizer. Each
            rewrite of the history starts a new segment with the full new prompt: see :attr:`segments`. The tokens
            after the last action are the environment's last message.
        turns: The turns in order; their spans do not overlap.
        messages: The conversation, including the agent's answers.
        logprobs: (T,), the sampler's log-probability of each agent token and 0.0 elsewhere; None if unknown.
        per_token_rewards: (T,), the turn rewards assigned to agent tokens; 0.0 elsewhere.
        final_reward: The sum of the rewards of all episodes except practice ones; with rewards by role, the total of
            the role that acts in the first turn.
        stop_reason: Why the last episode ended.
        session_id: The session that was played.
        task_index: Index of its task in the list given to ``rollout``.
        rollout_index: Index among the rollouts of that task.
        info: The environment's ``info`` of the last step; ``info["success"]`` is whether the task was solved, and the
            environment's own numbers are metrics: see :attr:`metrics`.
        error: For a failed rollout, where and why it failed, and the part of the traceback in user code, ending with
            the cause; None otherwise.
        num_close_errors: How often the environment's ``_close_episode`` raised, which has no other effect.
        num_retries: The number of failed attempts before this one (see ``FailurePolicy.max_retries``).
        final_rewards: Total reward of each role, including roles without a turn; empty without rewards by role, and
            in a failed rollout.
        final_components: The numbers of ``final_reward`` by name; None if it was a plain number, or in a failed
            rollout.
        task_data: The task as it was played, including its ``seed``; empty in a trajectory made by hand.
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
    final_components: Mapping[str, float] | None = None
    task_data: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        edge = segment = 0
        for k, turn in enumerate(self.turns):
            if not edge <= turn.start <= turn.stop <= len(self.token_ids):
                raise ValueError(
                    f"turn {k}: its span [{turn.start}, {turn.stop}) is not valid, overlaps the previous turn, or "
                    f"exceeds the {len(self.token_ids)} tokens"
                )
            if turn.prompt_start != segment and not edge <= turn.prompt_start <= turn.start:
                raise ValueError(
                    f"turn {k}: prompt_start must be {segment} or in [{edge}, {turn.start}], got {turn.prompt_start}"
                )
            if turn.parent is not None and not 0 <= turn.parent < k:
                raise ValueError(f"turn {k}: parent must be the index of an earlier turn or None, got {turn.parent}")
            edge, segment = turn.stop, turn.prompt_start
        for name in ("logprobs", "per_token_rewards"):
            values = getattr(self, name)
            if values and len(values) != len(self.token_ids):
                raise ValueError(f"{name} needs one value per token, got {len(values)} for {len(self.token_ids)}")

    @classmethod
    def from_messages(cls, tokenizer: Any, messages: Any, rewards: Any, **options: Any) -> Trajectory:
        """Convert a recorded conversation: see :func:`~agentsgym.recorded.messages.trajectory_from_messages`."""
        return _of_messages(tokenizer, messages, rewards, **options)

    @classmethod
    def from_training_trace(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise an error that names what to use instead: traces of OpenEnv were read until version 0.2."""
        raise AttributeError(REMOVED["from_training_trace"])

    def __repr__(self) -> str:
        num_agent_tokens = sum(turn.stop - turn.start for turn in self.turns)
        num_tokens = len(self.token_ids)
        tokens = f", {num_tokens} tokens, {num_agent_tokens} of them the agent's" if num_tokens else ""
        return f"<Trajectory of {self.headline}{tokens}>"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays."""
        return _html_of(self)

    @property
    def outcome(self) -> Literal["won", "lost", "failed", "played"]:
        """How the rollout ended, in one word; ``"played"`` if success is unknown."""
        return outcome_of(self.stop_reason, self.success)

    @property
    def headline(self) -> str:
        """The task, the rollout and its outcome, in one line.

        >>> Trajectory(token_ids=[], turns=[], messages=[], final_reward=0.5, stop_reason=StopReason.MAX_TURNS).headline
        'task 0, rollout 0: played after 0 turns (max_turns), reward 0.5'
        """
        turns = f"{self.num_turns} turn{'' if self.num_turns == 1 else 's'}"
        return (
            f"task {self.task_index}, rollout {self.rollout_index}: {self.outcome} after {turns} ({self.stop_reason}), "
            f"reward {self.final_reward:zg}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as plain JSON values, together with ``success``, ``failed`` and ``agent_token_mask``.

        Unknown log-probabilities are None. Keys that are not strings (roles may be others) become strings, as do values
        that JSON cannot represent, for example in ``info`` (:func:`~agentsgym.texts.as_json`).
        """
        values = {one.name: as_json(getattr(self, one.name)) for one in fields(self) if one.name != "turns"}
        turns = [{one.name: as_json(getattr(turn, one.name)) for one in fields(turn)} for turn in self.turns]
        derived = {"success": self.success, "failed": self.failed, "agent_token_mask": self.agent_token_mask}
        return values | {"turns": turns} | derived

    def to_rollout(self) -> dict[str, Any]:
        """Return an entry for TRL's ``rollout_func``: see :func:`~agentsgym.batch.views.rollout_dict`."""
        return _rollout_dict_of(self)

    def to_pandas(self, by: Literal["rollout", "turn", "token"] = "turn") -> DataFrame:
        """Return a table with one row, or with one per turn or per token.

        The columns are those of :func:`~agentsgym.reports.frames.rollout_row`, ``turn_rows`` and ``token_rows``.

        Raises:
            ConfigError: ``by`` has another value.
        """
        return _frame_of([self], by)

    @property
    def agent_token_mask(self) -> list[int]:
        """1 on the agent's tokens, 0 elsewhere, (T,)."""
        mask = [0] * len(self.token_ids)
        for turn in self.turns:
            mask[turn.start : turn.stop] = [1] * (turn.stop - turn.start)
        return mask

    @property
    def segments(self) -> list[range]:
        """The contiguous parts of ``token_ids``, in order; within a part, each token's context is all tokens before it.

        There is a single part unless the history was rewritten; each rewrite starts a new part.

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
    def role_components(self) -> Mapping[Hashable, Mapping[str, float]]:
        """The numbers of each role's ``final_rewards`` by name, if rewards are given by role and name."""
        return _role_components_of(self.turns)

    @property
    def num_turns(self) -> int:
        """The number of turns."""
        return len(self.turns)

    @property
    def exact(self) -> bool:
        """Whether all agent tokens are those that the agent sampled."""
        return all(turn.exact for turn in self.turns)

    @property
    def seed(self) -> Any:
        """The seed of the task; None if it was not recorded."""
        return self.task_data.get("seed")

    @property
    def failed(self) -> bool:
        """Whether the environment or the agent failed; such a rollout is excluded from the loss and from baselines."""
        return self.stop_reason is StopReason.FAILED

    @property
    def success(self) -> bool | None:
        """Whether the task was solved; None if unknown."""
        value = self.info.get("success")
        return None if value is None else bool(value)

    @property
    def metrics(self) -> dict[str, float]:
        """The environment's own metrics: every finite number in the last ``info``, with True as 1 and False as 0.

        Only the ``info`` of the last step is used, so an environment should keep running counts in its state and report
        them in every ``info``. The keys in :data:`RESERVED_INFO_KEYS` are excluded.

        >>> trajectory = Trajectory(token_ids=[], turns=[], messages=[], final_reward=0.0, stop_reason=StopReason.DONE,
        ...     info={"success": True, "num_calls": 3, "was_polite": True, "tool": "search"})
        >>> trajectory.metrics
        {'num_calls': 3.0, 'was_polite': 1.0}
        """
        found: dict[str, float] = {}
        for key, value in self.info.items():
            is_numpy_bool = str(getattr(value, "dtype", "")) == "bool" and getattr(value, "shape", None) == ()
            if key in RESERVED_INFO_KEYS or not (isinstance(value, Real) or is_numpy_bool):
                continue
            try:
                number = float(cast("Any", value))
            except Exception:  # noqa: BLE001  # user code may raise, e.g. for an int that is too large
                continue
            if math.isfinite(number):
                found[str(key)] = number
        return found


def _brief(value: TurnRequest | Action | Turn) -> str:
    """Return a repr with only the fields that differ from their defaults; collections are shown by their length."""
    written: list[str] = []
    for one in fields(value):
        item: Any = getattr(value, one.name)
        default: Any = value.text if isinstance(value, Action) and one.name == "written" else one.default
        if default is MISSING or default is None:
            is_default = default is item
        else:
            is_default = not item if isinstance(default, tuple) else bool(item == default)
        if not is_default:
            written.append(f"{one.name}=" + (f"<{len(item)}>" if one.name in _COUNTED else shown(item, _SHORT)))
    return f"{type(value).__name__}({', '.join(written)})"
