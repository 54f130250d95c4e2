"""The settings of a training run: all of TRL's, and what many turns need beside them."""

from __future__ import annotations

import copy
import json
import logging
import math
import pickle
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from trl import GRPOConfig

from agentsgym.credit.advantages import BoundEstimator, PotentialShaping, get_estimator
from agentsgym.errors import ConfigError
from agentsgym.training.rules import check_settings

logger = logging.getLogger(__name__)


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
        estimator_kwargs: Further options of that function, by name.
        potential_weight: Weight of potential-based shaping by what the environment's ``_potential`` says; 0 for none.
        discount: γ over turns, in [0, 1].
        layout: How rollouts become rows: ``"trajectory"`` is one row a rollout; ``"turn"`` one for each stretch in
            which history only grew, which also trains rollouts whose history was rewritten.
        loss_aggregation: What the loss is a mean over, in place of the loss type's own: ``"token"``, ``"turn"``,
            ``"trajectory"``, ``"group"`` or ``"constant"``; None leaves it to the loss type.
        invalid_turns: ``"keep"``, ``"mask"`` (nothing is learnt from them) or ``"mask_rollout"`` (nor from the rest of
            their rollouts).
        truncated_rollouts: Those that a budget ended: ``"keep"``, ``"penalise"`` or ``"mask"``.
        truncation_penalty: What ``"penalise"`` takes off the last turn's reward and the final reward.
        zero_variance_groups: Task groups whose final rewards are all equal: ``"keep"``, ``"drop"``, or ``"resample"``
            by other tasks, and drop what is left.
        max_resamples: How many times a generation batch is filled up at most.
        min_group_size: Task groups with fewer rollouts that count are dropped.
        sampler_correction: Without vLLM, the weight by which tokens are corrected for a sampler that was not the
            trained model: one of :data:`agentsgym.training.correction.CORRECTIONS`; None for no correction.
        sampler_correction_min: Its lower bound; None for the mode's own.
        sampler_correction_max: Its upper bound; None for the mode's own.
        value_head: Where ``turn_gae`` and ``bilevel_gae`` get their values from: a head on the policy's own trunk
            (``"shared"``) or on a copy of it (``"separate"``).
        value_learning_rate: The head's own; None for the policy's.
        value_loss_weight: Of the head's loss beside the policy's.
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
        metadata={"help": "How turn rewards become advantages: return_to_go, grpo, rloo, gigpo, rebn, ..."},
    )
    # As TRL types its own: a str is JSON from a command line.
    estimator_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further options of the estimator, by name."}
    )
    potential_weight: float = field(default=0.0, metadata={"help": "Weight of potential-based shaping."})
    discount: float = field(default=1.0, metadata={"help": "Discount over turns, in [0, 1]."})
    layout: str = field(default="trajectory", metadata={"help": "How rollouts become rows: 'trajectory' or 'turn'."})
    loss_aggregation: str | None = field(
        default=None, metadata={"help": "What the loss is a mean over; None leaves it to loss_type."}
    )
    invalid_turns: str = field(default="keep", metadata={"help": "'keep', 'mask' or 'mask_rollout'."})
    truncated_rollouts: str = field(default="keep", metadata={"help": "'keep', 'penalise' or 'mask'."})
    truncation_penalty: float = field(default=1.0, metadata={"help": "What 'penalise' takes off."})
    zero_variance_groups: str = field(default="keep", metadata={"help": "'keep', 'drop' or 'resample'."})
    max_resamples: int = field(default=3, metadata={"help": "How often a generation batch is filled up at most."})
    min_group_size: int = field(default=1, metadata={"help": "Task groups with fewer rollouts are dropped."})
    sampler_correction: str | None = field(
        default=None, metadata={"help": "How tokens are corrected for the sampler, without vLLM."}
    )
    sampler_correction_min: float | None = field(default=None, metadata={"help": "Its lower bound."})
    sampler_correction_max: float | None = field(default=None, metadata={"help": "Its upper bound."})
    value_head: str | None = field(default=None, metadata={"help": "None, 'shared' or 'separate'."})
    value_learning_rate: float | None = field(default=None, metadata={"help": "The value head's learning rate."})
    value_loss_weight: float = field(default=1.0, metadata={"help": "Weight of the value head's loss."})
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
        self.estimator_kwargs = _options(self.estimator_kwargs)
        if self.mask_truncated_completions and self.truncated_rollouts == "penalise":
            raise ConfigError("GRPOEnvConfig: truncated rollouts are masked or penalised, got both: leave one out")
        if self.mask_truncated_completions:  # TRL judges by a row's last token, which says nothing about a game
            self.mask_truncated_completions, self.truncated_rollouts = False, "mask"
        check_settings(self)
        if self.loss_type == "cispo" and (self.epsilon if self.epsilon_high is None else self.epsilon_high) < 1:
            logger.warning(
                "loss_type='cispo' takes epsilon_high for the bound itself, and it is below 1 (by default it is "
                "epsilon), so that even a ratio of 1 is cut: set epsilon_high=5.0 or so"
            )
        self.estimator()
        _check_picklable(self.advantage_estimator)

    def estimator(self) -> BoundEstimator | PotentialShaping:
        """A fresh estimator as the settings say.

        Raises:
            ConfigError: Its name or an option is unknown, or shaping would change nothing.
        """
        options = cast("dict[str, Any]", self.estimator_kwargs or {})
        estimator = copy.deepcopy(get_estimator(self.advantage_estimator, **options))
        if not self.potential_weight:
            return estimator
        if isinstance(estimator, PotentialShaping):
            raise ConfigError("advantage_estimator is shaped already: leave potential_weight at 0")
        return PotentialShaping(estimator, weight=self.potential_weight)

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
            ConfigError: ``save_steps`` is a share of a run of unknown length, or the best model could not be saved when
                it is evaluated.
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
        if self.load_best_model_at_end and self.eval_strategy == "steps":
            given = cast("float", self.eval_steps)  # transformers has filled it in
            every = int(given) if given >= 1 else math.ceil(given * self.max_steps)
            if every % cycle or rounded % every:
                raise ConfigError(
                    f"load_best_model_at_end saves what it evaluates, which can be done at multiples of the generation "
                    f"cycle ({cycle}) alone: set eval_steps ({every}) to one of them and save_steps ({steps:g}) to the "
                    "same"
                )


def _options(given: Any) -> dict[str, Any] | None:
    """The options of an estimator, also as JSON from a command line."""
    try:
        options = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError as error:
        raise ConfigError(f"GRPOEnvConfig.estimator_kwargs must be a dict or one in JSON, got {given!r}") from error
    if options is not None and not isinstance(options, dict):
        raise ConfigError(f"GRPOEnvConfig.estimator_kwargs must be a dict or one in JSON, got {given!r}")
    if unnamed := [name for name in options or () if not isinstance(name, str)]:
        raise ConfigError(f"GRPOEnvConfig.estimator_kwargs must have the names of options as keys, got {unnamed[0]!r}")
    return options


def _check_picklable(estimator: Any) -> None:
    try:
        pickle.dumps(estimator)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"advantage_estimator must be a function of a module or a functools.partial of one, since every checkpoint "
            f"holds the settings, got {estimator!r}"
        ) from error
