"""Find estimators by name, and bind and check their options.

What each of them reads and compares, its traits, is declared where it is defined;
:attr:`BoundEstimator.traits <agentsgym.credit.bound.BoundEstimator>` has them with the options applied.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

from agentsgym.credit.bound import BoundEstimator, Estimator, name_of
from agentsgym.credit.ema import EMABaselines
from agentsgym.credit.gae import bilevel_gae, turn_gae
from agentsgym.credit.outcomes import grpo, rae, reward, rloo
from agentsgym.credit.returns import gigpo, mt_grpo, rebn, return_to_go
from agentsgym.credit.traits import EstimatorTraits, Use, declaration_of, estimator_traits, traits_of
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import check_number

__all__ = ["ESTIMATORS", "EstimatorTraits", "Use", "estimator_traits", "get_estimator", "traits_of"]

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

_NO_OPTIONS = ("discount", "scale", "state")  # given by the caller, or bound here


def get_estimator(name_or_callable: str | Callable[..., Any], **options: Any) -> BoundEstimator:
    """Find an estimator by name, or take a callable, and bind options to it.

    One that takes ``state``, to keep something from one batch to the next, is given a fresh one. A ``partial`` is
    taken apart: its keywords are options like the others, which take precedence.

    Args:
        name_or_callable: A key of :data:`ESTIMATORS`, or a function that looks like
            :class:`~agentsgym.credit.bound.Estimator`; a bound one is returned as it is.
        **options: Keywords of the function other than ``discount``, ``scale`` and ``state``; and for every estimator
            ``potential_weight``, the weight of potential-based shaping (:func:`~agentsgym.credit.shaping.shaped`), 0
            for none.

    Raises:
        ConfigError: It is neither, it has no such option, or (for a built-in one) an option's value is not valid; or it
            is shaped already, or has an option ``potential_weight`` itself.

    >>> get_estimator("gigpo", baseline="others").options
    {'baseline': 'others'}
    >>> get_estimator("grpo", potential_weight=0.0).options
    {}
    """
    if isinstance(name_or_callable, BoundEstimator):
        weight = options.pop("potential_weight", 0.0)
        if options:
            raise ConfigError(f"the estimator has its options already, got {', '.join(map(repr, options))} as well")
        check_number("potential_weight", weight)
        if weight and name_or_callable.potential_weight:
            raise ConfigError("advantage_estimator is shaped already: leave potential_weight out")
        return replace(name_or_callable, potential_weight=weight) if weight else name_or_callable
    if not callable(name_or_callable):
        if not isinstance(name_or_callable, str) or name_or_callable not in ESTIMATORS:  # pyright: ignore[reportUnnecessaryIsInstance]
            hint = did_you_mean(str(name_or_callable), ESTIMATORS)
            raise ConfigError(f"advantage_estimator is neither known nor callable: {name_or_callable!r}{hint}")
        name_or_callable = ESTIMATORS[name_or_callable]
    function: Callable[..., Any] = name_or_callable
    inner = cast("partial[Any]", name_or_callable)
    if (
        isinstance(name_or_callable, partial) and not inner.args and "declaration" not in vars(inner)
    ):  # it would be lost
        function, options = inner.func, {**inner.keywords, **options}
    weight = options.pop("potential_weight", 0.0)
    takes_state = _check_options(function, options)
    declaration = declaration_of(function)
    keeps_state = takes_state and (declaration is None or declaration.keeps_state(options))
    estimator = BoundEstimator(function, options, EMABaselines() if keeps_state else None, weight)
    if function in ESTIMATORS.values():
        estimator([], discount=1.0, scale="none")  # they check their options before they look at the rollouts
    return estimator


def _check_options(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Refuse options that a function does not have; returns whether it takes ``state``."""
    try:
        parameters = [*inspect.signature(function).parameters.values()][1:]  # the first are the rollouts
    except ValueError:  # a compiled function may have none
        return False
    keywords = {one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if not takes_any and not {"discount", "scale"} <= keywords:
        raise ConfigError(
            f"the estimator {name_of(function)!r} must take the keywords 'discount' and 'scale', got {sorted(keywords)}"
        )
    if "potential_weight" in keywords:
        raise ConfigError(
            f"the estimator {name_of(function)!r} has an option 'potential_weight', which is the weight of "
            "potential-based shaping for every estimator: rename it"
        )
    known = keywords.difference(_NO_OPTIONS)
    for option in options:
        if option in _NO_OPTIONS or not (takes_any or option in known):
            hint = did_you_mean(option, known) if known else "; it has none"
            raise ConfigError(f"the estimator {name_of(function)!r} has no option {option!r}{hint}")
    for one in parameters:
        if one.name in known.difference(options) and one.default is one.empty:
            raise ConfigError(f"the estimator {name_of(function)!r} needs the option {one.name!r}")
    return "state" in keywords
