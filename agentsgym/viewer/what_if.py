"""Share the credit of stored rollouts out otherwise, by the functions that training calls."""

from __future__ import annotations

import functools
import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args, get_origin, get_type_hints

from agentsgym.credit.advantages import Scale, token_advantages
from agentsgym.credit.assignment import AdvantageAssigner
from agentsgym.credit.registry import ESTIMATORS, get_estimator, traits_of
from agentsgym.credit.rewards import TURN_CREDITS, per_token_rewards
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.settings import CreditSettings
from agentsgym.credit.traits import reads_token_rewards
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import check_choice, check_number
from agentsgym.store.values import to_json

if TYPE_CHECKING:
    from agentsgym.credit.settings import AdvantageSettings
    from agentsgym.store.records import StoredRollout
    from agentsgym.types import Trajectory

SCALES: Final = get_args(Scale)
NOTE: Final = (
    "Not here: turn_gae and bilevel_gae, which need the predictions of a value head, and rae and the baseline "
    "role_ema, which need averages over earlier batches: neither is stored with rollouts."
)
_OF_STATE: Final = {"state", "decay"}  # options that only a running average has
_MOST_KEPT: Final = 64
_HUGE: Final = 1e100  # of a reward: squares of sums of such overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How credit is to be shared out.

    Attributes:
        settings: How.
        turn_credit: Which turn is rewarded; None for what each rollout's environment says.
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
        options = {**self.settings.options}
        known = options_of(name)
        for option, value in options.items():
            if option not in known:
                hint = did_you_mean(option, known) if known else "; it has none"
                raise ConfigError(f"the estimator {name!r} has no option {option!r} here{hint}")
            if (choices := known[option]["choices"]) is not None:
                check_choice(option, value, choices)
        self.settings.estimator()  # checks the values of its options

    def as_dict(self, default_turn_credit: str) -> dict[str, Any]:
        """Tell it to the page."""
        return settings_as_dict(self.settings, self.turn_credit or default_turn_credit)


def settings_as_dict(settings: CreditSettings, turn_credit: str) -> dict[str, Any]:
    """Tell settings to the page: the choices it has, and beside them what of the run's else is not at its default."""
    own = settings.as_dict()
    chosen = ("advantage_estimator", "options", "discount", "scale_rewards")
    return {
        "estimator": settings.advantage_estimator,
        "options": dict(settings.options),
        "discount": settings.discount,
        "scale": settings.scale_rewards,
        "turn_credit": turn_credit,
        **{name: value for name, value in own.items() if name not in chosen},
    }


@functools.cache
def available() -> list[str]:
    """The estimators that need nothing but stored rollouts."""
    return [name for name in ESTIMATORS if _is_stateless(name) and not _reads_values(name)]


def choices() -> dict[str, Any]:
    """Everything that can be chosen, for the page."""
    estimators = [
        {"name": name, "options": options_of(name), "summary": _summary(ESTIMATORS[name])} for name in available()
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
    """The options of an estimator, each with its default and, where it is a name, the names that can be chosen."""
    function = cast("Callable[..., Any]", ESTIMATORS[name])
    hints = get_type_hints(function)
    parameters = [*inspect.signature(function).parameters.values()][1:]
    return {
        one.name: {"default": one.default, "choices": _choices(name, one.name, hints[one.name])}
        for one in parameters
        if one.name not in {"discount", "scale", *_OF_STATE}
    }


def _choices(name: str, option: str, hint: Any) -> list[Any] | None:
    if get_origin(hint) is not Literal:
        return None
    return [value for value in get_args(hint) if _is_stateless(name, **{option: value})]


def _is_stateless(name: str, **options: Any) -> bool:
    return get_estimator(name, **options).state is None


def _reads_values(name: str) -> bool:
    traits = traits_of(ESTIMATORS[name])
    return traits is not None and traits.reads_values


def _summary(function: Any) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


class WhatIf:
    """The rollouts whose advantages are computed together, ready to be computed again.

    Attributes:
        records: The rollouts.
        is_training: Whether they were trained on, so that the filters of the settings apply.
    """

    def __init__(self, records: Sequence[StoredRollout], groups: Sequence[Hashable], *, is_training: bool) -> None:
        """Take rollouts.

        Args:
            records: Those of a generation batch, of all ranks, or of one task group, (N,).
            groups: The task group of each, (N,).
            is_training: Whether they were trained on.
        """
        numbers: dict[Hashable, int] = {}
        self.records, self.is_training = records, is_training
        self._groups = [numbers.setdefault(group, len(numbers)) for group in groups]
        self._environments = [(one.env_class_path, to_json(one.env_config)) for one in records]
        self._known: dict[str, list[list[Any]]] = {}

    @property
    def settings(self) -> CreditSettings | None:
        """How the stored advantages were made; None where that is not known."""
        return next((found for one in self.records if (found := settings_of(one)) is not None), None)

    @property
    def note(self) -> str | None:
        """Why the numbers may be others than training's; None where nothing says so."""
        if not self.is_training:
            return None
        num_rollouts: Any = max((_credit(one).get("num_rollouts", 0) for one in self.records), default=0)
        if num_rollouts > len(self.records):
            return f"of the {num_rollouts} rollouts of the generation batch only {len(self.records)} are available"
        return None

    def advantages(self, request: Request) -> list[list[Any]]:
        """Estimate, (N, K): for each turn a number, or under ``reward`` a list of numbers, one a token.

        Raises:
            ConfigError: The estimator cannot be used on these rollouts.
        """
        key = repr(request)  # all task groups of a batch ask alike
        found = self._known.get(key)
        if found is None:
            found = self._estimate(request)
            if len(self._known) >= _MOST_KEPT:  # another thread may ask meanwhile: nothing is taken from it
                self._known = {}
            self._known[key] = found
        return found

    def _estimate(self, request: Request) -> list[list[Any]]:
        assigner = AdvantageAssigner(cast("AdvantageSettings", request.settings))  # frozen, and only read
        try:
            rollouts = [self._scored(place, request) for place in range(len(self.records))]
            found = assigner.estimate(rollouts, is_training=self.is_training)
        except ConfigError:
            raise
        except (OverflowError, ValueError) as error:
            played = [one.trajectory for one in self.records]
            rewards = [
                paid for one in played for paid in (*one.turn_rewards, *one.final_rewards.values(), one.final_reward)
            ]
            beyond = next((paid for paid in rewards if not abs(paid) < _HUGE), None)
            if beyond is None:
                raise
            raise ConfigError(f"advantages cannot be computed if a reward is {beyond:g}") from error
        laid = found.entries
        if reads_token_rewards(assigner.estimator.traits):
            on_tokens = functools.partial(_token_entries, request=request, estimator=assigner.estimator)
            laid = [on_tokens(one, own) for one, own in zip(self.records, found.entries, strict=True)]
        return [_weighed(own, [weight[i] for weight in found.weights]) for i, own in enumerate(laid)]

    def _scored(self, place: int, request: Request) -> ScoredRollout:
        record = self.records[place]
        try:
            return ScoredRollout.from_trajectory(
                record.trajectory,
                group=self._groups[place],
                turn_credit=request.turn_credit or turn_credit_of(record),
                environment=self._environments[place],
            )
        except ValueError as error:  # what was recorded elsewhere is not always consistent
            own = record.trajectory
            which = f"rollout {own.rollout_index} of task {own.task_index}"
            raise ConfigError(f"{which} cannot be given advantages: {error}") from error


def settings_of(record: StoredRollout) -> CreditSettings | None:
    """How a rollout's stored advantages were made; None where that is not known."""
    credit = _credit(record)
    return CreditSettings.from_dict(credit) if credit else None


def turn_credit_of(record: StoredRollout) -> str:
    """Which turn a rollout's environment rewards."""
    given = str((record.env_config or {}).get("turn_credit"))
    return given if given in TURN_CREDITS else "step"


def request_of(parameters: Mapping[str, str], run: CreditSettings | None) -> Request:
    """Read what the page asks for; what it leaves out is as in the run, or else at its default.

    Args:
        parameters: Query parameters: ``estimator``, ``options`` (JSON), ``discount``, ``scale``, ``turn_credit``,
            ``potential_weight``.
        run: How the stored advantages were made.

    Raises:
        ConfigError: Something is unknown or not valid.
    """
    settings = run or CreditSettings()
    changes: dict[str, Any] = {"value_head": None}
    if "estimator" in parameters:
        changes |= {"advantage_estimator": parameters["estimator"], "options": _json_object(parameters.get("options"))}
    if "scale" in parameters:
        changes["scale_rewards"] = parameters["scale"]
    for name in ("discount", "potential_weight"):
        if name in parameters:
            changes[name] = _float(name, parameters[name])
    estimator = changes.get("advantage_estimator", settings.advantage_estimator)
    if "potential_weight" not in parameters and not _takes_potentials(estimator):
        changes["potential_weight"] = 0.0
    return Request(settings=replace(settings, **changes), turn_credit=parameters.get("turn_credit") or None)


def _takes_potentials(name: str) -> bool:
    traits = traits_of(ESTIMATORS[name]) if name in ESTIMATORS else None
    return traits is not None and "turn_rewards" in traits.uses


def _credit(record: StoredRollout) -> Mapping[str, Any]:
    credit: Any = record.extra.get("credit")
    return cast("Mapping[str, Any]", credit) if isinstance(credit, Mapping) else {}


def _token_entries(record: StoredRollout, turns: Sequence[Any], *, request: Request, estimator: Any) -> list[Any]:
    """The per-token rewards of each turn: the environment's own, unless another ``turn_credit`` is asked for."""
    trajectory: Trajectory = record.trajectory
    asked, own = request.turn_credit, turn_credit_of(record)
    if asked is not None and asked != own:
        token_credit = "spread" if asked == "spread_final" else (record.env_config or {}).get("token_credit", "spread")
        placed = per_token_rewards(trajectory, turn_credit=asked, token_credit=token_credit)
        trajectory = replace(trajectory, per_token_rewards=placed)
    tokens = token_advantages(trajectory, turns, estimator=estimator)
    spans = zip(trajectory.turns, turns, strict=True)
    return [tokens[turn.start : turn.stop] if turn.stop > turn.start else entry for turn, entry in spans]


def _weighed(turns: Sequence[Any], weights: Sequence[Sequence[float]]) -> list[Any]:
    for weight in weights:
        turns = [
            [one * factor for one in cast("Sequence[float]", entry)] if isinstance(entry, Sequence) else entry * factor
            for entry, factor in zip(turns, weight, strict=True)
        ]
    return [*turns]


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value: Any = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"options must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("options must be a JSON object")
    return cast("dict[str, Any]", value)


def _float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{name} must be a number, got {text!r}") from error


class KeptBatches:
    """The last few of these, by what they are of; any thread may ask."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, WhatIf] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], WhatIf]) -> WhatIf:
        """The one of a key, made where it is not kept."""
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            found = make()
        with self._lock:
            self._kept[key] = found
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return found
