"""Estimate one advantage per turn from the rewards of task groups, and assign it to the turn's tokens.

An estimator is a plain function of the rollouts of an entire batch. It returns one number per turn of each rollout
(``bilevel_gae``: one per token), which multiplies the policy gradient of that turn's tokens (:func:`token_advantages`).
The estimators are defined in ``outcomes`` (``reward``, ``grpo``, ``rloo``, ``rae``), ``returns`` (``return_to_go``,
``rebn``, ``mt_grpo``, ``gigpo``) and ``gae``; :func:`get_estimator` finds them by name. All share five rules:

* ``R`` of a rollout is its final reward; ``G_k`` is the return of turn k: the sum of its reward and the later rewards.
* A rollout that failed or was dropped is excluded from all baselines and standard deviations, and gets 0.0 for every
  turn.
* If all values in a comparison are equal, the advantage is exactly 0.0, not just up to rounding. (This does not hold
  for a baseline from outside the batch: a moving average or a value.)
* In multi-agent environments, each role of a rollout is treated as a separate rollout (:mod:`agentsgym.credit.roles`):
  ``R`` and ``G_k`` are those of the role, and the role is compared with the same role.
* Rollouts may come in any order; state that an estimator keeps between batches is read before it is updated.

``scale`` names the divisor of a value minus its baseline. ``"none"``: no division. ``"group"``: ``s + 1e-4``, where s
is the standard deviation (n - 1 in the denominator, as in TRL) of the values in the group that the estimator compares.
``"batch"``: ``s + 1e-4``, where s is the standard deviation about 0 of all these differences in the batch (their mean
is about 0). Only ``"none"`` keeps an unbiased estimator unbiased. ``"batch"`` nearly preserves its direction in a batch
of many task groups (and equals ``"group"`` for a single one). ``"group"`` may learn faster, but its expected direction
is wrong if groups are small and wins are rare.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from agentsgym.credit._comparison import Scale, nearly_equal
from agentsgym.credit.bound import BoundEstimator, Estimator, TurnAdvantage
from agentsgym.credit.gae import bilevel_gae, turn_gae
from agentsgym.credit.outcomes import grpo, rae, reward, rloo
from agentsgym.credit.registry import ESTIMATORS, get_estimator
from agentsgym.credit.returns import gigpo, mt_grpo, rebn, return_to_go, same_state
from agentsgym.credit.rewards import scatter_to_tokens
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.traits import reads_token_rewards, traits_of
from agentsgym.types import Trajectory

__all__ = [
    "ESTIMATORS",
    "BoundEstimator",
    "Estimator",
    "Scale",
    "ScoredRollout",
    "bilevel_gae",
    "get_estimator",
    "gigpo",
    "grpo",
    "mt_grpo",
    "rae",
    "rebn",
    "return_to_go",
    "reward",
    "rloo",
    "step_group_sizes",
    "token_advantages",
    "turn_gae",
    "zero_variance_groups",
]


def token_advantages(
    trajectory: Trajectory, turn_advantages: Sequence[TurnAdvantage], *, estimator: Estimator
) -> list[float]:
    """Assign an estimator's entries for the turns of a rollout to the rollout's tokens.

    Args:
        trajectory: The rollout.
        turn_advantages: The estimator's entries for the rollout, (K,).
        estimator: The estimator; if it declares that it uses ``"per_token_rewards"``, as :func:`reward` does, the
            trajectory's per-token rewards are returned instead.

    Returns:
        (T,): 0.0 on environment tokens; per-token rewards are all 0.0 for a failed rollout.

    Raises:
        ValueError: The number of entries differs from the number of turns, or the length of a list differs from the
            number of tokens of its turn.
    """
    traits = estimator.traits if isinstance(estimator, BoundEstimator) else traits_of(estimator)
    if not reads_token_rewards(traits):
        return scatter_to_tokens(trajectory, turn_advantages, name="advantage")
    if trajectory.failed or not trajectory.per_token_rewards:
        return [0.0] * len(trajectory.token_ids)
    return list(trajectory.per_token_rewards)


def zero_variance_groups(rollouts: Sequence[ScoredRollout]) -> set[int]:
    """The numbers of the groups whose final rewards are all equal, so that their advantages with :func:`grpo` are 0.

    Rollouts that failed or were dropped are ignored, and so are groups that have no other rollouts; a group with a
    single remaining rollout counts as equal.

    Args:
        rollouts: The batch, each of one role, as :func:`~agentsgym.credit.roles.split_roles` returns them.
    """
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.included:
            rewards[rollout.group].append(rollout.final_reward)
    return {group for group, own in rewards.items() if nearly_equal(own)}


def step_group_sizes(rollouts: Sequence[ScoredRollout]) -> list[int]:
    """The number of turns in the same state, for each group of turns that :func:`gigpo` compares.

    Args:
        rollouts: The batch, each of one role.

    Returns:
        One size per group, each at least 1, in the order in which the groups first appear. Turns without a state key
        and rollouts that failed or were dropped are ignored.
    """
    sizes: Counter[Hashable] = Counter()
    for one in rollouts:
        if one.included:
            for k in range(len(one.state_keys)):
                sizes[same_state(one, k)] += 1
    del sizes[None]
    return [*sizes.values()]
