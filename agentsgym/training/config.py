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
from agentsgym.envs.config import Check, is_int, is_number, or_none
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.rollouts.pools import Pool, ThreadPool
from agentsgym.rollouts.processes import ProcessPool

logger = logging.getLogger(__name__)

# Those whose gradient is right where each token has an advantage of its own.
LOSS_TYPES: Final = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")

ENV_POOLS: Final[dict[str, Callable[[int], Pool]]] = {"threads": ThreadPool, "processes": ProcessPool}


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(text, str) and text for text in values)


# What TRL offers and this trainer does not do, each with the reason: refused, so that nothing is silently ignored.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
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
    (
        "chat_template_kwargs",
        bool,
        "the transcript writes the template's default form: set tokenizer.chat_template to a variant that needs none",
    ),
    ("cache_implementation", lambda value: value is not None, "rollouts keep their own key/value cache across turns"),
    ("remove_unused_columns", bool, "the environment's columns would be dropped from the rows"),
    ("max_tool_calling_iterations", lambda value: value is not None, "use env_config['max_steps_per_episode']"),
    ("deepspeed", bool, "it has not been proven with this trainer: shard with fsdp=True"),
)


def _is_share(value: Any) -> bool:
    return is_number(low=0.0)(value) and value <= 1


def _is_positive(value: Any) -> bool:
    return is_number(low=0.0)(value) and value > 0


# Our own settings: what each must be, as the end of a sentence, and whether a value is.
_WANTED: tuple[tuple[str, str, Check], ...] = (
    ("discount", "a number in [0, 1]", _is_share),
    ("max_turn_tokens", "a positive int", is_int(1)),
    ("max_completion_length", "a positive int", is_int(1)),
    ("temperature", "a positive number (the loss divides by it)", _is_positive),
    ("max_failed_fraction", "a number in [0, 1]", _is_share),
    ("num_env_workers", "a positive int", is_int(1)),
    ("turn_timeout_s", "a positive number or None", or_none(_is_positive)),
    ("episode_timeout_s", "a positive number or None", or_none(_is_positive)),
    ("drift_interval", "a non-negative int", is_int(0)),
    ("stop_strings", "a list of non-empty strings or None", or_none(_are_texts)),
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
        stop_strings: Texts that end a turn as its end-of-turn token does; their tokens stay in the turn.
        env_pool: Where the environments run: None for the training process itself, ``"threads"`` for those that wait,
            ``"processes"`` for those that compute, hang or crash.
        num_env_workers: How many threads or processes those are, on each rank.
        turn_timeout_s: Wall seconds of one call of an environment between two answers; None for no limit.
        episode_timeout_s: Wall seconds of a rollout; None for no limit.
        max_failed_fraction: The share of failed rollouts in a generation batch above which the run stops.
        drift_interval: Every so many generation batches the log-probabilities that the sampler gave are compared with
            the trained model's own (the metrics ``sampling/…``), at the cost of one scoring pass where the loss does
            not need it anyway; 0 for never.
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
    env_pool: str | None = field(default=None, metadata={"help": "Where environments run: 'threads' or 'processes'."})
    num_env_workers: int = field(default=8, metadata={"help": "Threads or processes of env_pool."})
    turn_timeout_s: float | None = field(default=None, metadata={"help": "Limit of one call of an environment."})
    episode_timeout_s: float | None = field(default=None, metadata={"help": "Limit of one rollout."})
    stop_strings: list[str] | None = field(default=None, metadata={"help": "Texts that end a turn."})
    drift_interval: int = field(
        default=0,
        metadata={"help": "Compare the sampler's log-probabilities with the model's every so many generation batches."},
    )
    # TRL's default, the ratio of a whole episode, would mask nearly every long one away.
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={"help": "As TRL names them; the token modes weigh each token by its own ratio."},
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
        self._check()

    def _check(self) -> None:
        for name, wanted, is_valid in _WANTED:
            value = getattr(self, name)
            if not is_valid(value):
                raise ConfigError(f"GRPOEnvConfig.{name} must be {wanted}, got {value!r}")
        for name, is_refused, reason in _REFUSED:
            value = getattr(self, name)
            if is_refused(value):
                raise ConfigError(f"GRPOEnvConfig({name}={value!r}) is refused: {reason}")
        for name, known in (("loss_type", LOSS_TYPES), ("env_pool", (None, *ENV_POOLS))):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(
                    f"GRPOEnvConfig.{name} is unknown: {value!r}{did_you_mean(str(value), filter(None, known))}"
                )
        if self.generation_kwargs and not self.use_vllm:
            raise ConfigError(
                f"GRPOEnvConfig(generation_kwargs={self.generation_kwargs!r}) is refused without use_vllm: set "
                "temperature, top_p, top_k, min_p, repetition_penalty and stop_strings themselves"
            )

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


def _check_picklable(estimator: Any) -> None:
    try:
        pickle.dumps(estimator)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"advantage_estimator must be a function of a module or a functools.partial of one, since every checkpoint "
            f"holds the settings, got {estimator!r}"
        ) from error
