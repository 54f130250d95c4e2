"""Reject settings of a stock trainer that would handle multi-turn rollouts wrongly, and explain why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from agentsgym.envs.base import MultistepEnv
from agentsgym.errors import ConfigError

logger = logging.getLogger(__name__)

Rule = tuple[str, Callable[[Any], bool], str]
"""A TRL setting, the predicate for values that are rejected, and the reason."""

_IS_SET: Final[Callable[[Any], bool]] = lambda value: value is not None  # noqa: E731  # an entry of the table

_NO_EFFECT: Final = (
    "it would have no effect, since rollout_func samples itself and keeps its own key/value cache across turns"
)

_UNSUPPORTED: Final[tuple[Rule, ...]] = (
    (
        "mask_truncated_completions",
        bool,
        "TRL detects truncation by the last token, which is an end of turn even if a turn limit ended the episode, and "
        "is not one if only the last turn was truncated: remove it",
    ),
    ("use_transformers_paged", bool, _NO_EFFECT),
    ("use_transformers_continuous_batching", bool, _NO_EFFECT),
    ("cache_implementation", _IS_SET, "rollouts keep their own key/value cache across turns"),
    ("max_tool_calling_iterations", _IS_SET, "the environment counts turns: set env_config['max_steps_per_episode']"),
    ("temperature", lambda value: not value > 0, "the loss divides by it: it must be a positive number"),
)

_TURN_LOSSES: Final = ("dapo", "cispo", "dr_grpo")

_UNSUPPORTED_BY_TURN: Final[tuple[Rule, ...]] = (
    (
        "scale_rewards",
        lambda value: value not in {"none", False},
        "the rows' rewards are already advantages, scaled by rollout_func(scale_rewards=...): set scale_rewards='none'",
    ),
    (
        "loss_type",
        lambda value: value not in _TURN_LOSSES,
        "it would weight each row by its number of tokens or by its neighbors, but a row is a part of a rollout: use "
        f"one of {', '.join(_TURN_LOSSES)}",
    ),
    (
        "importance_sampling_level",
        lambda value: value != "token",
        "a row's ratio would cover only a part of a rollout: use 'token'",
    ),
    (
        "multi_objective_aggregation",
        lambda value: value != "sum_then_normalize",
        "it divides the rows' rewards, which are already advantages, by their spread: use 'sum_then_normalize'",
    ),
    (
        "reward_weights",
        lambda value: value is not None and list(value) != [1.0],
        "the rows' rewards are already advantages: remove it",
    ),
    ("off_policy_mask_threshold", _IS_SET, "it would mask parts of a rollout separately: remove it"),
    ("top_entropy_quantile", lambda value: value < 1.0, "it would rank tokens across parts of rollouts: leave it at 1"),
)


def check_trainer(trainer: Any, *, by_turn: bool, rollouts_per_group: int | None) -> None:
    """Raise :class:`ConfigError` if the settings of a ``GRPOTrainer`` would silently produce wrong results.

    With ``by_turn``, rows are parts of rollouts, of which ``rollouts_per_group`` share the rows of a task group.
    """
    args = trainer.args
    for name, reason in _structural_errors(trainer):
        raise ConfigError(f"rollout_func does not support this trainer: {name}: {reason}")
    for name, is_unsupported, reason in (*_UNSUPPORTED, *(_UNSUPPORTED_BY_TURN if by_turn else ())):
        if hasattr(args, name) and is_unsupported(getattr(args, name)):
            setting = f"GRPOConfig({name}={getattr(args, name)!r})"
            raise ConfigError(f"{setting} is not supported with rollout_func: {reason}")
    if args.generation_kwargs and not args.use_vllm:
        raise ConfigError(
            f"GRPOConfig(generation_kwargs={args.generation_kwargs!r}) is not supported with rollout_func "
            "unless use_vllm=True: set the fields temperature, top_p, top_k, min_p and repetition_penalty of "
            "GRPOConfig instead, and pass stop_strings to rollout_func"
        )
    if by_turn:
        _check_turns(trainer, rollouts_per_group)
    mode = getattr(args, "vllm_importance_sampling_mode", "")
    if args.use_vllm and args.vllm_importance_sampling_correction and str(mode).startswith("sequence"):
        logger.warning(
            "vllm_importance_sampling_mode=%r multiplies the ratios of all tokens of a rollout, so with many turns a "
            "few rollouts dominate the loss: consider 'token_truncate', which corrects each token separately",
            mode,
        )


def _structural_errors(trainer: Any) -> Iterator[tuple[str, str]]:
    if getattr(trainer, "environment_factories", None) or getattr(trainer, "environments", None):
        yield "environment_factory", "TRL runs its environments itself: remove it or rollout_func"
    elif getattr(trainer, "tools", None):
        yield "tools", "with tools, TRL ignores env_mask, so observations would be trained on: remove the tools"
    if len(trainer.reward_funcs) == 0:
        yield "reward_funcs", "it is empty: pass reward_funcs=agentsgym.interop.environment_reward"


def _check_turns(trainer: Any, rollouts_per_group: int | None) -> None:
    num_rows = trainer.num_generations
    if rollouts_per_group is None or rollouts_per_group >= num_rows:
        raise ConfigError(
            f"with credit='turn', the num_generations={num_rows} rows of a task group hold the turns of "
            "rollouts_per_group rollouts, plus one row that makes the rewards sum to 0; so rollouts_per_group must be "
            f"an int below {num_rows}, got {rollouts_per_group!r}. For one row per turn, num_generations must be at "
            "least rollouts_per_group * turns + 1"
        )
    if len(trainer.reward_funcs) != 1:
        raise ConfigError(
            f"credit='turn' passes advantages to TRL as rewards and cannot be combined with other rewards, got "
            f"{len(trainer.reward_funcs)} reward_funcs: pass only agentsgym.interop.environment_reward"
        )
    local = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    if local % num_rows:
        raise ConfigError(
            f"credit='turn' requires complete task groups in each process: per_device_train_batch_size * "
            f"steps_per_generation ({local}) must be a multiple of num_generations ({num_rows})"
        )


def check_environment(env: MultistepEnv) -> None:
    """Raise :class:`ConfigError` if an environment's rollouts are not a single sequence of tokens."""
    history = env.env_config["history"]
    if history != "append":
        raise ConfigError(
            f"env_config['history']={history!r} rewrites history, but rollout_func must return a rollout as "
            "one sequence of tokens: use history='append', or train with GRPOEnvTrainer(layout='turn')"
        )
