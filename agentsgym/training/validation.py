"""Check the settings of a run: each value by itself, what TRL offers and is refused here, and combinations.

The settings are typed ``Any``: their class calls :func:`check_settings` when it is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Check, is_positive_number, one_of, require
from agentsgym.texts import shown
from agentsgym.training.settings import ALL_GROUPS, GROUPS
from agentsgym.training.tensors.loss_types import LOSS_TYPES

if TYPE_CHECKING:
    from agentsgym.credit.registry import EstimatorTraits
    from agentsgym.envs.base import MultistepEnv

Rule = tuple[str, Callable[[Any], bool], str]
"""The setting to name, whether its value (or the settings together) is refused, and why."""

# What TRL offers and this trainer does not do, each with the reason: refused, so that nothing is silently ignored.
_REFUSED: Final[tuple[Rule, ...]] = (
    ("use_transformers_continuous_batching", bool, "rollouts keep their own key/value cache across turns"),
    (
        "multi_objective_aggregation",
        lambda value: value != "sum_then_normalize",
        "rewards come from the environment, one number a turn",
    ),
    ("reward_weights", lambda value: value is not None, "rewards come from the environment, one number a turn"),
    (
        "chat_template_kwargs",
        lambda value: not isinstance(value, dict | None),
        "it must be a dict of options of the chat template, such as {'enable_thinking': False}",
    ),
    ("cache_implementation", lambda value: value is not None, "rollouts keep their own key/value cache across turns"),
    ("remove_unused_columns", bool, "the environment's columns would be dropped from the rows"),
    ("max_tool_calling_iterations", lambda value: value is not None, "use env_config['max_steps_per_episode']"),
    ("ignore_data_skip", bool, "a resumed run would play the first tasks of the dataset again"),
    (
        "enable_jit_checkpoint",
        bool,
        "it saves inside a generation cycle, where a run cannot go on exactly; on SIGTERM a run saves where it can",
    ),
)

# TRL's own settings that must be one of a few names or a number: a check, and the end of the sentence "must be …".
_TRL_CHECKS: Final[dict[str, tuple[Check, str]]] = {
    name: (one_of(*names), "one of " + ", ".join(map(repr, names)))
    for name, names in (
        ("loss_type", (*LOSS_TYPES,)),
        ("scale_rewards", ("none", "group", "batch")),
        ("importance_sampling_level", ("token", "sequence")),
    )
} | {"temperature": (is_positive_number, "a positive number (the loss divides by it)")}


_REWARDS: Final = "rewards come from the environment: return them from its _step_episode"
_TOOLS: Final = "tools are those of the environment: pass an environment that has them as env"
_TRL_ARGUMENTS: Final = {
    "reward_funcs": _REWARDS,
    "reward_processing_classes": _REWARDS,
    "tools": _TOOLS,
    "environment_factory": "pass the environment itself as env",
    "rollout_func": "the environment is played by `agent`, or by the policy: pass it as env",
    "quantization_config": "load the model with it, and pass the model",
}


def refuse_trl_arguments(names: Iterable[str]) -> None:
    """Refuse arguments that only TRL's constructor has.

    Raises:
        ConfigError: One of TRL's; the message says what is used in its place.
        TypeError: One that nobody has.
    """
    for name in names:
        if name not in _TRL_ARGUMENTS:
            raise TypeError(f"GRPOEnvTrainer got an unexpected keyword argument {name!r}")
        reason = _TRL_ARGUMENTS[name]
        raise ConfigError(f"{name} is an argument of TRL's trainer that GRPOEnvTrainer does not take: {reason}")


def check_settings(args: Any) -> None:
    """Raise :class:`ConfigError` for a value that is not valid, or values that do not go together."""
    own = ((one.name, one.metadata["check"]) for one in dataclasses.fields(args) if "check" in one.metadata)
    for name, (valid, expected) in ({name: (one.valid, one.expected) for name, one in own} | _TRL_CHECKS).items():
        require(f"GRPOEnvConfig.{name}", getattr(args, name), valid, expected)
    _check_groups(args)
    for name, is_refused, reason in _REFUSED:
        _refuse(is_refused(getattr(args, name)), args, name, reason)
    args.estimator()  # this and the next two raise if they are wrong; the combinations read what is valid by itself
    args.make_env_pool()
    _ = args.value_head_options
    for name, is_refused, reason in _COMBINATIONS:
        _refuse(is_refused(args), args, name, reason)


def _refuse(is_refused: bool, args: Any, name: str, reason: str) -> None:
    if is_refused:
        raise ConfigError(f"GRPOEnvConfig({name}={getattr(args, name)!r}) is refused: {reason}")


def _check_groups(args: Any) -> None:
    for name in args.tracked_groups - GROUPS.keys():
        hint = did_you_mean(name, (ALL_GROUPS, *GROUPS))
        raise ConfigError(f"GRPOEnvConfig.log_metrics has no group {shown(name)}{hint}")


def check_environment(env: MultistepEnv, args: Any) -> None:
    """Raise :class:`ConfigError` for an environment whose rollouts cannot be trained on correctly."""
    config = env.env_config
    if args.layout == "trajectory" and config["history"] != "append":
        raise ConfigError(
            f"env_config['history']={config['history']!r} rewrites history, so that a rollout is no single row of "
            "tokens, and layout='trajectory' trains one row per rollout: use layout='turn' or history='append'"
        )
    traits = _traits(args)
    if config["turn_credit"] == "repeat_final" and traits is not None and "turn_rewards" in traits.uses:
        raise ConfigError(
            "env_config['turn_credit']='repeat_final' gives the final reward for every turn, and advantage_estimator="
            f"{args.estimator().name!r} adds turn rewards up, so that it would count many times: "
            "use turn_credit='final'"
        )


def _traits(args: Any) -> EstimatorTraits | None:
    return args.estimator().traits


def _is_without_values(args: Any) -> bool:
    """Whether a value head would be trained that the estimator is known not to use."""
    traits = _traits(args)
    return args.value_head is not None and traits is not None and not traits.reads_values


def _lacks_values(args: Any) -> bool:
    traits = _traits(args)
    return args.value_head is None and traits is not None and traits.reads_values


def _takes_rewards_as_they_are(args: Any) -> bool:
    traits = _traits(args)
    return traits is not None and "per_token_rewards" in traits.uses


def _splits_rows(args: Any) -> bool:
    return args.layout != "trajectory"


def _has_crossed_bounds(args: Any) -> bool:
    correction = args.importance_correction
    return correction is not None and correction.bounds[0] >= correction.bounds[1]


def _has_idle_bounds(args: Any) -> bool:
    bounds = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    return args.importance_correction is None and not args.use_vllm and bounds != (None, None)


def _multiplies_what_vespo_does(args: Any) -> bool:
    correction = args.importance_correction
    is_by_row = correction is not None and not correction.mode.startswith("token")
    return args.use_vllm and args.loss.multiplies_row_ratios and is_by_row


_MEANS_OF_BATCH: Final = tuple(name for name, loss in LOSS_TYPES.items() if loss.mean_over == "tokens_of_batch")

# Settings that do not go together: the one to name, a test of all of them, and the reason.
_COMBINATIONS: Final[tuple[Rule, ...]] = (
    (
        "generation_kwargs",
        lambda args: bool(args.generation_kwargs) and not args.use_vllm,
        "without use_vllm set temperature, top_p, top_k, min_p, repetition_penalty and stop_strings themselves",
    ),
    (
        "vllm_server_base_url",
        lambda args: bool(args.vllm_server_urls) and not (args.use_vllm and args.vllm_mode == "server"),
        "a server is sampled from with use_vllm=True and vllm_mode='server': set both",
    ),
    (
        "max_staleness",
        lambda args: args.max_staleness > 0 and args.use_vllm and args.vllm_mode != "server",
        "a colocated engine samples and trains in turn: use vllm_mode='server'",
    ),
    (
        "max_staleness",
        lambda args: args.max_staleness > 0 and not args.corrects_for_sampler,
        "turns of older weights need the correction for the sampler: leave vllm_importance_sampling_correction alone",
    ),
    (
        "max_staleness",
        lambda args: args.max_staleness > 0 and args.zero_variance_groups == "resample",
        "a batch of groups that are finished is formed once: use zero_variance_groups='drop'",
    ),
    (
        "truncated_rollouts",
        lambda args: args.mask_truncated_completions and args.truncated_rollouts not in ("keep", "mask"),
        "mask_truncated_completions=True masks what it penalizes: leave one out",
    ),
    (
        "vllm_importance_sampling_correction",
        _has_idle_bounds,
        "vllm_importance_sampling_clip_min and vllm_importance_sampling_clip_max bound nothing without a correction: "
        "set it to True",
    ),
    (
        "vllm_importance_sampling_mode",
        _has_crossed_bounds,
        "its lower bound must lie below the upper one (each is the mode's own where it is not set)",
    ),
    (
        "vllm_importance_sampling_mode",
        _multiplies_what_vespo_does,
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
        lambda args: args.loss_aggregation is not None and args.loss.mean_over != "tokens_of_batch",
        f"it is folded into a loss that is a mean over all agent tokens, {', '.join(_MEANS_OF_BATCH)}; the others have "
        "an aggregation of their own",
    ),
    (
        "loss_type",
        lambda args: _splits_rows(args) and args.loss.mean_over == "tokens_of_microbatch",
        "layout='turn' makes the number of rows vary, and bnpo divides by the tokens of the rows that happen to share "
        "a micro-batch: use 'dapo'",
    ),
    (
        "beta",
        lambda args: (
            _splits_rows(args) and args.beta != 0 and args.loss.mean_over not in {"tokens_of_batch", "constant"}
        ),
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
        _lacks_values,
        "advantage_estimator needs values: set value_head='shared' or 'separate'",
    ),
    (
        "value_head",
        _is_without_values,
        "only turn_gae, bilevel_gae and estimators of your own look at values",
    ),
    (
        "value_head_kwargs",
        lambda args: args.value_head is None and bool(args.value_head_kwargs),
        "there is no value head to take them: set value_head='shared' or 'separate'",
    ),
    (
        "sync_ref_model",
        lambda args: args.sync_ref_model and bool(args.fsdp),
        "the reference that moves is part of the run's state, and with sharded weights no checkpoint holds it",
    ),
    (
        "value_head",
        lambda args: args.value_head is not None and bool(args.fsdp),
        "it has not been proven with sharded weights",
    ),
    (
        "value_head",
        lambda args: args.value_head == "shared" and bool(args.torch_compile),
        "it reads the hidden states of the policy's forward, which a compiled model does not expose: use 'separate'",
    ),
    (
        "value_head",
        lambda args: args.value_head is not None and bool(args.fp16),
        "the gradients of fp16 are scaled, and only those of the policy are scaled back: use bf16",
    ),
    (
        "truncated_rollouts",
        lambda args: args.truncation == "penalize" and _takes_rewards_as_they_are(args),
        "advantage_estimator='reward' takes the per-token rewards as the environment laid them out",
    ),
    (
        "scale_rewards",
        lambda args: args.scale_rewards == "batch" and _takes_rewards_as_they_are(args),
        "advantage_estimator='reward' takes the per-token rewards as they are, so that nothing is scaled: leave it out",
    ),
)
