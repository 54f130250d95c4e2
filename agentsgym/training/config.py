"""Configuration of a training run: TRL's settings and the settings of multi-turn training."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
from trl import GRPOConfig

from agentsgym.credit.objectives import AGGREGATIONS as OBJECTIVE_AGGREGATIONS
from agentsgym.credit.registry import get_estimator
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import is_int, is_number, is_positive_number, or_none, require
from agentsgym.texts import shown
from agentsgym.training.settings import (
    ALL_GROUPS,
    ENV_POOLS,
    GROUPS,
    EnvSettings,
    are_urls,
    choice,
    foreign_checks,
    groups_in,
    number_in,
    options_in,
    role_weights_in,
    setting,
    types_of,
    urls_in,
    weights_in,
    with_help,
)
from agentsgym.training.tensors.importance import CORRECTIONS, ImportanceCorrection
from agentsgym.training.tensors.loss_types import LOSS_TYPES, LossType
from agentsgym.training.validation import check_given, check_settings
from agentsgym.training.zero import check_launch
from agentsgym.versions import recompute_by_default

if TYPE_CHECKING:
    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.rollouts.process_pool import EnvProcessPool
    from agentsgym.rollouts.thread_pool import EnvThreadPool

    URLs = str | list[str]
else:
    URLs = str  # a command line has one type for each setting

logger = logging.getLogger(__name__)

_TRLS_BOUNDS: Final = (None, 3.0)  # TRL's bounds of the importance ratio with vLLM
_NUM_ENV_WORKERS: Final = 8


@with_help
@dataclass
class GRPOEnvConfig(EnvSettings, GRPOConfig):
    """TRL's ``GRPOConfig`` with the settings of multi-turn training, :class:`~agentsgym.training.settings.EnvSettings`.

    Fields of TRL that matter most here: ``num_generations`` (rollouts per task), ``max_completion_length``,
    ``scale_rewards`` (applied within the estimator's groups), ``loss_type``, ``beta``, ``num_iterations``,
    ``steps_per_generation``. Without an accelerator ``bf16``, on by default in TRL, is off unless it is set.

    Attributes:
        max_completion_length: Token budget of everything after the first prompt, observations included.
        gradient_checkpointing: Whether to trade compute for memory; by default only with an accelerator.
        dataloader_pin_memory: Whether to pin memory; by default only with an accelerator.
        vllm_importance_sampling_correction: Whether to apply importance weights because the sampler, vLLM or another,
            differs from the trained model; None to do so only with vLLM, ``max_staleness`` or
            ``merge_adapters_for_sampling``.
        vllm_importance_sampling_mode: Importance weight of the correction, one of
            :data:`agentsgym.training.tensors.importance.CORRECTIONS`.
        vllm_importance_sampling_clip_min: Lower bound of the ratio; None for the mode's default, 0 for no bound.
        vllm_importance_sampling_clip_max: Upper bound of the ratio; None for the mode's default, infinite for no bound.
        vllm_server_base_url: Base URL of a vLLM server, or several as a list or comma-separated, all reachable from
            every rank; a session always uses the same server. None for TRL's host and port. Server i receives its
            weights over port ``vllm_group_port + i``.
        reward_weights: Weights of named rewards, by name; a reward without a weight has 1, and a plain number is named
            ``"reward"``. A dict, or JSON from a command line.
        multi_objective_aggregation: ``"sum_then_normalize"``, or ``"normalize_then_sum"`` to give each named reward its
            own baseline and scale: see :mod:`agentsgym.credit.objectives`.
        use_cache: Whether the trained model's configuration enables its cache; the loss never uses one.

    Raises:
        ConfigError: A value is invalid, or a setting of TRL is not supported.
    """

    # TRL's settings with other defaults.
    max_completion_length: int | None = setting(4096, "a positive int", is_int(1))
    gradient_checkpointing: bool | None = field(default=None)  # pyright: ignore[reportIncompatibleVariableOverride]
    dataloader_pin_memory: bool | None = field(default=None)
    vllm_importance_sampling_correction: bool | None = field(default=None)  # pyright: ignore[reportIncompatibleVariableOverride]
    # TRL's default, the ratio of a whole episode, would mask nearly every long episode.
    vllm_importance_sampling_mode: str = choice(CORRECTIONS)
    vllm_importance_sampling_clip_min: float | None = setting(
        None, "a non-negative number or None", or_none(is_number(0))
    )
    vllm_importance_sampling_clip_max: float | None = setting(
        None, "a positive number or None", or_none(lambda value: value == math.inf or is_positive_number(value))
    )
    vllm_server_base_url: URLs | None = setting(  # pyright: ignore[reportIncompatibleVariableOverride]  # noqa: RUF009
        None,
        "a URL that begins with http:// or https://, several distinct ones (a list or comma-separated), or None",
        or_none(are_urls),
    )
    reward_weights: dict[str, Any] | str | None = field(default=None)
    multi_objective_aggregation: str = choice(OBJECTIVE_AGGREGATIONS)
    use_cache: bool = field(default=True)

    def __post_init__(self) -> None:
        check_given(self, types_of(GRPOEnvConfig))
        check_launch(self)
        has_accelerator = torch.accelerator.is_available() and not self.use_cpu
        if self.bf16 is None and not self.fp16 and not has_accelerator:
            self.bf16 = False
        recompute_by_default(self, is_recomputed=has_accelerator)
        if self.dataloader_pin_memory is None:
            self.dataloader_pin_memory = has_accelerator  # pyright: ignore[reportIncompatibleVariableOverride]
        has_no_bounds = (self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max) == (None, None)
        if has_no_bounds:  # TRL requires a bound for some modes, but here None stands for the default
            self.vllm_importance_sampling_clip_max = math.inf
        with foreign_checks("GRPOEnvConfig"):
            super().__post_init__()
        # Otherwise, TRL read it from a deprecated name.
        if has_no_bounds and self.vllm_importance_sampling_clip_max == math.inf:
            self.vllm_importance_sampling_clip_max = None
        if self.reward_weights is not None:
            self.reward_weights = weights_in("reward_weights", self.reward_weights)  # pyright: ignore[reportIncompatibleVariableOverride]
        self.observation_loss_weight = role_weights_in("observation_loss_weight", self.observation_loss_weight)
        check_settings(self)
        if self.loss_type == "cispo" and (self.epsilon if self.epsilon_high is None else self.epsilon_high) < 1:
            logger.warning(
                "loss_type='cispo' clips ratios at epsilon_high, which is below 1 here (its default is epsilon): even "
                "a ratio of 1 is clipped; set e.g. epsilon_high=5.0"
            )
        try:
            pickle.dumps(self.advantage_estimator)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"advantage_estimator must be picklable (a module-level function or a functools.partial of one), "
                f"since checkpoints contain the settings, got {self.advantage_estimator!r}"
            ) from error

    # Derived values

    def estimator(self) -> BoundEstimator:
        """Return a new estimator.

        Raises:
            ConfigError: The name or an option is unknown or invalid.
        """
        options = options_in("estimator_kwargs", self.estimator_kwargs)
        return copy.deepcopy(get_estimator(self.advantage_estimator, **options))

    def make_env_pool(self) -> EnvThreadPool | EnvProcessPool | None:
        """Return the pool in which the environments run; None if they run in the training process.

        Raises:
            ConfigError: ``env_pool_kwargs`` are not valid for the pool, or ``env_pool`` is not set.
        """
        options = options_in("env_pool_kwargs", self.env_pool_kwargs)
        if self.env_pool is None:
            if options:
                raise ConfigError(
                    f"GRPOEnvConfig.env_pool_kwargs requires env_pool='threads' or 'processes', got {shown(options)} "
                    "without env_pool"
                )
            return None
        pool = ENV_POOLS[self.env_pool]
        known = inspect.signature(pool).parameters
        for name in options:
            if name not in known:
                hint = did_you_mean(name, known)
                raise ConfigError(
                    f"GRPOEnvConfig.env_pool_kwargs[{shown(name)}] is unknown for env_pool={self.env_pool!r}{hint}"
                )
        try:
            return pool(**{"num_workers": _NUM_ENV_WORKERS, **options})
        except ConfigError as error:
            raise ConfigError(f"GRPOEnvConfig.env_pool_kwargs: {error}") from error

    @property
    def value_head_options(self) -> dict[str, float]:
        """The ``learning_rate`` and the ``loss_weight`` of the value head, even without one.

        Raises:
            ConfigError: ``value_head_kwargs`` has an unknown key or an invalid value.
        """
        options = {"learning_rate": self.learning_rate, "loss_weight": 1.0}
        for name, value in options_in("value_head_kwargs", self.value_head_kwargs).items():
            place, number = f"GRPOEnvConfig.value_head_kwargs[{shown(name)}]", number_in(value)
            if name not in options:
                raise ConfigError(f"{place} is unknown{did_you_mean(name, options)}")
            require(place, number, is_positive_number, "a positive number")
            options[name] = number
        return options

    @property
    def observation_loss(self) -> float | dict[str, float] | None:
        """The weights of the loss on observations; None if they are not trained on."""
        weights = cast("float | dict[str, float]", self.observation_loss_weight)
        return weights if (any(weights.values()) if isinstance(weights, dict) else weights) else None

    @property
    def rollout_folder(self) -> Path | None:
        """The folder of the rollout store; None if rollouts are not stored."""
        given = str(self.store_rollouts or "")
        if given.lower() in {"", "false", "none"}:
            return None
        return Path(cast("str", self.output_dir)) / "rollouts" if given.lower() == "true" else Path(given)

    @property
    def vllm_server_urls(self) -> tuple[str, ...]:
        """The base URLs of the vLLM servers; empty if TRL's host and port are used."""
        return urls_in(self.vllm_server_base_url or ())

    @property
    def tracked_groups(self) -> frozenset[str]:
        """The groups of metrics sent to trackers."""
        names = groups_in(self.log_metrics)
        return frozenset(GROUPS if names == (ALL_GROUPS,) else names)

    @property
    def printed_groups(self) -> frozenset[str]:
        """The groups of metrics printed in the terminal."""
        names = groups_in(self.log_metrics)
        return frozenset({"summary"} if names == (ALL_GROUPS,) else names)

    @property
    def loss(self) -> LossType:
        """The loss type, with what it averages over and where it clips."""
        return LOSS_TYPES[self.loss_type]

    @property
    def truncation(self) -> str:
        """The treatment of truncated rollouts, ``"keep"``, ``"mask"`` or ``"penalize"``.

        Set by ``truncated_rollouts`` or TRL's ``mask_truncated_completions``. (TRL's check of a row's last token would
        be wrong for episodes and is not used.)
        """
        if self.mask_truncated_completions:
            return "mask"
        return str(self.truncated_rollouts) if self.truncated_rollouts in ("keep", "mask") else "penalize"

    @property
    def truncation_penalty(self) -> float:
        """The penalty subtracted from the rewards of truncated rollouts; 0 if there is none."""
        return float(self.truncated_rollouts) if self.truncation == "penalize" else 0.0

    @property
    def corrects_for_sampler(self) -> bool:
        """Whether the loss corrects for the sampler; by default, if the sampler's weights may differ."""
        correction = self.vllm_importance_sampling_correction
        others = self.use_vllm or self.max_staleness > 0 or self.merge_adapters_for_sampling
        return others if correction is None else correction

    @property
    def importance_correction(self) -> ImportanceCorrection | None:
        """The importance correction for the sampler; None if it is off.

        With vLLM, the default bounds are TRL's, except for ``geometric_mask``, whose ratios are so close to 1 that
        TRL's bounds would have no effect.
        """
        if not self.corrects_for_sampler:
            return None
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        mode = self.vllm_importance_sampling_mode
        default = _TRLS_BOUNDS if self.use_vllm and mode != "geometric_mask" else CORRECTIONS[mode]
        return ImportanceCorrection(
            mode=mode, clip_min=default[0] if low is None else low, clip_max=default[1] if high is None else high
        )

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether updates use rollouts from earlier weights, so that the loss needs the old log-probabilities.

        If each batch is used for a single update, TRL uses the current log-probabilities, detached.
        """
        return self.gradient_accumulation_steps % self.micro_steps_per_generation != 0

    def to_dict(self) -> dict[str, Any]:
        """Convert as TRL does, but replace a callable estimator by its name, since loggers write JSON."""
        values = super().to_dict()
        if callable(self.advantage_estimator):
            name = getattr(self.advantage_estimator, "__qualname__", repr(self.advantage_estimator))
            values["advantage_estimator"] = name
        return values

    @property
    def micro_steps_per_generation(self) -> int:
        """Number of micro-batches between two generation batches."""
        return cast("int", self.steps_per_generation) * self.num_iterations  # TRL has filled it in

    @property
    def steps_per_cycle(self) -> int:
        """Length of a generation cycle: the least number of optimizer steps that use up complete generation batches."""
        accumulation = self.gradient_accumulation_steps
        return math.lcm(self.micro_steps_per_generation, accumulation) // accumulation

    def generations_at(self, global_step: int) -> int:
        """Return the number of generation batches played after a number of optimizer steps."""
        return math.ceil(global_step * self.gradient_accumulation_steps / self.micro_steps_per_generation)

    def for_trl(self) -> Self:
        """Return a copy for TRL, with defaults that depend on other settings filled in.

        Raises:
            ConfigError: See :meth:`with_aligned_saving`.
        """
        settings = copy.copy(self.with_aligned_saving())
        if self.vllm_server_urls:
            settings.vllm_server_base_url = self.vllm_server_urls[0]  # TRL connects only to the first server
        settings.reward_weights = None  # TRL has one reward
        settings.vllm_importance_sampling_correction = self.corrects_for_sampler
        return settings

    def with_aligned_saving(self) -> Self:
        """Return these settings, or a copy that saves only between generation cycles.

        A checkpoint within a generation cycle would lose the rollouts that are not trained on yet.

        Raises:
            ConfigError: ``save_steps`` is a fraction of a run of unknown length, or the best model could not be saved
                when it is evaluated.
        """
        cycle = self.steps_per_cycle
        if self.save_strategy != "steps" or cycle == 1:
            return self
        if self.save_steps < 1 and self.max_steps <= 0:
            raise ConfigError(
                f"save_steps={self.save_steps} is a fraction of a run of unknown length: set max_steps, or "
                "save_steps as a number of steps"
            )
        steps = self.save_steps if self.save_steps >= 1 else self.save_steps * self.max_steps
        rounded = math.ceil(steps / cycle) * cycle
        if self.load_best_model_at_end and self.eval_strategy == "steps":
            eval_steps = cast("float", self.eval_steps)  # transformers has filled it in
            every = int(eval_steps) if eval_steps >= 1 else math.ceil(eval_steps * self.max_steps)
            if every % cycle or rounded % every:
                raise ConfigError(
                    f"load_best_model_at_end requires eval_steps ({every}) to be a multiple of {cycle}, since "
                    f"checkpoints can be saved only every {cycle} steps, and save_steps ({steps:g}) to be a multiple "
                    "of eval_steps"
                )
        if rounded == self.save_steps:
            return self
        logger.warning(
            "save_steps=%s was rounded up to %d steps, since checkpoints can be saved only every %d steps, when all "
            "generated rollouts have been trained on",
            *(self.save_steps, rounded, cycle),
        )
        aligned = copy.copy(self)
        aligned.save_steps = rounded
        return aligned
