"""Reward progress without changing which policy is best (potential-based shaping)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentsgym.credit.roles import environment_suffix
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import ConfigError
from agentsgym.fields import check_number


def shaped(rollouts: Sequence[ScoredRollout], *, discount: float, weight: float) -> list[ScoredRollout]:
    """Reward each turn for the change in potential, ``r'_k = r_k + w·(γ·Φ_{k+1} - Φ_k)`` (Ng, Harada & Russell 1999).

    Φ_k is the environment's potential of the state before turn k, and 0 after the last turn, however the rollout ended.
    The returns then become ``G_k - w·Φ_k``: a baseline that depends only on the state, so the ranking of policies does
    not change. With an unbiased estimator and the same discount, the expected gradient does not change either, only its
    variance. ``final_reward`` is unchanged: without discount, the sum over a rollout changes only by ``-w·Φ_0``, which
    is the same for the entire task group. The next turn may belong to a later episode of the same trial.

    Φ is the value of the state to the role that acts, and the next turn is the next turn of that role: rollouts of
    several roles are split first (:func:`~agentsgym.credit.roles.split_roles`).

    Args:
        rollouts: The batch, each of one role; rollouts that are not included are returned unchanged.
        discount: γ, the discount of the estimator.
        weight: w.

    Returns:
        The rollouts with shaped turn rewards.

    Raises:
        ConfigError: The environment has no potential for a turn, or ``weight`` is not a finite number.

    >>> rollout = ScoredRollout(
    ...     turn_rewards=[0.0, 1.0], final_reward=1.0, group=0, state_keys=[None] * 2, potentials=[-1.0, -0.25]
    ... )
    >>> shaped([rollout], discount=1.0, weight=1.0)[0].turn_rewards
    [0.75, 1.25]
    """
    check_number("potential_weight", weight)
    seen: list[ScoredRollout] = []
    for rollout in rollouts:
        if not rollout.included:
            seen.append(rollout)
            continue
        potentials = [*rollout.potentials] or [None] * len(rollout.turn_rewards)
        known = [potential for potential in potentials if potential is not None]
        if len(known) < len(potentials):
            raise ConfigError(
                "potential-based shaping requires the potential of every turn: `_potential` must return a number, "
                f"got None in {len(potentials) - len(known)} of {len(potentials)} turns"
                f"{environment_suffix(rollout.environment)}"
            )
        rewards = [
            reward + weight * (discount * after - before)
            for reward, before, after in zip(rollout.turn_rewards, known, [*known, 0.0][1:], strict=True)
        ]
        seen.append(replace(rollout, turn_rewards=rewards))
    return seen
