"""TRL's own trainer on the small games, as its users would set it up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from games import QUIET, policy, tasks
from number_games import GuessNumber
from trl import GRPOConfig, GRPOTrainer

from agentsgym.interop import RolloutFunc, environment_reward, prompt_dataset, rollout_func


class Recorded:
    """Calls a rollout function, and keeps what it gave and whether that was for training."""

    def __init__(self, function: RolloutFunc) -> None:
        self.function = function
        self.calls: list[tuple[bool, dict[str, Any]]] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found = self.function(prompts, trainer)
        self.calls.append((trainer.model.training, found))
        return found


def stock_settings(folder: Path, **changes: Any) -> GRPOConfig:
    """Small, quiet, and without files unless requested; as ``games.settings``."""
    own = {"bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}
    return GRPOConfig(**{"output_dir": str(folder), **QUIET, **own, **changes})


def stock_trainer(
    folder: Path,
    *,
    rows: Any = None,
    env: Any = None,
    env_config: dict[str, Any] | None = None,
    rollouts: dict[str, Any] | None = None,
    weights: int = 0,
    **changes: Any,
) -> GRPOTrainer:
    """``GRPOTrainer`` on the guessing game; parts of the trainer and settings among the changes."""
    model, tokenizer = policy(weights)
    names = ("eval_dataset", "peft_config", "tools", "reward_funcs", "callbacks")
    parts = {name: changes.pop(name) for name in names if name in changes}
    function = rollout_func(
        GuessNumber(tokenizer, env_config) if env is None else env, **{"max_turn_tokens": 4, **(rollouts or {})}
    )
    return GRPOTrainer(
        model,
        args=stock_settings(folder, **changes),
        train_dataset=prompt_dataset(tasks() if rows is None else rows),
        processing_class=tokenizer,
        rollout_func=Recorded(function),
        **{"reward_funcs": environment_reward, **parts},
    )
