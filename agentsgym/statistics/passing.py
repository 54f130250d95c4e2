"""Estimate how often any of k attempts succeeds (pass@k) or all of them do (pass^k), with intervals over tasks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from agentsgym.seeding import derive_seed
from agentsgym.statistics.intervals import NUM_RESAMPLES, Estimate, exact_binomial_interval, share_estimate
from agentsgym.types import Trajectory


def maj_at_k(trajectories: Sequence[Trajectory], k: int) -> float:
    """Estimate the probability that the most frequent answer of k rollouts of a task is right, averaged over tasks.

    The vote of a rollout is its ``info["answer"]``, as normalized by the environment; a rollout without an answer, or
    with None, does not vote. Ties are broken uniformly at random; without any votes the task is not solved. The
    probability that an answer is right is the fraction of its rollouts that were won. With n rollouts of a task, the
    result is the exact mean over all choices of k of them (self-consistency, 2203.11171, with the averaging of pass@k,
    2107.03374). Failed rollouts are excluded.

    Raises:
        ValueError: k is below 1, some task has fewer than k rollouts that did not fail, or no rollout has an answer.
    """
    played: defaultdict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        played[trajectory.task_index] += [] if trajectory.failed else [trajectory]
    _counts_for("maj@k", trajectories, k)
    if not any(_vote(one) is not None for rollouts in played.values() for one in rollouts):
        raise ValueError("maj@k requires info['answer'], which no rollout has")
    scores: list[float] = []
    for rollouts in played.values():
        counts = Counter(_vote(one) for one in rollouts)
        won = Counter(_vote(one) for one in rollouts if one.success)
        silent = counts.pop(None, 0)
        chances = winning_chances(list(counts.values()), k, silent=silent)
        scores.append(sum(chance * won[vote] / counts[vote] for vote, chance in zip(counts, chances, strict=True)))
    return sum(scores) / len(scores)


def winning_chances(counts: Sequence[int], k: int, *, silent: int = 0) -> list[float]:
    """Return each answer's probability of being the most frequent of k rollouts drawn without replacement.

    With c_i rollouts of answer i, this is ``Σ_m C(c_i, m) Σ_t N_i(m, t) / (t + 1) / C(n, k)``, where m of them are
    drawn, t other answers tie with it, and N_i(m, t) counts the ways to draw the other k − m rollouts so that t answers
    tie and none has more than m.

    >>> winning_chances([2, 1], 3), winning_chances([1, 1], 1, silent=2)
    ([1.0, 0.0], [0.25, 0.25])
    """
    total = math.comb(sum(counts) + silent, k)
    chance_of: dict[int, float] = {}  # equal counts have equal chances
    for own in set(counts):
        others = [*counts]
        others.remove(own)
        ways = sum(math.comb(own, m) * _ways(others, k - m, m, silent) for m in range(1, min(own, k) + 1))
        chance_of[own] = ways / total
    return [chance_of[own] for own in counts]


def _ways(others: Sequence[int], num_drawn: int, most: int, silent: int) -> float:
    """Count the draws in which no other answer has more than ``most`` rollouts, each as 1 / (1 + its ties)."""
    ways: Counter[tuple[int, int]] = Counter({(0, 0): 1})  # by the numbers of rollouts drawn and of ties so far
    for count in others:
        extended: Counter[tuple[int, int]] = Counter()
        for (drawn, ties), number in ways.items():
            for m in range(min(count, most, num_drawn - drawn) + 1):
                extended[drawn + m, ties + (m == most)] += number * math.comb(count, m)
        ways = extended
    return sum(number * math.comb(silent, num_drawn - drawn) / (ties + 1) for (drawn, ties), number in ways.items())


def _vote(trajectory: Trajectory) -> Hashable:
    answer = trajectory.info.get("answer")
    return answer if isinstance(answer, Hashable) else repr(answer)


@dataclass(frozen=True, slots=True)
class _Measure:
    """A criterion for k attempts.

    Attributes:
        name: Name in error messages.
        chance: Probability that k drawn rollouts meet it, given the numbers of played, won and drawn rollouts.
        chance_at_rate: Probability that k attempts meet it if each is won independently with a given probability.
    """

    name: str
    chance: Callable[[int, int, int], float]
    chance_at_rate: Callable[[float, int], float]


_ANY = _Measure(
    "pass@k",
    lambda played, won, k: 1 - math.comb(played - won, k) / math.comb(played, k),
    lambda rate, k: 1 - (1 - rate) ** k,
)
_ALL = _Measure("pass^k", lambda played, won, k: math.comb(won, k) / math.comb(played, k), lambda rate, k: rate**k)


def pass_at_k(trajectories: Sequence[Trajectory], k: int) -> float:
    """Estimate the probability that at least one of k rollouts of a task is won, averaged over tasks.

    ``1 − C(n − c, k) / C(n, k)`` for a task with n rollouts, c of them won: unbiased (2107.03374, eq. 1). Failed
    rollouts are left out.

    Raises:
        ValueError: k is below 1, or some task has fewer than k rollouts that did not fail.
    """
    return _mean(_ANY, trajectories, k)


def pass_hat_k(trajectories: Sequence[Trajectory], k: int) -> float:
    """Estimate the probability that all of k rollouts of a task are won, averaged over tasks: pass^k.

    ``C(c, k) / C(n, k)`` for a task with n rollouts, c of them won: unbiased (2406.12045, section 3). Where pass@k
    measures capability, this measures reliability. Failed rollouts are left out.

    Raises:
        ValueError: As :func:`pass_at_k`.
    """
    return _mean(_ALL, trajectories, k)


def pass_at_k_interval(
    trajectories: Sequence[Trajectory],
    k: int,
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Estimate pass@k as :func:`pass_at_k` does, with a confidence interval that accounts for the choice of tasks.

    The interval comes from a percentile bootstrap over tasks, as for win rate and reward. If the estimate is 0 or 1, it
    is the exact binomial interval over the tasks. If there is a single task, its rollouts are resampled, and the
    interval is valid only for that task.

    Args:
        trajectories: The rollouts; failed ones are excluded.
        k: The number of attempts.
        clusters: One key per trajectory, as in :func:`~agentsgym.statistics.metrics.summarize`; a task has the key of
            its first rollout. If None, each task is a cluster.
        confidence: Confidence level of the interval, in (0, 1).
        seed: Random seed of the bootstrap.

    Raises:
        ValueError: As :func:`pass_at_k`; or ``clusters`` has another length, or ``confidence`` is not in (0, 1).
    """
    return _interval(_ANY, trajectories, clusters, k, confidence, seed)


def pass_hat_k_interval(
    trajectories: Sequence[Trajectory],
    k: int,
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Estimate pass^k as :func:`pass_hat_k` does, with an interval as in :func:`pass_at_k_interval`."""
    return _interval(_ALL, trajectories, clusters, k, confidence, seed)


def max_k(trajectories: Sequence[Trajectory]) -> int:
    """The largest valid k: the smallest number of non-failed rollouts of any task; 0 if there are no tasks."""
    return min((played for played, _ in _counts(trajectories).values()), default=0)


def _mean(measure: _Measure, trajectories: Sequence[Trajectory], k: int) -> float:
    chances = [measure.chance(n, won, k) for n, won in _counts_for(measure.name, trajectories, k).values()]
    return sum(chances) / len(chances)


def _interval(
    measure: _Measure,
    trajectories: Sequence[Trajectory],
    clusters: Sequence[Hashable] | None,
    k: int,
    confidence: float,
    seed: int,
) -> Estimate:
    if clusters is not None and len(clusters) != len(trajectories):
        raise ValueError(f"clusters must have one entry per trajectory, got {len(clusters)} for {len(trajectories)}")
    key_of: dict[int, Hashable] = {}
    for trajectory, key in zip(trajectories, clusters or [one.task_index for one in trajectories], strict=True):
        key_of.setdefault(trajectory.task_index, key)
    counts = _counts_for(measure.name, trajectories, k)
    if len(counts) == 1:
        (only,) = counts.values()
        return _of_one_task(measure, only, k, confidence, seed)
    chances = [measure.chance(n, won, k) for n, won in counts.values()]
    keys = [key_of[task] for task in counts]
    return share_estimate(chances, keys if len(set(keys)) > 1 else list(counts), confidence=confidence, seed=seed)


def _counts_for(name: str, trajectories: Sequence[Trajectory], k: int) -> dict[int, tuple[int, int]]:
    most = max_k(trajectories)
    if not 1 <= k <= most:
        limit = f"the smallest number of non-failed rollouts of any task ({most})"
        raise ValueError(f"{name} requires k to be at least 1 and at most {limit}, got {k}")
    return _counts(trajectories)


def _counts(trajectories: Sequence[Trajectory]) -> dict[int, tuple[int, int]]:
    """The number of rollouts of each task that did not fail, and the number of those that were won."""
    counts: dict[int, tuple[int, int]] = {}
    for one in trajectories:
        played, won = counts.get(one.task_index, (0, 0))
        counts[one.task_index] = played + (not one.failed), won + (bool(one.success) and not one.failed)
    return counts


def _of_one_task(measure: _Measure, count: tuple[int, int], k: int, confidence: float, seed: int) -> Estimate:
    """Compute the interval from one task's rollouts; if all have the same outcome, from the exact win-rate interval."""
    played, won = count
    mean = measure.chance(played, won, k)
    if won in {0, played}:
        one = exact_binomial_interval(float(won > 0), played, confidence)
        return Estimate(mean=mean, low=measure.chance_at_rate(one.low, k), high=measure.chance_at_rate(one.high, k))
    generator = np.random.default_rng(derive_seed("bootstrap of one task", seed))
    drawn = generator.binomial(played, won / played, size=NUM_RESAMPLES)
    chance_of = np.array([measure.chance(played, count, k) for count in range(played + 1)])
    low, high = np.quantile(chance_of[drawn], [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(mean=mean, low=min(mean, float(low)), high=max(mean, float(high)))
