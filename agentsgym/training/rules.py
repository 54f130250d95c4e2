"""What the settings of a run must be, and what TRL offers that this trainer refuses, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.batch.layouts import LAYOUTS
from agentsgym.credit.advantages import (
    ESTIMATORS,
    get_estimator,
    gigpo,
    grpo,
    mt_grpo,
    rae,
    rebn,
    return_to_go,
    reward,
    rloo,
)
from agentsgym.credit.gae import bilevel_gae, turn_gae
from agentsgym.credit.weights import AGGREGATIONS, INVALID_TURN_MODES
from agentsgym.envs.config import Check, is_int, is_number, or_none
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.rollouts.pools import Pool, ThreadPool
from agentsgym.rollouts.processes import ProcessPool
from agentsgym.training.correction import CORRECTIONS

if TYPE_CHECKING:
    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.credit.shaping import PotentialShaping
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.training.config import GRPOEnvConfig

LOSS_TYPES: Final = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")

# Those that divide by the agent tokens of the whole generation batch, a number that is known when it is laid out.
TOKEN_MEANS: Final = ("dapo", "cispo", "vespo")

ENV_POOLS: Final[dict[str, Callable[[int], Pool]]] = {"threads": ThreadPool, "processes": ProcessPool}

# With whom a value head does anything.
CRITICS: Final = (turn_gae, bilevel_gae)

# Those that sum what turns are paid, and those that hold a rollout against the others of its task group.
OF_RETURNS: Final = (return_to_go, rebn, gigpo, *CRITICS)
_OF_TASK_GROUPS: Final = (grpo, rloo, return_to_go, gigpo, mt_grpo)
_BASELINES_OF_TASK_GROUPS: Final = (None, "self", "others")

# Those to which it is all one when a turn was paid.
UNDISCOUNTED: Final = (grpo, rloo, rae, mt_grpo, reward)

# A mode of agentsgym.training.correction with its lower and its upper bound.
Correction = tuple[str, float | None, float | None]

Rule = tuple[str, Callable[[Any], bool], str]

# What TRL offers and this trainer does not do, each with the reason: refused, so that nothing is silently ignored.
_REFUSED: tuple[Rule, ...] = (
    ("use_transformers_continuous_batching", bool, "rollouts keep their own key/value cache across turns"),
    (
        "multi_objective_aggregation",
        lambda value: value != "sum_then_normalize",
        "rewards come from the environment, one number a turn",
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


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(text, str) and text for text in cast("list[Any]", values))


def _is_share(value: Any) -> bool:
    return is_number(low=0.0)(value) and value <= 1


def _is_positive(value: Any) -> bool:
    return is_number(low=0.0)(value) and value > 0


# Our own settings that are numbers: what each must be, as the end of a sentence, and whether a value is.
_WANTED: tuple[tuple[str, str, Check], ...] = (
    ("discount", "a number in [0, 1]", _is_share),
    ("potential_weight", "a number", is_number()),
    ("max_turn_tokens", "a positive int", is_int(1)),
    ("max_completion_length", "a positive int", is_int(1)),
    ("temperature", "a positive number (the loss divides by it)", _is_positive),
    ("max_failed_fraction", "a number in [0, 1]", _is_share),
    ("truncation_penalty", "a number", is_number()),
    ("max_resamples", "a positive int", is_int(1)),
    ("min_group_size", "a positive int", is_int(1)),
    ("value_learning_rate", "a positive number or None", or_none(_is_positive)),
    ("value_loss_weight", "a positive number", _is_positive),
    ("sampler_correction_min", "a non-negative number or None", or_none(is_number(low=0.0))),
    ("sampler_correction_max", "a positive number or None", or_none(_is_positive)),
    ("num_env_workers", "a positive int", is_int(1)),
    ("turn_timeout_s", "a positive number or None", or_none(_is_positive)),
    ("episode_timeout_s", "a positive number or None", or_none(_is_positive)),
    ("drift_interval", "a non-negative int", is_int(0)),
    ("stop_strings", "a list of non-empty strings or None", or_none(_are_texts)),
)

# Settings that are one of a few names.
_NAMES: Final[dict[str, tuple[str | None, ...]]] = {
    "loss_type": LOSS_TYPES,
    "scale_rewards": ("none", "group", "batch"),
    "importance_sampling_level": ("token", "sequence"),
    "layout": tuple(LAYOUTS),
    "loss_aggregation": (None, *AGGREGATIONS),
    "sampler_correction": (None, *CORRECTIONS),
    "vllm_importance_sampling_mode": tuple(CORRECTIONS),
    "invalid_turns": tuple(INVALID_TURN_MODES),
    "truncated_rollouts": ("keep", "penalise", "mask"),
    "zero_variance_groups": ("keep", "drop", "resample"),
    "value_head": (None, "shared", "separate"),
    "env_pool": (None, *ENV_POOLS),
}


_TRLS_BOUNDS = (None, 3.0)


def compares_in_task_groups(estimator: BoundEstimator | PotentialShaping) -> bool:
    """Whether it holds a rollout against the others of its task."""
    is_of_groups = estimator.options.get("baseline") in _BASELINES_OF_TASK_GROUPS
    return estimator.function in _OF_TASK_GROUPS and is_of_groups


def correction_of(args: GRPOEnvConfig) -> Correction | None:
    """The mode that corrects for the sampler and its bounds; None where nothing does."""
    if args.use_vllm:
        if not args.vllm_importance_sampling_correction:
            return None
        mode = args.vllm_importance_sampling_mode
        low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        if mode != "geometric_mask":
            return mode, low, high
        # TRL's defaults are meant for the ratios of its own modes: next to 1, nothing would lie outside of them.
        ours = CORRECTIONS[mode]
        return mode, ours[0] if low == _TRLS_BOUNDS[0] else low, ours[1] if high == _TRLS_BOUNDS[1] else high
    if args.sampler_correction is None:
        return None
    low, high = CORRECTIONS[args.sampler_correction]
    return (
        args.sampler_correction,
        low if args.sampler_correction_min is None else args.sampler_correction_min,
        high if args.sampler_correction_max is None else args.sampler_correction_max,
    )


def check_environment(env: MultistepEnv, args: GRPOEnvConfig) -> None:
    """Raise :class:`ConfigError` for an environment whose rollouts the settings would make something wrong of."""
    config, estimator = env.env_config, get_estimator(args.advantage_estimator)
    if args.layout == "trajectory" and config["history"] != "append":
        raise ConfigError(
            f"env_config['history']={config['history']!r} rewrites history, so that a rollout is no single row of "
            "tokens, and layout='trajectory' trains one row a rollout: use layout='turn' or history='append'"
        )
    if config["turn_credit"] == "repeat_final" and estimator.function in (*OF_RETURNS, mt_grpo):
        raise ConfigError(
            "env_config['turn_credit']='repeat_final' pays the final reward on every turn, and advantage_estimator="
            f"{estimator.name!r} adds what turns are paid to what else they brought, so that it would count many "
            "times: use turn_credit='final'"
        )


def check_settings(args: GRPOEnvConfig) -> None:
    """Raise :class:`ConfigError` for a value that is not valid, or a pair of values that do not go together."""
    complaints = [*_unwanted(args), *_refused(args), *_unknown(args)]
    for name, is_refused, reason in () if complaints else _TOGETHER:  # which read values that are valid by themselves
        if is_refused(args):
            complaints.append(f"({name}={getattr(args, name)!r}) is refused: {reason}")
    if complaints:
        raise ConfigError(f"GRPOEnvConfig{complaints[0]}")


def _unwanted(args: GRPOEnvConfig) -> Iterator[str]:
    for name, wanted, is_valid in _WANTED:
        value = getattr(args, name)
        if not is_valid(value):
            yield f".{name} must be {wanted}, got {value!r}"


def _refused(args: GRPOEnvConfig) -> Iterator[str]:
    for name, is_refused, reason in _REFUSED:
        value = getattr(args, name)
        if is_refused(value):
            yield f"({name}={value!r}) is refused: {reason}"


def _unknown(args: GRPOEnvConfig) -> Iterator[str]:
    for name, known in _NAMES.items():
        value = getattr(args, name)
        if value not in known:
            yield f".{name} is unknown: {value!r}{did_you_mean(str(value), [choice for choice in known if choice])}"


def _function(args: GRPOEnvConfig) -> Any:
    return get_estimator(args.advantage_estimator).function


def _has_critic(args: GRPOEnvConfig) -> bool:
    return _function(args) in CRITICS


def _splits_rows(args: GRPOEnvConfig) -> bool:
    return args.layout != "trajectory"


def _has_crossed_bounds(args: GRPOEnvConfig) -> bool:
    _, low, high = correction_of(args) or (None, None, None)
    return low is not None and high is not None and low >= high


# What does not go together: the setting to blame, whether the settings are so, and why they may not be.
_TOGETHER: tuple[Rule, ...] = (
    (
        "generation_kwargs",
        lambda args: bool(args.generation_kwargs) and not args.use_vllm,
        "without use_vllm set temperature, top_p, top_k, min_p, repetition_penalty and stop_strings themselves",
    ),
    (
        "sampler_correction",
        lambda args: args.use_vllm and args.sampler_correction is not None,
        "under vLLM it is vllm_importance_sampling_mode that says how the loss is corrected for the sampler",
    ),
    (
        "sampler_correction",
        lambda args: (
            args.sampler_correction is None
            and (args.sampler_correction_min is not None or args.sampler_correction_max is not None)
        ),
        "sampler_correction_min and sampler_correction_max bound nothing without a mode",
    ),
    (
        "sampler_correction",
        _has_crossed_bounds,
        "its lower bound must lie below the upper one (each is the mode's own where it is not set)",
    ),
    (
        "vllm_importance_sampling_mode",
        lambda args: (
            args.use_vllm
            and args.vllm_importance_sampling_correction
            and args.loss_type == "vespo"
            and args.vllm_importance_sampling_mode not in _BY_TOKEN
        ),
        "loss_type='vespo' multiplies the ratios of a row's tokens, so that they must be those of single tokens: "
        "'token_truncate' or 'token_mask'",
    ),
    (
        "use_bias_correction_kl",
        lambda args: args.use_bias_correction_kl and args.beta != 0 and args.importance_sampling_level == "sequence",
        "importance_sampling_level='sequence' would weigh the KL term of each token by the ratio of its whole row: "
        "set it to False",
    ),
    (
        "min_group_size",
        lambda args: args.min_group_size > args.num_generations,
        "no task group has more rollouts than num_generations, so that all would be dropped",
    ),
    (
        "loss_aggregation",
        lambda args: args.loss_aggregation is not None and args.loss_type not in TOKEN_MEANS,
        f"it is folded into a loss that is a mean over all agent tokens, {', '.join(TOKEN_MEANS)}; the others have an "
        "aggregation of their own",
    ),
    (
        "loss_type",
        lambda args: _splits_rows(args) and args.loss_type == "bnpo",
        "layout='turn' makes the number of rows vary, and bnpo divides by the tokens of the rows that happen to share "
        "a micro-batch: use 'dapo'",
    ),
    (
        "beta",
        lambda args: _splits_rows(args) and args.beta != 0 and args.loss_type not in (*TOKEN_MEANS, "dr_grpo"),
        "layout='turn' makes several rows of a rollout, and this loss_type would weigh the KL of each row like that of "
        "a whole rollout: use 'dapo'",
    ),
    (
        "entropy_coef",
        lambda args: _splits_rows(args) and (args.entropy_coef != 0 or args.use_adaptive_entropy),
        "layout='turn' makes the number of rows vary, and TRL's entropy bonus is a mean over those of a micro-batch",
    ),
    (
        "top_entropy_quantile",
        lambda args: _splits_rows(args) and args.top_entropy_quantile < 1,
        "layout='turn' makes the number of rows vary, and TRL's quantile is over those of a micro-batch",
    ),
    (
        "value_head",
        lambda args: args.value_head is None and _has_critic(args),
        "advantage_estimator needs values: set value_head='shared' or 'separate'",
    ),
    (
        "value_head",
        lambda args: args.value_head is not None and _function(args) in ESTIMATORS.values() and not _has_critic(args),
        "only turn_gae, bilevel_gae and estimators of your own look at values",
    ),
    (
        "value_learning_rate",
        lambda args: args.value_head is None and args.value_learning_rate is not None,
        "there is no value head to learn at it",
    ),
    (
        "value_head",
        lambda args: args.value_head is not None and bool(args.fsdp),
        "it has not been proven with sharded weights",
    ),
    (
        "value_head",
        lambda args: args.value_head == "shared" and bool(args.torch_compile),
        "it reads the hidden states of the policy's forward, which a compiled model does not show: use 'separate'",
    ),
    (
        "value_head",
        lambda args: args.value_head is not None and bool(args.fp16),
        "the gradients of fp16 are scaled, and only those of the policy are scaled back: use bf16",
    ),
    (
        "truncated_rollouts",
        lambda args: args.truncated_rollouts == "penalise" and _function(args) is reward,
        "advantage_estimator='reward' takes the per-token rewards as the environment laid them out",
    ),
)

_BY_TOKEN = ("token_truncate", "token_mask")
