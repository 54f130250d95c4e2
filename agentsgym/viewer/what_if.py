"""Estimation of stored rollouts' advantages under other settings, with the same functions as in training."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args, get_origin, get_type_hints

from agentsgym.credit.advantages import Scale, token_advantages
from agentsgym.credit.assignment import AdvantageAssigner, check_parents
from agentsgym.credit.registry import ESTIMATORS, get_estimator, traits_of
from agentsgym.credit.rewards import TURN_CREDITS, per_token_rewards
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.settings import CreditSettings
from agentsgym.credit.traits import reads_token_rewards
from agentsgym.envs.state_scores import check_discount
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import check_choice, check_number
from agentsgym.store.values import to_json

if TYPE_CHECKING:
    from agentsgym.credit.settings import CreditArgs
    from agentsgym.store.records import StoredRollout
    from agentsgym.types import Trajectory

SCALES: Final = get_args(Scale)
NOTE: Final = (
    "Not available: turn_gae and bilevel_gae (they need a value head's predictions), rae and the baseline role_ema "
    "(they need averages over earlier batches). None of these is stored with rollouts."
)
_STATE_OPTIONS: Final = {"state", "decay"}  # used only for running averages
_MAX_CACHED: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The settings of a what-if.

    Attributes:
        settings: The credit settings.
        turn_credit: The turns that receive the rewards; None for the setting of each rollout's environment.
    """

    settings: CreditSettings
    turn_credit: str | None = None

    def __post_init__(self) -> None:
        name = self.settings.advantage_estimator
        if name in ESTIMATORS and name not in available():
            raise ConfigError(f"{name} cannot be computed from stored rollouts. {NOTE}")
        check_choice("estimator", name, available())
        check_choice("scale", self.settings.scale_rewards, SCALES)
        check_number("discount", self.settings.discount, 0.0, 1.0)
        if self.turn_credit is not None:
            check_choice("turn_credit", self.turn_credit, TURN_CREDITS)
        known = options_of(name)
        for option, value in self.settings.options.items():
            if option not in known:
                hint = did_you_mean(option, known) if known else " (it has no options here)"
                raise ConfigError(f"the estimator {name!r} has no option {option!r} in a what-if{hint}")
            if (choices := known[option]["choices"]) is not None:
                check_choice(option, value, choices)
        self.settings.estimator()  # checks the values of its options


def settings_as_dict(settings: CreditSettings, turn_credit: str) -> dict[str, Any]:
    """Return the settings that the page can change, and any other settings that differ from their defaults."""
    chosen = ("advantage_estimator", "options", "discount", "scale_rewards")
    return {
        "estimator": settings.advantage_estimator,
        "options": dict(settings.options),
        "discount": settings.discount,
        "scale": settings.scale_rewards,
        "turn_credit": turn_credit,
        **{name: value for name, value in settings.as_dict().items() if name not in chosen},
    }


@functools.cache
def available() -> list[str]:
    """Return the names of the estimators that need only stored rollouts."""
    traits = {name: traits_of(function) for name, function in ESTIMATORS.items()}
    needs_values = {name for name, one in traits.items() if one is not None and one.reads_values}
    return [name for name in traits if _is_stateless(name) and name not in needs_values]


def choices(*, has_calls: bool) -> dict[str, Any]:
    """Return the choices that the page offers; ``has_calls`` is whether any rollout has a tree of calls."""
    estimators = [
        {
            "name": name,
            "options": {key: value for key, value in options_of(name).items() if has_calls or key != "follow"},
            "summary": (inspect.getdoc(ESTIMATORS[name]) or "").partition("\n")[0],
        }
        for name in available()
    ]
    return {
        "estimators": estimators,
        "scales": [*SCALES],
        "turn_credits": [*TURN_CREDITS],
        "discount": 1.0,
        "note": NOTE,
    }


@functools.cache
def options_of(name: str) -> dict[str, dict[str, Any]]:
    """Return an estimator's options, each with its default and, if its values are names, the allowed names."""
    function = cast("Callable[..., Any]", ESTIMATORS[name])
    hints = get_type_hints(function)
    found: dict[str, dict[str, Any]] = {}
    for one in [*inspect.signature(function).parameters.values()][1:]:
        if one.name not in {"discount", "scale", *_STATE_OPTIONS}:
            hint, values = hints[one.name], None
            if get_origin(hint) is Literal:
                values = [value for value in get_args(hint) if _is_stateless(name, **{one.name: value})]
            found[one.name] = {"default": one.default, "choices": values}
    return found


def _is_stateless(name: str, **options: Any) -> bool:
    return get_estimator(name, **options).state is None


class WhatIf:
    """Estimates of the advantages of rollouts that are computed together, under other settings.

    Attributes:
        records: The rollouts of a generation batch, over all ranks, or of a task group, (N,).
        is_training: Whether the rollouts belong to training, in which case the settings' filters apply.
    """

    def __init__(self, records: Sequence[StoredRollout], groups: Sequence[Hashable], *, is_training: bool) -> None:
        numbers: dict[Hashable, int] = {}
        self.records, self.is_training = records, is_training
        self._groups = [numbers.setdefault(group, len(numbers)) for group in groups]
        self._environments = [(one.env_class_path, to_json(one.env_config)) for one in records]
        self._cache: dict[str, list[list[Any]]] = {}

    @property
    def settings(self) -> CreditSettings | None:
        """The settings of the stored advantages; None if unknown."""
        return next((found for one in self.records if (found := settings_of(one)) is not None), None)

    @property
    def note(self) -> str | None:
        """Why the numbers may differ from training's; None if they do not."""
        if not self.is_training:
            return None
        num_rollouts: Any = max((_credit(one).get("num_rollouts", 0) for one in self.records), default=0)
        if num_rollouts > len(self.records):
            return f"only {len(self.records)} of the {num_rollouts} rollouts of the generation batch are available"
        return None

    def advantages(self, request: Request) -> list[list[Any]]:
        """Estimate the advantage of each turn, (N, K); with the estimator ``reward``, each is one number per token.

        Raises:
            ConfigError: The estimator cannot be applied to these rollouts.
        """
        key = repr(request)  # the same for all task groups of a batch
        found = self._cache.get(key)
        if found is None:
            found = self._estimate(request)
            if len(self._cache) >= _MAX_CACHED:  # replaced, not cleared, since another thread may be reading it
                self._cache = {}
            self._cache[key] = found
        return found

    def _estimate(self, request: Request) -> list[list[Any]]:
        assigner = AdvantageAssigner(cast("CreditArgs", request.settings))  # frozen, and not modified
        rollouts = [self._scored(place, request) for place in range(len(self.records))]
        check_parents(rollouts, assigner.estimator)
        traits = assigner.estimator.traits
        for config in [one.env_config or {} for one in self.records]:
            check_discount(config, request.settings.discount if traits is None or "discount" in traits.uses else 1.0)
        found = assigner.estimate(rollouts, is_training=self.is_training)
        is_per_token = reads_token_rewards(assigner.estimator.traits)
        estimates: list[list[Any]] = []
        for place, (record, turns) in enumerate(zip(self.records, found.entries, strict=True)):
            entries = _token_entries(record, turns, request, assigner.estimator) if is_per_token else turns
            estimates.append(
                [
                    [one * factor for one in cast("Sequence[float]", entry)]
                    if isinstance(entry, Sequence)
                    else entry * factor
                    for entry, factor in zip(entries, found.weights[place], strict=True)
                ]
            )
        return estimates

    def _scored(self, place: int, request: Request) -> ScoredRollout:
        record = self.records[place]
        try:
            return ScoredRollout.from_trajectory(
                record.trajectory,
                group=self._groups[place],
                turn_credit=request.turn_credit or turn_credit_of(record),
                environment=self._environments[place],
            )
        except ValueError as error:  # rollouts recorded elsewhere may be inconsistent
            trajectory = record.trajectory
            which = f"rollout {trajectory.rollout_index} of task {trajectory.task_index}"
            raise ConfigError(f"advantages cannot be computed for {which}: {error}") from error


def settings_of(record: StoredRollout) -> CreditSettings | None:
    """Return the settings of a rollout's stored advantages; None if unknown."""
    credit = _credit(record)
    return CreditSettings.from_dict(credit) if credit else None


def turn_credit_of(record: StoredRollout) -> str:
    """Return the ``turn_credit`` of a rollout's environment."""
    turn_credit = str((record.env_config or {}).get("turn_credit"))
    return turn_credit if turn_credit in TURN_CREDITS else "step"


def request_of(parameters: Mapping[str, str], run: CreditSettings | None) -> Request:
    """Parse a request of the page; settings that it omits are those of the run, or the defaults if these are unknown.

    Args:
        parameters: Query parameters: ``estimator``, ``options`` (JSON), ``discount``, ``scale``, ``turn_credit``,
            ``potential_weight``.
        run: The settings of the stored advantages.
    """
    settings = run or CreditSettings()
    changes: dict[str, Any] = {"value_head": None}
    if "estimator" in parameters:
        changes |= {"advantage_estimator": parameters["estimator"], "options": _json_object(parameters.get("options"))}
    if "scale" in parameters:
        changes["scale_rewards"] = parameters["scale"]
    for name in ("discount", "potential_weight"):
        if name in parameters:
            try:
                changes[name] = float(parameters[name])
            except ValueError as error:
                raise ConfigError(f"{name} must be a number, got {parameters[name]!r}") from error
    estimator = changes.get("advantage_estimator", settings.advantage_estimator)
    traits = traits_of(ESTIMATORS[estimator]) if estimator in ESTIMATORS else None
    if "potential_weight" not in parameters and (traits is None or "turn_rewards" not in traits.uses):
        changes["potential_weight"] = 0.0  # the estimator does not use potentials
    return Request(settings=replace(settings, **changes), turn_credit=parameters.get("turn_credit") or None)


def _credit(record: StoredRollout) -> Mapping[str, Any]:
    credit: Any = record.extra.get("credit")
    return cast("Mapping[str, Any]", credit) if isinstance(credit, Mapping) else {}


def _token_entries(record: StoredRollout, turns: Sequence[Any], request: Request, estimator: Any) -> list[Any]:
    """Return the token advantages of each turn, from the stored token rewards or those of another ``turn_credit``."""
    trajectory: Trajectory = record.trajectory
    turn_credit = request.turn_credit
    if turn_credit is not None and turn_credit != turn_credit_of(record):
        is_spread = turn_credit == "spread_final"
        token_credit = "spread" if is_spread else (record.env_config or {}).get("token_credit", "spread")
        placed = per_token_rewards(trajectory, turn_credit=turn_credit, token_credit=token_credit)
        trajectory = replace(trajectory, per_token_rewards=placed)
    tokens = token_advantages(trajectory, turns, estimator=estimator)
    spans = zip(trajectory.turns, turns, strict=True)
    return [tokens[turn.start : turn.stop] if turn.stop > turn.start else entry for turn, entry in spans]


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value: Any = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"options must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("options must be a JSON object")
    return cast("dict[str, Any]", value)
