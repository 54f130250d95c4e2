"""Majority votes: how often the answer that most of k rollouts give is right."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from agentsgym.types import Trajectory


def maj_at_k(trajectories: Sequence[Trajectory], k: int) -> float:
    """Estimate the chance that the most frequent answer of k rollouts of a task is right, averaged over tasks.

    The vote of a rollout is its ``info["answer"]``, as the environment normalizes it; one that has none, or None, does
    not vote. Of several answers that are equally frequent each is taken with equal chance; without a vote the task is
    not solved. An answer's chance to be right is the fraction of its rollouts that were won. With n rollouts of a task
    this is the exact mean over all choices of k of them, without drawing any (self-consistency, 2203.11171, with the
    averaging of pass@k, 2107.03374). Failed rollouts are left out.

    Raises:
        ValueError: k is below 1, some task has fewer than k rollouts that did not fail, or no rollout has an answer.
    """
    played: defaultdict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        played[trajectory.task_index] += [] if trajectory.failed else [trajectory]
    fewest = min(map(len, played.values()), default=0)
    if not 1 <= k <= fewest:
        raise ValueError(f"maj@k needs 1 <= k <= the fewest rollouts of a task, got k = {k} and {fewest} rollouts")
    if not any(_vote(one) is not None for rollouts in played.values() for one in rollouts):
        raise ValueError("maj@k counts info['answer'], and no rollout has one")
    return sum(_of_task(rollouts, k) for rollouts in played.values()) / len(played)


def _of_task(rollouts: Sequence[Trajectory], k: int) -> float:
    counts = Counter(_vote(one) for one in rollouts)
    won = Counter(_vote(one) for one in rollouts if one.success)
    silent = counts.pop(None, 0)
    chances = winning_chances(list(counts.values()), k, silent=silent)
    return sum(chance * won[vote] / counts[vote] for vote, chance in zip(counts, chances, strict=True))


def winning_chances(counts: Sequence[int], k: int, *, silent: int = 0) -> list[float]:
    """Give the chance of each answer to be the most frequent of k rollouts drawn without replacement.

    For answer i with m of its c_i rollouts drawn, the others at most m each, and t of them exactly m, it is
    ``Σ_m C(c_i, m) Σ_t N_i(m, t) / (t + 1) / C(n, k)``, where N_i counts the ways to draw the other k − m.

    Args:
        counts: How many rollouts gave each answer.
        k: How many are drawn, at most all.
        silent: How many rollouts gave none.

    >>> winning_chances([2, 1], 3), winning_chances([1, 1], 1, silent=2)
    ([1.0, 0.0], [0.25, 0.25])
    """
    total = math.comb(sum(counts) + silent, k)
    chance_of = {own: _chance(own, counts, k, silent) / total for own in set(counts)}  # equal counts, equal chances
    return [chance_of[own] for own in counts]


def _chance(own: int, counts: Sequence[int], k: int, silent: int) -> float:
    others = [*counts]
    others.remove(own)
    return sum(math.comb(own, m) * _ways(others, k - m, m, silent) for m in range(1, min(own, k) + 1))


def _ways(others: Sequence[int], num_drawn: int, most: int, silent: int) -> float:
    """Count the draws of ``num_drawn`` in which no other answer has more than ``most``, each over 1 + its ties."""
    ways: Counter[tuple[int, int]] = Counter({(0, 0): 1})  # by what is drawn so far and how many ties there are
    for count in others:
        longer: Counter[tuple[int, int]] = Counter()
        for (drawn, ties), number in ways.items():
            for m in range(min(count, most, num_drawn - drawn) + 1):
                longer[drawn + m, ties + (m == most)] += number * math.comb(count, m)
        ways = longer
    return sum(number * math.comb(silent, num_drawn - drawn) / (ties + 1) for (drawn, ties), number in ways.items())


def _vote(trajectory: Trajectory) -> Hashable:
    answer = trajectory.info.get("answer")
    return answer if isinstance(answer, Hashable) else repr(answer)
