"""What `accelerate launch` runs for the test of resuming on two ranks: every checkpoint of three passes in turn."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from games import trainer_of
from launch import leave
from sharded_run import shard_on_cpu
from torch.distributed.tensor import DTensor

from agentsgym.training.trainer import GRPOEnvTrainer

NUM_STEPS = 9  # of three passes
SHARDINGS: dict[str, dict[str, Any]] = {"replicated": {}, "sharded": {"fsdp": True}}


def trained(folder: Path, resume: Path | str | None = None, **changes: Any) -> dict[str, Any]:
    """Train and report what came of it on this rank."""
    rows = Dataset.from_list([{"task_data": {"seed": seed, "secret": seed}} for seed in range(6)])
    values = {"max_steps": NUM_STEPS, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(folder, dataset=rows, **{**values, **changes})
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    state = trainer.accelerator.get_state_dict(trainer.model)  # the whole of it on the main rank
    data = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in (state or {}).values())
    assert any(isinstance(one, DTensor) for one in trainer.model.parameters()) == bool(changes.get("fsdp"))
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {"weights": hashlib.sha256(data).hexdigest(), "losses": losses, "step": trainer.state.global_step}


def results(target: Path, name: str, steps: range) -> dict[str, Any]:
    """Train through, then from every checkpoint, and once more what is finished."""
    folder, changes = target / name, SHARDINGS[name]
    found = {"straight": trained(folder, **changes)}
    for step in steps:
        found[str(step)] = trained(target / f"{name}-{step}", folder / f"checkpoint-{step}", **changes)
    return {**found, "finished": trained(folder, "auto", **changes)}


if __name__ == "__main__":
    gc.freeze()
    place = Path(sys.argv[1])
    reported = {"replicated": results(place, "replicated", range(1, NUM_STEPS))}
    shard_on_cpu(GRPOEnvTrainer)
    reported["sharded"] = results(place, "sharded", range(2, NUM_STEPS, 3))
    place.joinpath(f"rank{PartialState().process_index}.json").write_text(json.dumps(reported))
    leave()
