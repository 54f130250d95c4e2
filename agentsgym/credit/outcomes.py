"""Estimate advantages from only a rollout's final reward, or only each turn's own reward.

The rules that all estimators share, and ``scale``, are described in :mod:`agentsgym.credit.advantages`. R is never
discounted: ``discount`` is not used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from agentsgym.credit._comparison import Sample, Scale, center, center_on, final_rewards, mean_of_all, mean_of_others
from agentsgym.credit.ema import EMABaselines
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.traits import estimator_traits
from agentsgym.fields import check_number


@estimator_traits(uses=["per_token_rewards"])
def reward(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,  # noqa: ARG001  # all estimators have these arguments
    scale: Scale = "group",  # noqa: ARG001  # as above
) -> list[list[float]]:
    """Each turn's own reward, ``A_k = r_k``: no baseline, no lookahead, no scaling.

    Biased: a turn gets no credit for later rewards that it made possible. In training it works per token:
    :func:`~agentsgym.credit.advantages.token_advantages` replaces these values with the trajectory's per-token rewards,
    which the environment's ``_calculate_rewards`` assigns.

    >>> reward([ScoredRollout(turn_rewards=[0.5, 1.0], final_reward=1.5, group=0, state_keys=[None] * 2)])
    [[0.5, 1.0]]
    """
    return [list(one.turn_rewards) if one.included else [0.0] * len(one.turn_rewards) for one in rollouts]


@estimator_traits(uses=["final_reward"], compares_in_task_groups=True)
def grpo(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,  # noqa: ARG001  # all estimators have these arguments
    scale: Scale = "group",
) -> list[list[float]]:
    """The final reward against its task group's mean, ``A_k = (R - mean_g R) / (std_g R + 1e-4)`` (GRPO, 2402.03300).

    All turns get the same number. With ``scale="none"`` it is the form of Dr. GRPO (2503.20783), in expectation
    ``(n - 1) / n`` times the gradient for a group of n. Dividing by the group's standard deviation changes the
    gradient's direction. In multi-agent environments, n is the number of rollouts in which a role acts: a role that
    does not act in all of them gets a smaller gradient than the others, which also changes the direction
    (:func:`rloo` is unbiased). A group of one gets 0.

    Raises:
        ConfigError: ``scale`` is unknown.

    >>> pair = [ScoredRollout(turn_rewards=[r], final_reward=r, group=0, state_keys=[None]) for r in (1.0, 3.0)]
    >>> grpo(pair, scale="none")
    [[-1.0], [1.0]]
    """
    return center(rollouts, final_rewards(rollouts), mean_of_all, scale)


@estimator_traits(uses=["final_reward"], compares_in_task_groups=True)
def rloo(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,  # noqa: ARG001  # all estimators have these arguments
    scale: Scale = "group",
) -> list[list[float]]:
    """The final reward against the mean of the others, ``A_k,i = R_i - mean_{j≠i} R_j`` (RLOO, 2402.14740).

    All turns get the same number. With ``scale="none"``, as in the paper, the estimate of the gradient is unbiased, and
    a group of one has the baseline 0. With ``scale="group"`` a group of one gets 0, since it has no spread.

    Raises:
        ConfigError: ``scale`` is unknown.

    >>> pair = [ScoredRollout(turn_rewards=[r], final_reward=r, group=0, state_keys=[None]) for r in (1.0, 3.0)]
    >>> rloo(pair, scale="none")
    [[-2.0], [2.0]]
    """
    return center(rollouts, final_rewards(rollouts), mean_of_others, scale)


@estimator_traits(uses=["final_reward", "roles"])
def rae(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,  # noqa: ARG001  # all estimators have these arguments
    scale: Scale = "group",
    decay: float = 0.95,
    state: EMABaselines | None = None,
) -> list[list[float]]:
    """The final reward against the average of the role in earlier batches, ``A_k = R - b[environment, role_k]``.

    Role-conditioned advantage estimation (SPIRAL, 2506.24119), ``b ← decay·b + (1 - decay)·R`` from b = 0. It needs no
    task group, so one rollout per task is enough, and its baseline tracks a changing opponent. All rollouts of a batch
    use b as it was before the batch; then b is updated once for each (rollout, role) pair, in rollout order. With
    ``scale="none"``, as in the paper, the estimate of the gradient is unbiased, since b does not depend on the batch.
    For ``scale="group"``, all rollouts of the same environment and role form a group, with the deviation about b.

    Args:
        rollouts: The batch.
        discount: Not used: R is never discounted.
        scale: The divisor of the difference.
        decay: The weight of the old b in each update, in [0, 1].
        state: The values of b by (environment, role); without it, every call starts from 0.

    Raises:
        ConfigError: ``decay`` or ``scale`` is invalid, or an environment or role cannot be stored in a checkpoint.

    >>> state = EMABaselines()
    >>> won = [ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None], roles=["white"])]
    >>> rae(won, scale="none", decay=0.5, state=state), rae(won, scale="none", decay=0.5, state=state)
    ([[1.0]], [[0.5]])
    """
    check_number("decay", decay, 0.0, 1.0)
    baselines = EMABaselines() if state is None else state
    samples: list[Sample] = []
    for i, one in enumerate(rollouts):
        turns: defaultdict[Hashable, list[int]] = defaultdict(list)
        for k in range(len(one.turn_rewards) if one.included else 0):
            turns[one.role(k)].append(k)
        samples += [
            Sample(value=one.final_reward, rollout_index=i, turns=own, group=(one.environment, role))
            for role, own in turns.items()
        ]
    advantages = center_on(rollouts, samples, baselines.get, scale)
    for sample in samples:
        baselines.update(sample.group, sample.value, decay=decay)
    return advantages
