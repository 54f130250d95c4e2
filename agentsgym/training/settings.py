"""The settings of a training run that TRL does not have: their declarations and the parsing of structured values.

Values derived from them are in :mod:`agentsgym.training.config`, whose ``GRPOEnvConfig`` adds TRL's settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isnan
from numbers import Integral, Real
from os import PathLike
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from agentsgym.batch.layouts import LAYOUTS
from agentsgym.credit.weights import AGGREGATIONS, INVALID_TURN_MODES
from agentsgym.envs.config import COMMON_FIELDS
from agentsgym.errors import ConfigError, check_options, misspelled
from agentsgym.failures import RETRY_SEEDS
from agentsgym.fields import (
    Check,
    Field,
    is_bool,
    is_fraction,
    is_int,
    is_number,
    is_seconds,
    is_str,
    is_strings,
    or_none,
    require,
)
from agentsgym.rollouts.process_pool import EnvProcessPool
from agentsgym.rollouts.thread_pool import EnvThreadPool
from agentsgym.texts import sentence_of, shown

ENV_POOLS: Final = MappingProxyType({"threads": EnvThreadPool, "processes": EnvProcessPool})
"""The classes of environment pools, by their names in ``env_pool``."""

GROUPS: Final[Mapping[str, str]] = MappingProxyType({
    "summary": "the most important metrics: reward, wins, failures, loss, entropy",
    "info": "numbers in the environments' `info`, with one key per number",
    "stops": "stop reasons and errors of rollouts",
    "lengths": "turns and tokens",
    "by_turn": "one key per turn index",
    "by_role": "one key per role",
    "by_environment": "one key per environment of a mixed batch",
    "credit": "advantages and what they depend on: groups, filters, curriculum, value head",
    "loss": "the loss and the optimizer",
    "sampler": "distance between the sampler and the model",
})  # fmt: skip
"""The groups of metrics, and what each holds. ``GRPOEnvConfig.log_metrics`` chooses among them."""

ALL_GROUPS: Final = "all"
SettingsT = TypeVar("SettingsT")

# A command line has one type for each setting, which is the one used at run time.
if TYPE_CHECKING:
    Groups = str | list[str] | None
    Folder = bool | str
    Treatment = str | float
    RoleWeights = float | str | dict[str, float]
else:
    Groups = list[str]  # --log_metrics summary by_turn
    Folder = str  # "true" is read as True
    Treatment = str  # a number is read as one
    RoleWeights = str  # likewise, and JSON


class _Metadata(dict[str, Any]):
    """Metadata of a field; only the help is copied, since ``HfArgumentParser`` passes the copy to argparse."""

    def copy(self) -> dict[str, Any]:
        return {"help": self.get("help")}

    def keys(self) -> Any:  # for ``dict(field.metadata)``
        return self.copy().keys()


def setting(default: Any, expected: str, valid: Check) -> Any:
    """Declare a checked setting; ``expected`` ends the sentence "must be …"."""
    return field(default=default, metadata=_Metadata(check=Field(default=default, expected=expected, valid=valid)))


def choice(choices: Iterable[str | None]) -> Any:
    """Declare a setting with a fixed set of values, the first of which is the default."""
    names = [*choices]
    valid: Check = lambda value: or_none(is_str)(value) and value in names  # noqa: E731
    return setting(names[0], "one of " + ", ".join(map(repr, names)), valid)


def with_help(settings: type[SettingsT]) -> type[SettingsT]:
    """Describe the settings on a command line as the docstring of their class does."""
    for one in dataclasses.fields(cast("Any", settings)):
        found = re.search(rf"^ {{8}}{one.name}: (.*(?:\n {{12}}.*)*)", settings.__doc__ or "", re.MULTILINE)
        if found:
            plain = re.sub(r"(:\w+:)?`+~?([^`]*)`+", r"\2", " ".join(found[1].split()))
            one.metadata = MappingProxyType(_Metadata(one.metadata.items(), help=plain))
    return settings


@contextmanager
def foreign_checks(owner: str) -> Generator[None]:
    """Raise :class:`ConfigError` instead of the errors of TRL's and transformers' own checks of settings."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(sentence_of(error)) from error
    except (AttributeError, LookupError, ArithmeticError, ImportError, OSError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {sentence_of(error)}"
        raise ConfigError(f"TRL cannot create {owner} from these values ({reason})") from error


# Types wider than the hints, which allow one type per setting for the command line.
_WIDER: Final[dict[str, Any]] = {
    **dict.fromkeys(("resume_from_checkpoint", "fsdp", "scale_rewards"), bool | str | None),
    "observation_loss_weight": float | str | dict[str, float],
}
_KINDS: Final[Mapping[Any, tuple[str, Check]]] = MappingProxyType({
    bool: ("true or false", is_bool),
    int: ("a whole number", lambda value: not isinstance(value, bool) and isinstance(value, Integral)),
    float: ("a number", lambda value: not isinstance(value, bool) and isinstance(value, Real) and not isnan(value)),
    str: ("a string", lambda value: isinstance(value, str | PathLike) or callable(value)),
    NoneType: ("null", lambda value: value is None),
})  # fmt: skip


def types_of(settings: type[Any]) -> dict[str, Any]:
    """Return the type of each setting of a dataclass, by name, for :func:`problem_of`."""
    return get_type_hints(settings) | _WIDER


def problem_of(value: Any, setting: dataclasses.Field[Any], hint: Any) -> str:
    """Return why a setting cannot have a value, as the end of a sentence that begins with its name; empty if it can.

    Args:
        value: The value.
        setting: The setting, which may have a check.
        hint: Its type, which is checked otherwise if it consists of bools, numbers, strings and None.
    """
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"must be a number of at most 63 bits, got {shown(value)}"
    check: Field | None = setting.metadata.get("check")
    if check is None:
        wanted = {*get_args(hint)} if get_origin(hint) in {Union, UnionType} else {hint}
        kinds = [one for kind, one in _KINDS.items() if kind in wanted]
        if len(kinds) < len(wanted) or any(is_kind(value) for _, is_kind in kinds):
            return ""
        return f"must be {' or '.join(words for words, _ in kinds)}, got {shown(value)}"
    return "" if check.valid(value) else f"must be {check.expected}, got {shown(value)}"


def number_in(value: Any) -> Any:
    """Convert a number that YAML or a command line left as text, such as 1e-3; other values are returned unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def options_in(name: str, given: Any) -> dict[str, Any]:
    """Parse a setting that is a dict of options, or JSON from a command line."""
    options = given
    if isinstance(given, str):
        with contextlib.suppress(ValueError, RecursionError):
            options = json.loads(given)
    if options is not None and not isinstance(options, dict):
        raise ConfigError(
            f"GRPOEnvConfig.{name} must be a dict, or a JSON object from a command line, got {shown(given)}"
        )
    if unnamed := [key for key in options or () if not isinstance(key, str)]:  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(f"GRPOEnvConfig.{name} must have strings as keys, got {unnamed[0]!r}")
    return dict(cast("dict[str, Any]", options or {}))


def weights_in(name: str, given: Any) -> dict[str, float]:
    """Parse a setting that is a dict of numbers by name, or JSON from a command line.

    Raises:
        ConfigError: The value is neither, or a number is not finite.
    """
    weights = {key: number_in(value) for key, value in options_in(name, given).items()}
    for key, value in weights.items():
        require(f"GRPOEnvConfig.{name}[{shown(key)}]", value, is_number(), "a finite number")
    return weights


def role_weights_in(name: str, given: Any) -> float | dict[str, float]:
    """Parse a setting that is a non-negative number, or a dict of them by role, or JSON from a command line.

    Raises:
        ConfigError: The value is neither.
    """
    number = number_in(given)
    if is_number(0)(number):
        return float(number)
    expected = "a non-negative number, or a dict of them by the role of messages"
    if not isinstance(given, Mapping | str) or (isinstance(given, str) and not given.lstrip().startswith("{")):
        require(f"GRPOEnvConfig.{name}", given, lambda _: False, expected)
    weights = weights_in(name, given)
    for role, weight in weights.items():
        meant = misspelled(role, ("system", "user", "tool"))  # a template may have others
        require(f"GRPOEnvConfig.{name}", role, lambda _, meant=meant: meant is None, f"by role, such as {meant!r}")
        require(f"GRPOEnvConfig.{name}[{shown(role)}]", weight, is_number(0), "a non-negative number")
    return weights


def urls_in(given: Any) -> tuple[str, ...]:
    """Parse one URL, a list, or a comma-separated text; empty for any other value."""
    if isinstance(given, str):
        return tuple(url.strip() for url in given.split(","))
    return tuple(cast("list[str]", given)) if is_strings(given) else ()


def groups_in(given: Any) -> tuple[str, ...]:
    """Parse names of groups of metrics; empty if they are invalid. Command lines turn no value into None."""
    if given is None or isinstance(given, str):
        return (ALL_GROUPS if given is None else given,)
    return tuple(cast("list[str]", given)) if is_strings(given) else ()


def are_urls(value: Any) -> bool:
    """Return whether :func:`urls_in` finds one or several distinct URLs."""
    urls = urls_in(value)
    return bool(urls) and len({*urls}) == len(urls) and all(url.startswith(("http://", "https://")) for url in urls)


_SECONDS: Final = ("a positive number or None", or_none(is_seconds))


@with_help
@dataclass
class EnvSettings:
    """The settings of multi-turn training that TRL's ``GRPOConfig`` does not have.

    Attributes:
        advantage_estimator: Name of a function in :mod:`agentsgym.credit.advantages`, or a function with the same
            signature.
        estimator_kwargs: Options of that function, and for every estimator ``potential_weight``, the weight of
            potential-based shaping by the environment's ``_potential``. A dict, or JSON from a command line.
        discount: Discount over turns, γ, in [0, 1].
        layout: Conversion of rollouts to rows: ``"trajectory"`` for one row per rollout; ``"turn"`` for one row per
            stretch in which history was only appended to, which supports rewritten histories.
        shared_prefix: ``"auto"``: rows of a micro-batch that begin alike, such as a task group's, compute what they
            share once, where that saves a tenth of the tokens and the model allows it; ``"off"``: never.
        loss_aggregation: Unit that the loss averages over, instead of the loss type's: ``"token"``, ``"turn"``,
            ``"trajectory"``, ``"group"`` or ``"constant"``; None for the loss type's.
        invalid_turns: Treatment of invalid turns: ``"keep"``, ``"mask"`` (excluded from the loss) or
            ``"mask_rollout"`` (their whole rollouts are).
        truncated_rollouts: Treatment of rollouts ended by a budget: ``"keep"``, ``"mask"`` (excluded from the loss) or
            a penalty, a non-negative number subtracted from the last turn's reward and from the final reward.
        zero_variance_groups: Treatment of task groups whose final rewards are all equal: ``"keep"``, ``"drop"``, or
            ``"resample"`` (replaced by other tasks, at most three times; the rest is dropped).
        min_group_size: Minimum number of usable rollouts of a task group; smaller groups are dropped.
        value_head: Source of the values of ``turn_gae`` and ``bilevel_gae``: a head on the policy's own trunk
            (``"shared"``) or on a copy of it (``"separate"``).
        value_head_kwargs: Options of the value head: ``learning_rate`` (by default the policy's) and ``loss_weight``,
            the weight of its loss relative to the policy's (by default 1). A dict, or JSON from a command line.
        observation_loss_weight: Weight of a loss on observations (ECHO, 2605.24517), the mean of -log p over the
            observation tokens between the turns of a rollout; 0 for none. A number, or a dict of weights by the role of
            the observation's message, such as ``{"tool": 0.05}``; JSON from a command line.
        max_turn_tokens: Token budget of one turn.
        merge_adapters_for_sampling: Whether to sample with PEFT's adapters merged into copies of the weights, made anew
            for each generation batch, if they fit into the memory that is free before training. It is faster, most of
            all on a GPU; by default, the loss then corrects for the rounding of merged weights.
        stop_strings: Texts that end a turn like its end-of-turn token; their tokens stay in the turn.
        drift_interval: Number of generation batches between comparisons of the sampler's log-probabilities with the
            trained model's (the metrics ``sampling/…``), at the cost of one scoring pass unless the loss needs it
            anyway; 0 for none.
        max_staleness: Maximum number of updates between the weights that sampled a turn and those first trained on it;
            an update is one trained generation batch. 0 plays each batch after the last update; 1 plays the next batch
            concurrently; above that, a batch waits for long episodes only when they reach the limit.
        max_failed_fraction: Fraction of failed rollouts in a generation batch above which the run stops; 0 stops it at
            the first failure.
        episode_retries: Maximum number of replays of a failed rollout, before the batch is used.
        retry_seed: Start of a replayed rollout: ``"same"``, or ``"new"`` for another one, which its group need not
            share.
        turn_timeout_s: Time limit for one environment call between two actions, in seconds; None for no limit.
        episode_timeout_s: Time limit for a rollout, in seconds; None for no limit.
        preemption_grace_s: Seconds from a signal (SIGTERM, SIGHUP, Ctrl-C) to the end of the run; None to always
            finish the cycle.
        env_pool: Executor of the environments: None for the training process, ``"threads"`` for environments that
            wait, ``"processes"`` for those that compute, hang or crash. The workers end with the training or a
            stand-alone evaluation.
        env_pool_kwargs: Arguments of :class:`~agentsgym.rollouts.thread_pool.EnvThreadPool` or
            :class:`~agentsgym.rollouts.process_pool.EnvProcessPool`: ``num_workers`` (8 on each rank by default) and,
            for processes, ``max_sessions_per_worker``, ``max_memory_mb``, ``recycle_after_episodes`` and
            ``recycle_above_mb``. A dict, or JSON from a command line.
        store_rollouts: Folder of a rollout store for every rollout with its advantages; True for ``rollouts`` in
            ``output_dir``, None for no store.
        log_metrics: Groups of metrics for trackers and the terminal, keys of
            :data:`agentsgym.training.metrics.registry.GROUPS`. ``"all"`` sends everything to trackers and
            prints the group ``"summary"``. In either case ``trainer.state.log_history`` contains all metrics.
        log_conversations: Number of full conversations of the newest generation batch to log with the metrics, from
            best to worst: in the terminal, and as tables (and traces) in wandb and trackio; 0 for none.
    """

    def __new__(cls, *_args: Any, **given: Any) -> Self:
        """Reject an unknown setting with the most similar name, or with what became of it."""
        if keys := [name for name in given if name in COMMON_FIELDS and name not in cls.__dataclass_fields__]:
            raise TypeError(
                f"{cls.__name__} has no argument {keys[0]!r}, which is a key of an environment's env_config"
            )
        check_options(given, *cls.__mro__[:-1])
        return super().__new__(cls)

    advantage_estimator: str = field(default="return_to_go")
    # Typed like TRL's settings: a str is JSON from a command line.
    estimator_kwargs: dict[str, Any] | str | None = field(default=None)
    discount: float = setting(1.0, "a number in [0, 1]", is_fraction)
    layout: str = choice(LAYOUTS)
    shared_prefix: str = choice(("auto", "off"))
    loss_aggregation: str | None = choice((None, *AGGREGATIONS))
    invalid_turns: str = choice(INVALID_TURN_MODES)
    truncated_rollouts: Treatment = setting(  # noqa: RUF009  # it makes a field
        "keep",
        "'keep', 'mask' or a penalty to subtract, a non-negative number",
        lambda value: value in ("keep", "mask") or is_number(0)(number_in(value)),
    )
    zero_variance_groups: str = choice(("keep", "drop", "resample"))
    min_group_size: int = setting(1, "a positive int", is_int(1))
    value_head: str | None = choice((None, "shared", "separate"))
    value_head_kwargs: dict[str, Any] | str | None = field(default=None)
    observation_loss_weight: RoleWeights = field(default=0.0)
    max_turn_tokens: int = setting(256, "a positive int", is_int(1))
    merge_adapters_for_sampling: bool = field(default=False)
    stop_strings: list[str] | None = setting(  # noqa: RUF009  # likewise
        None,
        "a list of non-empty strings or None",
        or_none(lambda value: isinstance(value, list) and is_strings(value) and "" not in value),
    )
    drift_interval: int = setting(0, "a non-negative int", is_int(0))
    max_staleness: int = setting(0, "a non-negative int", is_int(0))
    max_failed_fraction: float = setting(0.1, "a number in [0, 1]", is_fraction)
    episode_retries: int = setting(0, "a non-negative int", is_int(0))
    retry_seed: str = choice(RETRY_SEEDS)
    turn_timeout_s: float | None = setting(None, *_SECONDS)
    episode_timeout_s: float | None = setting(None, *_SECONDS)
    preemption_grace_s: float | None = setting(25.0, "a non-negative number or None", or_none(is_number(0)))
    env_pool: str | None = choice((None, *ENV_POOLS))
    env_pool_kwargs: dict[str, Any] | str | None = field(default=None)
    store_rollouts: Folder | None = setting(  # noqa: RUF009  # likewise
        None,
        "a folder, True or None",
        or_none(lambda value: isinstance(value, bool) or (isinstance(value, str) and value != "")),
    )
    log_metrics: Groups = setting(  # noqa: RUF009  # likewise
        ALL_GROUPS, "'all' or a list of names", lambda value: groups_in(value) != ()
    )
    log_conversations: int = setting(0, "a non-negative int", is_int(0))
