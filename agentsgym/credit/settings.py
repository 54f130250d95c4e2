"""Describe how the advantages of stored rollouts were estimated, so that they can be estimated again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, Self

from agentsgym.credit.registry import ESTIMATORS, get_estimator

if TYPE_CHECKING:
    from agentsgym.credit.bound import BoundEstimator


class CreditArgs(Protocol):
    """The fields of a configuration from which :class:`CreditSettings` are taken."""

    discount: float
    scale_rewards: str
    loss_aggregation: str | None
    max_completion_length: int | None
    invalid_turns: str
    zero_variance_groups: str
    min_group_size: int
    value_head: str | None
    multi_objective_aggregation: str
    reward_weights: Any

    @property
    def truncation(self) -> str:
        """How truncated rollouts are treated: ``"keep"``, ``"penalize"`` or ``"mask"``."""
        ...

    @property
    def truncation_penalty(self) -> float:
        """The amount that ``"penalize"`` subtracts."""
        ...

    def estimator(self) -> BoundEstimator:
        """Make a fresh estimator."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditSettings:
    """The settings that determine a rollout's advantages, except its environment's ``turn_credit``.

    :class:`~agentsgym.credit.assignment.AdvantageAssigner` uses them. Attributes that are not described here mean the
    same as in :class:`~agentsgym.training.config.GRPOEnvConfig`.

    Attributes:
        advantage_estimator: Name of a built-in estimator; for any other function, its module and name, which are
            informative only: the estimator cannot be rebuilt from them.
        options: The estimator's options.
        potential_weight: Weight of potential-based shaping; 0 for none.
        max_completion_length: The divisor of the aggregation ``"constant"``.
        truncation: The treatment of truncated rollouts: ``"keep"``, ``"penalize"`` or ``"mask"``.
        truncation_penalty: The amount that ``"penalize"`` subtracts.
    """

    advantage_estimator: str = "return_to_go"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    potential_weight: float = 0.0
    discount: float = 1.0
    scale_rewards: str = "group"
    loss_aggregation: str | None = None
    max_completion_length: int | None = None
    invalid_turns: str = "keep"
    truncation: str = "keep"
    truncation_penalty: float = 1.0
    zero_variance_groups: str = "keep"
    min_group_size: int = 1
    value_head: str | None = None
    reward_weights: Mapping[str, float] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"

    @classmethod
    def of(cls, args: CreditArgs, estimator: BoundEstimator) -> Self:
        """Collect these settings from those of a run and from its estimator."""
        own = ESTIMATORS.get(estimator.name)
        module = getattr(estimator.function, "__module__", None) or type(estimator.function).__module__
        name = estimator.name if own is estimator.function else f"{module}.{estimator.name}"
        set_separately = {"options", "potential_weight", "advantage_estimator", "max_completion_length"}
        set_separately |= set() if args.truncation == "penalize" else {"truncation_penalty"}  # unused
        return cls(
            max_completion_length=args.max_completion_length if args.loss_aggregation == "constant" else None,
            advantage_estimator=name,
            options=dict(estimator.options),
            potential_weight=estimator.potential_weight,
            **{one.name: getattr(args, one.name) for one in fields(cls) if one.name not in set_separately},
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild the settings from :meth:`as_dict`; unknown ones, such as those of a later release, are ignored."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def as_dict(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, and always the estimator, discount and scale."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        defaults = type(self)()
        always = {"advantage_estimator", "discount", "scale_rewards"}
        return {name: value for name, value in values.items() if name in always or value != getattr(defaults, name)}

    def estimator(self) -> BoundEstimator:
        """Make a fresh estimator.

        Raises:
            ConfigError: The estimator's name or one of its options is unknown or invalid.
        """
        return get_estimator(self.advantage_estimator, **{"potential_weight": self.potential_weight, **self.options})
