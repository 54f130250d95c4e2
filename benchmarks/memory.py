"""Measure the most memory that loss and gradient of one row need, by the length of the row: TRL's trainer and this one.

The row is a conversation whose every fourth token is the agent's, the model a Llama made from its configuration.
``full logits`` is the loss by its definition, from the logits of all positions. TRL's own trainer scores every token
in tiles; this one agent tokens alone, on any device.
Both recompute activations in the backward pass (gradient checkpointing).

Each number comes from a separate process: on a CPU the highest resident memory of one step beyond what was resident
before it, on a GPU what ``torch.cuda.max_memory_allocated`` reports. Model and gradients are allocated before, and are
part of no row.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch, transformers and vLLM leave parts of their signatures untyped.

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, TwentyQuestionsEnv
from agentsgym.tiny import tiny_policy
from agentsgym.training._trl import unused_reward
from agentsgym.training.loss import loss_inputs

WAYS = ("full logits", "TRL", "agentsgym")
TURN_TOKENS, AGENT_TOKENS = 64, 16
ENV_CONFIG: dict[str, Any] = {"objects": list(DEMO_OBJECTS), "properties": list(DEMO_PROPERTIES)}


def make_model(options: argparse.Namespace) -> Any:
    """A Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 64),
        num_key_value_heads=max(1, options.hidden // 128),
        max_position_embeddings=1 << 18,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def make_batch(options: argparse.Namespace, length: int, device: torch.device) -> dict[str, Any]:
    """One row of so many tokens, as the trainer makes it."""
    ids = torch.randint(options.vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    place = torch.arange(length)
    mask = (place % TURN_TOKENS >= TURN_TOKENS - AGENT_TOKENS).long()[None]
    turns = (place // TURN_TOKENS)[None].where(mask.bool(), -1)
    batch = {
        "prompt_completion_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "agent_token_mask": mask,
        "advantages": torch.randn(1, length, generator=torch.Generator().manual_seed(1)) * mask,
        "turn_index": turns,
        "num_items_in_batch": mask.sum(),
    }
    return {name: value.to(device) for name, value in batch.items()}


def make_trainer(way: str, model: Any, folder: str, *, on_cpu: bool) -> Any:
    """The trainer, TRL's own or this one; nothing is played."""
    text_env = TwentyQuestionsEnv(env_config=ENV_CONFIG)
    tokenizer = tiny_policy(text_env, hidden_size=16, num_heads=2, num_layers=1)[1]
    values: dict[str, Any] = {
        "output_dir": folder,
        "report_to": "none",
        "use_cpu": on_cpu,
        "bf16": not on_cpu,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "gradient_checkpointing": True,
        "max_completion_length": 1 << 18,
    }
    if way == "agentsgym":
        rows = TwentyQuestionsEnv.get_train_dataset(ENV_CONFIG)
        env = TwentyQuestionsEnv(tokenizer, ENV_CONFIG)
        return GRPOEnvTrainer(model, env, GRPOEnvConfig(**values), train_dataset=rows)
    rows = Dataset.from_list([{"prompt": "a"}] * 4)
    args = GRPOConfig(**values)
    return GRPOTrainer(model, unused_reward, args, train_dataset=rows, processing_class=tokenizer)


def full_logits_loss(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The loss by its definition."""
    ids, weights = batch["prompt_completion_ids"], batch["advantages"][:, 1:] / batch["num_items_in_batch"]
    with trainer.accelerator.autocast():
        logits = trainer.model(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).logits
    logprobs = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return -(logprobs * weights).sum()


def step(way: str, trainer: Any, batch: dict[str, Any]) -> None:
    """Loss and gradient."""
    if way == "full logits":
        loss = full_logits_loss(trainer, batch)
    elif way == "TRL":
        inputs = loss_inputs(batch, 1, batch["attention_mask"].shape[1])
        loss = GRPOTrainer.compute_loss(trainer, trainer.model, inputs)
    else:
        loss = trainer.compute_loss(trainer.model, batch)
    trainer.accelerator.backward(loss)


class PeakMemory:
    """The most memory since it was made, beyond what was held then, in MB."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        if self._on_cpu:
            Path("/proc/self/clear_refs").write_text("5")  # the highest becomes the present
            self._before = self._resident("VmRSS")
        else:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated() / 2**20

    def read(self) -> float:
        """Since then."""
        highest = self._resident("VmHWM") if self._on_cpu else torch.cuda.max_memory_allocated() / 2**20
        return highest - self._before

    def _resident(self, name: str) -> float:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
        return int(line.split()[1]) / 2**10


def measure_one(way: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """One step in this process, after one on a short row."""
    torch.set_num_threads(1)
    on_cpu = not torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(way, make_model(options), folder, on_cpu=on_cpu)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        device = trainer.accelerator.device
        step(way, trainer, make_batch(options, 2 * TURN_TOKENS, device))  # gradients are there from now on
        batch = make_batch(options, length, device)
        memory, start = PeakMemory(device), time.process_time()
        step(way, trainer, batch)
        seconds = time.process_time() - start
        norm = torch.stack([p.grad.float().norm() for p in trainer.model.parameters() if p.grad is not None]).norm()
        return {"mb": round(memory.read()), "cpu_s": round(seconds, 2), "gradient_norm": norm.item()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every way at every length, each in its own process."""
    shape = [f"--{name}={getattr(options, name)}" for name in ("vocabulary", "hidden", "layers")]
    rows: list[dict[str, Any]] = []
    for length in options.lengths:
        row: dict[str, Any] = {"length": length, "agent_tokens": length * AGENT_TOKENS // TURN_TOKENS}
        for way in WAYS:
            command = [sys.executable, __file__, *shape, "--one", way, str(length)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{way} with {length} tokens failed: {done.stderr[-2000:]}")
            row[way] = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "vocabulary": options.vocabulary,
        "hidden": options.hidden,
        "layers": options.layers,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """What a person reads."""
    head = f"{result['device']}, {result['layers']} layers of {result['hidden']}, {result['vocabulary']} words"
    lines = [head, "tokens  of the agent  " + "  ".join(f"{way + ' MB':>14} {'CPU s':>7}" for way in WAYS)]
    lines += [
        f"{row['length']:6} {row['agent_tokens']:13}  "
        + "  ".join(f"{row[way]['mb']:14} {row[way]['cpu_s']:7}" for way in WAYS)
        for row in result["rows"]
    ]
    return "\n".join(lines)


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="tokens of the row")
    parser.add_argument("--vocabulary", type=int, default=32_768, help="words of the model (default: 32768)")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model (default: 128)")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model (default: 2)")
    parser.add_argument("--quick", action="store_true", help="short rows and a small model, to see that it runs")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.lengths, options.vocabulary, options.hidden = [512], 8192, 64
    if options.one:
        print(json.dumps(measure_one(options.one[0], int(options.one[1]), options)))
        return
    result = measure(options)
    print(json.dumps(result) if options.json else table(result))


if __name__ == "__main__":
    main()
