"""Generalized advantage estimation over turns, with the values of a value head as the baseline.

V of a turn is what the value head expects just before the turn's first token, so that no baseline knows anything of
the action that it judges. After the last turn V is 0, also where a budget ended the episode: a budget is part of the
task. A turn without tokens was no decision, and nothing told what it is worth: its V is what it was paid and, after
it, the next turn's V, so that its δ is 0 and estimates reach past it to the first value that is known.

There is no comparison with other rollouts, so that task groups of one will do, and ``scale`` has none to work in:
``"group"`` divides by ``s + 1e-4``, s the standard deviation about 0 of all advantages of the same game and role,
``"batch"`` by that of all advantages; about their mean, advantages that are all alike, as before the values have learnt
anything, have none. No mean is subtracted: the value is the baseline already, and the mean of a batch holds each
advantage's own future.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, get_args

from agentsgym.credit._comparison import Scale, check_choice, check_number, divisor
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import ConfigError


def turn_gae(
    rollouts: Sequence[ScoredRollout], *, discount: float = 1.0, scale: Scale = "group", trace_decay: float = 0.95
) -> list[list[float]]:
    """GAE over turns, ``A_k = Σ_j (γλ)^j δ_{k+j}`` with ``δ_k = r_k + γ·V_{k+1} - V_k`` (1506.02438; 2512.17008).

    All tokens of a turn share its advantage. With ``trace_decay=1``, ``scale="none"`` and no discount an unbiased
    estimate of the gradient, whatever the values are; below 1 it trusts the values, and is as biased as they are wrong.

    Args:
        rollouts: The batch, with the values of a value head.
        discount: γ over turns.
        scale: What the advantages are divided by.
        trace_decay: λ in [0, 1]: 0 looks one turn ahead, 1 to the end of the rollout.

    Returns:
        One number for each turn of each rollout; 0.0 for a turn without tokens.

    Raises:
        ConfigError: The rollouts have no values, ``scale`` is unknown, or ``trace_decay`` is not in [0, 1].

    >>> values = [[0.5], [0.5]]
    >>> pair = ScoredRollout(turn_rewards=[0, 1], final_reward=1, group=0, state_keys=[None] * 2, values=values)
    >>> turn_gae([pair], scale="none", trace_decay=0.0), turn_gae([pair], scale="none", trace_decay=1.0)
    ([[0.0, 0.5]], [[0.5, 0.5]])
    """
    estimated = _turn_estimates(rollouts, discount, trace_decay)
    nested = [[[] if number is None else [number] for number in turns] for turns in estimated]
    return [[number[0] if number else 0.0 for number in turns] for turns in _scaled(rollouts, nested, scale)]


def bilevel_gae(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float = 1.0,
    scale: Scale = "group",
    trace_decay: float = 0.95,
    token_discount: float = 1.0,
    token_trace_decay: float = 1.0,
) -> list[list[list[float]]]:
    """GAE over turns and, inside each turn, over its tokens (bi-level GAE, VAGEN 2510.16907).

    ``A_k + V_k`` of :func:`turn_gae`, what the turn proved to be worth, is the reward on the turn's last token; GAE
    over the turn's own tokens, with the value before each of them and 0 after the last, carries it back. Environment
    tokens are no part of it. With ``token_discount=1`` and ``token_trace_decay=1`` token t gets ``A_k + V_k - V_t``.

    A turn that was paid 0 is a turn like any other. (Public implementations find the ends of turns by their non-zero
    rewards, which melts such a turn into the next one.) The turn's value is taken before its first token, where the
    paper takes it at its last: there it would judge the turn by what it has just said.

    Args:
        rollouts: The batch, with the values of a value head.
        discount: γ over turns.
        scale: What the advantages are divided by.
        trace_decay: λ over turns, in [0, 1].
        token_discount: γ from token to token inside a turn, in [0, 1]. Below 1 it prefers short answers.
        token_trace_decay: λ from token to token inside a turn, in [0, 1].

    Returns:
        For each turn of each rollout one number for each of its tokens, (K, n_k).

    Raises:
        ConfigError: The rollouts have no values, ``scale`` is unknown, or a number is not in [0, 1].

    >>> turn = ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None], values=[[0.5, 0.75]])
    >>> bilevel_gae([turn], scale="none")
    [[[0.5, 0.25]]]
    """
    return _scaled(
        rollouts, _token_estimates(rollouts, discount, trace_decay, token_discount, token_trace_decay), scale
    )


def targets_of(
    estimator: Callable[..., object], rollouts: Sequence[ScoredRollout], discount: float, **options: Any
) -> list[list[list[float]]]:
    """What the value head is to learn: the λ-returns ``A + V``, A before it is scaled.

    Args:
        estimator: :func:`turn_gae`, whose values are learnt at the first token of each turn, or :func:`bilevel_gae`,
            whose values are learnt at every token.
        rollouts: The batch, with the values of a value head.
        discount: γ over turns.
        **options: What else the estimator is given.

    Returns:
        As ``values`` of the rollouts, (K, n_k) each; NaN where nothing is learnt, which is all of a rollout that does
        not count.

    Raises:
        ConfigError: The estimator uses no values, the rollouts have none, or a number is not in [0, 1].

    >>> turn = ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None], values=[[0.5, 0.75]])
    >>> targets_of(turn_gae, [turn], 1.0), targets_of(bilevel_gae, [turn], 1.0)
    ([[[1.0, nan]]], [[[1.0, 1.0]]])
    """
    if estimator not in _TARGETS:
        raise ConfigError(
            "value_head needs advantage_estimator to be 'turn_gae' or 'bilevel_gae', which use its values, got "
            f"{getattr(estimator, '__name__', estimator)!r}"
        )
    return _TARGETS[estimator](rollouts, discount=discount, **options)


def gae(rewards: Sequence[float], values: Sequence[float], *, discount: float, trace_decay: float) -> list[float]:
    """``A_k = δ_k + γλ·A_{k+1}`` with ``δ_k = r_k + γ·V_{k+1} - V_k``, V and A 0 after the last step (1506.02438).

    Args:
        rewards: What each step is paid, (N,).
        values: V before each step, (N,).
        discount: γ.
        trace_decay: λ.

    Returns:
        One advantage a step, (N,).

    >>> gae([0.0, 1.0], [0.25, 0.5], discount=1.0, trace_decay=0.5)
    [0.5, 0.5]
    """
    advantages: list[float] = []
    following_value = following = 0.0
    for paid, value in zip(reversed(rewards), reversed(values), strict=True):
        following = paid + discount * following_value - value + discount * trace_decay * following
        following_value = value
        advantages.append(following)
    return advantages[::-1]


def _turn_targets(
    rollouts: Sequence[ScoredRollout], *, discount: float, trace_decay: float = 0.95
) -> list[list[list[float]]]:
    estimated = _turn_estimates(rollouts, discount, trace_decay)
    return [
        [_first_alone(turn, number) for turn, number in zip(rollout.values, numbers, strict=True)]
        for rollout, numbers in zip(rollouts, estimated, strict=True)
    ]


def _first_alone(values: Sequence[float], advantage: float | None) -> list[float]:
    target = [math.nan] * len(values)
    if advantage is not None:
        target[0] = advantage + values[0]
    return target


def _token_targets(
    rollouts: Sequence[ScoredRollout],
    *,
    discount: float,
    trace_decay: float = 0.95,
    token_discount: float = 1.0,
    token_trace_decay: float = 1.0,
) -> list[list[list[float]]]:
    estimated = _token_estimates(rollouts, discount, trace_decay, token_discount, token_trace_decay)
    return [
        [
            [number + value if rollout.counts else math.nan for number, value in zip(*turn, strict=True)]
            for turn in zip(turns, rollout.values, strict=True)
        ]
        for rollout, turns in zip(rollouts, estimated, strict=True)
    ]


_TARGETS: Final[dict[Callable[..., object], Callable[..., list[list[list[float]]]]]] = {
    turn_gae: _turn_targets,
    bilevel_gae: _token_targets,
}


def _turn_estimates(rollouts: Sequence[ScoredRollout], discount: float, trace_decay: float) -> list[list[float | None]]:
    """The advantage of each turn, unscaled; None for a turn that nothing is learnt from."""
    check_number("trace_decay", trace_decay, 0, 1)
    estimated: list[list[float | None]] = []
    for rollout in rollouts:
        values = _turn_values(rollout, discount)
        advantages = gae(rollout.turn_rewards, values, discount=discount, trace_decay=trace_decay)
        learnt = [rollout.counts and len(turn) > 0 for turn in rollout.values]
        estimated.append([number if kept else None for number, kept in zip(advantages, learnt, strict=True)])
    return estimated


def _token_estimates(
    rollouts: Sequence[ScoredRollout],
    discount: float,
    trace_decay: float,
    token_discount: float,
    token_trace_decay: float,
) -> list[list[list[float]]]:
    """The advantage of each token of each turn, unscaled; 0.0 where nothing is learnt."""
    check_number("token_discount", token_discount, 0, 1)
    check_number("token_trace_decay", token_trace_decay, 0, 1)

    def of_tokens(advantage: float | None, values: Sequence[float]) -> list[float]:
        if advantage is None:
            return [0.0] * len(values)
        paid = [0.0] * (len(values) - 1) + [advantage + values[0]]
        return gae(paid, values, discount=token_discount, trace_decay=token_trace_decay)

    return [
        [of_tokens(number, values) for number, values in zip(numbers, rollout.values, strict=True)]
        for rollout, numbers in zip(rollouts, _turn_estimates(rollouts, discount, trace_decay), strict=True)
    ]


def _turn_values(rollout: ScoredRollout, discount: float) -> list[float]:
    """V before each turn, (K,)."""
    if len(rollout.values) != len(rollout.turn_rewards):
        raise ConfigError(
            "turn_gae and bilevel_gae work with the values of a value head, and the rollouts have none: set value_head "
            "to 'shared' or 'separate', or choose another advantage_estimator"
        )
    values: list[float] = []
    following = 0.0
    for paid, of_tokens in zip(reversed(rollout.turn_rewards), reversed(rollout.values), strict=True):
        following = of_tokens[0] if of_tokens else paid + discount * following
        values.append(following)
    return values[::-1]


def _scaled(
    rollouts: Sequence[ScoredRollout], numbers: Sequence[Sequence[Sequence[float]]], scale: Scale
) -> list[list[list[float]]]:
    """Divide the numbers of each turn, (K, any), by the spread of those that ``scale`` puts together."""
    check_choice("scale_rewards", scale, get_args(Scale))
    if scale == "none":
        return [[[*own] for own in turns] for turns in numbers]
    pools: defaultdict[Hashable, list[float]] = defaultdict(list)
    for rollout, turns in zip(rollouts, numbers, strict=True):
        for k, own in enumerate(turns if rollout.counts else ()):
            pools[_pool(rollout, k, scale)] += own
    by = defaultdict(lambda: 1.0, {key: divisor(pool) for key, pool in pools.items()})
    return [
        [[number / by[_pool(rollout, k, scale)] for number in own] for k, own in enumerate(turns)]
        for rollout, turns in zip(rollouts, numbers, strict=True)
    ]


def _pool(rollout: ScoredRollout, k: int, scale: Scale) -> Hashable:
    return (rollout.game, rollout.role(k)) if scale == "group" else None
