"""Small games and small policies that the tests of the trainer play with."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerate.utils.imports
import torch
from datasets import Dataset
from number_games import NUMBERS, GuessNumber, SayBlue
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from agentsgym import Agent, Demonstrations, GRPOEnvConfig, GRPOEnvTrainer, tiny_policy
from agentsgym.training.generation.batch import GenerationBatch

# A trainer looks twenty packages up, in the file system each time.
_look_up = accelerate.utils.imports._is_package_available
accelerate.utils.imports._is_package_available = functools.cache(_look_up)
_tiny_policy = functools.cache(tiny_policy)
__all__ = ["NUMBERS", "GuessNumber", "SayBlue"]  # the games, beside what stands here
# Before transformers 5.23, the setting has its earlier name.
NEW_NAME = hasattr(TrainingArguments, "activation_checkpointing")
CLOCKS = {
    "step_time",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "train_loss",
    "total_flos",
}
RECOMPUTED: dict[str, Any] = {"activation_checkpointing" if NEW_NAME else "gradient_checkpointing": True}
WORDS = [
    f"Guess a number from one to six. Higher. Lower. A number, please. {' '.join(NUMBERS)}",
    "Say a color. red blue",
]


class TextAgent(Agent):
    """Answers the numbers one after the other, as text alone."""

    def get_action(self, messages: Sequence[Any], agent_state: Any) -> tuple[str, Any]:
        turn = agent_state or 0
        return NUMBERS[turn % len(NUMBERS)], turn + 1


def policy(seed: int = 0, *, num_layers: int = 1) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Llama of width 32 and its tokenizer: copies, which take less time than new ones."""
    return copy.deepcopy(_tiny_policy(tuple(WORDS), hidden_size=32, num_heads=2, num_layers=num_layers, seed=seed))


def saved_policy(folder: Path) -> str:
    """The folder, in which a new policy and its tokenizer now are."""
    for part in policy():
        part.save_pretrained(folder)
    return str(folder)


def demonstrated(num_episodes: int = 6, **changes: Any) -> Demonstrations:
    """Episodes of a player that counts, to be imitated during training."""
    env = GuessNumber(policy()[1])
    return Demonstrations(trajectories=env.rollout([{"seed": n} for n in range(num_episodes)], TextAgent()), **changes)


@functools.cache
def tasks(num_tasks: int = 8, **task_data: Any) -> Dataset:
    """Rows of any game: tasks that differ in their seed alone."""
    return Dataset.from_list([{"task_data": {"seed": seed, **task_data}} for seed in range(num_tasks)])


QUIET: dict[str, Any] = {
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "max_steps": 2,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 100,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
}


def settings(folder: Path, **changes: Any) -> GRPOEnvConfig:
    """Small, quiet, and without files unless requested."""
    return GRPOEnvConfig(**{"output_dir": str(folder), **QUIET, "max_turn_tokens": 4, **changes})


def correcting(mode: str, *, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """The settings that correct for any sampler."""
    return {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
    }


def trainer_of(
    folder: Path,
    *,
    env_config: dict[str, Any] | None = None,
    weights: int = 0,
    num_layers: int = 1,
    dataset: Any = None,
    env_class: type[GuessNumber] = GuessNumber,
    **changes: Any,
) -> GRPOEnvTrainer:
    """A trainer of the guessing game; ``model``, ``eval_dataset``, ``agent`` and settings among the changes."""
    model, tokenizer = policy(weights, num_layers=num_layers)
    parts = ("eval_dataset", "agent", "callbacks", "peft_config", "curriculum", "distillation", "demonstrations")
    own = {name: changes.pop(name) for name in parts if name in changes}
    return GRPOEnvTrainer(
        changes.pop("model", model),
        env_class(tokenizer, env_config),
        settings(folder, **changes),
        train_dataset=tasks() if dataset is None else dataset,
        **own,
    )


def logged(trainer: GRPOEnvTrainer, name: str) -> list[float]:
    """What was logged under a name, oldest first."""
    return [log[name] for log in trainer.state.log_history if name in log]


def history(trainer: GRPOEnvTrainer, key: str = "loss") -> list[dict[str, Any]]:
    """What was logged of training, or with another key, clocks left out."""
    logs = [log for log in trainer.state.log_history if key in log]
    return [{name: value for name, value in log.items() if name not in CLOCKS} for log in logs]


def weights(trainer: GRPOEnvTrainer) -> dict[str, torch.Tensor]:
    """Copies of the policy's weights."""
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def recording(trainer: GRPOEnvTrainer) -> list[GenerationBatch]:
    """What the trainer plays from now on."""
    played: list[GenerationBatch] = []
    play = trainer.generator.generate

    def recorded(*args: Any, **kwargs: Any) -> GenerationBatch:
        played.append(play(*args, **kwargs))
        return played[-1]

    trainer.generator.generate = recorded  # type: ignore[method-assign]
    return played


class Snapshots(TrainerCallback):
    """The weights after each optimizer step."""

    def __init__(self, model: Any) -> None:
        self.weights = {0: copy.deepcopy(model.state_dict())}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights[state.global_step] = copy.deepcopy(model.state_dict())


def has_moved(trainer: GRPOEnvTrainer, weights: int = 0) -> bool:
    """Whether training changed the policy that ``trainer_of`` began with."""
    before = policy(weights)[0].state_dict()
    return any(not torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
