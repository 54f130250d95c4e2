"""The settings of a training run: all of TRL's, and what many turns need beside them."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from trl import GRPOConfig

from agentsgym.credit.advantages import get_estimator
from agentsgym.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

# Those whose gradient is right where each token has an advantage of its own.
LOSS_TYPES: Final = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")

# What TRL offers and this trainer does not do, each with the reason: refused, so that nothing is silently ignored.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("use_vllm", bool, "rollouts run on transformers; vLLM is not supported yet"),
    ("use_transformers_continuous_batching", bool, "rollouts keep their own key/value cache across turns"),
    ("layout", lambda value: value != "trajectory", "only layout='trajectory' is supported yet"),
    (
        "importance_sampling_level",
        lambda value: value != "token",
        "TRL's sequence-level ratio gives every token of a row the same gradient, which would erase per-turn credit",
    ),
    (
        "loss_type",
        lambda value: value == "vespo",
        "its weight turns on the sign of the whole sequence's advantage, which per-turn advantages do not have",
    ),
    (
        "off_policy_mask_threshold",
        lambda value: value is not None,
        "with per-token advantages it would drop a stale row's bad turns and keep its good ones",
    ),
    (
        "mask_truncated_completions",
        bool,
        "TRL judges truncation by a row's last token, which says nothing about a game; read stop reasons instead",
    ),
    (
        "multi_objective_aggregation",
        lambda value: value != "sum_then_normalize",
        "rewards come from the environment, one number a turn",
    ),
    (
        "scale_rewards",
        lambda value: value not in {"none", "group", "batch"},
        "it must be 'none', 'group' or 'batch'",
    ),
    ("reward_weights", lambda value: value is not None, "rewards come from the environment, one number a turn"),
    ("generation_kwargs", bool, "set temperature, top_p, top_k, min_p and repetition_penalty themselves"),
    (
        "chat_template_kwargs",
        bool,
        "the transcript writes the template's default form: set tokenizer.chat_template to a variant that needs none",
    ),
    ("cache_implementation", lambda value: value is not None, "rollouts keep their own key/value cache across turns"),
    ("remove_unused_columns", bool, "the environment's columns would be dropped from the rows"),
    ("max_tool_calling_iterations", lambda value: value is not None, "use env_config['max_steps_per_episode']"),
    ("deepspeed", bool, "training on several ranks is not supported yet"),
    ("fsdp", bool, "training on several ranks is not supported yet"),
)


@dataclass
class GRPOEnvConfig(GRPOConfig):
    """TRL's ``GRPOConfig`` with the settings of multi-turn training.

    Fields of TRL that matter most here: ``num_generations`` (rollouts a task), ``max_completion_length`` (everything
    after the first prompt, observations included), ``scale_rewards`` (applied to the estimator's own groups),
    ``loss_type``, ``beta``, ``num_iterations``, ``steps_per_generation``. On a machine without accelerator ``bf16`` and
    ``gradient_checkpointing``, both on by TRL's default, are off unless they are asked for.

    Attributes:
        advantage_estimator: Name of a function of :mod:`agentsgym.credit.advantages`, or one of your own with its
            signature.
        discount: γ over turns, in [0, 1].
        layout: How rollouts become rows: ``"trajectory"`` is one row a rollout.
        max_turn_tokens: The budget of one turn in tokens.
        max_failed_fraction: The share of failed rollouts in a generation batch above which the run stops.
        use_cache: What the trained model's configuration says of its cache; the loss runs without one in any case.

    Raises:
        ConfigError: A value is not valid, or TRL offers something that would go silently wrong here.
    """

    advantage_estimator: str = field(
        default="return_to_go",
        metadata={"help": "How turn rewards become advantages: reward, grpo, rloo, return_to_go or gigpo."},
    )
    discount: float = field(default=1.0, metadata={"help": "Discount over turns, in [0, 1]."})
    layout: str = field(default="trajectory", metadata={"help": "How rollouts become rows: 'trajectory'."})
    max_turn_tokens: int = field(default=256, metadata={"help": "Token budget of one turn."})
    max_completion_length: int | None = field(
        default=4096,
        metadata={"help": "Token budget of everything after the first prompt, observations included."},
    )
    gradient_checkpointing: bool | None = field(  # pyright: ignore[reportIncompatibleVariableOverride]  # TRL narrowed it
        default=None,
        metadata={"help": "Trade compute for memory; by default only where there is an accelerator."},
    )
    max_failed_fraction: float = field(
        default=0.1,
        metadata={"help": "Share of failed rollouts in a generation batch above which the run stops."},
    )
    use_cache: bool = field(
        default=True,
        metadata={"help": "What the trained model's configuration says of its cache."},
    )

    def __post_init__(self) -> None:
        has_accelerator = torch.accelerator.is_available() and not self.use_cpu
        if self.bf16 is None and not self.fp16 and not has_accelerator:
            self.bf16 = False
        if self.activation_checkpointing is None and self.gradient_checkpointing is None:
            self.activation_checkpointing = has_accelerator  # its new name; transformers warns of the old one
        super().__post_init__()
        get_estimator(self.advantage_estimator)
        _check_picklable(self.advantage_estimator)
        _require("discount", self.discount, "a number in [0, 1]", lambda value: 0.0 <= value <= 1.0)
        _require("max_turn_tokens", self.max_turn_tokens, "a positive int", _is_positive_int)
        _require("max_completion_length", self.max_completion_length, "a positive int", _is_positive_int)
        _require("max_failed_fraction", self.max_failed_fraction, "a number in [0, 1]", lambda value: 0 <= value <= 1)
        for name, is_refused, reason in _REFUSED:
            value = getattr(self, name)
            if is_refused(value):
                raise ConfigError(f"GRPOEnvConfig({name}={value!r}) is refused: {reason}")
        if self.loss_type not in LOSS_TYPES:
            hint = did_you_mean(self.loss_type, LOSS_TYPES)
            raise ConfigError(f"GRPOEnvConfig.loss_type is unknown: {self.loss_type!r}{hint}")
        if self.world_size > 1:
            raise ConfigError(f"training on several ranks is not supported yet, got {self.world_size} processes")

    def to_dict(self) -> dict[str, Any]:
        """TRL's, with an estimator of one's own by its name, since loggers write it as JSON."""
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
        """How many generation batches have been played when that many optimizer steps are done."""
        return math.ceil(global_step * self.gradient_accumulation_steps / self.micro_steps_per_generation)

    def align_saving(self) -> None:
        """Save on generation boundaries alone: within one, the rollouts that are still to be trained would be lost.

        Raises:
            ConfigError: ``save_steps`` is a share of a run of unknown length.
        """
        cycle = self.steps_per_cycle
        if self.save_strategy != "steps" or cycle == 1:
            return
        if self.save_steps < 1 and self.max_steps <= 0:
            raise ConfigError(
                f"save_steps={self.save_steps} is a share of the run, whose length only max_steps gives in advance: "
                "set max_steps, or save_steps as a number of steps"
            )
        steps = self.save_steps if self.save_steps >= 1 else self.save_steps * self.max_steps
        rounded = math.ceil(steps / cycle) * cycle
        if rounded != self.save_steps:
            logger.warning("save_steps: %s becomes %d, a multiple of the generation cycle", self.save_steps, rounded)
            self.save_steps = rounded


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


def _check_picklable(estimator: Any) -> None:
    try:
        pickle.dumps(estimator)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"advantage_estimator must be a function of a module or a functools.partial of one, since every checkpoint "
            f"holds the settings, got {estimator!r}"
        ) from error


def _require(name: str, value: Any, wanted: str, is_valid: Callable[[Any], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_valid(value):
        raise ConfigError(f"GRPOEnvConfig.{name} must be {wanted}, got {value!r}")
