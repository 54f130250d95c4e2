"""The settings of a training run that TRL does not have: their declarations, and how values of several parts are read.

What follows from them is in :mod:`agentsgym.training.config`, whose ``GRPOEnvConfig`` adds TRL's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self, cast

from agentsgym.batch.layouts import LAYOUTS
from agentsgym.credit.weights import AGGREGATIONS, INVALID_TURN_MODES
from agentsgym.errors import ConfigError
from agentsgym.failure_policy import RETRY_SEEDS
from agentsgym.fields import Check, Field, is_fraction, is_int, is_number, is_positive_number, is_strings, or_none
from agentsgym.rollouts.process_pool import EnvProcessPool
from agentsgym.rollouts.thread_pool import EnvThreadPool

ENV_POOLS: Final = MappingProxyType({"threads": EnvThreadPool, "processes": EnvProcessPool})
"""Where environments run, by the name that ``env_pool`` has for it."""

GROUPS: Final[Mapping[str, str]] = MappingProxyType({
    "summary": "what a person reads first: reward, wins, failures, loss, entropy",
    "info": "the numbers that environments give in `info`, one key each",
    "stops": "why rollouts ended, and what went wrong in them",
    "lengths": "turns and tokens",
    "by_turn": "one key for every turn index",
    "by_role": "one key for every role",
    "by_environment": "one key for every environment of a mixed batch",
    "credit": "what advantages are made from: spread, groups, filters, curriculum, value head",
    "loss": "what the loss and the optimizer do",
    "sampler": "how far the sampler is from the model",
})  # fmt: skip
"""The groups of metrics, and what each holds. ``GRPOEnvConfig.log_metrics`` chooses among them."""

ALL_GROUPS: Final = "all"

MOVED: Final[Mapping[str, str]] = MappingProxyType({
    "num_env_workers": 'is a key of env_pool_kwargs now: write env_pool_kwargs={"num_workers": 8}',
    "env_worker_sessions": 'is a key of env_pool_kwargs now: write env_pool_kwargs={"max_sessions_per_worker": 32}',
    "env_worker_memory_mb": 'is a key of env_pool_kwargs now: write env_pool_kwargs={"max_memory_mb": 2000}',
    "env_worker_recycle_episodes":
        'is a key of env_pool_kwargs now: write env_pool_kwargs={"recycle_after_episodes": 100}',
    "env_worker_recycle_mb": 'is a key of env_pool_kwargs now: write env_pool_kwargs={"recycle_above_mb": 1500}',
    "value_learning_rate": 'is a key of value_head_kwargs now: write value_head_kwargs={"learning_rate": 1e-4}',
    "value_loss_weight": 'is a key of value_head_kwargs now: write value_head_kwargs={"loss_weight": 0.5}',
    "truncation_penalty": "is the value of truncated_rollouts now: write truncated_rollouts=1.0",
    "potential_weight": 'is a key of estimator_kwargs now: write estimator_kwargs={"potential_weight": 0.5}',
    "vllm_server_base_urls":
        "is vllm_server_base_url now, which takes several: write vllm_server_base_url=http://a:8000,http://b:8000",
    "max_resamples": "is always 3 now: leave it out",
    "vllm_sync_timeout_s": "is always 600 seconds now: leave it out",
})  # fmt: skip
"""Settings of earlier versions, and how each is written now, as the end of a sentence that begins with its name."""

# A command line has one type for each setting, which is the one that stands here at run time.
if TYPE_CHECKING:
    Groups = str | list[str] | None
    Folder = bool | str
    Treatment = str | float
else:
    Groups = list[str]  # --log_metrics summary by_turn
    Folder = str  # "true" is read as True
    Treatment = str  # a number is read as one


class _Metadata(dict[str, Any]):
    """Metadata of a field, of which ``HfArgumentParser``, which copies it to argparse, gets the help alone."""

    def copy(self) -> dict[str, Any]:
        return {"help": self["help"]}

    def keys(self) -> Any:  # what ``dict(field.metadata)`` asks for
        return self.copy().keys()


def setting(default: Any, help: str, expected: str, valid: Check) -> Any:  # argparse's word
    """Declare a setting whose value is checked; ``expected`` ends the sentence "must be …"."""
    check = Field(default=default, expected=expected, valid=valid)
    return field(default=default, metadata=_Metadata(help=help, check=check))


def choice(default: str | None, help: str, choices: Sequence[str | None]) -> Any:
    """Declare a setting whose value is one of a few names."""
    names = [*choices]
    return setting(default, help, "one of " + ", ".join(map(repr, names)), lambda value: value in names)


def number_in(value: Any) -> Any:
    """Read a number that YAML or a command line left as text, as YAML does 1e-3; anything else is returned as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def options_in(name: str, given: Any) -> dict[str, Any]:
    """Read a setting that is a dict of options, or JSON from a command line.

    Raises:
        ConfigError: It is neither.
    """
    try:
        options = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError as error:
        raise ConfigError(f"GRPOEnvConfig.{name} must be a dict or one in JSON, got {given!r}") from error
    if options is not None and not isinstance(options, dict):
        raise ConfigError(f"GRPOEnvConfig.{name} must be a dict or one in JSON, got {given!r}")
    if unnamed := [key for key in options or () if not isinstance(key, str)]:
        raise ConfigError(f"GRPOEnvConfig.{name} must have the names of options as keys, got {unnamed[0]!r}")
    return dict(cast("dict[str, Any]", options or {}))


def urls_in(given: Any) -> tuple[str, ...]:
    """Read one URL, a list of them, or a text with commas between them; empty if that is not what was given."""
    if isinstance(given, str):
        return tuple(url.strip() for url in given.split(","))
    return tuple(cast("list[str]", given)) if is_strings(given) else ()


def groups_in(given: Any) -> tuple[str, ...]:
    """Read the names of groups of metrics; empty if they are not valid. None is what command lines make of no value."""
    if given is None or isinstance(given, str):
        return (ALL_GROUPS if given is None else given,)
    return tuple(cast("list[str]", given)) if is_strings(given) else ()


def are_urls(value: Any) -> bool:
    """Accept what :func:`urls_in` reads as one or several different URLs."""
    urls = urls_in(value)
    return bool(urls) and len({*urls}) == len(urls) and all(url.startswith(("http://", "https://")) for url in urls)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and is_strings(value) and all(cast("list[str]", value))


def _is_treatment(value: Any) -> bool:
    return value in ("keep", "mask") or is_number(0)(number_in(value))


def _is_folder(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and bool(value))


_SECONDS: Final = ("a positive number or None", or_none(is_positive_number))


@dataclass
class EnvSettings:
    """The settings of multi-turn training that TRL's ``GRPOConfig`` does not have.

    Attributes:
        advantage_estimator: Name of a function of :mod:`agentsgym.credit.advantages`, or one of your own with its
            signature.
        estimator_kwargs: Further options of that function, by name, and for all of them ``potential_weight``: the
            weight of potential-based shaping by the environment's ``_potential``. A dict, or JSON from a command line.
        discount: γ over turns, in [0, 1].
        layout: The way rollouts become rows: ``"trajectory"`` is one row a rollout; ``"turn"`` one for each stretch in
            which history only grew, which also trains rollouts whose history was rewritten.
        loss_aggregation: What the loss is a mean over, in place of the loss type's own: ``"token"``, ``"turn"``,
            ``"trajectory"``, ``"group"`` or ``"constant"``; None leaves it to the loss type.
        invalid_turns: Treatment of invalid turns: ``"keep"``, ``"mask"`` (they are not trained on) or
            ``"mask_rollout"`` (nor is the rest of their rollouts).
        truncated_rollouts: Treatment of rollouts that a budget ended: ``"keep"``, ``"mask"`` (they are not trained on)
            or a penalty, a non-negative number that is subtracted from the last turn's reward and from the final
            reward.
        zero_variance_groups: Treatment of task groups whose final rewards are all equal: ``"keep"``, ``"drop"``, or
            ``"resample"`` (other tasks in their place, at most three times; what is left is dropped).
        min_group_size: Smallest number of rollouts that count with which a task group is trained on.
        value_head: Source of the values of ``turn_gae`` and ``bilevel_gae``: a head on the policy's own trunk
            (``"shared"``) or on a copy of it (``"separate"``).
        value_head_kwargs: Options of the value head: ``learning_rate`` (by default the policy's) and ``loss_weight``,
            the weight of its loss beside the policy's (by default 1). A dict, or JSON from a command line.
        max_turn_tokens: Token budget of one turn.
        stop_strings: Texts that end a turn as its end-of-turn token does; their tokens stay in the turn.
        drift_interval: Number of generation batches from one comparison of the sampler's log-probabilities with the
            trained model's own (the metrics ``sampling/…``) to the next, at the cost of one scoring pass where the loss
            does not need it anyway; 0 for never.
        max_staleness: Largest number of updates between the weights that sampled a turn and those that are first
            trained on it; an update is a generation batch that was trained on. 0 plays each batch after the last
            update; 1 plays the next batch meanwhile; with more, no batch waits for long episodes until they are as old.
        max_failed_fraction: Fraction of failed rollouts in a generation batch above which the run stops; 0 stops it at
            the first failure.
        episode_retries: Number of times a failed rollout is played again at most, before the batch is used.
        retry_seed: Start of a rollout that is played again: ``"same"``, or ``"new"`` for another one, which its group
            need not share.
        turn_timeout_s: Wall-clock seconds of one call of an environment, between two actions; None for no limit.
        episode_timeout_s: Wall-clock seconds of a rollout; None for no limit.
        preemption_grace_s: Seconds from a signal (SIGTERM, SIGHUP, Ctrl-C) to the end of the run; None to always
            finish the cycle.
        env_pool: Place where the environments run: None for the training process itself, ``"threads"`` for environments
            that wait, ``"processes"`` for those that compute, hang or crash. The workers end with the training or a
            stand-alone evaluation.
        env_pool_kwargs: Arguments of :class:`~agentsgym.rollouts.thread_pool.EnvThreadPool` or
            :class:`~agentsgym.rollouts.process_pool.EnvProcessPool`: ``num_workers`` (8 on each rank by default) and,
            for processes, ``max_sessions_per_worker``, ``max_memory_mb``, ``recycle_after_episodes`` and
            ``recycle_above_mb``. A dict, or JSON from a command line.
        store_rollouts: Folder of a rollout store that keeps every rollout with its advantages; True for ``rollouts`` in
            ``output_dir``, None for no store.
        log_metrics: Groups of metrics that trackers and the terminal get, keys of
            :data:`agentsgym.training.metrics.registry.GROUPS`. ``"all"``: trackers get everything, the terminal the
            group ``"summary"``. In either case ``trainer.state.log_history`` has everything.
        log_conversations: Number of whole conversations of the newest generation batch that are shown whenever metrics
            are logged, from the best to the worst: in the terminal, and as tables (and traces) in wandb and trackio; 0
            for none.
    """

    advantage_estimator: str = field(
        default="return_to_go",
        metadata={"help": "Estimator of advantages from rewards: return_to_go, grpo, rloo, gigpo, rebn, ..."},
    )
    # As TRL types its own: a str is JSON from a command line.
    estimator_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the estimator, by name, and potential_weight, as JSON."}
    )
    discount: float = setting(1.0, "Discount over turns, in [0, 1].", "a number in [0, 1]", is_fraction)
    layout: str = choice("trajectory", "Rows of a rollout: 'trajectory' (one) or 'turn'.", tuple(LAYOUTS))
    loss_aggregation: str | None = choice(
        None, "Unit that the loss is a mean over; by default that of loss_type.", (None, *AGGREGATIONS)
    )
    invalid_turns: str = choice(
        "keep", "Treatment of invalid turns: 'keep', 'mask' or 'mask_rollout'.", tuple(INVALID_TURN_MODES)
    )
    truncated_rollouts: Treatment = setting(  # noqa: RUF009  # it makes a field
        "keep",
        "Treatment of rollouts that a budget ended: 'keep', 'mask' or the penalty to subtract.",
        "'keep', 'mask' or a penalty to subtract, a non-negative number",
        _is_treatment,
    )
    zero_variance_groups: str = choice(
        "keep", "Treatment of task groups of equal rewards: 'keep', 'drop' or 'resample'.", ("keep", "drop", "resample")
    )
    min_group_size: int = setting(1, "Smallest task group that is trained on.", "a positive int", is_int(1))
    value_head: str | None = choice(None, "Value head: 'shared' or 'separate'.", (None, "shared", "separate"))
    value_head_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the value head, learning_rate and loss_weight, as JSON."}
    )
    max_turn_tokens: int = setting(256, "Token budget of one turn.", "a positive int", is_int(1))
    stop_strings: list[str] | None = setting(  # noqa: RUF009  # likewise
        None, "Texts that end a turn.", "a list of non-empty strings or None", or_none(_are_texts)
    )
    drift_interval: int = setting(
        0,
        "Generation batches between comparisons of the sampler's log-probabilities with the model's; 0 for none.",
        "a non-negative int",
        is_int(0),
    )
    max_staleness: int = setting(
        0, "Largest number of updates by which rollouts are behind.", "a non-negative int", is_int(0)
    )
    max_failed_fraction: float = setting(
        0.1,
        "Fraction of failed rollouts in a generation batch above which the run stops.",
        "a number in [0, 1]",
        is_fraction,
    )
    episode_retries: int = setting(0, "Largest number of replays of a failed rollout.", "a non-negative int", is_int(0))
    retry_seed: str = choice("same", "Start of a replayed rollout: 'same' or 'new'.", RETRY_SEEDS)
    turn_timeout_s: float | None = setting(None, "Seconds of one call of an environment.", *_SECONDS)
    episode_timeout_s: float | None = setting(None, "Seconds of one rollout.", *_SECONDS)
    preemption_grace_s: float | None = setting(
        25.0, "Seconds from a SIGTERM to the end.", "a non-negative number or None", or_none(is_number(0))
    )
    env_pool: str | None = choice(
        None, "Place of environments other than this process: 'threads' or 'processes'.", (None, *ENV_POOLS)
    )
    env_pool_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of the pool of environments, such as num_workers, as JSON."}
    )
    store_rollouts: Folder | None = setting(  # noqa: RUF009  # likewise
        None, "Folder for all rollouts; true for one in output_dir.", "a folder, True or None", or_none(_is_folder)
    )
    log_metrics: Groups = setting(  # noqa: RUF009  # likewise
        ALL_GROUPS,
        "Groups of metrics for trackers and the terminal, or 'all'.",
        "'all' or a list of names",
        lambda value: groups_in(value) != (),
    )
    log_conversations: int = setting(0, "Whole conversations shown at every log.", "a non-negative int", is_int(0))

    def __new__(cls, *_: Any, **values: Any) -> Self:
        """Refuse the settings of earlier versions, with how each is written now."""
        for name in values:
            if name in MOVED:
                raise ConfigError(f"GRPOEnvConfig.{name} {MOVED[name]}")
        return super().__new__(cls)
