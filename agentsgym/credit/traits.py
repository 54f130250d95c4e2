"""Declare what an estimator reads and compares, so that settings are checked by what it does, not by its name.

A declaration is attached to the estimator itself and found within a ``partial`` too, so that your own estimator is
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
    "per_token_rewards",  # the trajectory's own take the place of the numbers that the estimator returns
    "state_keys",
    "roles",
    "values",  # of a value head
    "turn_values",  # only those before the first token of a turn
]

Options = Mapping[str, Any]
ValueTargets = Callable[..., list[list[list[float]]]]
"""(rollouts, \\*, discount, and the estimator's options) → a target for each token of each turn of each rollout."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorTraits:
    """What an estimator reads and compares; nothing that it does not declare may change what it returns.

    Attributes:
        uses: What it reads of a rollout and of its arguments.
        compares_in_task_groups: Whether its baseline comes from the other rollouts of the task.
        per_token: Whether it may return one number for each token instead of each turn.

    Raises:
        ConfigError: ``uses`` has an unknown word.
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
            raise ConfigError(f"uses has the unknown word {word!r}{did_you_mean(word, get_args(Use))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The declarations of an estimator.

    Attributes:
        traits_of: Returns the traits that it has with some options.
        keeps_state: Whether an estimator that takes ``state`` keeps something from one batch to the next with some
            options.
        value_targets: Returns what its value head is trained towards; None for the discounted returns.
    """

    traits_of: Callable[[Options], EstimatorTraits]
    keeps_state: Callable[[Options], bool] = lambda _options: True
    value_targets: ValueTargets | None = None

    def on(self, estimator: F) -> F:
        """Attach it to an estimator; to be used as a decorator."""
        cast("Any", estimator).declaration = self
        return estimator


def estimator_traits(
    *, uses: Collection[Use], compares_in_task_groups: bool = False, per_token: bool = False
) -> Callable[[F], F]:
    """Declare the traits of your own estimator: a decorator for a function, or for a class of callables.

    Args:
        uses: Any of ``"discount"``, ``"turn_rewards"``, ``"final_reward"``, ``"per_token_rewards"``, ``"state_keys"``,
            ``"roles"``, ``"values"`` and ``"turn_values"``.
        compares_in_task_groups: As in :class:`EstimatorTraits`.
        per_token: As in :class:`EstimatorTraits`.

    Raises:
        ConfigError: ``uses`` is a single word, or has an unknown word.

    >>> @estimator_traits(uses=["final_reward"])
    ... def whole(rollouts, *, discount, scale):
    ...     return [[one.final_reward] * len(one.turn_rewards) for one in rollouts]
    >>> traits_of(whole)
    EstimatorTraits(uses=frozenset({'final_reward'}), compares_in_task_groups=False, per_token=False)
    """
    if isinstance(uses, str):
        raise ConfigError(f"uses must be a list or a set of words, got the single word {uses!r}")
    traits = EstimatorTraits(uses=frozenset(uses), compares_in_task_groups=compares_in_task_groups, per_token=per_token)
    return Declaration(traits_of=lambda _options: traits).on


def declaration_of(estimator: Callable[..., Any]) -> Declaration | None:
    """What an estimator, or the function within a ``partial``, declares; None if it declares nothing."""
    declaration = getattr(estimator, "declaration", None)
    if isinstance(declaration, Declaration):
        return declaration
    return declaration_of(cast("partial[Any]", estimator).func) if isinstance(estimator, partial) else None


def traits_of(estimator: Callable[..., Any], options: Options | None = None) -> EstimatorTraits | None:
    """The traits that an estimator has with some options; None if it declares none.

    Args:
        estimator: The function, or a ``partial`` of it, whose keywords are options as well.
        options: Keywords that it is called with beside ``discount`` and ``scale``.
    """
    declaration = declaration_of(estimator)
    return declaration and declaration.traits_of(all_options(estimator, options or {}))


def all_options(estimator: Callable[..., Any], options: Options) -> Options:
    """The keywords of a ``partial`` and the options, which take precedence."""
    keywords: Options = cast("partial[Any]", estimator).keywords if isinstance(estimator, partial) else {}
    return {**keywords, **options}


def reads_token_rewards(traits: EstimatorTraits | None) -> bool:
    """Whether the trajectory's per-token rewards take the place of the estimator's numbers, as under ``reward``."""
    return traits is not None and "per_token_rewards" in traits.uses
