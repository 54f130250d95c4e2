"""Win rate, reward and turns with intervals, pass@k, and the fraction of optimal play."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from agentsgym.seeding import derive_seed
from agentsgym.types import StopReason, Trajectory

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_ENTRIES_PER_BLOCK = 1_000_000  # of drawn indices held at once: a few tens of MB however many tasks there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over rollouts and the interval in which the mean over such tasks lies.

    Attributes:
        mean: The mean over the rollouts played.
        low: Lower end of the interval.
        high: Upper end.
    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Estimates from a set of rollouts. One is None where no rollout says anything about it.

    Attributes:
        win_rate: Fraction of rollouts that were won, in [0, 1]; None if no environment says so. As soon as one does,
            a rollout of which it is not known counts as not won.
        reward: Final reward of a rollout; None if all failed.
        turns: Turns of a rollout; None if all failed.
        num_episodes: The rollouts that the estimates rest on, one episode or one trial each; failed ones are not among
            them.
        num_failed: Rollouts in which the environment or the agent broke.
        stop_reasons: How many rollouts ended for which reason, failed ones included.
        trajectories: All rollouts, as given.
        confidence: The probability with which the method's intervals hold the truth, in (0, 1).
        num_left_out: Rollouts that did not fail, and whose task groups were too small (``min_group_size``).
    """

    win_rate: Estimate | None
    reward: Estimate | None
    turns: Estimate | None
    num_episodes: int
    num_failed: int
    stop_reasons: Mapping[StopReason, int]
    trajectories: Sequence[Trajectory]
    confidence: float = 0.95
    num_left_out: int = 0

    @property
    def num_games(self) -> int:
        """The old name of ``num_episodes``."""
        warnings.warn("Evaluation.num_games is now Evaluation.num_episodes", DeprecationWarning, stacklevel=2)
        return self.num_episodes

    def as_dict(self) -> dict[str, Any]:
        """Give the numbers as plain JSON values; what was not computed is None."""
        numbers: dict[str, Any] = {}
        for name, estimate in (("win_rate", self.win_rate), ("mean_turns", self.turns), ("mean_reward", self.reward)):
            numbers[name] = None if estimate is None else estimate.mean
            numbers[f"{name}_interval"] = None if estimate is None else [estimate.low, estimate.high]
        return numbers | {
            "confidence": self.confidence,
            "num_episodes": self.num_episodes,
            "num_failed": self.num_failed,
            "num_left_out": self.num_left_out,
            "stop_reasons": {reason.value: count for reason, count in self.stop_reasons.items()},
        }


class RolloutOutcome(Protocol):
    """What an evaluation reads of a rollout: a :class:`~agentsgym.types.Trajectory` has it, and so may a summary."""

    @property
    def stop_reason(self) -> StopReason:
        """Why it ended."""
        ...

    @property
    def failed(self) -> bool:
        """Whether the environment or the agent broke."""
        ...

    @property
    def success(self) -> bool | None:
        """Whether it was won; None if the environment does not say."""
        ...

    @property
    def final_reward(self) -> float:
        """Its reward."""
        ...

    @property
    def num_turns(self) -> int:
        """Its turns."""
        ...


def summarize(
    trajectories: Sequence[Trajectory],
    *,
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
    confidence: float = 0.95,
) -> Evaluation:
    """Sum up rollouts in an :class:`Evaluation`.

    Intervals come from a bootstrap over tasks (:func:`bootstrap_intervals`), since repeats of one task are not
    independent evidence about the next. If all rollouts are of one task they come from a bootstrap over these, and
    speak of that task only. If every rollout was won or every one lost, resampling sees no spread at all, and the win
    rate's interval is the exact binomial one over the n tasks instead, ``(α/2)^(1/n)`` away from the far end
    (Clopper & Pearson 1934).

    Args:
        trajectories: The rollouts, failed ones included; they are counted and left out of every estimate.
        clusters: What belongs together, one key a trajectory; default is each one's ``task_index``. Rows of a task
            list count as tasks of their own, so give, say, the secrets if the list repeats them with other seeds and
            the question is how the agent would do on other secrets.
        seed: Of the bootstrap; equal input and seed give equal intervals.
        confidence: Of the intervals, in (0, 1).

    Raises:
        ValueError: There are no trajectories, or ``clusters`` has another length.
    """
    keys = [trajectory.task_index for trajectory in trajectories] if clusters is None else clusters
    return summarize_outcomes(trajectories, trajectories, clusters=keys, seed=seed, confidence=confidence)


def summarize_outcomes(
    outcomes: Sequence[RolloutOutcome],
    trajectories: Sequence[Trajectory],
    *,
    clusters: Sequence[Hashable],
    seed: int = 0,
    confidence: float = 0.95,
) -> Evaluation:
    """Do as :func:`summarize` where not all rollouts are at hand, but what came of them is.

    Args:
        outcomes: All rollouts, failed ones included.
        trajectories: Those of them that are at hand.
        clusters: One key an outcome, as in :func:`summarize`.
        seed: Likewise.
        confidence: Likewise.

    Raises:
        ValueError: There are no outcomes, or ``clusters`` has another length.
    """
    if not outcomes:
        raise ValueError("an evaluation needs at least one trajectory, got none")
    if len(clusters) != len(outcomes):
        raise ValueError(f"clusters needs one key a trajectory, got {len(clusters)} for {len(outcomes)}")
    played = [outcome for outcome in outcomes if not outcome.failed]
    keys = [key for key, outcome in zip(clusters, outcomes, strict=True) if not outcome.failed]
    win_rate, reward, turns = _estimates(played, keys, seed, confidence) if played else (None, None, None)
    return Evaluation(
        win_rate=win_rate,
        reward=reward,
        turns=turns,
        num_episodes=len(played),
        num_failed=len(outcomes) - len(played),
        stop_reasons=dict(sorted(Counter(outcome.stop_reason for outcome in outcomes).items())),
        trajectories=trajectories,
        confidence=confidence,
    )


def bootstrap_intervals(
    values: ArrayLike,
    clusters: Sequence[Hashable],
    *,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Bound the mean of each column by a percentile bootstrap over clusters.

    C clusters are drawn with replacement out of the C there are, and all rows of a drawn cluster come along:
    ``mean* = Σ_c sum_c / Σ_c count_c`` over the drawn c; the bounds are the ``(1 ± confidence) / 2`` quantiles of
    ``mean*`` (Efron & Tibshirani 1993, chapters 8 and 13). Columns share the draws.

    Args:
        values: (N, M), one row a rollout, one column a quantity.
        clusters: (N,), equal keys belong together.
        confidence: In (0, 1).
        num_resamples: How often to draw.
        seed: Of the draws.

    Returns:
        (2, M), the lower bounds and the upper ones.

    Raises:
        ValueError: ``confidence`` is not in (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    sums, counts = _cluster_totals(np.asarray(values, dtype=np.float64), clusters)  # (C, M), (C, 1)
    num_clusters = len(sums)
    generator = np.random.default_rng(derive_seed("bootstrap", seed))
    block = max(1, _ENTRIES_PER_BLOCK // num_clusters)
    means: list[NDArray[np.float64]] = []
    for start in range(0, num_resamples, block):
        size = (min(block, num_resamples - start), num_clusters)
        drawn = generator.integers(num_clusters, size=size)  # (R, C)
        means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))  # (R, M)
    return np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)


def pass_at_k(trajectories: Sequence[Trajectory], k: int) -> float:
    """Estimate the chance that at least one of k rollouts of a task is won, averaged over tasks.

    ``1 − C(n − c, k) / C(n, k)`` for a task with n rollouts, c of them won: unbiased (2107.03374, eq. 1). Failed
    rollouts are left out.

    Raises:
        ValueError: k is below 1, or some task has fewer than k rollouts that did not fail.
    """
    played: Counter[int] = Counter()
    won: Counter[int] = Counter()
    for trajectory in trajectories:
        played[trajectory.task_index] += not trajectory.failed
        won[trajectory.task_index] += bool(trajectory.success) and not trajectory.failed
    fewest = min(played.values(), default=0)
    if not 1 <= k <= fewest:
        raise ValueError(f"pass@k needs 1 <= k <= the fewest rollouts of a task, got k = {k} and {fewest} rollouts")
    return sum(1 - math.comb(n - won[task], k) / math.comb(n, k) for task, n in played.items()) / len(played)


def fraction_of_optimal(value: float, *, random: float, optimal: float) -> float:
    """Place a value between random play (0) and optimal play (1): ``(value − random) / (optimal − random)``.

    >>> fraction_of_optimal(0.75, random=0.5, optimal=1.0)
    0.5
    """
    return (value - random) / (optimal - random)


def _estimates(
    played: Sequence[RolloutOutcome], keys: Sequence[Hashable], seed: int, confidence: float
) -> tuple[Estimate | None, Estimate, Estimate]:
    clusters = keys if len(set(keys)) > 1 else range(len(played))
    values = np.array([[bool(one.success), one.final_reward, one.num_turns] for one in played], dtype=np.float64)
    low, high = bootstrap_intervals(values, clusters, confidence=confidence, seed=seed)
    # The mean itself bounds the interval: the quantiles of equal values can be off by a rounding error.
    # Adding 0.0 turns -0.0, which would be printed, into 0.0.
    win_rate, reward, turns = (
        Estimate(mean=float(m) + 0.0, low=float(min(a, m)) + 0.0, high=float(max(b, m)) + 0.0)
        for m, a, b in zip(values.mean(axis=0), low, high, strict=True)
    )
    if all(one.success is None for one in played):
        return None, reward, turns
    if win_rate.mean in {0.0, 1.0}:
        win_rate = _without_spread(win_rate.mean, len(set(clusters)), confidence)
    return win_rate, reward, turns


def _without_spread(mean: float, num_tasks: int, confidence: float) -> Estimate:
    reach = ((1 - confidence) / 2) ** (1 / num_tasks)
    return Estimate(mean=mean, low=reach if mean else 0.0, high=1.0 if mean else 1 - reach)


def _cluster_totals(
    values: NDArray[np.float64], clusters: Sequence[Hashable]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Add up the rows of each cluster: sums (C, M) and how many rows they are (C, 1)."""
    codes: dict[Hashable, int] = {}
    rows = np.array([codes.setdefault(key, len(codes)) for key in clusters])  # (N,)
    sums = np.zeros((len(codes), values.shape[1]))
    np.add.at(sums, rows, values)
    return sums, np.bincount(rows).astype(np.float64)[:, None]
