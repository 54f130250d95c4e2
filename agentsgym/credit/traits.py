"""Declare an estimator's inputs and comparisons, so that settings are checked by its behavior, not by its name.

A declaration is attached to the estimator itself, and also found inside a ``partial``, so your own estimators are
treated like the built-in ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, cast, get_args

from agentsgym.errors import ConfigError, did_you_mean

Use = Literal[
    "discount",  # sums the discounted rewards of turns
    "turn_rewards",
    "final_reward",
    "per_token_rewards",  # the trajectory's per-token rewards replace the values that the estimator returns
    "state_keys",
    "roles",
    "values",  # predictions of a value head
    "parents",  # which turn each turn follows in a tree of calls
    "turn_values",  # only the predictions before the first token of each turn
]

Options = Mapping[str, Any]
ValueTargets = Callable[..., list[list[list[float]]]]
"""(rollouts, \\*, discount, and the estimator's options) → a target for each token of each turn of each rollout."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorTraits:
    """The inputs that an estimator uses and compares; its result must not depend on anything undeclared.

    Attributes:
        uses: The attributes of rollouts and the arguments that it uses.
        compares_in_task_groups: Whether its baseline comes from the other rollouts of the task.
        per_token: Whether it may return one number per token instead of per turn.

    Raises:
        ConfigError: ``uses`` has an unknown name.
    """

    uses: frozenset[Use]
    compares_in_task_groups: bool = False
    per_token: bool = False

    @property
    def reads_values(self) -> bool:
        """Whether it needs a value head."""
        return not self.uses.isdisjoint(("values", "turn_values"))

    def __post_init__(self) -> None:
        for word in sorted(self.uses.difference(get_args(Use))):
            raise ConfigError(f"uses has the unknown name {word!r}{did_you_mean(word, get_args(Use), kind='trait')}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The declarations of an estimator.

    Attributes:
        traits_of: Returns the estimator's traits for the given options.
        keeps_state: Given the options, returns whether an estimator that accepts ``state`` carries state from one batch
            to the next.
        value_targets: Returns the training targets of its value head; None for the discounted returns.
    """

    traits_of: Callable[[Options], EstimatorTraits]
    keeps_state: Callable[[Options], bool] = lambda _options: True
    value_targets: ValueTargets | None = None

    def attach_to(self, estimator: F) -> F:
        """Attach this declaration to an estimator; usable as a decorator."""
        cast("Any", estimator).declaration = self
        return estimator


def estimator_traits(
    *, uses: Collection[Use], compares_in_task_groups: bool = False, per_token: bool = False
) -> Callable[[F], F]:
    """Declare the traits of your own estimator: a decorator for a function, or for a class of callables.

    Args:
        uses: Any of ``"discount"``, ``"turn_rewards"``, ``"final_reward"``, ``"per_token_rewards"``, ``"state_keys"``,
            ``"roles"``, ``"parents"``, ``"values"`` and ``"turn_values"``.
        compares_in_task_groups: As in :class:`EstimatorTraits`.
        per_token: As in :class:`EstimatorTraits`.

    Raises:
        ConfigError: ``uses`` is a single string, or has an unknown name.

    >>> @estimator_traits(uses=["final_reward"])
    ... def final_reward_everywhere(rollouts, *, discount, scale):
    ...     return [[one.final_reward] * len(one.turn_rewards) for one in rollouts]
    >>> traits_of(final_reward_everywhere)
    EstimatorTraits(uses=frozenset({'final_reward'}), compares_in_task_groups=False, per_token=False)
    """
    if isinstance(uses, str):
        raise ConfigError(f"uses must be a list or a set of names, got the string {uses!r}")
    traits = EstimatorTraits(uses=frozenset(uses), compares_in_task_groups=compares_in_task_groups, per_token=per_token)
    return Declaration(traits_of=lambda _options: traits).attach_to


def declaration_of(estimator: Callable[..., Any]) -> Declaration | None:
    """The declaration of an estimator, or of the function inside a ``partial``; None if there is none."""
    declaration = getattr(estimator, "declaration", None)
    if isinstance(declaration, Declaration):
        return declaration
    return declaration_of(cast("partial[Any]", estimator).func) if isinstance(estimator, partial) else None


def traits_of(estimator: Callable[..., Any], options: Options | None = None) -> EstimatorTraits | None:
    """The traits of an estimator with the given options; None if it declares none.

    Args:
        estimator: The function, or a ``partial`` of it, whose keywords are options as well.
        options: The keyword arguments it is called with, besides ``discount`` and ``scale``.
    """
    declaration = declaration_of(estimator)
    return declaration and declaration.traits_of(all_options(estimator, options or {}))


def all_options(estimator: Callable[..., Any], options: Options) -> Options:
    """The keyword arguments of a ``partial``, updated with the options."""
    keywords: Options = cast("partial[Any]", estimator).keywords if isinstance(estimator, partial) else {}
    return {**keywords, **options}


def reads_token_rewards(traits: EstimatorTraits | None) -> bool:
    """Whether the trajectory's per-token rewards replace the estimator's values, as with the ``reward`` estimator."""
    return traits is not None and "per_token_rewards" in traits.uses
