"""What `accelerate launch` runs for the tests of sharded models: every scenario in turn, one file of results a rank.

Accelerate shards models for accelerators alone. Everything it does then runs on CPUs too, so the trainers here take
the ranks for the kind it wants; the weights are sharded and the gradients reduced as they are anywhere.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from games import RECOMPUTED, GuessNumber, logged, policy, settings, tasks
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from agentsgym import GRPOEnvTrainer, NonFiniteError, PolicyAgent, SamplingParams
from agentsgym.agents.policy.sharded import ShardedPolicyAgent
from agentsgym.agents.trained import BatchStart
from agentsgym.rollouts.driver import drive
from agentsgym.versions import CACHE_NAMES

NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
NUM_TURNS = 6
NUM_ROWS = 12  # of a generation batch over all ranks, three groups of four: the middle one straddles two ranks
WATCHED = ("loss", "grad_norm", "reward", "turns/mean", "kl", "eval_reward")

BROKEN = "model.layers.1.mlp.up_proj.weight"
Shard = Callable[[PreTrainedModel], Callable[..., Any]]

START = BatchStart(seed_parts=("rows",), session_ids=(), first_session=0, step=0)

# How many games each rank plays.
GAMES = {"uneven": (4, 3), "silent_rank": (0, 3), "one_game": (1, 0), "raises_once": (4, 4), "takes_no_cache": (2, 0)}

TRAINED: dict[str, dict[str, Any]] = {
    "dapo": {"drift_interval": 1},
    "iterated": {"num_iterations": 2, "max_steps": 4},
    "accumulated": {"gradient_accumulation_steps": 3},
    "recomputed": RECOMPUTED,
    "evaluated": {"eval_dataset": tasks(3), "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    "reference": {"beta": 0.1},
    "adapters": {"beta": 0.1, "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
}


def fsdp2(model: PreTrainedModel) -> Callable[..., Any]:
    """Shard in place, each layer by itself."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model: PreTrainedModel) -> Callable[..., Any]:
    """Wrap, each layer by itself; from then on the model runs in its wrapper alone."""
    wrapped = ModuleWrapPolicy([type(model.model.layers[0])])
    return FullyShardedDataParallel(model, auto_wrap_policy=wrapped, device_id=torch.device("cpu"))


SHARDINGS: dict[str, Shard] = {"fsdp1": fsdp1, "fsdp2": fsdp2}


def raise_once(tokenizer: PreTrainedTokenizerBase, call: int) -> None:
    """Have one call of the tokenizer's ``decode`` raise: between two tokens, since the agent has a stop text."""
    decode, calls = tokenizer.decode, iter(range(call + 1))

    def decode_or_raise(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) == call:
            raise RuntimeError("no text for you")
        return decode(*args, **kwargs)

    tokenizer.decode = decode_or_raise


def refuse_caches(model: PreTrainedModel) -> None:
    """Have the second layer raise where it is given a cache: in the middle of a forward pass."""

    def refuse(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if any(kwargs.get(name) is not None for name in CACHE_NAMES):
            raise NotImplementedError("no cache, please")

    model.model.layers[1].register_forward_pre_hook(refuse, with_kwargs=True)


def count_tokens(model: PreTrainedModel) -> list[int]:
    """A list that gets the number of tokens, padding included, of each forward pass from now on."""
    counts: list[int] = []

    def count(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        counts.append(kwargs["input_ids"].numel())

    model.register_forward_pre_hook(count, with_kwargs=True)
    return counts


def played(agent: PolicyAgent, tokenizer: PreTrainedTokenizerBase, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Play a game a row, with the row for its seed and its draws."""
    if not rows:
        return drive([], agent)
    env = GuessNumber(tokenizer, {"max_steps_per_episode": NUM_TURNS})
    agent.reseed("rows", first=rows[0])
    games = [{"seed": row, "secret": row % 7} for row in rows]  # 6 is no number: that game goes on to the last turn
    return [
        {"ids": one.token_ids, "logprobs": one.logprobs, "turns": len(one.turns), "error": one.error}
        for one in env.rollout(games, agent)
    ]


def played_alone(name: str) -> dict[str, Any]:
    """All games of a scenario, in one process and with the model as it is."""
    model, tokenizer = policy(num_layers=2)
    agent = PolicyAgent(model, tokenizer, sampling=SamplingParams(stop=("six",)), max_turn_tokens=5)
    counts = count_tokens(model)
    return {"games": played(agent, tokenizer, range(sum(GAMES[name]))), "tokens_run": counts}


def played_sharded(name: str, shard: Shard) -> dict[str, Any]:
    """This rank's games of a scenario."""
    rank, counts = PartialState().process_index, GAMES[name]
    model, tokenizer = policy(num_layers=2)
    if name == "raises_once" and rank == 1:
        raise_once(tokenizer, 7)
    if name == "takes_no_cache":
        refuse_caches(model)
    agent = ShardedPolicyAgent(
        model, tokenizer, forward=shard(model), sampling=SamplingParams(stop=("six",)), max_turn_tokens=5
    )
    tokens_run = count_tokens(model)
    agent.prepare(START)
    if isinstance(model, FSDPModule):
        model.reshard()  # as a training step leaves it; a forward pass leaves the root's weights gathered
    first = sum(counts[:rank])
    return {"games": played(agent, tokenizer, range(first, first + counts[rank])), "tokens_run": tokens_run}


def break_off() -> None:
    """Play, and have rank 1 raise in the middle of a forward pass."""
    model, tokenizer = policy(num_layers=2)
    agent = ShardedPolicyAgent(model, tokenizer, forward=fsdp2(model))
    agent.prepare(START)
    if PartialState().process_index == 1:
        refuse_caches(model)
    played(agent, tokenizer, range(2))


def shard_on_cpu(trainer: type[GRPOEnvTrainer]) -> None:
    """Have accelerate believe that the trainers' ranks are of the kind whose models it shards."""
    create = trainer.create_accelerator_and_postprocess

    def create_as_if_there_were_gpus(self: GRPOEnvTrainer) -> None:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        create(self)

    trainer.create_accelerator_and_postprocess = create_as_if_there_were_gpus


def trained(name: str, folder: Path, base: Path, **changes: Any) -> dict[str, Any]:
    """Train the model in ``base`` as a scenario states and report what came of it, whole weights included."""
    changes = {"max_steps": 2, **TRAINED[name], **changes}
    share = NUM_ROWS // NUM_RANKS // changes.get("gradient_accumulation_steps", 1)
    if "per_device_eval_batch_size" in changes:
        changes["per_device_eval_batch_size"] //= NUM_RANKS
    own = {key: changes.pop(key) for key in ("eval_dataset", "peft_config") if key in changes}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), policy()[1]
    trainer = GRPOEnvTrainer(
        model,
        GuessNumber(tokenizer),
        settings(folder / name, per_device_train_batch_size=share, **changes),
        train_dataset=tasks(),
        **own,
    )
    trainer.train()
    trainer.save_model(str(folder / name / "saved"))
    whole = {key: _whole(parameter).tolist() for key, parameter in trainer.model.named_parameters()}
    return {
        "agent": type(trainer.agent).__name__,
        "shares": trainer._trl.shares_prefixes,
        "sharded": any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
        "weights": whole,
        **{key: logged(trainer, key) for key in WATCHED},
    }


def broken(folder: Path, base: Path) -> str:
    """What a rank raises when rank 1 alone finds NaN, in its shard of a gradient."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), policy()[1]
    share = settings(folder / "broken", per_device_train_batch_size=NUM_ROWS // NUM_RANKS, fsdp=True)
    trainer = GRPOEnvTrainer(model, GuessNumber(tokenizer), share, train_dataset=tasks())
    go_backward = trainer.accelerator.backward

    def backward(loss: torch.Tensor, **kwargs: Any) -> None:
        go_backward(loss, **kwargs)
        gradient: Any = dict(trainer.model.named_parameters())[BROKEN].grad
        if PartialState().process_index == 1:
            gradient.to_local()[0, 0] = math.nan

    trainer.accelerator.backward = backward
    try:
        trainer.train()
    except NonFiniteError as error:
        return str(error)
    return ""


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def main(base: Path, target: Path) -> None:
    """Play, train, and at last break off."""
    PartialState(cpu=True)
    results: dict[str, Any] = {
        f"{name} {sharding}": played_sharded(name, shard) for name in GAMES for sharding, shard in SHARDINGS.items()
    }
    shard_on_cpu(GRPOEnvTrainer)
    results |= {name: trained(name, target, base, fsdp=True) for name in TRAINED}
    results["broken"] = broken(target, base)
    target.joinpath(f"rank{PartialState().process_index}.json").write_text(json.dumps(results))
    PartialState().wait_for_everyone()
    break_off()


if __name__ == "__main__":
    gc.freeze()  # each training collects the garbage, and passes by what is imported
    main(Path(sys.argv[1]), Path(sys.argv[2]))
