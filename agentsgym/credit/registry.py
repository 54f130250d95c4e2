"""Find estimators by name, and bind and check their options.

Each estimator declares its traits (what it reads and compares) where it is defined;
:attr:`BoundEstimator.traits <agentsgym.credit.bound.BoundEstimator>` has them with the options applied.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
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
from agentsgym.texts import shown

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

_SET_BY = {"discount": "discount", "scale": "scale_rewards"}  # the trainer's setting for each argument


def get_estimator(name_or_callable: str | Callable[..., Any], **options: Any) -> BoundEstimator:
    """Find an estimator by name, or accept a callable, and bind options to it.

    An estimator that accepts ``state``, to carry it from one batch to the next, gets a fresh state. A ``partial`` is
    unpacked: its keyword arguments become options, which ``options`` override.

    Args:
        name_or_callable: A key of :data:`ESTIMATORS`, or a function with the signature of
            :class:`~agentsgym.credit.bound.Estimator`; a bound estimator is returned unchanged.
        **options: Keyword arguments of the function other than ``discount``, ``scale`` and ``state``; and for every
            estimator ``potential_weight``, the weight of potential-based shaping
            (:func:`~agentsgym.credit.bound.shaped`), 0 for none.

    Raises:
        ConfigError: The estimator is unknown, an option is unknown or (for a built-in estimator) invalid, or
            ``potential_weight`` conflicts with an option or with shaping that is already applied.

    >>> get_estimator("gigpo", baseline="others").options
    {'baseline': 'others'}
    >>> get_estimator("grpo", potential_weight=0.0).options
    {}
    """
    if isinstance(name_or_callable, BoundEstimator):
        weight = options.pop("potential_weight", 0.0)
        if options:
            names = ", ".join(map(repr, options))
            raise ConfigError(f"the estimator's options are already bound, got {names}: pass it by name to set options")
        check_number("potential_weight", weight)
        if weight and name_or_callable.potential_weight:
            raise ConfigError("the estimator already applies potential-based shaping: omit potential_weight")
        return replace(name_or_callable, potential_weight=weight) if weight else name_or_callable
    if not callable(name_or_callable):
        if not isinstance(name_or_callable, str) or name_or_callable not in ESTIMATORS:  # pyright: ignore[reportUnnecessaryIsInstance]
            given = shown(name_or_callable)
            hint = did_you_mean(name_or_callable, ESTIMATORS, kind="estimator")
            raise ConfigError(f"advantage_estimator must be a known name or a callable, got {given}{hint}")
        name_or_callable = ESTIMATORS[name_or_callable]
    function: Callable[..., Any] = name_or_callable
    inner = cast("partial[Any]", name_or_callable)
    # Positional arguments and a declaration of the partial would be lost.
    if isinstance(name_or_callable, partial) and not inner.args and "declaration" not in vars(inner):
        function, options = inner.func, {**inner.keywords, **options}
    weight = options.pop("potential_weight", 0.0)
    takes_state = _check_options(function, options)
    declaration = declaration_of(function)
    keeps_state = takes_state and (declaration is None or declaration.keeps_state(options))
    estimator = BoundEstimator(function, options, EMABaselines() if keeps_state else None, weight)
    if function in ESTIMATORS.values():
        estimator([], discount=1.0, scale="none")  # without rollouts, it only checks its options
    return estimator


def _check_options(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Reject options that a function does not have; return whether it accepts ``state``."""
    try:
        parameters = [*inspect.signature(function).parameters.values()][1:]  # the first one is for the rollouts
    except ValueError:  # a compiled function may have no signature
        return False
    keywords = {one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if not takes_any and not {"discount", "scale"} <= keywords:
        raise ConfigError(
            f"the estimator {name_of(function)!r} must accept the keyword arguments 'discount' and 'scale', "
            f"but accepts {sorted(keywords)}"
        )
    if "potential_weight" in keywords:
        raise ConfigError(
            f"the estimator {name_of(function)!r} must not have an option named 'potential_weight', which is reserved "
            "for potential-based shaping: rename the option"
        )
    known = keywords.difference(_SET_BY, ["state"])
    for option in options:
        if option in {*_SET_BY, "state"} or not (takes_any or option in known):
            raise ConfigError(f"the estimator {name_of(function)!r} has no option {option!r}{_hint(option, known)}")
    for one in parameters:
        if one.name in known.difference(options) and one.default is one.empty:
            raise ConfigError(f"the estimator {name_of(function)!r} requires the option {one.name!r}")
    return "state" in keywords


def _hint(option: str, known: Collection[str]) -> str:
    if option in _SET_BY:
        return f": set {_SET_BY[option]} in the trainer's settings instead"
    return did_you_mean(option, known) if known else " (it has no options)"
