"""What `accelerate launch` runs for the tests of several ranks: every scenario in turn, one file of results a rank."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from games import logged, tasks, trainer_of

from agentsgym.agents.base import Agent
from agentsgym.errors import AgentFault, ConfigError
from agentsgym.training.trainer import GRPOEnvTrainer
from agentsgym.types import Action, TurnRequest

NUM_ROWS = 12  # of a generation batch over all ranks; three groups of four, so that the middle one straddles two ranks
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
WATCHED = ("loss", "grad_norm", "reward", "reward_std", "win_rate", "turns/mean", "alive/turn_03", "num_tokens", "kl")


class Refusing(Agent):
    """Cannot play at all on the last rank, and says so once it is asked."""

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentFault]:
        if PartialState().process_index == 1:
            raise ConfigError("no model is loaded here")
        return [Action(text="one") for _ in requests]


def rows(broken: Sequence[bool]) -> Dataset:
    """A task group a flag; those marked cannot even start."""
    return Dataset.from_list([{"task_data": {"seed": seed, "cannot_start": flag}} for seed, flag in enumerate(broken)])


SCENARIOS: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo", "advantage_estimator": "gigpo", "scale_rewards": "batch"},
    "accumulated": {"gradient_accumulation_steps": 3, "max_steps": 2},
    "iterated": {"num_iterations": 2, "max_steps": 4},
    "evaluated": {"eval_dataset": tasks(3), "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    # Of two groups the second is broken, so that rank 1 of 2 has no row that could be played.
    "silent_rank": {
        "dataset": rows([False, True]),
        "shuffle_dataset": False,
        "per_device_train_batch_size": 8,
        "max_failed_fraction": 0.5,
    },
    "too_many_failed": {
        "dataset": rows([False, True]),
        "shuffle_dataset": False,
        "per_device_train_batch_size": 8,
        "max_failed_fraction": 0.4,
    },
    "refused": {"agent": Refusing()},
}


def weights(trainer: GRPOEnvTrainer) -> str:
    """A digest of the policy: equal on all ranks, or they have drifted apart."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    data = b"".join(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for tensor in model.parameters())
    return hashlib.sha256(data).hexdigest()


def outcome(name: str, folder: Path) -> dict[str, Any]:
    """Train as a scenario says and tell what came of it."""
    changes = dict(SCENARIOS[name])
    num_rows = changes.pop("per_device_train_batch_size", NUM_ROWS)
    accumulation = changes.get("gradient_accumulation_steps", 1)
    share = num_rows // NUM_RANKS // accumulation
    if "per_device_eval_batch_size" in changes:
        changes["per_device_eval_batch_size"] //= NUM_RANKS
    trainer = trainer_of(folder / name, **{"max_steps": 2, "per_device_train_batch_size": share, **changes})
    try:
        trainer.train()
    except Exception as error:  # noqa: BLE001  # what each rank raises is what is asked
        return {"error": f"{type(error).__name__}: {error}"}
    evaluated = {key: logged(trainer, key) for key in ("eval_win_rate", "eval_reward", "eval_num_games")}
    return {"weights": weights(trainer), **{key: logged(trainer, key) for key in WATCHED}, **evaluated}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    results = {name: outcome(name, target / "runs") for name in SCENARIOS}
    target.joinpath(f"rank{PartialState().process_index}.json").write_text(json.dumps(results))
