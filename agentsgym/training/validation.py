"""Check the settings of a run: single values, unsupported settings of TRL, and combinations.

The settings are typed ``Any``, since their class calls :func:`check_settings`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from transformers.integrations.integration_utils import get_reporting_integration_callbacks  # pyright: ignore[reportUnknownVariableType]

from agentsgym.credit.objectives import check_objectives
from agentsgym.credit.traits import reads_token_rewards
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.state_scores import check_discount
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Check, is_fraction, is_int, is_number, is_positive_number, one_of, require
from agentsgym.texts import shown
from agentsgym.training.settings import ALL_GROUPS, GROUPS, problem_of
from agentsgym.training.tensors.loss_types import LOSS_TYPES

if TYPE_CHECKING:
    from agentsgym.credit.registry import EstimatorTraits

logger = logging.getLogger(__name__)


def _is_no_tracker(report_to: Any) -> bool:
    try:
        get_reporting_integration_callbacks(report_to)
    except (TypeError, ValueError):  # or what cannot be a name
        return True
    return False


Rule = tuple[str, Callable[[Any], bool], str]
"""The name of a setting, a predicate of its value (or of all settings) that rejects it, and the reason."""

# Settings of TRL that this trainer does not support; they are rejected rather than silently ignored.
_UNSUPPORTED: Final[tuple[Rule, ...]] = (
    ("use_transformers_continuous_batching", bool, "rollouts keep their own key/value cache across turns"),
    (
        "chat_template_kwargs",
        lambda value: not isinstance(value, dict | None),
        "it must be a dict of options of the chat template, such as {'enable_thinking': False}",
    ),
    (
        "report_to",
        _is_no_tracker,
        "it must be 'none', 'all' or names of trackers that transformers supports, such as 'wandb' and 'trackio'",
    ),
    ("cache_implementation", lambda value: value is not None, "rollouts keep their own key/value cache across turns"),
    ("remove_unused_columns", bool, "the environment's columns would be dropped from the rows"),
    ("max_tool_calling_iterations", lambda value: value is not None, "use env_config['max_steps_per_episode']"),
    ("ignore_data_skip", bool, "a resumed run would play the first tasks of the dataset again"),
    (
        "enable_jit_checkpoint",
        bool,
        "it saves within a generation cycle, where a run cannot be resumed exactly; on SIGTERM it saves at a boundary",
    ),
)

# Checks of TRL's settings, each with the end of the sentence "must be …".
_TRL_CHECKS: Final[dict[str, tuple[Check, str]]] = {
    name: (one_of(*names), "one of " + ", ".join(map(repr, names)))
    for name, names in (
        ("loss_type", (*LOSS_TYPES,)),
        ("scale_rewards", ("none", "group", "batch")),
        ("importance_sampling_level", ("token", "sequence")),
    )
} | {
    "temperature": (is_positive_number, "a positive number (the loss divides by it)"),
    "beta": (is_number(0), "a non-negative number, the weight of the KL term"),
    "top_entropy_quantile": (is_fraction, "a number in [0, 1], the share of tokens to train on"),
    "num_iterations": (is_int(1), "a positive int"),
}


_REWARDS: Final = "rewards come from the environment: return them from its _step_episode"
_TOOLS: Final = "tools come from the environment: pass an environment with these tools as env"
_TRL_ARGUMENTS: Final = {
    "reward_funcs": _REWARDS,
    "reward_processing_classes": _REWARDS,
    "tools": _TOOLS,
    "environment_factory": "pass the environment itself as env",
    "rollout_func": "the environment is played by `agent`, or by the policy: pass it as env",
    "quantization_config": "load the model with it and pass the model",
}


def reject_trl_arguments(names: Iterable[str]) -> None:
    """Reject arguments that only TRL's constructor has."""
    for name in names:
        if name not in _TRL_ARGUMENTS:
            raise TypeError(f"GRPOEnvTrainer got an unexpected keyword argument {name!r}")
        reason = _TRL_ARGUMENTS[name]
        raise ConfigError(f"GRPOEnvTrainer does not support the argument {name} of TRL's trainer: {reason}")


def check_given(args: Any, types: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for a value that TRL and transformers would misread instead of refusing it.

    Args:
        args: The settings.
        types: Their types, by name, without those that a subclass adds.
    """
    for one in dataclasses.fields(args):
        value = getattr(args, one.name)
        if one.name in types and "check" not in one.metadata and value is not one.default:
            problem = problem_of(value, one, types[one.name])
            if problem:
                raise ConfigError(f"GRPOEnvConfig.{one.name} {problem}")
        if getattr(value, "shape", ()) != ():  # its comparisons are arrays, too
            raise ConfigError(f"GRPOEnvConfig.{one.name} must not be an array, got {shown(value)}")
    for name in ("accelerator_config", "fsdp_config", "deepspeed"):  # an int is the descriptor of an open file
        is_file: Check = lambda value: not isinstance(value, int | float)  # noqa: E731
        require(f"GRPOEnvConfig.{name}", getattr(args, name), is_file, "a dict, the path of one, or None")


def check_settings(args: Any) -> None:
    """Raise :class:`ConfigError` for an invalid value, or an invalid combination."""
    fields = {one.name: one.metadata["check"] for one in dataclasses.fields(args) if "check" in one.metadata}
    checks = {name: (check.valid, check.expected) for name, check in fields.items()} | _TRL_CHECKS
    for name, (valid, expected) in checks.items():
        require(f"GRPOEnvConfig.{name}", getattr(args, name), valid, expected)
    for name in args.tracked_groups - GROUPS.keys():
        if name == ALL_GROUPS:
            raise ConfigError(
                f"GRPOEnvConfig.log_metrics must be either 'all' or names of groups, got {args.log_metrics}"
            )
        hint = did_you_mean(name, (ALL_GROUPS, *GROUPS))
        raise ConfigError(f"GRPOEnvConfig.log_metrics has the unknown group {shown(name)}{hint}")
    for name, is_unsupported, reason in _UNSUPPORTED:
        _reject(is_unsupported(getattr(args, name)), args, name, reason)
    # These raise for invalid values; the combinations assume valid single values.
    check_objectives(args, args.estimator())
    args.make_env_pool()
    _ = args.value_head_options
    for name, is_invalid, reason in _COMBINATIONS:
        _reject(is_invalid(args), args, name, reason)
    if args.scale_rewards != "none" and _takes_rewards_as_they_are(args):
        logger.warning(
            "scale_rewards=%r is not applied: advantage_estimator=%r uses the per-token rewards unscaled; set "
            "scale_rewards='none'",
            args.scale_rewards,
            args.estimator().name,
        )


def _reject(is_rejected: bool, args: Any, name: str, reason: str) -> None:
    if is_rejected:
        raise ConfigError(f"GRPOEnvConfig({name}={shown(getattr(args, name))}) is not supported: {reason}")


def check_environment(env: MultistepEnv, args: Any, unread: set[str]) -> None:
    """Raise :class:`ConfigError` if rollouts of an environment cannot be trained on correctly.

    Args:
        env: The environment.
        args: The settings.
        unread: The warnings of per-token rewards that the estimator does not read, which a run logs once.
    """
    config = env.env_config
    if args.layout == "trajectory" and config["history"] != "append":
        # A program decides for itself what it sends.
        other = "" if config["history"] == "calls" else " or history='append'"
        raise ConfigError(
            f"env_config['history']={config['history']!r} rewrites history, but layout='trajectory' requires a "
            f"rollout to be a single row of tokens: use layout='turn'{other}"
        )
    traits = _traits(args)
    if env.overrides_score_state:
        check_discount(config, args.discount if traits is None or "discount" in traits.uses else 1.0)
    if config["turn_credit"] == "repeat_final" and traits is not None and "turn_rewards" in traits.uses:
        raise ConfigError(
            "env_config['turn_credit']='repeat_final' gives every turn the final reward, which "
            f"advantage_estimator={args.estimator().name!r} would count several times, since it sums turn rewards: "
            "use turn_credit='final'"
        )
    if traits is not None and not reads_token_rewards(traits):
        _warn_of_unread_rewards(env, args.estimator().name, unread)


def _warn_of_unread_rewards(env: MultistepEnv, estimator: str, warned: set[str]) -> None:
    """Warn of per-token rewards that do not have their default values, which most estimators ignore."""
    name, token_credit = type(env).__name__, env.env_config["token_credit"]
    is_default = type(env)._calculate_rewards is MultistepEnv._calculate_rewards  # pyright: ignore[reportPrivateUsage]
    unread = [] if is_default else [f"{name}._calculate_rewards"]
    unread += [] if token_credit == "spread" else [f"env_config['token_credit']={token_credit!r}"]
    for one in unread:
        if one not in warned:
            warned.add(one)
            logger.warning(
                "%s changes only per-token rewards, which advantage_estimator=%r does not read: return the rewards "
                "of turns from _step_episode, or use advantage_estimator='reward'",
                one,
                estimator,
            )


def _traits(args: Any) -> EstimatorTraits | None:
    return args.estimator().traits


def _reads_values(args: Any) -> bool | None:
    """Whether the estimator uses the values of a value head; None if its traits are unknown."""
    traits = _traits(args)
    return None if traits is None else traits.reads_values


def _takes_rewards_as_they_are(args: Any) -> bool:
    return reads_token_rewards(_traits(args))


def _splits_rows(args: Any) -> bool:
    return args.layout != "trajectory"


def _has_idle_bounds(args: Any) -> bool:
    bounds = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    is_set = bounds != (None, None) or args.vllm_importance_sampling_mode != "token_truncate"
    return args.importance_correction is None and not args.use_vllm and is_set


def _multiplies_what_vespo_does(args: Any) -> bool:
    correction = args.importance_correction
    is_by_row = correction is not None and not correction.mode.startswith("token")
    return args.use_vllm and args.loss.multiplies_row_ratios and is_by_row


_MEANS_OF_BATCH: Final = tuple(name for name, loss in LOSS_TYPES.items() if loss.mean_over == "tokens_of_batch")

# Invalid combinations of settings: the name of a setting, a predicate of all settings, and the reason.
_COMBINATIONS: Final[tuple[Rule, ...]] = (
    (
        "generation_kwargs",
        lambda args: bool(args.generation_kwargs) and not args.use_vllm,
        "it requires use_vllm; otherwise set temperature, top_p, top_k, min_p, repetition_penalty and stop_strings",
    ),
    (
        "vllm_server_base_url",
        lambda args: bool(args.vllm_server_urls) and not (args.use_vllm and args.vllm_mode == "server"),
        "it requires use_vllm=True and vllm_mode='server'",
    ),
    (
        "merge_adapters_for_sampling",
        lambda args: args.merge_adapters_for_sampling and (args.use_vllm or args.max_staleness > 0),
        "only the policy agent of the training process can do so, not vLLM or an agent with a copy of the weights",
    ),
    (
        "max_staleness",
        lambda args: args.max_staleness > 0 and args.use_vllm and args.vllm_mode != "server",
        "a colocated engine cannot sample during training: use vllm_mode='server'",
    ),
    (
        "max_staleness",
        lambda args: args.max_staleness > 0 and not args.corrects_for_sampler,
        "turns of older weights require the correction for the sampler: leave vllm_importance_sampling_correction on",
    ),
    (
        "max_staleness",
        lambda args: args.max_staleness > 0 and args.zero_variance_groups == "resample",
        "batches formed from finished groups cannot be resampled: use zero_variance_groups='drop'",
    ),
    (
        "truncated_rollouts",
        lambda args: args.mask_truncated_completions and args.truncated_rollouts not in ("keep", "mask"),
        "mask_truncated_completions=True masks the rollouts that it penalizes: set only one of them",
    ),
    (
        "vllm_importance_sampling_correction",
        _has_idle_bounds,
        "vllm_importance_sampling_mode, …_clip_min and …_clip_max have no effect without a correction: set it to True",
    ),
    (
        "vllm_importance_sampling_mode",
        lambda args: (one := args.importance_correction) is not None and one.bounds[0] >= one.bounds[1],
        "its lower bound must be below its upper bound (by default the mode's)",
    ),
    (
        "vllm_importance_sampling_mode",
        _multiplies_what_vespo_does,
        "loss_type='vespo' multiplies the ratios of a row's tokens, so each must be that of a single token: use "
        "'token_truncate' or 'token_mask'",
    ),
    (
        "use_bias_correction_kl",
        lambda args: args.use_bias_correction_kl and args.beta != 0 and args.importance_sampling_level == "sequence",
        "importance_sampling_level='sequence' would weight the KL term of each token by the ratio of its whole row: "
        "set it to False",
    ),
    (
        "retry_seed",
        lambda args: args.retry_seed != "same" and not args.episode_retries,
        "with episode_retries=0 no rollout is replayed: set episode_retries=1",
    ),
    (
        "min_group_size",
        lambda args: args.min_group_size > args.num_generations,
        "it exceeds num_generations, the number of rollouts per task group, so every group would be dropped",
    ),
    (
        "loss_aggregation",
        lambda args: args.loss_aggregation is not None and args.loss.mean_over != "tokens_of_batch",
        f"it requires a loss type that is a mean over all agent tokens: {', '.join(_MEANS_OF_BATCH)}",
    ),
    (
        "loss_type",
        lambda args: _splits_rows(args) and args.loss.mean_over == "tokens_of_microbatch",
        "with layout='turn' the number of rows varies, and bnpo divides by the tokens of the rows that happen to "
        "share a micro-batch: use 'dapo'",
    ),
    (
        "beta",
        lambda args: (
            _splits_rows(args) and args.beta != 0 and args.loss.mean_over not in {"tokens_of_batch", "constant"}
        ),
        "with layout='turn' a rollout has several rows, and this loss_type would weight the KL of each row like that "
        "of a whole rollout: use 'dapo'",
    ),
    (
        "entropy_coef",
        lambda args: _splits_rows(args) and (args.entropy_coef != 0 or args.use_adaptive_entropy),
        "with layout='turn' the number of rows varies, and TRL's entropy bonus is a mean over those of a micro-batch",
    ),
    (
        "top_entropy_quantile",
        lambda args: _splits_rows(args) and args.top_entropy_quantile < 1,
        "with layout='turn' the number of rows varies, and TRL's quantile is over the rows of a micro-batch",
    ),
    (
        "value_head",
        lambda args: args.value_head is None and _reads_values(args) is True,
        "advantage_estimator requires values: set value_head='shared' or 'separate'",
    ),
    (
        "value_head",
        lambda args: args.value_head is not None and _reads_values(args) is False,
        "only turn_gae, bilevel_gae and user-defined estimators use values",
    ),
    (
        "value_head_kwargs",
        lambda args: args.value_head is None and bool(args.value_head_kwargs),
        "it requires a value head: set value_head='shared' or 'separate'",
    ),
    (
        "sync_ref_model",
        lambda args: args.sync_ref_model and bool(args.fsdp),
        "a synchronized reference model is part of the run's state, which sharded checkpoints do not contain",
    ),
    ("value_head", lambda args: args.value_head is not None and bool(args.fsdp), "it is untested with sharded weights"),
    (
        "value_head",
        lambda args: args.value_head == "shared" and bool(args.torch_compile),
        "it reads hidden states of the policy, which a compiled model does not expose: use 'separate'",
    ),
    (
        "value_head",
        lambda args: args.value_head is not None and bool(args.fp16),
        "fp16 gradients are scaled, and only those of the policy are unscaled: use bf16",
    ),
    (
        "truncated_rollouts",
        lambda args: args.truncation == "penalize" and _takes_rewards_as_they_are(args),
        "advantage_estimator='reward' uses the environment's per-token rewards unchanged",
    ),
    (
        "scale_rewards",
        lambda args: args.scale_rewards == "batch" and _takes_rewards_as_they_are(args),
        "advantage_estimator='reward' uses the per-token rewards unchanged and unscaled: leave it out",
    ),
)
