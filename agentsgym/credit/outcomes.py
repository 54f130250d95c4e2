"""Estimators that see a rollout's outcome, or each turn's own pay, and nothing between: one number for all of it.

What they share with the others, and what ``scale`` does, is said in :mod:`agentsgym.credit.advantages`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from agentsgym.credit._comparison import (
    Sample,
    Scale,
    check_number,
    compare,
    compare_with,
    final_rewards,
    laid_out,
    mean_of_all,
    mean_of_others,
)
from agentsgym.credit.memory import MovingBaselines
from agentsgym.credit.scored import ScoredRollout


def reward(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,  # noqa: ARG001  # every estimator is called alike
    scale: Scale = "group",  # noqa: ARG001  # likewise
) -> list[list[float]]:
    """Each turn's own reward, ``A_k = r_k``: no baseline, no look ahead, no scale.

    Biased: a turn hears nothing of what it made possible later. The one estimator that works token by token:
    :func:`~agentsgym.credit.advantages.token_advantages` takes the trajectory's per-token rewards, in which
    ``_calculate_rewards`` of the environment has the last word, in place of these numbers.

    Args:
        rollouts: The batch.
        discount: Not used.
        scale: Not used.

    Returns:
        One number for each turn of each rollout.

    >>> reward([ScoredRollout(turn_rewards=[0.5, 1.0], final_reward=1.5, group=0, state_keys=[None] * 2)])
    [[0.5, 1.0]]
    """
    return [list(one.turn_rewards) if one.counts else [0.0] * len(one.turn_rewards) for one in rollouts]


def grpo(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,  # noqa: ARG001  # every estimator is called alike
    scale: Scale = "group",
) -> list[list[float]]:
    """The final reward against its task group's mean, ``A_k = (R - mean_g R) / (std_g R + 1e-4)`` (GRPO, 2402.03300).

    The same number for every turn. With ``scale="none"`` it is the form of Dr. GRPO (2503.20783), in expectation
    ``(n - 1) / n`` times the gradient of a group of n; the division by the group's spread bends the direction. A
    group of one gets 0.

    Args:
        rollouts: The batch.
        discount: Not used: R is never discounted.
        scale: What the difference is divided by.

    Returns:
        One number for each turn of each rollout.

    Raises:
        ConfigError: ``scale`` is unknown.

    >>> pair = [ScoredRollout(turn_rewards=[r], final_reward=r, group=0, state_keys=[None]) for r in (1.0, 3.0)]
    >>> grpo(pair, scale="none")
    [[-1.0], [1.0]]
    """
    samples = final_rewards(rollouts)
    return laid_out(rollouts, samples, compare(samples, mean_of_all, scale))


def rloo(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,  # noqa: ARG001  # every estimator is called alike
    scale: Scale = "group",
) -> list[list[float]]:
    """The final reward against the mean of the others, ``A_k,i = R_i - mean_{j≠i} R_j`` (RLOO, 2402.14740).

    The same number for every turn. With ``scale="none"``, as in the paper, an unbiased estimate of the gradient; a
    group of one then has the baseline 0. With ``scale="group"`` a group of one gets 0, since it has no spread.

    Args:
        rollouts: The batch.
        discount: Not used: R is never discounted.
        scale: What the difference is divided by.

    Returns:
        One number for each turn of each rollout.

    Raises:
        ConfigError: ``scale`` is unknown.

    >>> pair = [ScoredRollout(turn_rewards=[r], final_reward=r, group=0, state_keys=[None]) for r in (1.0, 3.0)]
    >>> rloo(pair, scale="none")
    [[-2.0], [2.0]]
    """
    samples = final_rewards(rollouts)
    return laid_out(rollouts, samples, compare(samples, mean_of_others, scale))


def rae(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,  # noqa: ARG001  # every estimator is called alike
    scale: Scale = "group",
    decay: float = 0.95,
    memory: MovingBaselines | None = None,
) -> list[list[float]]:
    """The final reward against what the role has earned in earlier batches, ``A_k = R - b[game, role_k]``.

    Role-conditioned advantage estimation (SPIRAL, 2506.24119), ``b ← decay·b + (1 - decay)·R`` from b = 0. It needs no
    task group, so one rollout a task is enough, and follows an opponent that changes. A whole batch is held against
    the b of the batches before it; then each pair of a rollout and a role in it updates b once, in the order of the
    rollouts. With ``scale="none"``, as in the paper, an unbiased estimate of the gradient, since b knows nothing of
    the batch. For ``scale="group"`` all rollouts of the same game and role are a group, with the spread about b.

    Args:
        rollouts: The batch.
        discount: Not used: R is never discounted.
        scale: What the difference is divided by.
        decay: What remains of b at each update, in [0, 1].
        memory: Holds b by (game, role); without it every call begins at 0.

    Returns:
        One number for each turn of each rollout.

    Raises:
        ConfigError: ``decay`` or ``scale`` is not valid, or a game or role is none that a checkpoint can hold.

    >>> memory = MovingBaselines()
    >>> won = [ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None], roles=["white"])]
    >>> rae(won, scale="none", decay=0.5, memory=memory), rae(won, scale="none", decay=0.5, memory=memory)
    ([[1.0]], [[0.5]])
    """
    check_number("decay", decay, 0.0, 1.0)
    baselines = MovingBaselines() if memory is None else memory
    samples = _final_rewards_by_role(rollouts)
    numbers = compare_with(samples, baselines.get, scale)
    for sample in samples:
        baselines.update(sample.group, sample.value, decay=decay)
    return laid_out(rollouts, samples, numbers)


def _final_rewards_by_role(rollouts: Sequence[ScoredRollout]) -> list[Sample]:
    samples: list[Sample] = []
    for i, one in enumerate(rollouts):
        turns: defaultdict[Hashable, list[int]] = defaultdict(list)
        for k in range(len(one.turn_rewards) if one.counts else 0):
            turns[one.role(k)].append(k)
        samples += [
            Sample(value=one.final_reward, rollout=i, turns=own, group=(one.game, role)) for role, own in turns.items()
        ]
    return samples
