"""Judgments, and their scores as rewards of a rollout.

The score of a turn is added to that turn's reward, and any other score to the last turn's; each is added to the final
reward, too, so that the two agree as they did before. A reward becomes a named one: what the environment gave without a
name keeps the name ``reward``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from agentsgym.credit.components import attribute_rewards, by_name, role_components
from agentsgym.errors import ConfigError
from agentsgym.judging.rubric import Scope
from agentsgym.types import Trajectory, Turn

INFO_KEY = "judgments"
"""The key of ``Trajectory.info`` with the judgments, as dicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgment:
    """The judgment of one turn or one rollout.

    Attributes:
        judge: The name of the judge.
        scope: What was judged at once.
        turn: The index of the turn; None for a rollout.
        values: By criterion, the answer as a number in [0, 1]; in a task group, the rollout's rank.
        scores: By criterion, the reward: the value times the weight.
        reason: The judge's reason.
        answers: The judge's answers, as they were written; several if a task group was shown in several orders.
        order: In a task group, the place at which the rollout was shown each time, from 1; otherwise empty.
        calls: Number of calls that this judgment took; a task group's are divided among its rollouts.
        tokens: Number of tokens of these calls; None if unknown.
        seconds: Duration of these calls.
        cached: Number of answers that came from the cache.
        repeats: The share of its questions that were asked twice, since the first answer could not be read.
        error: The reason why the judge failed; the values are then its ``on_judge_failure``. None if it answered.
    """

    judge: str
    scope: Scope
    turn: int | None = None
    values: dict[str, float]
    scores: dict[str, float]
    reason: str = ""
    answers: list[str] = field(default_factory=list[str])
    order: list[int] = field(default_factory=list[int])
    calls: float = 0
    tokens: float | None = None
    seconds: float = 0.0
    cached: float = 0
    repeats: float = 0
    error: str | None = None


def with_judgments(trajectory: Trajectory, judgments: Sequence[Judgment]) -> Trajectory:
    """Return a rollout with judgments: their scores as rewards, and their words and cost in ``info``.

    The cost is in the numbers, and so metrics, ``judge_calls``, ``judge_cached``, ``judge_failures``, ``judge_seconds``
    and, if known, ``judge_tokens``; ``judge_repeats`` is the share of questions that were asked twice.

    The rollout must not have failed; its ``per_token_rewards`` stay as they are.

    Raises:
        ConfigError: See :func:`with_scores`.
    """
    if not judgments:
        return trajectory
    numbers: dict[str, float] = {
        "judge_calls": float(sum(one.calls for one in judgments)),
        "judge_cached": float(sum(one.cached for one in judgments)),
        "judge_seconds": sum(one.seconds for one in judgments),
    }
    tokens = [one.tokens for one in judgments if one.tokens is not None]
    if tokens:
        numbers["judge_tokens"] = float(sum(tokens))
    numbers["judge_failures"] = float(sum(one.error is not None for one in judgments))
    earlier: list[Any] = [*trajectory.info.get(INFO_KEY, ())]
    numbers = {key: number + trajectory.info.get(key, 0.0) * bool(earlier) for key, number in numbers.items()}
    words = [*earlier, *map(asdict, judgments)]
    numbers["judge_repeats"] = sum(one.get("repeats", 0.0) for one in words) / len(words)
    scored = with_scores(trajectory, [(one.turn, one.scores) for one in judgments])
    return replace(scored, info={**trajectory.info, INFO_KEY: words, **numbers})


def recorded_scores(info: Mapping[str, Any]) -> list[tuple[int | None, dict[str, float]]]:
    """Return the turn and the scores of each judgment in the ``info`` of a recorded rollout."""
    given: Any = info.get(INFO_KEY) or ()
    found: list[tuple[int | None, dict[str, float]]] = []
    for one in cast("Sequence[Any]", given) if isinstance(given, Sequence) else ():
        judgment = cast("Mapping[str, Any]", one) if isinstance(one, Mapping) else dict[str, Any]()
        scores: Any = judgment.get("scores")
        if isinstance(scores, Mapping):
            found.append((judgment.get("turn"), {**cast("Mapping[str, float]", scores)}))
    return found


def with_scores(trajectory: Trajectory, scores: Sequence[tuple[int | None, Mapping[str, float]]]) -> Trajectory:
    """Add scores to the rewards of a rollout; ``per_token_rewards`` and ``info`` stay as they are.

    Args:
        trajectory: The rollout.
        scores: The index of a turn (None for the rollout as a whole) and its scores by name.

    Raises:
        ConfigError: A score has the name of a reward of the environment, or the rewards are given by role and the score
            is not that of a turn, so that it is unknown whose it is.

    >>> from agentsgym.types import StopReason
    >>> turns = [Turn(start=0, stop=0, reward=0.0), Turn(start=0, stop=0, reward=1.0)]
    >>> played = Trajectory(token_ids=[], turns=turns, messages=[], final_reward=1.0, stop_reason=StopReason.DONE)
    >>> judged = with_scores(played, [(None, {"polite": 0.5})])
    >>> judged.turns[1].components, judged.final_components, judged.final_reward
    ({'reward': 1.0, 'polite': 0.5}, {'reward': 1.0, 'polite': 0.5}, 1.5)
    """
    _check_names(trajectory, scores)
    if trajectory.final_rewards and any(turn is None for turn, _ in scores):
        raise ConfigError(
            "rewards are given by role, so a judge of scope 'episode' or 'group' cannot tell whose its score is: use "
            "scope='turn'"
        )
    turns = [*trajectory.turns]
    for turn, own in scores:
        if turns:
            index = len(turns) - 1 if turn is None else turn
            turns[index] = _with_score(turns[index], own)
    if trajectory.final_rewards:
        turns, final_rewards = attribute_rewards(turns)
        first = turns[0].role
        final = {"final_reward": final_rewards[first], "final_components": role_components(turns).get(first)}
        return replace(trajectory, turns=turns, final_rewards=final_rewards, **final)
    total, components = trajectory.final_reward, by_name(trajectory.final_reward, trajectory.final_components)
    for _, own in scores:
        total += sum(own.values())
        components = _added(components, own)
    return replace(trajectory, turns=turns, final_reward=total, final_components={**components})


def _with_score(turn: Turn, scores: Mapping[str, float]) -> Turn:
    total, components = sum(scores.values()), _added(by_name(turn.reward, turn.components), scores)
    if turn.role_rewards is None:
        return replace(turn, reward=turn.reward + total, components=components)
    given = turn.role_rewards.get(turn.role, 0.0)
    named = {**(turn.role_components or {})}
    named[turn.role] = _added(by_name(given, named.get(turn.role)), scores)
    return replace(turn, role_rewards={**turn.role_rewards, turn.role: given + total}, role_components=named)


def _added(amounts: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    return {**amounts, **{name: amounts.get(name, 0.0) + amount for name, amount in more.items()}}


def _check_names(trajectory: Trajectory, scores: Sequence[tuple[int | None, Mapping[str, float]]]) -> None:
    known = {name for turn in trajectory.turns for name in turn.components or ()} | {
        *(trajectory.final_components or ())
    }
    judged = {name for _, own in recorded_scores(trajectory.info) for name in own}
    for _, own in scores:
        if taken := [name for name in own if name in known - judged]:
            raise ConfigError(
                f"the judge's criterion {taken[0]!r} has the same name as a reward of the environment: rename the "
                "criterion"
            )
