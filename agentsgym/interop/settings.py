"""Reject settings of a stock trainer that would handle multi-turn rollouts wrongly, and explain why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from agentsgym.envs.base import MultistepEnv
from agentsgym.errors import ConfigError

logger = logging.getLogger(__name__)

Rule = tuple[str, Callable[[Any], bool], str]
"""A TRL setting, the predicate of rejected values, and the reason."""

_IS_SET: Final[Callable[[Any], bool]] = lambda value: value is not None  # noqa: E731  # an entry of the table

_REFUSED: Final[tuple[Rule, ...]] = (
    (
        "mask_truncated_completions",
        bool,
        "TRL detects truncation by the last token, which is an end of turn also if a turn limit ended the episode, and "
        "no end of turn if only the last turn was truncated: leave it out",
    ),
    (
        "use_transformers_paged",
        bool,
        "it would have no effect, since rollout_func samples itself and keeps its own key/value cache across turns",
    ),
    (
        "use_transformers_continuous_batching",
        bool,
        "it would have no effect, since rollout_func samples itself and keeps its own key/value cache across turns",
    ),
    ("cache_implementation", _IS_SET, "rollouts keep their own key/value cache across turns"),
    (
        "max_tool_calling_iterations",
        _IS_SET,
        "the environment counts turns: set env_config['max_steps_per_episode']",
    ),
    ("temperature", lambda value: not value > 0, "the loss divides by it: it must be a positive number"),
)

_TURN_LOSSES: Final = ("dapo", "cispo", "dr_grpo")

_REFUSED_BY_TURN: Final[tuple[Rule, ...]] = (
    (
        "scale_rewards",
        lambda value: value not in {"none", False},
        "the rows' rewards are advantages already, scaled as set in rollout_func: set scale_rewards='none'",
    ),
    (
        "loss_type",
        lambda value: value not in _TURN_LOSSES,
        f"it would weight each row by its own tokens or its neighbors, and a row is a part of a rollout: use one of "
        f"{', '.join(_TURN_LOSSES)}",
    ),
    (
        "importance_sampling_level",
        lambda value: value != "token",
        "the ratio of a row would be that of a part of a rollout: use 'token'",
    ),
    (
        "multi_objective_aggregation",
        lambda value: value != "sum_then_normalize",
        "it divides the rows' rewards, which are advantages already, by their spread: use 'sum_then_normalize'",
    ),
    (
        "reward_weights",
        lambda value: value is not None and list(value) != [1.0],
        "the rows' rewards are advantages already: leave it out",
    ),
    ("off_policy_mask_threshold", _IS_SET, "it would mask parts of a rollout separately: leave it out"),
    ("top_entropy_quantile", lambda value: value < 1.0, "it would rank tokens across parts of rollouts: leave it at 1"),
)


def check_trainer(trainer: Any, *, by_turn: bool, rollouts_per_group: int | None) -> None:
    """Raise :class:`ConfigError` for a trainer whose settings would silently give wrong results.

    Args:
        trainer: A ``GRPOTrainer`` or one derived from it.
        by_turn: Whether rows are parts of rollouts.
        rollouts_per_group: The number of rollouts that share the rows of a task group; None for one per row.
    """
    args = trainer.args
    for name, reason in _structural_errors(trainer):
        raise ConfigError(f"rollout_func does not support this trainer: {name}: {reason}")
    for name, is_refused, reason in (*_REFUSED, *(_REFUSED_BY_TURN if by_turn else ())):
        if hasattr(args, name) and is_refused(getattr(args, name)):
            raise ConfigError(f"GRPOConfig({name}={getattr(args, name)!r}) is refused with rollout_func: {reason}")
    if args.generation_kwargs and not args.use_vllm:
        raise ConfigError(
            f"GRPOConfig(generation_kwargs={args.generation_kwargs!r}) is refused with rollout_func: without "
            "use_vllm, set temperature, top_p, top_k, min_p and repetition_penalty themselves, and stop_strings of "
            "rollout_func"
        )
    if by_turn:
        _check_turns(trainer, rollouts_per_group)
    mode = getattr(args, "vllm_importance_sampling_mode", "")
    if args.use_vllm and args.vllm_importance_sampling_correction and str(mode).startswith("sequence"):
        logger.warning(
            "vllm_importance_sampling_mode=%r multiplies the ratios of all tokens of a rollout, so that most rows of "
            "many turns fall outside its bounds: 'token_truncate' corrects each token separately",
            mode,
        )


def _structural_errors(trainer: Any) -> Iterator[tuple[str, str]]:
    if getattr(trainer, "environment_factories", None) or getattr(trainer, "environments", None):
        yield "environment_factory", "TRL runs those itself: pass one or the other"
    elif getattr(trainer, "tools", None):
        yield "tools", "TRL ignores env_mask if it has tools, so observations would be trained on: leave it out"
    if len(trainer.reward_funcs) == 0:
        yield "reward_funcs", "it is empty: pass reward_funcs=agentsgym.interop.environment_reward"


def _check_turns(trainer: Any, rollouts_per_group: int | None) -> None:
    num_rows = trainer.num_generations
    if rollouts_per_group is None or rollouts_per_group >= num_rows:
        raise ConfigError(
            f"credit='turn' uses the rows of a task group (num_generations={num_rows}) for the turns of fewer "
            f"rollouts and one row that balances their sum, so rollouts_per_group must be an int below {num_rows}, "
            f"got {rollouts_per_group!r}; rollouts_per_group * turns + 1 rows give every turn its own"
        )
    if len(trainer.reward_funcs) != 1:
        raise ConfigError(
            f"credit='turn' passes advantages to TRL as rewards and cannot be combined with other rewards, got "
            f"{len(trainer.reward_funcs)} reward_funcs: pass agentsgym.interop.environment_reward alone"
        )
    local = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    if local % num_rows:
        raise ConfigError(
            f"credit='turn' needs whole task groups on each process: per_device_train_batch_size * "
            f"steps_per_generation ({local}) must be a multiple of num_generations ({num_rows})"
        )


def check_environment(env: MultistepEnv) -> None:
    """Raise :class:`ConfigError` for an environment whose rollouts are not a single token stream."""
    history = env.env_config["history"]
    if history != "append":
        raise ConfigError(
            f"env_config['history']={history!r} rewrites history, but rollout_func must return a rollout as "
            "one sequence of tokens: use history='append', or train with GRPOEnvTrainer(layout='turn')"
        )
