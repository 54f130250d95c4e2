"""Check recorded rollouts without any assumptions: they may come from a file or another library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Literal, NamedTuple, cast

from agentsgym.credit.components import reward_mismatch
from agentsgym.credit.rewards import TOKEN_CREDITS, check_credit, credited_rewards
from agentsgym.errors import AgentsGymError
from agentsgym.fields import check_rollouts, is_bool, is_dict, is_int, is_str, or_none, require
from agentsgym.texts import shortened, shown
from agentsgym.types import StopReason, Trajectory

Check = Literal[
    "fields",  # a value is missing or has the wrong type; the trajectory's other checks are then skipped
    "lengths",  # a list does not have one value per token
    "token_ids",  # an id is not a valid token id
    "spans",  # turns overlap, are out of order or extend beyond the tokens
    "parents",  # a turn's parent is not an earlier turn
    "prompts",  # a turn's prompt does not extend the tokens before it
    "mask",  # the agent token mask is not the union of the spans
    "messages",  # an invalid message, or a turn that does not refer to its answer
    "logprobs",  # an invalid log-probability
    "rewards",  # a reward is not finite, or is assigned to the wrong tokens
    "outcome",  # the final reward, the stop reason and the error are inconsistent
]

_SHOWN, _SHOWN_BYTES = 20, 450  # problems in the text of a report, and the size limit of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of one trajectory.

    Attributes:
        check: The check that found it.
        trajectory: Index of the trajectory in the audited list.
        session_id: The trajectory's session id.
        turn: Index of the turn; None if the problem does not concern one turn.
        message: The problem and the expected value, in one sentence.
    """

    check: Check
    trajectory: int
    session_id: str
    turn: int | None
    message: str

    def __str__(self) -> str:
        turn = "" if self.turn is None else f", turn {self.turn}"
        session = f" (session {shown(self.session_id)[1:-1]})" if self.session_id else ""
        return f"trajectory {self.trajectory}{session}{turn}: [{self.check}] {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The result of an audit; the counts exclude trajectories with missing or wrongly typed fields.

    Attributes:
        num_trajectories: Number of all audited trajectories.
        num_failed: Number of rollouts in which the environment or the agent failed.
        num_turns: Number of turns.
        num_segments: Number of segments (contiguous tokens in which history only grew).
        num_tokens: Number of tokens.
        num_agent_tokens: Number of agent tokens.
        num_invalid_turns: Number of turns that the environment marked as invalid.
        num_inexact_turns: Number of turns whose tokens were encoded from text.
        num_turns_without_logprobs: Number of turns that have tokens but no log-probabilities.
        problems: The problems, in the order of the trajectories.
    """

    num_trajectories: int
    num_failed: int
    num_turns: int
    num_segments: int
    num_tokens: int
    num_agent_tokens: int
    num_invalid_turns: int
    num_inexact_turns: int
    num_turns_without_logprobs: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def raise_if_broken(self) -> None:
        """Raise an :class:`~agentsgym.errors.AgentsGymError` with the text of the report if there are problems."""
        if self.problems:
            raise AgentsGymError(str(self))

    def __str__(self) -> str:
        lines = [
            f"{self.num_trajectories} trajectories ({self.num_failed} failed), {self.num_turns} turns "
            f"({self.num_invalid_turns} invalid, {self.num_inexact_turns} encoded afterwards, "
            f"{self.num_turns_without_logprobs} without log-probabilities), {self.num_tokens} tokens "
            f"({self.num_agent_tokens} of agents) in {self.num_segments} segments",
            f"{len(self.problems)} problems" if self.problems else "no problems",
        ]
        lines += [shortened(f"  {problem}", _SHOWN_BYTES, tail=0) for problem in self.problems[:_SHOWN]]
        more = [f"  and {len(self.problems) - _SHOWN} more"] if len(self.problems) > _SHOWN else []
        return "\n".join([*lines, *more])


_LOGPROB_TOLERANCE = 1e-4  # rounding can make the log-probability of a certain token slightly positive
_is_close = partial(math.isclose, rel_tol=1e-6, abs_tol=1e-6)  # for rewards, perhaps rounded to single precision

_Finding = tuple[Check, int | None, str]  # the int is the index of the turn concerned
_Findings = Iterator[_Finding]


class _Expected(NamedTuple):
    vocabulary_size: float
    turn_credit: str | None
    token_credit: str | None
    final_reward_is_sum: bool


def audit(
    trajectories: Sequence[Trajectory],
    *,
    vocabulary_size: int | None = None,
    turn_credit: str | None = "step",
    token_credit: str | None = "spread",
    final_reward_is_sum: bool = True,
) -> AuditReport:
    """Check everything in the data that training relies on, and report the problems without raising.

    Args:
        trajectories: The rollouts, of any class that has the attributes of a :class:`~agentsgym.types.Trajectory`.
        vocabulary_size: Exclusive upper bound on the token ids; None for no limit.
        turn_credit: Which turns are rewarded, as in ``env_config``; None for an environment that assigns its rewards
            itself (``_calculate_rewards``), whose amounts are not checked.
        token_credit: Which tokens of a turn get its reward, as in ``env_config``; None as above.
        final_reward_is_sum: Whether final rewards must be the sums of the turn rewards; False for an environment
            with a custom ``_final_reward``.

    Raises:
        ConfigError: ``vocabulary_size`` is not a positive int, or a credit setting is invalid.

    >>> audit([Trajectory(token_ids=[], turns=[], messages=[], final_reward=1.0, stop_reason=StopReason.MAX_TOKENS)]).ok
    False
    """
    check_rollouts("audit(trajectories)", trajectories)
    require("vocabulary_size", vocabulary_size, or_none(is_int(1)), "a positive int or None")
    check_credit("step" if turn_credit is None else turn_credit, "spread" if token_credit is None else token_credit)
    expected = _Expected(vocabulary_size or math.inf, turn_credit, token_credit, final_reward_is_sum)
    problems: list[Problem] = []
    readable: list[Any] = []
    for index, trajectory in enumerate(trajectories):
        findings = [*_wrong_kinds(trajectory, _TRAJECTORY_FIELDS)]
        turns: Any = getattr(trajectory, "turns", None)
        for k, turn in enumerate(turns if _is_list(turns) else ()):
            findings += _wrong_kinds(turn, _TURN_FIELDS, k)
        if not findings:
            readable.append(trajectory)
            findings = [*_contents(trajectory, expected)]
        given = getattr(trajectory, "session_id", "")
        session_id = given if isinstance(given, str) else shown(given)
        problems += [
            Problem(check=check, trajectory=index, session_id=session_id, turn=turn, message=message)
            for check, turn, message in findings
        ]
    played = [(turn, row.logprobs is None) for row in readable for turn in row.turns]
    return AuditReport(
        num_trajectories=len(trajectories),
        num_failed=sum(row.stop_reason is StopReason.FAILED for row in readable),
        num_turns=len(played),
        num_segments=sum(len({0, *(turn.prompt_start for turn in row.turns)}) for row in readable),
        num_tokens=sum(len(row.token_ids) for row in readable),
        num_agent_tokens=sum(max(0, turn.stop - turn.start) for turn, _ in played),
        num_invalid_turns=sum(turn.invalid for turn, _ in played),
        num_inexact_turns=sum(not turn.exact for turn, _ in played),
        num_turns_without_logprobs=sum(is_unknown and turn.stop > turn.start for turn, is_unknown in played),
        problems=tuple(problems),
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_numbers(values: Any) -> bool:
    # Checking types instead of values is fast: a row has thousands of tokens, but only one or two types of numbers.
    return _is_list(values) and all(kind is not bool and issubclass(kind, Real) for kind in set[Any](map(type, values)))


def _is_message(value: Any) -> bool:
    message = cast("Mapping[str, Any]", value)
    return isinstance(value, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


_Kinds = Mapping[tuple[str, Callable[[Any], bool]], tuple[str, ...]]
_INDEX, _LIST = ("an int >= 0", is_int(0)), ("a list", _is_list)
_NUMBER: tuple[str, Callable[[Any], bool]] = ("a number", lambda value: _are_numbers([value]))
_TRAJECTORY_FIELDS: _Kinds = {
    _LIST: ("token_ids", "turns", "messages"),
    _NUMBER: ("final_reward",),
    _INDEX: ("task_index", "rollout_index"),
    ("a StopReason", lambda value: isinstance(value, StopReason)): ("stop_reason",),
    ("a list of numbers", _are_numbers): ("per_token_rewards",),
    ("a list of numbers or None", or_none(_are_numbers)): ("logprobs",),
    ("a str", is_str): ("session_id",),
    ("a str or None", or_none(is_str)): ("error",),
    ("a dict", is_dict): ("info", "final_rewards"),
}
_TURN_FIELDS: _Kinds = {
    _INDEX: ("start", "stop", "episode", "message_index", "prompt_start"),
    _NUMBER: ("reward",),
    ("True or False", is_bool): ("invalid", "exact"),
    ("a list or None", or_none(_is_list)): ("prompt_messages",),
    ("a dict or None", or_none(is_dict)): ("role_rewards",),
    ("an int >= 0 or None", or_none(is_int(0))): ("policy_version", "parent"),
}


def _wrong_kinds(value: object, kinds: _Kinds, turn: int | None = None) -> _Findings:
    for (kind, is_right), names in kinds.items():
        for name in names:
            if not hasattr(value, name):
                yield "fields", turn, f"{name} must be {kind}, but {type(value).__name__} has no such attribute"
            elif not is_right(given := getattr(value, name)):
                yield "fields", turn, f"{name} must be {kind}, got {shown(given)} ({type(given).__name__})"


def _contents(trajectory: Any, expected: _Expected) -> _Findings:
    ids, limit, size = trajectory.token_ids, expected.vocabulary_size, len(trajectory.token_ids)
    if wrong := [index for index, token in enumerate(ids) if type(token) is not int or not 0 <= token < limit]:
        yield "token_ids", None, f"ids must be ints in [0, {limit}), got {_at(wrong, ids)}"
    yield from _messages(trajectory)
    yield from _outcome(trajectory, expected)
    edge, are_spans_valid = 0, True
    for k, turn in enumerate(trajectory.turns):
        if turn.parent is not None and turn.parent >= k:
            yield "parents", k, f"its parent must be an earlier turn, got {turn.parent}"
        if edge <= turn.start <= turn.stop <= size:
            edge = turn.stop
        else:
            are_spans_valid = False
            yield "spans", k, f"its span must lie in [{edge}, {size}), got [{turn.start}, {turn.stop})"
    if are_spans_valid:  # otherwise values cannot be matched to tokens
        yield from _prompts(trajectory)
        given = list(getattr(trajectory, "agent_token_mask", ()))
        spoken = {index for turn in trajectory.turns for index in range(turn.start, turn.stop)}
        right = [int(index in spoken) for index in range(size)]
        if len(given) != size:
            yield _wrong_length("agent_token_mask", given, trajectory)
        elif wrong := [index for index, mask in enumerate(given) if mask != right[index]]:
            yield "mask", None, f"agent_token_mask must be 1 only in the turns' spans, got {_at(wrong, given)}"
        yield from _logprobs(trajectory)
        yield from _rewards(trajectory, expected)


def _prompts(trajectory: Any) -> _Findings:
    edge = segment = 0
    for k, turn in enumerate(trajectory.turns):
        begin = turn.prompt_start
        if begin != segment and not edge <= begin <= turn.start:
            expected = f"at {segment}, like the previous turn's, or in [{edge}, {turn.start}]"
            yield "prompts", k, f"its prompt must begin {expected}, got {begin}"
        elif turn.stop > turn.start == begin:
            yield "prompts", k, "its prompt must have at least one token, got an empty one"
        else:
            segment = begin
        edge = turn.stop


def _messages(trajectory: Any) -> _Findings:
    messages = trajectory.messages
    for index, message in enumerate(messages):
        if not _is_message(message):
            yield ("messages", None, f"messages[{index}] must have a str 'role' and 'content', got {shown(message)}")
    last, episode = -1, 0
    for k, turn in enumerate(trajectory.turns):
        index = turn.message_index
        if last < index < len(messages) and _role(messages[index]) == "assistant":
            last = index
        else:
            expected = f"that of an assistant message in ({last}, {len(messages)})"
            yield "messages", k, f"message_index must be {expected}, got {index}"
        roles = [_role(message) for message in turn.prompt_messages or ()]
        if turn.prompt_messages is not None and (None in roles or roles[-1:] in ([], ["assistant"])):
            expected = "messages that end with a message to answer"
            yield "messages", k, f"prompt_messages must be {expected}, got {shown(turn.prompt_messages)}"
        if turn.episode < episode:
            yield "messages", k, f"its episode must be {episode} or later, got {turn.episode}"
        episode = max(episode, turn.episode)


def _role(message: Any) -> str | None:
    return message["role"] if _is_message(message) else None


def _logprobs(trajectory: Any) -> _Findings:
    values = trajectory.logprobs
    if values is None:
        return
    if len(values) != len(trajectory.token_ids):
        yield _wrong_length("logprobs", values, trajectory)
        return
    for k, turn in enumerate(trajectory.turns):
        span = range(turn.start, turn.stop)  # NaN (unknown) fails both comparisons
        if wrong := [i for i in span if values[i] > _LOGPROB_TOLERANCE or values[i] == -math.inf]:
            yield "logprobs", k, f"log-probabilities must be finite and at most 0, got {_at(wrong, values)}"
    if wrong := _nonzero_outside(trajectory.turns, values):
        yield "logprobs", None, f"logprobs must be 0.0 on environment tokens, got {_at(wrong, values)}"


def _rewards(trajectory: Any, expected: _Expected) -> _Findings:
    values, turns = trajectory.per_token_rewards, trajectory.turns
    if len(values) != len(trajectory.token_ids):
        yield _wrong_length("per_token_rewards", values, trajectory)
        return
    failed = trajectory.stop_reason is StopReason.FAILED
    if wrong := _nonzero_outside(() if failed else turns, values):
        where = "in a failed rollout" if failed else "on environment tokens"
        yield "rewards", None, f"per_token_rewards must be 0.0 {where}, got {_at(wrong, values)}"
    rewards = [[turn.reward, *values[turn.start : turn.stop]] for turn in turns]
    endless = [k for k, amounts in enumerate(rewards) if not all(map(math.isfinite, amounts))]
    for k in endless:
        yield "rewards", k, f"rewards must be finite, got {shown(rewards[k])}"
    yield from _components(trajectory)
    is_finite = not endless and math.isfinite(trajectory.final_reward)
    if failed or not is_finite or expected.turn_credit is None or expected.token_credit is None:
        return
    amounts = credited_rewards(trajectory, expected.turn_credit)
    for k, (turn, amount) in enumerate(zip(turns, amounts, strict=True)):
        right = TOKEN_CREDITS[expected.token_credit](amount, turn.stop - turn.start)
        given = values[turn.start : turn.stop]
        if not all(map(_is_close, given, right)):
            how = f"(turn_credit {expected.turn_credit!r}, token_credit {expected.token_credit!r})"
            yield "rewards", k, f"its tokens' rewards must be {shown(right)} {how}, got {shown(given)}"


def _components(trajectory: Any) -> _Findings:
    named = [(k, turn.reward, turn.components) for k, turn in enumerate(trajectory.turns)]
    for k, reward, components in (*named, (None, trajectory.final_reward, trajectory.final_components)):
        if components is not None and not _is_close(math.fsum(components.values()), reward):
            yield "rewards", k, f"the components {shown(dict(components))} must add up to the reward, {reward!r}"


def _outcome(trajectory: Any, expected: _Expected) -> _Findings:
    reason, reward, turns = trajectory.stop_reason, trajectory.final_reward, trajectory.turns
    failed = reason is StopReason.FAILED
    if not math.isfinite(reward):
        yield "outcome", None, f"final_reward must be finite, got {shown(reward)}"
    elif failed and reward != 0.0:
        yield "outcome", None, f"final_reward of a failed rollout must be 0.0, got {shown(reward)}"
    if failed != (trajectory.error is not None):
        given = f"{reason.value!r} and {shown(trajectory.error)}"
        yield "outcome", None, f"a rollout must have an error if and only if its stop reason is 'failed', got {given}"
    if not turns and reason not in {StopReason.MAX_TOKENS, StopReason.FAILED}:
        yield "outcome", None, f"a rollout without turns must end with 'max_tokens' or 'failed', got {reason.value!r}"
    if turns and reason is StopReason.INVALID and not turns[-1].invalid:
        yield "outcome", None, "the last turn must be invalid if the stop reason is 'invalid', got a valid one"
    rewards = [turn.reward for turn in turns]
    is_sound = not failed and all(map(math.isfinite, (reward, *rewards)))
    if is_sound and (wrong := reward_mismatch(trajectory, is_sum=expected.final_reward_is_sum)):
        yield "outcome", None, wrong


def _nonzero_outside(turns: Any, values: Any) -> list[int]:
    starts, stops = [0, *(turn.stop for turn in turns)], [*(turn.start for turn in turns), len(values)]
    return [i for start, stop in zip(starts, stops, strict=True) for i in range(start, stop) if values[i] != 0.0]


def _wrong_length(name: str, values: Sequence[Any], trajectory: Any) -> _Finding:
    return "lengths", None, f"{name} must have {len(trajectory.token_ids)} values, one per token, got {len(values)}"


def _at(wrong: Sequence[int], values: Sequence[Any]) -> str:
    others = f" and {len(wrong) - 1} more such" if len(wrong) > 1 else ""
    return f"{shown(values[wrong[0]])} at token {wrong[0]}{others}"
