"""Advantage estimators: from the rewards of task groups to one number a turn, and onto the turn's tokens.

An estimator is a plain function of the rollouts of a whole batch. What it returns, one number for each turn of each
rollout (``bilevel_gae`` alone: one for each token), multiplies the policy gradient of that turn's tokens
(:func:`token_advantages`). They stand in ``outcomes`` (``reward``, ``grpo``, ``rloo``, ``rae``), ``returns``
(``return_to_go``, ``rebn``, ``mt_grpo``, ``gigpo``) and ``gae``; :func:`get_estimator` finds them by name. All share
four rules:

* ``R`` of a rollout is its final reward; ``G_k`` is the return of turn k, what it was paid and what follows it.
* A rollout that failed or was dropped is in no baseline and no spread, and gets 0.0 for every turn.
* Where all rollouts or turns that are compared with each other are equal, the advantage is exactly 0.0, not what
  floating point leaves over. (A baseline from outside the batch, a moving average or a value, compares with that.)
* Rollouts may come in any order; what an estimator keeps from one batch to the next it reads before it writes.

``scale`` says what a value minus its baseline is divided by, within the groups that the estimator compares:
``"none"`` nothing; ``"group"`` ``s + 1e-4``, s the standard deviation (n - 1 in the denominator, as in TRL) of the
values compared; ``"batch"`` ``s + 1e-4``, s that of all such differences in the batch, about 0, where their mean
lies. Only ``"none"`` leaves an unbiased estimator unbiased; ``"batch"`` all but keeps its direction in a batch of many
task groups (with a single one it is ``"group"``); ``"group"`` may learn faster, but points the wrong way in expectation
where groups are small and wins are rare.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

from agentsgym.credit._comparison import Scale, nearly_equal
from agentsgym.credit.bound import BoundEstimator, Estimator, TurnAdvantage, name_of
from agentsgym.credit.gae import bilevel_gae, turn_gae
from agentsgym.credit.memory import MovingBaselines
from agentsgym.credit.outcomes import grpo, rae, reward, rloo
from agentsgym.credit.returns import gigpo, mt_grpo, rebn, return_to_go, same_state
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.shaping import PotentialShaping
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.types import Trajectory

__all__ = [
    "ESTIMATORS",
    "BoundEstimator",
    "Estimator",
    "PotentialShaping",
    "Scale",
    "ScoredRollout",
    "bilevel_gae",
    "expand_to_tokens",
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
    "zero_variance_share",
]

ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "reward": reward,
    "grpo": grpo,
    "rloo": rloo,
    "rae": rae,
    "return_to_go": return_to_go,
    "rebn": rebn,
    "mt_grpo": mt_grpo,
    "gigpo": gigpo,
    "turn_gae": turn_gae,
    "bilevel_gae": bilevel_gae,
}

_NO_OPTIONS = ("discount", "scale", "memory")  # given by who calls, or bound here


def get_estimator(name_or_callable: str | Callable[..., Any], **options: Any) -> BoundEstimator | PotentialShaping:
    """Find an estimator by name, or take a callable, and bind options to it.

    One that takes ``memory``, to keep something from one batch to the next, is given a fresh one. A ``partial`` is
    taken apart: its keywords are options like the others, which go before them.

    Args:
        name_or_callable: A key of :data:`ESTIMATORS`, or a function that looks like :class:`Estimator`; what is bound
            already is returned as it is.
        **options: Keywords of the function other than ``discount``, ``scale`` and ``memory``.

    Raises:
        ConfigError: It is neither, it has no such option, or (for one of ours) an option's value is not valid.

    >>> get_estimator("gigpo", baseline="others").options
    {'baseline': 'others'}
    """
    if isinstance(name_or_callable, BoundEstimator | PotentialShaping):
        if options:
            raise ConfigError(f"the estimator has its options already, got {', '.join(map(repr, options))} as well")
        return name_or_callable
    function, options = _without_partial(_found(name_or_callable), options)
    memory = _check_options(function, options)
    if function is return_to_go and options.get("baseline") != "role_ema":
        memory = None  # its other baselines remember nothing
    bound = BoundEstimator(function, options, memory)
    if function in ESTIMATORS.values():
        bound([], discount=1.0, scale="none")  # they check their options before they look at the rollouts
    return bound


def token_advantages(
    trajectory: Trajectory, turn_advantages: Sequence[TurnAdvantage], *, estimator: Estimator
) -> list[float]:
    """Put what an estimator gave for a rollout on the rollout's tokens.

    Args:
        trajectory: The rollout.
        turn_advantages: What ``estimator`` returned for it, (K,).
        estimator: Who returned it; for :func:`reward` the trajectory's per-token rewards are taken instead.

    Returns:
        (T,): 0.0 on environment tokens, and on all tokens of a failed rollout under :func:`reward`.

    Raises:
        ValueError: There is not one entry for each turn, or a turn's list has not one number for each of its tokens.
    """
    if getattr(estimator, "function", estimator) is not reward:
        return expand_to_tokens(trajectory, turn_advantages)
    if trajectory.failed or not trajectory.per_token_rewards:
        return [0.0] * len(trajectory.token_ids)
    return list(trajectory.per_token_rewards)


def expand_to_tokens(trajectory: Trajectory, turn_advantages: Sequence[TurnAdvantage]) -> list[float]:
    """Put each turn's number on all of its tokens, or its list of numbers on them one by one.

    Args:
        trajectory: Gives the spans of the turns and the number of tokens T.
        turn_advantages: One entry a turn, (K,): a number, or a list of one number a token of the turn.

    Returns:
        (T,), 0.0 on every environment token.

    Raises:
        ValueError: There is not one entry for each turn, or a turn's list has not one number for each of its tokens.
    """
    if len(turn_advantages) != len(trajectory.turns):
        raise ValueError(f"one advantage a turn is wanted: {len(trajectory.turns)} turns, got {len(turn_advantages)}")
    placed = [0.0] * len(trajectory.token_ids)  # (T,)
    for k, (turn, entry) in enumerate(zip(trajectory.turns, turn_advantages, strict=True)):
        num_tokens = turn.stop - turn.start
        numbers = list(entry) if isinstance(entry, Sequence) else [entry] * num_tokens
        if len(numbers) != num_tokens:
            raise ValueError(f"turn {k} has {num_tokens} tokens, got {len(numbers)} advantages for them")
        placed[turn.start : turn.stop] = numbers
    return placed


def zero_variance_groups(rollouts: Sequence[ScoredRollout]) -> set[int]:
    """The task groups whose final rewards are all equal, so that :func:`grpo` learns nothing from them.

    A group of one counts as equal; rollouts that failed or were dropped, and groups that have no other, do not count.

    Args:
        rollouts: The batch.

    Returns:
        Their ``group``.
    """
    return {group for group, rewards in _final_rewards_by_group(rollouts).items() if nearly_equal(rewards)}


def zero_variance_share(rollouts: Sequence[ScoredRollout]) -> float:
    """The share of task groups that are :func:`zero_variance_groups`.

    Args:
        rollouts: The batch.

    Returns:
        In [0, 1]; 0.0 without any group.
    """
    num_groups = len(_final_rewards_by_group(rollouts))
    return len(zero_variance_groups(rollouts)) / num_groups if num_groups else 0.0


def step_group_sizes(rollouts: Sequence[ScoredRollout]) -> list[int]:
    """How many turns are in the same state, for each group of turns that :func:`gigpo` compares.

    Args:
        rollouts: The batch.

    Returns:
        One size a group, at least 1 each, in the order in which the groups first appear; turns without a state key,
        and rollouts that failed or were dropped, do not count.
    """
    groups = Counter(same_state(one, k) for one in rollouts if one.counts for k in range(len(one.state_keys)))
    return [size for group, size in groups.items() if group is not None]


def _found(name_or_callable: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(name_or_callable):
        return name_or_callable
    if not isinstance(name_or_callable, str) or name_or_callable not in ESTIMATORS:  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = did_you_mean(str(name_or_callable), ESTIMATORS)
        raise ConfigError(f"advantage_estimator is neither known nor callable: {name_or_callable!r}{hint}")
    return ESTIMATORS[name_or_callable]


def _without_partial(
    function: Callable[..., Any], options: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    inner = cast("partial[Any]", function)
    is_partial = isinstance(function, partial) and not inner.args
    return (inner.func, {**inner.keywords, **options}) if is_partial else (inner, options)


def _check_options(function: Callable[..., Any], options: Mapping[str, Any]) -> MovingBaselines | None:
    """Refuse options that a function does not have; returns a memory for one that takes it."""
    try:
        parameters = [*inspect.signature(function).parameters.values()][1:]  # the first are the rollouts
    except ValueError:  # a compiled function does not say
        return None
    keywords = {one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if not takes_any and not {"discount", "scale"} <= keywords:
        raise ConfigError(
            f"the estimator {name_of(function)!r} must take the keywords 'discount' and 'scale', got {sorted(keywords)}"
        )
    known = keywords.difference(_NO_OPTIONS)
    for option in options:
        if option in _NO_OPTIONS or not (takes_any or option in known):
            hint = did_you_mean(option, known) if known else "; it has none"
            raise ConfigError(f"the estimator {name_of(function)!r} has no option {option!r}{hint}")
    for one in parameters:
        if one.name in known.difference(options) and one.default is one.empty:
            raise ConfigError(f"the estimator {name_of(function)!r} needs the option {one.name!r}")
    return MovingBaselines() if "memory" in keywords else None


def _final_rewards_by_group(rollouts: Sequence[ScoredRollout]) -> dict[int, list[float]]:
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.counts:
            groups[rollout.group].append(rollout.final_reward)
    return groups
