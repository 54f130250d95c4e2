"""Configure a training run: all of TRL's settings, and those that many turns need."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import pickle
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Final, Self, cast

import torch
from trl import GRPOConfig

from agentsgym.batch.layouts import LAYOUTS
from agentsgym.credit.bound import BoundEstimator
from agentsgym.credit.registry import get_estimator
from agentsgym.credit.shaping import PotentialShaping
from agentsgym.credit.weights import AGGREGATIONS, INVALID_TURN_MODES
from agentsgym.errors import ConfigError
from agentsgym.failure_policy import RETRY_SEEDS
from agentsgym.fields import is_fraction, is_int, is_number, is_positive_number, or_none
from agentsgym.training.settings.asynchronous import AsyncSettings
from agentsgym.training.settings.deepspeed import check_launch
from agentsgym.training.settings.fields import choice as _choice
from agentsgym.training.settings.fields import number as _number
from agentsgym.training.settings.pools import PoolSettings
from agentsgym.training.settings.reporting import ReportSettings
from agentsgym.training.settings.storing import StoreSettings
from agentsgym.training.settings.vllm import VLLMSettings
from agentsgym.training.tensors.importance import CORRECTIONS, ImportanceCorrection
from agentsgym.training.tensors.loss_types import LOSS_TYPES, LossType
from agentsgym.training.validation import check_settings

logger = logging.getLogger(__name__)

_TRLS_BOUNDS: Final = (None, 3.0)  # of a correction under vLLM


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(text, str) and text for text in cast("list[Any]", values))


_SECONDS: Final[dict[str, Any]] = {"expected": "a positive number or None", "valid": or_none(is_positive_number)}
_GRACE: Final[dict[str, Any]] = {"expected": "a non-negative number or None", "valid": or_none(is_number(low=0.0))}


@dataclass
class GRPOEnvConfig(PoolSettings, StoreSettings, ReportSettings, VLLMSettings, AsyncSettings, GRPOConfig):
    """TRL's ``GRPOConfig`` with the settings of multi-turn training.

    Fields of TRL that matter most here: ``num_generations`` (rollouts a task), ``max_completion_length`` (everything
    after the first prompt, observations included), ``scale_rewards`` (applied to the estimator's own groups),
    ``loss_type``, ``beta``, ``num_iterations``, ``steps_per_generation``. On a machine without accelerator ``bf16`` and
    ``gradient_checkpointing``, both on by TRL's default, are off unless they are set.

    Where the environments run is that of :class:`~agentsgym.training.settings.pools.PoolSettings`, where rollouts are
    kept that of :class:`~agentsgym.training.settings.storing.StoreSettings`, what is shown and tracked that of
    :class:`~agentsgym.training.settings.reporting.ReportSettings`, vLLM servers that of
    :class:`~agentsgym.training.settings.vllm.VLLMSettings`.

    Attributes:
        advantage_estimator: Name of a function of :mod:`agentsgym.credit.advantages`, or one of your own with its
            signature.
        estimator_kwargs: Further options of that function, by name.
        potential_weight: Weight of potential-based shaping by the environment's ``_potential``; 0 for none.
        discount: γ over turns, in [0, 1].
        layout: How rollouts become rows: ``"trajectory"`` is one row a rollout; ``"turn"`` one for each stretch in
            which history only grew, which also trains rollouts whose history was rewritten.
        loss_aggregation: What the loss is a mean over, in place of the loss type's own: ``"token"``, ``"turn"``,
            ``"trajectory"``, ``"group"`` or ``"constant"``; None leaves it to the loss type.
        invalid_turns: ``"keep"``, ``"mask"`` (they are not trained on) or ``"mask_rollout"`` (nor is the rest of their
            rollouts).
        truncated_rollouts: Rollouts that a budget ended: ``"keep"``, ``"penalize"`` or ``"mask"``.
        truncation_penalty: What ``"penalize"`` subtracts from the last turn's reward and from the final reward.
        zero_variance_groups: Task groups whose final rewards are all equal: ``"keep"``, ``"drop"``, or ``"resample"``
            by other tasks, and drop what is left.
        max_resamples: How many times a generation batch is resampled at most.
        min_group_size: Task groups with fewer rollouts that count are dropped.
        vllm_importance_sampling_correction: Whether tokens are corrected for a sampler that was not the trained model,
            vLLM or another; None for under vLLM alone.
        vllm_importance_sampling_mode: The weight that corrects: one of
            :data:`agentsgym.training.tensors.importance.CORRECTIONS`.
        vllm_importance_sampling_clip_min: Lower bound of the ratio; None for the mode's own, 0 for none.
        vllm_importance_sampling_clip_max: Its upper bound; None for the mode's own, infinite for none.
        value_head: Where ``turn_gae`` and ``bilevel_gae`` get their values from: a head on the policy's own trunk
            (``"shared"``) or on a copy of it (``"separate"``).
        value_learning_rate: Learning rate of the head; None for the policy's.
        value_loss_weight: Weight of the head's loss beside the policy's.
        max_turn_tokens: The budget of one turn in tokens.
        stop_strings: Texts that end a turn as its end-of-turn token does; their tokens stay in the turn.
        turn_timeout_s: Wall-clock seconds of one call of an environment, between two actions; None for no limit.
        episode_timeout_s: Wall-clock seconds of a rollout; None for no limit.
        max_failed_fraction: The fraction of failed rollouts in a generation batch above which the run stops; 0 stops it
            at the first failure.
        episode_retries: How many times a failed rollout is played again at most, before the batch is used.
        retry_seed: ``"same"``: from the same start; ``"new"``: from another, which its group need not share.
        preemption_grace_s: Seconds from a signal (SIGTERM, SIGHUP, Ctrl-C) to the end of the run; None to always finish
            the cycle.
        drift_interval: Every so many generation batches the sampler's log-probabilities are compared with the trained
            model's own (the metrics ``sampling/…``), at the cost of one scoring pass where the loss does not need it
            anyway; 0 for never.
        use_cache: Written into the trained model's configuration; the loss runs without a cache in any case.

    Raises:
        ConfigError: A value is not valid, or TRL offers something that would go silently wrong here.
    """

    advantage_estimator: str = field(
        default="return_to_go",
        metadata={"help": "How turn rewards become advantages: return_to_go, grpo, rloo, gigpo, rebn, ..."},
    )
    # As TRL types its own: a str is JSON from a command line.
    estimator_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further options of the estimator, by name."}
    )
    potential_weight: float = _number(0.0, "Weight of potential-based shaping.", expected="a number", valid=is_number())
    discount: float = _number(1.0, "Discount over turns, in [0, 1].", expected="a number in [0, 1]", valid=is_fraction)
    layout: str = _choice("trajectory", "How rollouts become rows: 'trajectory' or 'turn'.", tuple(LAYOUTS))
    loss_aggregation: str | None = _choice(
        None, "What the loss is a mean over; None leaves it to loss_type.", (None, *AGGREGATIONS)
    )
    invalid_turns: str = _choice("keep", "'keep', 'mask' or 'mask_rollout'.", tuple(INVALID_TURN_MODES))
    truncated_rollouts: str = _choice("keep", "'keep', 'penalize' or 'mask'.", ("keep", "penalize", "mask"))
    truncation_penalty: float = _number(
        1.0, "What 'penalize' subtracts.", expected="a non-negative number", valid=is_number(low=0.0)
    )
    zero_variance_groups: str = _choice("keep", "'keep', 'drop' or 'resample'.", ("keep", "drop", "resample"))
    max_resamples: int = _number(
        3, "How often a generation batch is resampled at most.", expected="a positive int", valid=is_int(1)
    )
    min_group_size: int = _number(
        1, "Task groups with fewer rollouts are dropped.", expected="a positive int", valid=is_int(1)
    )
    value_head: str | None = _choice(None, "None, 'shared' or 'separate'.", (None, "shared", "separate"))
    value_learning_rate: float | None = _number(
        None, "The value head's learning rate.", expected="a positive number or None", valid=or_none(is_positive_number)
    )
    value_loss_weight: float = _number(
        1.0, "Weight of the value head's loss.", expected="a positive number", valid=is_positive_number
    )
    max_turn_tokens: int = _number(256, "Token budget of one turn.", expected="a positive int", valid=is_int(1))
    max_failed_fraction: float = _number(
        0.1,
        "Fraction of failed rollouts in a generation batch above which the run stops.",
        expected="a number in [0, 1]",
        valid=is_fraction,
    )
    episode_retries: int = _number(
        0, "How often a failed rollout is played again.", expected="a non-negative int", valid=is_int(0)
    )
    retry_seed: str = _choice("same", "Where it starts from: 'same' or 'new'.", RETRY_SEEDS)
    turn_timeout_s: float | None = _number(None, "Limit of one call of an environment.", **_SECONDS)
    episode_timeout_s: float | None = _number(None, "Limit of one rollout.", **_SECONDS)
    preemption_grace_s: float | None = _number(25.0, "Time from a SIGTERM to the end.", **_GRACE)
    stop_strings: list[str] | None = _number(  # noqa: RUF009  # it makes a field
        None, "Texts that end a turn.", expected="a list of non-empty strings or None", valid=or_none(_are_texts)
    )
    drift_interval: int = _number(
        0,
        "Compare the sampler's log-probabilities with the model's every so many generation batches.",
        expected="a non-negative int",
        valid=is_int(0),
    )

    # TRL's own, with another default.
    max_completion_length: int | None = _number(
        4096,
        "Token budget of everything after the first prompt, observations included.",
        expected="a positive int",
        valid=is_int(1),
    )
    gradient_checkpointing: bool | None = field(  # pyright: ignore[reportIncompatibleVariableOverride]  # TRL narrowed it
        default=None,
        metadata={"help": "Trade compute for memory; by default only where there is an accelerator."},
    )
    dataloader_pin_memory: bool | None = field(  # pyright: ignore[reportIncompatibleVariableOverride]  # likewise
        default=None, metadata={"help": "Pin memory; by default only where there is an accelerator."}
    )
    vllm_importance_sampling_correction: bool | None = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None, metadata={"help": "Correct for the sampler; by default under vLLM alone."}
    )
    # TRL's default, the ratio of a whole episode, would mask nearly every long one away.
    vllm_importance_sampling_mode: str = _choice(
        "token_truncate",
        "As TRL names them; the token modes weigh each token by its own ratio.",
        tuple(CORRECTIONS),
    )
    vllm_importance_sampling_clip_min: float | None = _number(
        None,
        "Lower bound of the ratio; by default the mode's own.",
        expected="a non-negative number or None",
        valid=or_none(is_number(low=0.0)),
    )
    vllm_importance_sampling_clip_max: float | None = _number(
        None,
        "Upper bound of the ratio; by default the mode's own.",
        expected="a positive number or None",
        valid=or_none(lambda value: value == math.inf or is_positive_number(value)),
    )
    use_cache: bool = field(
        default=True,
        metadata={"help": "Whether the trained model's configuration enables its cache."},
    )

    def __post_init__(self) -> None:
        check_launch(self)
        has_accelerator = torch.accelerator.is_available() and not self.use_cpu
        if self.bf16 is None and not self.fp16 and not has_accelerator:
            self.bf16 = False
        if self.activation_checkpointing is None and self.gradient_checkpointing is None:
            self.activation_checkpointing = has_accelerator  # its new name; transformers warns of the old one
        if self.dataloader_pin_memory is None:
            self.dataloader_pin_memory = has_accelerator  # pyright: ignore[reportIncompatibleVariableOverride]
        with self._bounds_that_trl_accepts():
            super().__post_init__()
        check_settings(self)
        if self.loss_type == "cispo" and (self.epsilon if self.epsilon_high is None else self.epsilon_high) < 1:
            logger.warning(
                "loss_type='cispo' takes epsilon_high for the bound itself, and it is below 1 (by default it is "
                "epsilon), so that even a ratio of 1 is cut: set epsilon_high=5.0 or so"
            )
        _check_picklable(self.advantage_estimator)

    @contextlib.contextmanager
    def _bounds_that_trl_accepts(self) -> Generator[None]:
        """Set a bound that cuts nothing inside: TRL wants one for some modes, where None is the mode's own here."""
        is_open = (self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max) == (None, None)
        if is_open:
            self.vllm_importance_sampling_clip_max = math.inf
        yield
        if is_open and self.vllm_importance_sampling_clip_max == math.inf:  # else TRL took it from an older name
            self.vllm_importance_sampling_clip_max = None

    # What follows from the fields

    def estimator(self) -> BoundEstimator | PotentialShaping:
        """A fresh estimator as the settings name it.

        Raises:
            ConfigError: Its name or an option is unknown, or it is shaped already and ``potential_weight`` is set.
        """
        estimator = copy.deepcopy(get_estimator(self.advantage_estimator, **_options(self.estimator_kwargs)))
        if not self.potential_weight:
            return estimator
        if isinstance(estimator, PotentialShaping):
            raise ConfigError("advantage_estimator is shaped already: leave potential_weight at 0")
        return PotentialShaping(estimator, weight=self.potential_weight)

    @property
    def loss(self) -> LossType:
        """The loss type: what it averages over and where it clips."""
        return LOSS_TYPES[self.loss_type]

    @property
    def truncation(self) -> str:
        """The treatment of truncated rollouts, by ``truncated_rollouts`` or TRL's ``mask_truncated_completions``.

        (TRL's own code judges by a row's last token, which says nothing about an episode; it does not run here.)
        """
        return "mask" if self.mask_truncated_completions else self.truncated_rollouts

    @property
    def corrects_for_sampler(self) -> bool:
        """Whether the loss is corrected for the sampler, by default where it has weights of its own."""
        given = self.vllm_importance_sampling_correction
        return (self.use_vllm or self.max_staleness > 0) if given is None else given

    @property
    def importance_correction(self) -> ImportanceCorrection | None:
        """The correction of the loss for the sampler; None for none.

        Under vLLM the default bounds are TRL's, except for ``geometric_mask``: its ratios are so close to 1 that TRL's
        bounds would cut nothing.
        """
        if not self.corrects_for_sampler:
            return None
        mode, low, high = (
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )
        own = _TRLS_BOUNDS if self.use_vllm and mode != "geometric_mask" else CORRECTIONS[mode]
        return ImportanceCorrection(
            mode=mode, clip_min=own[0] if low is None else low, clip_max=own[1] if high is None else high
        )

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether updates run on rollouts of earlier weights, so that the loss needs the sampler's log-probabilities.

        Where each batch is used once, TRL takes the current ones, detached.
        """
        return self.gradient_accumulation_steps % self.micro_steps_per_generation != 0

    def to_dict(self) -> dict[str, Any]:
        """Convert as TRL does, with a callable estimator by its name, since loggers write it as JSON."""
        values = super().to_dict()
        if callable(self.advantage_estimator):
            values["advantage_estimator"] = getattr(
                self.advantage_estimator, "__qualname__", repr(self.advantage_estimator)
            )
        return values

    @property
    def micro_steps_per_generation(self) -> int:
        """Micro-batches that are trained on between one generation batch and the next."""
        return cast("int", self.steps_per_generation) * self.num_iterations  # TRL has filled it in

    @property
    def steps_per_cycle(self) -> int:
        """Optimizer steps from one generation boundary to the next that falls on an optimizer step."""
        accumulation = self.gradient_accumulation_steps
        return math.lcm(self.micro_steps_per_generation, accumulation) // accumulation

    def generations_at(self, global_step: int) -> int:
        """Count the generation batches that have been played after a number of optimizer steps."""
        return math.ceil(global_step * self.gradient_accumulation_steps / self.micro_steps_per_generation)

    def for_trl(self) -> Self:
        """A copy of these settings as TRL reads them, defaults that depend on others filled in.

        Raises:
            ConfigError: As :meth:`with_aligned_saving`.
        """
        settings = copy.copy(self.with_aligned_saving())
        if self.vllm_server_base_urls is not None:
            settings.vllm_server_base_url = self.vllm_server_base_urls[0]  # TRL has a client of this one
        settings.vllm_importance_sampling_correction = self.corrects_for_sampler  # pyright: ignore[reportIncompatibleVariableOverride]
        return settings

    def with_aligned_saving(self) -> Self:
        """Return these settings, or a copy of them that saves at generation boundaries only.

        Inside a generation cycle, the rollouts that are still to be trained on would be lost.

        Raises:
            ConfigError: ``save_steps`` is a fraction of a run of unknown length, or the best model could not be saved
                when it is evaluated.
        """
        cycle = self.steps_per_cycle
        if self.save_strategy != "steps" or cycle == 1:
            return self
        if self.save_steps < 1 and self.max_steps <= 0:
            raise ConfigError(
                f"save_steps={self.save_steps} is a fraction of the run, whose length only max_steps gives in advance: "
                "set max_steps, or save_steps as a number of steps"
            )
        steps = self.save_steps if self.save_steps >= 1 else self.save_steps * self.max_steps
        rounded = math.ceil(steps / cycle) * cycle
        if self.load_best_model_at_end and self.eval_strategy == "steps":
            given = cast("float", self.eval_steps)  # transformers has filled it in
            every = int(given) if given >= 1 else math.ceil(given * self.max_steps)
            if every % cycle or rounded % every:
                raise ConfigError(
                    f"load_best_model_at_end saves what it evaluates, which is possible only at multiples of the "
                    f"generation cycle ({cycle}): set eval_steps ({every}) to one of them and save_steps ({steps:g}) "
                    "to the same"
                )
        if rounded == self.save_steps:
            return self
        logger.warning("save_steps: %s becomes %d, a multiple of the generation cycle", self.save_steps, rounded)
        aligned = copy.copy(self)
        aligned.save_steps = rounded
        return aligned


def _options(given: Any) -> dict[str, Any]:
    """Read the options of an estimator, also as JSON from a command line."""
    try:
        options = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError as error:
        raise ConfigError(f"GRPOEnvConfig.estimator_kwargs must be a dict or one in JSON, got {given!r}") from error
    if options is not None and not isinstance(options, dict):
        raise ConfigError(f"GRPOEnvConfig.estimator_kwargs must be a dict or one in JSON, got {given!r}")
    if unnamed := [name for name in options or () if not isinstance(name, str)]:
        raise ConfigError(f"GRPOEnvConfig.estimator_kwargs must have the names of options as keys, got {unnamed[0]!r}")
    return options or {}


def _check_picklable(estimator: Any) -> None:
    try:
        pickle.dumps(estimator)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"advantage_estimator must be a function of a module or a functools.partial of one, since every checkpoint "
            f"holds the settings, got {estimator!r}"
        ) from error
