"""Estimate advantages over turns with the values of a value head as the baseline (GAE).

V of a turn is the value head's prediction just before the turn's first token, so no baseline depends on the action
whose return it is subtracted from. After the last turn V is 0, even if a budget ended the episode: the budget is part
of the task. A turn without tokens has no prediction: its V is its reward plus the discounted V of the next turn, so its
δ is 0 and the estimates use the next known value instead.

Rollouts are not compared with each other, so task groups of one are enough, and ``scale`` does not refer to task
groups: ``"group"`` divides by ``s + 1e-4``, where s is the standard deviation about 0 of all advantages of the same
environment and role, and ``"batch"`` uses all advantages. The deviation is taken about 0 because nearly equal
advantages, as before the value head is trained, have almost no deviation about their mean. No mean is subtracted: the
value is already the baseline, and the mean of a batch would include the return that each advantage is computed from.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Final, get_args

from agentsgym.credit._comparison import Scale, scale_divisor
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.traits import Declaration, EstimatorTraits, Use
from agentsgym.errors import ConfigError
from agentsgym.fields import check_choice, check_number

# Roles matter only to the scale, which divides by the standard deviation of each role.
_USES: Final[tuple[Use, ...]] = ("discount", "turn_rewards", "roles")


def gae(rewards: Sequence[float], values: Sequence[float], *, discount: float, gae_lambda: float) -> list[float]:
    """Estimate ``A_k = δ_k + γλ·A_{k+1}``, ``δ_k = r_k + γ·V_{k+1} - V_k``; V and A are 0 at the end (1506.02438).

    Args:
        rewards: The reward of each step, (N,).
        values: V before each step, (N,).
        discount: γ.
        gae_lambda: λ.

    Returns:
        One advantage per step, (N,).

    >>> gae([0.0, 1.0], [0.25, 0.5], discount=1.0, gae_lambda=0.5)
    [0.5, 0.5]
    """
    advantages: list[float] = []
    following_value = following = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + discount * following_value - value + discount * gae_lambda * following
        following_value = value
        advantages.append(following)
    return advantages[::-1]


def turn_value_targets(
    rollouts: Sequence[ScoredRollout], *, discount: float, gae_lambda: float = 0.95
) -> list[list[list[float]]]:
    """The λ-returns of turns, ``A + V`` with unscaled A, as targets at the first token of each turn.

    With λ = 1 they are the discounted returns.

    Args:
        rollouts: The batch, with the values of a value head.
        discount: γ over turns.
        gae_lambda: λ in [0, 1].

    Returns:
        Lists of the same shape as the rollouts' ``values``, (K, n_k) each; NaN where the value head is not trained: at
        later tokens of a turn, and everywhere in a rollout that is not included.

    Raises:
        ConfigError: The rollouts have no values, or ``gae_lambda`` is not in [0, 1].

    >>> turn = ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None], values=[[0.5, 0.75]])
    >>> turn_value_targets([turn], discount=1.0)
    [[[1.0, nan]]]
    """
    estimated = _turn_estimates(rollouts, discount, gae_lambda)
    targets = [[[math.nan] * len(turn) for turn in rollout.values] for rollout in rollouts]
    for rollout, rows, advantages in zip(rollouts, targets, estimated, strict=True):
        for row, values, advantage in zip(rows, rollout.values, advantages, strict=True):
            if advantage is not None:
                row[0] = advantage + values[0]
    return targets


def token_value_targets(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float,
    gae_lambda: float = 0.95,
    token_discount: float = 1.0,
    token_gae_lambda: float = 1.0,
) -> list[list[list[float]]]:
    """The λ-returns inside turns, ``A + V`` of :func:`bilevel_gae` with unscaled A, as targets at every token.

    The arguments are those of :func:`bilevel_gae`.

    Returns:
        Lists of the same shape as the rollouts' ``values``, (K, n_k) each; NaN in a rollout that is not included.

    Raises:
        ConfigError: The rollouts have no values, or a number is not in [0, 1].

    >>> turn = ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None], values=[[0.5, 0.75]])
    >>> token_value_targets([turn], discount=1.0)
    [[[1.0, 1.0]]]
    """
    estimated = _token_estimates(rollouts, discount, gae_lambda, token_discount, token_gae_lambda)
    return [
        [
            [advantage + value if rollout.included else math.nan for advantage, value in zip(*turn, strict=True)]
            for turn in zip(turns, rollout.values, strict=True)
        ]
        for rollout, turns in zip(rollouts, estimated, strict=True)
    ]


_TURN_TRAITS: Final = EstimatorTraits(uses=frozenset((*_USES, "turn_values")))
_TOKEN_TRAITS: Final = EstimatorTraits(uses=frozenset((*_USES, "values")), per_token=True)


@Declaration(traits_of=lambda _options: _TURN_TRAITS, value_targets=turn_value_targets).attach_to
def turn_gae(
    rollouts: Sequence[ScoredRollout], *, discount: float = 1.0, scale: Scale = "group", gae_lambda: float = 0.95
) -> list[list[float]]:
    """GAE over turns, ``A_k = Σ_j (γλ)^j δ_{k+j}`` with ``δ_k = r_k + γ·V_{k+1} - V_k`` (1506.02438; 2512.17008).

    All tokens of a turn share its advantage. With ``gae_lambda=1``, ``scale="none"`` and no discount, the estimate of
    the gradient is unbiased, whatever the values are; below 1 it relies on the values, whose errors bias it.

    Args:
        rollouts: The batch, with the values of a value head.
        discount: γ over turns.
        scale: The divisor of the advantages.
        gae_lambda: λ in [0, 1]: 0 looks one turn ahead, 1 looks to the end of the rollout.

    Returns:
        One advantage per turn of each rollout; 0.0 for a turn without tokens.

    Raises:
        ConfigError: The rollouts have no values, ``scale`` is unknown, or ``gae_lambda`` is not in [0, 1].

    >>> values = [[0.5], [0.5]]
    >>> pair = ScoredRollout(turn_rewards=[0, 1], final_reward=1, group=0, state_keys=[None] * 2, values=values)
    >>> turn_gae([pair], scale="none", gae_lambda=0.0), turn_gae([pair], scale="none", gae_lambda=1.0)
    ([[0.0, 0.5]], [[0.5, 0.5]])
    """
    estimated = _turn_estimates(rollouts, discount, gae_lambda)
    nested = [[[] if advantage is None else [advantage] for advantage in turns] for turns in estimated]
    return [[turn[0] if turn else 0.0 for turn in turns] for turns in _scaled(rollouts, nested, scale)]


@Declaration(traits_of=lambda _options: _TOKEN_TRAITS, value_targets=token_value_targets).attach_to
def bilevel_gae(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,
    scale: Scale = "group",
    gae_lambda: float = 0.95,
    token_discount: float = 1.0,
    token_gae_lambda: float = 1.0,
) -> list[list[list[float]]]:
    """GAE over turns and, inside each turn, over its tokens (bi-level GAE, VAGEN 2510.16907).

    ``A_k + V_k`` of :func:`turn_gae`, the estimated return of the turn, is the reward of the turn's last token. GAE
    over the turn's tokens propagates it to earlier tokens, with the value before each token and 0 after the last.
    Environment tokens are excluded. With ``token_discount=1`` and ``token_gae_lambda=1``, token t gets
    ``A_k + V_k - V_t``.

    A turn with a reward of 0 is treated like any other. (Public implementations detect the ends of turns by non-zero
    rewards, which merges such a turn with the next.) The turn's value is taken before its first token; the paper uses
    the last token, where the value would depend on the turn's own tokens.

    Args:
        rollouts: The batch, with the values of a value head.
        discount: γ over turns.
        scale: The divisor of the advantages.
        gae_lambda: λ over turns, in [0, 1].
        token_discount: γ from token to token inside a turn, in [0, 1]. Below 1 it prefers short answers.
        token_gae_lambda: λ from token to token inside a turn, in [0, 1].

    Returns:
        For each rollout, one advantage per token of each turn, (K, n_k).

    Raises:
        ConfigError: The rollouts have no values, ``scale`` is unknown, or a number is not in [0, 1].

    >>> turn = ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None], values=[[0.5, 0.75]])
    >>> bilevel_gae([turn], scale="none")
    [[[0.5, 0.25]]]
    """
    return _scaled(rollouts, _token_estimates(rollouts, discount, gae_lambda, token_discount, token_gae_lambda), scale)


def _turn_estimates(rollouts: Sequence[ScoredRollout], discount: float, gae_lambda: float) -> list[list[float | None]]:
    """The advantage of each turn, unscaled; None for a turn that is not trained on."""
    check_number("gae_lambda", gae_lambda, 0, 1)
    estimated: list[list[float | None]] = []
    for rollout in rollouts:
        if len(rollout.values) != len(rollout.turn_rewards):
            raise ConfigError(
                "turn_gae and bilevel_gae require the values of a value head, but the rollouts have none: set "
                "value_head to 'shared' or 'separate', or choose another advantage_estimator"
            )
        values: list[float] = []  # V before each turn, the last first
        following = 0.0
        for reward, token_values in zip(reversed(rollout.turn_rewards), reversed(rollout.values), strict=True):
            following = token_values[0] if token_values else reward + discount * following
            values.append(following)
        advantages = gae(rollout.turn_rewards, values[::-1], discount=discount, gae_lambda=gae_lambda)
        trained_on = [rollout.included and len(turn) > 0 for turn in rollout.values]
        estimated.append([one if kept else None for one, kept in zip(advantages, trained_on, strict=True)])
    return estimated


def _token_estimates(
    rollouts: Sequence[ScoredRollout],
    discount: float,
    gae_lambda: float,
    token_discount: float,
    token_gae_lambda: float,
) -> list[list[list[float]]]:
    """The advantage of each token of each turn, unscaled; 0.0 in a turn that is not trained on."""
    check_number("token_discount", token_discount, 0, 1)
    check_number("token_gae_lambda", token_gae_lambda, 0, 1)
    estimated: list[list[list[float]]] = []
    for rollout, advantages in zip(rollouts, _turn_estimates(rollouts, discount, gae_lambda), strict=True):
        turns = [[0.0] * len(values) for values in rollout.values]
        for k, (advantage, values) in enumerate(zip(advantages, rollout.values, strict=True)):
            if advantage is not None:
                rewards = [0.0] * (len(values) - 1) + [advantage + values[0]]
                turns[k] = gae(rewards, values, discount=token_discount, gae_lambda=token_gae_lambda)
        estimated.append(turns)
    return estimated


def _scaled(
    rollouts: Sequence[ScoredRollout], advantages: Sequence[Sequence[Sequence[float]]], scale: Scale
) -> list[list[list[float]]]:
    """Divide the advantages of each turn, (K, any), by the standard deviation of the turn's pool under ``scale``."""
    check_choice("scale", scale, get_args(Scale))
    if scale == "none":
        return [[[*turn] for turn in turns] for turns in advantages]
    pools: defaultdict[Hashable, list[float]] = defaultdict(list)
    for rollout, turns in zip(rollouts, advantages, strict=True):
        for k, turn in enumerate(turns if rollout.included else ()):
            pools[_pool(rollout, k, scale)] += turn
    divisors = defaultdict(lambda: 1.0, {key: scale_divisor(pool) for key, pool in pools.items()})
    return [
        [[advantage / divisors[_pool(rollout, k, scale)] for advantage in turn] for k, turn in enumerate(turns)]
        for rollout, turns in zip(rollouts, advantages, strict=True)
    ]


def _pool(rollout: ScoredRollout, k: int, scale: Scale) -> Hashable:
    return (rollout.environment, rollout.role(k)) if scale == "group" else None
