"""What `accelerate launch` runs for the tests of ZeRO: every scenario in turn, one file of results a rank.

On CPUs accelerate starts DeepSpeed where ``use_cpu`` is not set and the backend is named.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from games import GuessNumber, logged, policy, settings, tasks
from launch import leave
from peft import LoraConfig
from ranks_run import impossible, newest, rows
from transformers import AutoModelForCausalLM, TrainerCallback

from agentsgym.training.trainer import GRPOEnvTrainer

NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
IS_ZERO = "ACCELERATE_USE_DEEPSPEED" in os.environ
ON_CPU: dict[str, Any] = {"use_cpu": False, "bf16": False} if IS_ZERO else {}
NUM_ROWS = 12  # of a generation batch over all ranks, three groups of four: the middle one straddles two ranks
WATCHED = (
    *("loss", "grad_norm", "reward", "turns/mean", "kl", "entropy", "clip_ratio/turn_01", "effective_sample_size"),
    *("eval_reward", "eval_win_rate", "sampling/sampling_logp_difference/max", "sampling/kl/k1", "learning_rate"),
)
LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}

TRAINED: dict[str, dict[str, Any]] = {
    "dapo": {"drift_interval": 1, "max_steps": 4, "max_grad_norm": 0.05},
    "unclipped": {"max_grad_norm": 0.0, "lr_scheduler_type": "linear", "warmup_steps": 1, "max_steps": 3},
    "iterated": {"num_iterations": 2, "max_steps": 4, "sampler_correction": True},
    "accumulated": {"gradient_accumulation_steps": 3, "beta": 0.1, "drift_interval": 1},
    "evaluated": {
        "eval_dataset": tasks(3), "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True,
        "per_device_eval_batch_size": 4,
    },
    "reference": {"beta": 0.1, "max_steps": 3},
    "adapters": {"beta": 0.1, **LORA, "max_steps": 3},
    "rewritten": {"layout": "turn", "env_config": {"history": newest}},
    "rewritten_accumulated": {"layout": "turn", "env_config": {"history": newest}, "gradient_accumulation_steps": 3},
    "rewritten_adapters": {"layout": "turn", "env_config": {"history": newest}, **LORA},
    "checkpointed": {"activation_checkpointing": True},
    "by_path": {"by_path": True, "beta": 0.1},
    "resampled": {
        "dataset": impossible(1, 3, 4), "shuffle_dataset": False, "zero_variance_groups": "resample",
    },
    "silent_rank": {
        "dataset": rows([False, True]), "shuffle_dataset": False, "num_rows": 8, "max_failed_fraction": 0.5,
        "drift_interval": 1,
    },
    "moving_reference": {
        "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5, "beta": 0.1, "max_steps": 3,
    },
}  # fmt: skip
NOT_SHARDED = ("moving_reference",)
SOME = ("dapo", "accumulated", "rewritten_accumulated", "adapters")  # at stage 1, which differs from 2 in little


def trainer_of(name: str, folder: Path, base: Path, **changes: Any) -> GRPOEnvTrainer:
    """The trainer of a scenario, this rank's share of it."""
    changes = {"max_steps": 2, **TRAINED[name], **changes}
    share = changes.pop("num_rows", NUM_ROWS) // NUM_RANKS // changes.get("gradient_accumulation_steps", 1)
    if "per_device_eval_batch_size" in changes:
        changes["per_device_eval_batch_size"] //= NUM_RANKS
    if changes.pop("sampler_correction", False):
        changes |= {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate"}
    own = {key: changes.pop(key) for key in ("eval_dataset", "peft_config", "callbacks", "agent") if key in changes}
    dataset, env_config = changes.pop("dataset", None), changes.pop("env_config", None)
    by_path = changes.pop("by_path", False)
    torch.manual_seed(0)  # of the adapters
    return GRPOEnvTrainer(
        str(base) if by_path else AutoModelForCausalLM.from_pretrained(base),
        GuessNumber(policy()[1], env_config),
        settings(folder / name, per_device_train_batch_size=share, **{**changes, **ON_CPU}),
        train_dataset=tasks() if dataset is None else dataset,
        **own,
    )


def outcome(trainer: GRPOEnvTrainer) -> dict[str, Any]:
    """What is compared, whole weights included."""
    weights: dict[str, Any] = {}
    for key, parameter in trainer.model.named_parameters():
        with gathered(parameter):
            weights[key] = parameter.detach().tolist()
    return {
        "agent": type(trainer.agent).__name__,
        "shares": trainer._trl.shares_prefixes,
        "num_held": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "weights": weights,
        **{key: logged(trainer, key) for key in WATCHED},
    }


def gathered(parameter: torch.nn.Parameter) -> Any:
    """Collective: hold all of a parameter inside, where ranks hold pieces of it."""
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed  # noqa: PLC0415  # not in the one process

    return deepspeed.zero.GatheredParameters([parameter])


class Stop(TrainerCallback):
    """Saves and stops in the middle of the second pass over the dataset."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == 3


def resumed(folder: Path, base: Path, **changes: Any) -> dict[str, Any]:
    """A run of six steps, and the same that was stopped after three."""
    straight = trainer_of("accumulated", folder / "straight", base, max_steps=6, **changes)
    straight.train()
    changes |= {"save_strategy": "steps", "save_steps": 100}
    trainer_of("accumulated", folder / "stopped", base, max_steps=6, callbacks=[Stop()], **changes).train()
    again = trainer_of("accumulated", folder / "stopped", base, max_steps=6, **changes)
    again.train(resume_from_checkpoint=True)
    return {"straight": outcome(straight), "resumed": outcome(again)}


def main(base: Path, target: Path, ways: list[str], names: list[str]) -> None:
    """Train every scenario in every way of sampling, and resume once."""
    results: dict[str, Any] = {}
    for way in ways:
        changes = {"ds3_gather_for_generation": way == "gathered"}
        for name in names:
            trainer = trainer_of(name, target / way, base, **changes)
            trainer.train()
            trainer.save_model(str(target / way / name / "saved"))
            results[f"{way} {name}"] = outcome(trainer)
            trainer.accelerator.free_memory()
        results[f"{way} resumed"] = resumed(target / way / "resumed", base, **changes)
    target.joinpath(f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    gc.freeze()  # each training collects the garbage, and passes by what is imported
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","), sys.argv[4].split(","))
    leave()
