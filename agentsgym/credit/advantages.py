"""Estimate advantages: from the rewards of task groups to one number a turn, and onto the turn's tokens.

An estimator is a plain function of the rollouts of a whole batch. It returns one number for each turn of each rollout
(``bilevel_gae`` one for each token), which multiplies the policy gradient of that turn's tokens
(:func:`token_advantages`). They are defined in ``outcomes`` (``reward``, ``grpo``, ``rloo``, ``rae``), ``returns``
(``return_to_go``, ``rebn``, ``mt_grpo``, ``gigpo``) and ``gae``; :func:`get_estimator` finds them by name. All share
five rules:

* ``R`` of a rollout is its final reward; ``G_k`` is the return of turn k, its reward and those that follow.
* A rollout that failed or was dropped is in no baseline and no spread, and gets 0.0 for every turn.
* Where all rollouts or turns that are compared with each other are equal, the advantage is exactly 0.0, without a
  rounding error. (This does not hold for a baseline from outside the batch, a moving average or a value.)
* With several seats every role of a rollout counts as a rollout of its own (:mod:`agentsgym.credit.seats`): ``R`` and
  ``G_k`` are the role's own, and it is compared with the same role.
* Rollouts may come in any order; what an estimator keeps from one batch to the next is read before it is updated.

``scale`` is what a value minus its baseline is divided by, within the groups that the estimator compares:
``"none"`` nothing; ``"group"`` ``s + 1e-4``, s the standard deviation (n - 1 in the denominator, as in TRL) of the
values compared; ``"batch"`` ``s + 1e-4``, s that of all such differences in the batch, about 0, where their mean
lies. Only ``"none"`` leaves an unbiased estimator unbiased; ``"batch"`` nearly keeps its direction in a batch of many
task groups (with a single one it is ``"group"``); ``"group"`` may learn faster, but points the wrong way in expectation
where groups are small and wins are rare.
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
    "zero_variance_fraction",
    "zero_variance_groups",
]


def token_advantages(
    trajectory: Trajectory, turn_advantages: Sequence[TurnAdvantage], *, estimator: Estimator
) -> list[float]:
    """Put an estimator's entries for the turns of a rollout on the rollout's tokens.

    Args:
        trajectory: The rollout.
        turn_advantages: The entries of ``estimator`` for it, (K,).
        estimator: The estimator; where it declares that it uses ``"per_token_rewards"``, as :func:`reward` does, the
            trajectory's per-token rewards are taken instead.

    Returns:
        (T,): 0.0 on environment tokens; the per-token rewards of a failed rollout are 0.0 on all tokens.

    Raises:
        ValueError: The number of entries is not that of the turns, or a list has a number of entries other than the
            turn's tokens.
    """
    traits = estimator.traits if isinstance(estimator, BoundEstimator) else traits_of(estimator)
    if not reads_token_rewards(traits):
        return scatter_to_tokens(trajectory, turn_advantages, name="advantage")
    if trajectory.failed or not trajectory.per_token_rewards:
        return [0.0] * len(trajectory.token_ids)
    return list(trajectory.per_token_rewards)


def zero_variance_groups(rollouts: Sequence[ScoredRollout]) -> set[int]:
    """The numbers of the groups whose final rewards are all equal, so that their advantages under :func:`grpo` are 0.

    A group of one is included; rollouts that failed or were dropped, and groups without others, are left out.

    Args:
        rollouts: The batch, each of one role, as :func:`~agentsgym.credit.seats.split_seats` returns them.
    """
    return {group for group, rewards in _final_rewards_by_group(rollouts).items() if nearly_equal(rewards)}


def zero_variance_fraction(rollouts: Sequence[ScoredRollout]) -> float:
    """The fraction of groups that are :func:`zero_variance_groups`, in [0, 1]; 0.0 without any group."""
    rewards = _final_rewards_by_group(rollouts).values()
    return sum(map(nearly_equal, rewards)) / len(rewards) if rewards else 0.0


def step_group_sizes(rollouts: Sequence[ScoredRollout]) -> list[int]:
    """The number of turns in the same state, for each group of turns that :func:`gigpo` compares.

    Args:
        rollouts: The batch, each of one role.

    Returns:
        One size a group, at least 1 each, in the order in which the groups first appear; turns without a state key,
        and rollouts that failed or were dropped, are left out.
    """
    sizes: Counter[Hashable] = Counter()
    for one in rollouts:
        if one.included:
            for k in range(len(one.state_keys)):
                sizes[same_state(one, k)] += 1
    del sizes[None]
    return [*sizes.values()]


def _final_rewards_by_group(rollouts: Sequence[ScoredRollout]) -> dict[int, list[float]]:
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.included:
            groups[rollout.group].append(rollout.final_reward)
    return groups
