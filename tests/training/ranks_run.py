"""What `accelerate launch` runs for the tests of several ranks: every scenario in turn, one file of results a rank."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import pickle
import sys
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from games import RECOMPUTED, demonstrated, logged, policy, tasks, trainer_of
from judged import Ranked
from launch import leave
from peft import LoraConfig
from programs import SayBlueTwice
from stock import Recorded, stock_trainer
from whole_models import Lengths, whole

from agentsgym.agents.base import Agent
from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.credit.advantages import Scale
from agentsgym.credit.outcomes import grpo
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import AgentError, ConfigError
from agentsgym.store.reader import RolloutStore
from agentsgym.training.selection.curriculum import Curriculum
from agentsgym.training.trainer import GRPOEnvTrainer
from agentsgym.types import Action, Message, TurnRequest

NUM_ROWS = 12  # of a generation batch over all ranks; three groups of four, so that the middle one straddles two ranks
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
WATCHED = (
    *("loss", "grad_norm", "entropy", "kl", "num_tokens"),
    *("reward", "reward_std", "win_rate", "turns/mean", "active_fraction/turn_03"),
    *("sampling/kl/k1", "sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/min"),
    *("curriculum/levels_known", "curriculum/levels_in_bounds", "demonstration_loss"),
    *("groups/kept", "groups/resampled", "value_loss", "observation_loss", "rollouts/retried", "failed"),
    *("advantage/turn_01", "advantage_std/turn_01", "step_groups/mean_size", "frac_reward_zero_std"),
    *("entropy/turn_01", "ratio/turn_01", "clip_ratio/turn_01", "effective_sample_size"),
)
EVALUATED = ("eval_win_rate", "eval_reward", "eval_num_episodes", "eval_turns/mean")


class Refusing(Agent):
    """Cannot play at all on the last rank, and reports it once it is called."""

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        if PartialState().process_index == 1:
            raise ConfigError("no model is loaded here")
        return [Action(text="one") for _ in requests]


def unplayable() -> IterableDataset:
    """Tasks of which the third, whose rollouts are the last rank's alone, turns out to be none when it is played."""
    rows = [{"task_data": {"seed": seed}} for seed in (0, 1, "two")]
    return IterableDataset.from_generator(partial(iter, rows))


def stream(num_tasks: int) -> IterableDataset:
    """Tasks as a dataset of unknown length."""
    return IterableDataset.from_generator(partial(iter, list(tasks(num_tasks))))


def misfitting(rollouts: Sequence[ScoredRollout], *, discount: float, scale: Scale) -> list[list[float]]:
    """An estimator that gives the very last rollout, which the last rank has played, a number too many."""
    *others, last = grpo(rollouts, discount=discount, scale=scale)
    return [*others, [*last, 0.0]]


def uneven(rollouts: Sequence[ScoredRollout], *, discount: float, scale: Scale) -> list[list[float]]:
    """An estimator that breaks on the last rank alone."""
    if PartialState().process_index == PartialState().num_processes - 1:
        raise RuntimeError("only here")
    return grpo(rollouts, discount=discount, scale=scale)


def newest(messages: list[Message]) -> list[Message]:
    """A history that is rewritten from the third turn on, so that rollouts are of one row to three."""
    return messages[-3:]


def impossible(*numbers: int) -> Dataset:
    """Six tasks, those of these numbers such as nobody can solve, so that their rollouts have one reward."""
    return Dataset.from_list([{"task_data": {"seed": i, "secret": 99 if i in numbers else i}} for i in range(6)])


def rows(broken: Sequence[bool]) -> Dataset:
    """A task group a flag; those marked cannot even start."""
    return Dataset.from_list([{"task_data": {"seed": seed, "cannot_start": flag}} for seed, flag in enumerate(broken)])


SCENARIOS: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo", "advantage_estimator": "gigpo", "scale_rewards": "batch"},
    "accumulated": {"gradient_accumulation_steps": 3, "max_steps": 2},
    "iterated": {"num_iterations": 2, "max_steps": 4},
    "evaluated": {"eval_dataset": tasks(3), "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    "streamed": {"eval_dataset": stream(3), "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8},
    "two_episodes": {"env_config": {"episodes_per_trial": 2}},
    "shared_values": {
        "advantage_estimator": "turn_gae",
        "value_head": "shared",
        "value_head_kwargs": {"learning_rate": 0.05},
    },
    "own_values": {
        "advantage_estimator": "bilevel_gae",
        "value_head": "separate",
        "gradient_accumulation_steps": 3,
        "max_steps": 2,
    },
    "remembering": {"advantage_estimator": "rae", "scale_rewards": "none"},
    "adapters": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), "beta": 0.1, "max_steps": 3},
    "rewritten": {"layout": "turn", "env_config": {"history": newest}, "loss_type": "grpo", "num_iterations": 2},
    "rewritten_accumulated": {
        "layout": "turn",
        "env_config": {"history": newest},
        "gradient_accumulation_steps": 3,
        "max_steps": 2,
    },
    "resampled": {"dataset": impossible(1, 3, 4), "shuffle_dataset": False, "zero_variance_groups": "resample"},
    "drawn": {
        "dataset": impossible(1, 3, 4),
        "curriculum": Curriculum(lambda row: row["task_data"]["secret"] == 99, window=8, min_results=4),
        "zero_variance_groups": "resample",
    },
    # Of two groups the second is broken, so that rank 1 of 2 has no row that could be played.
    "silent_rank": {
        "dataset": rows([False, True]),
        "shuffle_dataset": False,
        "per_device_train_batch_size": 8,
        "max_failed_fraction": 0.5,
        "drift_interval": 1,
        "sampled_by": 1,
    },
    "retried": {
        "dataset": tasks(6, fears="six"),
        "episode_retries": 3,
        "retry_seed": "new",
        "max_failed_fraction": 1.0,
    },
    "too_many_failed": {
        "dataset": rows([False, True]),
        "shuffle_dataset": False,
        "per_device_train_batch_size": 8,
        "max_failed_fraction": 0.4,
    },
    "observed": {
        "observation_loss_weight": 0.5,
        "layout": "turn",
        "env_config": {"history": newest},
        "gradient_accumulation_steps": 3,
        "max_steps": 2,
    },
    # Each rank draws its own demonstrations; here there is only one to draw.
    "imitating": {"demonstrations": demonstrated(1, batch_size=2), "gradient_accumulation_steps": 3, "max_steps": 2},
    # Without gradients of the vision tower, DDP would wait for them.
    "towers": {"whole": "gemma3", "env_class": Lengths, **RECOMPUTED},
    "programs": {"env_class": SayBlueTwice, "layout": "turn"},
    "ranked": {"env_class": Ranked, "per_device_train_batch_size": 8},  # each rank judges a complete task group
    "shown": {"log_completions": True, "max_steps": 1},
    "stored": {"store_rollouts": True},
    "unstorable": {"store_rollouts": __file__ if os.environ.get("RANK") == "1" else True},
    "unplayable": {"dataset": unplayable(), "shuffle_dataset": False},
    "refused": {"agent": Refusing()},
    "misfitting": {"advantage_estimator": misfitting},
    "uneven": {"advantage_estimator": uneven},
}


def weights(trainer: GRPOEnvTrainer) -> str:
    """A digest of the policy: equal on all ranks, or they have drifted apart."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    values = [] if trainer.value_model is None else [*trainer.value_model.parameters()]
    tensors = [tensor.detach().contiguous() for tensor in (*model.parameters(), *values)]
    data = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def listening() -> Generator[dict[str, int]]:
    """Note what this rank sends as objects: the types of the items, each with the size of its largest in bytes."""
    sent: dict[str, int] = {}
    originals = {name: getattr(dist, name) for name in ("all_gather_object", "gather_object")}

    def note(items: Sequence[Any]) -> None:
        for item in items:
            if isinstance(item, tuple) and isinstance(item[0], bytes):  # packed, with what went wrong
                note(pickle.loads(item[0]) if item[0] else ())
            else:
                kind = type(item).__name__
                sent[kind] = max(sent.get(kind, 0), len(pickle.dumps(item)))

    def all_gather_object(parts: Any, items: Any, *args: Any, **kwargs: Any) -> Any:
        note(items)
        return originals["all_gather_object"](parts, items, *args, **kwargs)

    def gather_object(items: Any, *args: Any, **kwargs: Any) -> Any:
        note(items)
        return originals["gather_object"](items, *args, **kwargs)

    dist.all_gather_object, dist.gather_object = all_gather_object, gather_object
    try:
        yield sent
    finally:
        dist.all_gather_object, dist.gather_object = originals.values()


def conversations(trainer: GRPOEnvTrainer) -> list[str]:
    """What TRL's completions table shows of the newest generation batch."""
    logs = trainer._logs
    return [json.dumps([*prompt, *output]) for prompt, output in zip(logs["prompt"], logs["completion"], strict=True)]


def outcome(name: str, folder: Path, **others: Any) -> dict[str, Any]:
    """Train as a scenario states, with other settings if given, and report what came of it."""
    changes = SCENARIOS[name] | others
    num_rows = changes.pop("per_device_train_batch_size", NUM_ROWS)
    accumulation = changes.get("gradient_accumulation_steps", 1)
    own = num_rows // NUM_RANKS // accumulation
    if "per_device_eval_batch_size" in changes:
        changes["per_device_eval_batch_size"] //= NUM_RANKS
    sampler = changes.pop("sampled_by", None)
    if "whole" in changes:
        changes["model"] = whole(changes.pop("whole"))
    torch.manual_seed(0)  # of the adapters
    trainer = trainer_of(folder / name, **{"max_steps": 2, "per_device_train_batch_size": own, **changes})
    if sampler is not None:
        trainer.agent = PolicyAgent(*policy(sampler), max_turn_tokens=4)
    try:
        with listening() as sent:
            trainer.train()
    except Exception as error:  # noqa: BLE001  # what each rank raises is the result
        return {"error": f"{type(error).__name__}: {error}"}
    evaluated = {key: logged(trainer, key) for key in (*EVALUATED, "eval_loss")}
    names = sorted({f"{log['step']}: {name}" for log in trainer.state.log_history for name in log})
    seen = {"weights": weights(trainer), "names": names, "sent": sent}
    if trainer.args.log_completions:
        seen["conversations"] = conversations(trainer)
    if trainer.args.rollout_folder is not None:
        mine = RolloutStore(trainer.args.rollout_folder)
        records = [one for one in mine.records() if one.extra["rank"] == PartialState().process_index]
        seen["stored"] = [
            (one.run, one.generation, one.group, own.task_index, own.rollout_index, own.final_reward)
            for one in records
            for own in [one.trajectory]
        ]
    return {**seen, **{key: logged(trainer, key) for key in WATCHED}, **evaluated}


def stock_batches(folder: Path) -> list[dict[str, Any]]:
    """What TRL's own trainer was given to train on this rank, batch after batch."""
    rows_here = NUM_ROWS // NUM_RANKS
    trainer = stock_trainer(folder / "stock", rows=tasks(6), learning_rate=0.0, per_device_train_batch_size=rows_here)
    trainer.train()
    assert isinstance(trainer.rollout_func, Recorded)
    return [found for _, found in trainer.rollout_func.calls]


if __name__ == "__main__":
    gc.freeze()  # each training collects the garbage, and passes by what is imported
    target = Path(sys.argv[1])
    results: dict[str, Any] = {name: outcome(name, target / "runs") for name in SCENARIOS}
    results["stock"] = stock_batches(target / "runs")
    target.joinpath(f"rank{PartialState().process_index}.json").write_text(json.dumps(results))
    leave()
