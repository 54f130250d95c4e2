"""Combine named rewards: weigh and add up the components, or their advantages.

There are two ways to combine several components into one advantage per turn, with TRL's names. Let ``A[r]`` be the
advantage that an estimator computes from rewards r, and ``w_n`` the weight of the component ``r_n``:

* ``"sum_then_normalize"``: ``A[Σ_n w_n·r_n]``. The estimator sees the weighted sum.
* ``"normalize_then_sum"``: ``Σ_n w_n·A[r_n] / (s + 1e-4)``. Each component has its own baseline and its own scale, so
  that a component with large differences does not hide the others (GDPO, 2601.05242, there with ``grpo``). s is the
  standard deviation of the weighted sum over the rollouts of the batch; with the scale ``"none"`` nothing is divided,
  and both ways agree.

Both are computed turn by turn, with the estimator's own returns, comparisons and roles. A component that is constant
within its group adds nothing to an estimator that compares within groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.credit._comparison import scale_divisor
from agentsgym.credit.components import UNNAMED
from agentsgym.credit.rewards import RewardComponent
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.traits import reads_token_rewards
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.texts import shown

if TYPE_CHECKING:
    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.credit.settings import CreditArgs

AGGREGATIONS: Final = ("sum_then_normalize", "normalize_then_sum")

Weights = Mapping[str, float]
Entry = float | list[float]
"""The advantage of a turn, or of each of its tokens."""


def check_objectives(args: CreditArgs, estimator: BoundEstimator) -> None:
    """Reject weights and aggregations that an estimator cannot apply.

    Raises:
        ConfigError: The combination would have no effect, or is not defined.
    """
    is_separate = args.multi_objective_aggregation == "normalize_then_sum"
    if (is_separate or args.reward_weights) and reads_token_rewards(estimator.traits):
        raise ConfigError(
            f"advantage_estimator={estimator.name!r} uses the environment's per-token rewards unchanged, so "
            "reward_weights and multi_objective_aggregation would have no effect: weigh the rewards in the "
            "environment, or use another estimator, such as 'return_to_go'"
        )
    reads_values = estimator.traits is not None and estimator.traits.reads_values
    if is_separate and (reads_values or args.value_head is not None):
        raise ConfigError(
            "multi_objective_aggregation='normalize_then_sum' requires one prediction per component, but a value head "
            "predicts a single return: use 'sum_then_normalize', or an estimator without a value head"
        )
    if is_separate and estimator.potential_weight:
        raise ConfigError(
            "multi_objective_aggregation='normalize_then_sum' scales each component separately, so a potential, which "
            "is a baseline of their sum, belongs to none of them: use 'sum_then_normalize', or omit potential_weight"
        )


def check_names(rollouts: Sequence[ScoredRollout], weights: Weights) -> None:
    """Reject weights of components that no rollout has.

    Args:
        rollouts: A batch with at least one included rollout.
        weights: The weights by name.

    Raises:
        ConfigError: A name is unknown.
    """
    known = component_names(rollouts)
    for name in weights:
        if name not in known:
            names = ", ".join(map(repr, known))
            raise ConfigError(
                f"reward_weights has a weight for {shown(name)}, but the rewards of the first batch have only the "
                f"components {names}{did_you_mean(name, known)}"
            )


def missing_names(rollouts: Iterable[ScoredRollout]) -> dict[str, Hashable]:
    """Find components that only some rollouts of an environment have, each with one such environment."""
    names: dict[Hashable, list[frozenset[str]]] = {}
    for one in rollouts:
        if one.included:
            names.setdefault(one.environment, []).append(frozenset(one.components) - {UNNAMED})
    return {
        name: environment
        for environment, own in names.items()
        for name in sorted(frozenset[str]().union(*own) - own[0].intersection(*own))
    }


def component_names(rollouts: Iterable[ScoredRollout]) -> list[str]:
    """The names of the components of a batch's included rollouts; plain numbers are the component ``"reward"``."""
    included = [one for one in rollouts if one.included]
    names = dict.fromkeys(chain.from_iterable(one.components for one in included))
    if not all(one.components for one in included):
        names[UNNAMED] = None
    return [*names]


def component(rollout: ScoredRollout, name: str) -> ScoredRollout:
    """Replace the rewards of a rollout by one component; it is 0 if the rollout lacks it.

    The name becomes part of ``environment``, so that an estimator's moving averages are kept per component.

    >>> one = ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None], environment="maze")
    >>> found = component(one, "coins")
    >>> found.turn_rewards, found.final_reward, found.environment
    ([0.0], 0.0, ('maze', 'coins'))
    """
    own = _components(rollout).get(name)
    if own is None:
        own = RewardComponent(turn_rewards=[0.0] * len(rollout.turn_rewards), final_reward=0.0)
    environment: Any = rollout.environment
    key = (*cast("tuple[Any, ...]", environment), name) if isinstance(environment, tuple) else (environment, name)
    return replace(
        rollout,
        turn_rewards=own.turn_rewards,
        final_reward=own.final_reward,
        final_rewards=own.final_rewards or dict.fromkeys(rollout.final_rewards, own.final_reward),
        environment=key,
        components={},
    )


def weighted(rollouts: Sequence[ScoredRollout], weights: Weights | None) -> list[ScoredRollout]:
    """Replace the rewards by the weighted sum of their components, ``Σ_n w_n·r_n``; unchanged if all weights are 1.

    Args:
        rollouts: The batch.
        weights: ``w_n`` by name, 1 for others; a plain number is the component ``"reward"``. None for 1.
    """
    factors = weights or {}
    is_same = [all(factors.get(name, 1) == 1 for name in one.components or (UNNAMED,)) for one in rollouts]
    return [one if same else _weighted(one, factors) for one, same in zip(rollouts, is_same, strict=True)]


def add_component(rollout: ScoredRollout, name: str, amount: float) -> ScoredRollout:
    """Add an amount to the last turn's reward and to the final reward, as one more component."""
    zeros = [0.0] * len(rollout.turn_rewards)
    parts = {**_components(rollout), name: RewardComponent(turn_rewards=_raised(zeros, amount), final_reward=amount)}
    rewards, final_reward = _raised(rollout.turn_rewards, amount), rollout.final_reward + amount
    return replace(rollout, turn_rewards=rewards, final_reward=final_reward, components=parts)


def summed(
    parts: Sequence[tuple[float, Sequence[Sequence[Entry]]]], rollouts: Sequence[ScoredRollout], scale: str
) -> list[list[Entry]]:
    """Add up the weighted advantages of components, ``Σ_n w_n·A_n / (s + 1e-4)``.

    s is the root mean square over the included rollouts, n - 1 in the denominator, each with the mean square of its
    turns. So with one number per rollout it is the standard deviation by which TRL divides; TRL also subtracts the
    mean, which is 0 if each component is compared with its group's mean.

    Args:
        parts: The weight and the entries of each component, (N, K): numbers, or lists with one number per token.
        rollouts: The batch, (N,).
        scale: The estimator's scale; with ``"none"``, nothing is divided.

    >>> rollouts = [ScoredRollout(turn_rewards=[0.0], final_reward=0.0, group=0, state_keys=[None])] * 2
    >>> summed([(1.0, [[1.0], [-1.0]]), (0.5, [[-1.0], [1.0]])], rollouts, "none")
    [[0.5], [-0.5]]
    """
    totals = [
        [_total([(weight, entries[i][k]) for weight, entries in parts]) for k in range(len(one.turn_rewards))]
        for i, one in enumerate(rollouts)
    ]
    if scale == "none":
        return totals
    own = [turns for one, turns in zip(rollouts, totals, strict=True) if one.included and turns]
    divisor = scale_divisor([math.sqrt(fmean(map(_mean_square, turns))) for turns in own])
    return [[_map(lambda one: one / divisor, entry) for entry in turns] for turns in totals]


def _total(parts: Sequence[tuple[float, Entry]]) -> Entry:
    """Add up the weighted entries of one turn; where one has a number per token, so has the sum."""
    length = next((len(entry) for _, entry in parts if isinstance(entry, list)), None)
    per_token = [(weight, entry if isinstance(entry, list) else [entry] * (length or 1)) for weight, entry in parts]
    total = [
        math.fsum(weight * entry[t] for weight, entry in per_token) for t in range(1 if length is None else length)
    ]
    return total[0] if length is None else total


def _map(function: Callable[[float], float], entry: Entry) -> Entry:
    return list(map(function, entry)) if isinstance(entry, list) else function(entry)


def _mean_square(entry: Entry) -> float:
    squares = _map(lambda one: one * one, entry)
    return math.fsum(squares) / max(len(squares), 1) if isinstance(squares, list) else squares


def _raised(rewards: Sequence[float], amount: float) -> list[float]:
    return [*rewards[:-1], *(reward + amount for reward in rewards[-1:])]


def _components(rollout: ScoredRollout) -> Mapping[str, RewardComponent]:
    """The components of a rollout's rewards; a plain number is one."""
    if rollout.components:
        return rollout.components
    own = {name: getattr(rollout, name) for name in ("turn_rewards", "final_reward", "final_rewards")}
    return {UNNAMED: RewardComponent(**own)}


def _weighted(rollout: ScoredRollout, factors: Weights) -> ScoredRollout:
    parts = _components(rollout)
    weights = {name: factors.get(name, 1) for name in parts}

    def total(amount_of: Callable[[RewardComponent], float]) -> float:
        return math.fsum(weights[name] * amount_of(one) for name, one in parts.items())

    return replace(
        rollout,
        turn_rewards=[total(lambda one, k=k: one.turn_rewards[k]) for k in range(len(rollout.turn_rewards))],
        final_reward=total(lambda one: one.final_reward),
        final_rewards={
            role: total(lambda one, role=role: one.final_rewards.get(role, 0.0)) for role in rollout.final_rewards
        },
        components=parts,
    )
