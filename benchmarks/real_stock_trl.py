"""What a training step of SmolLM2 costs with TRL's rollout function, written by hand, and with agentsgym.

Both train adapters on the same conversations: a task group of 16 episodes of 8 or 32 turns, in which every answer has 8
tokens. The function by hand generates each turn from the whole history, as in TRL's examples, and decodes and encodes
it again. Steps of the two trainers alternate; the first pair is not counted. TRL's ``environment_factory`` cannot play
at all: it requires a chat template with tools.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from statistics import median
from typing import Any, cast

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer
from agentsgym.agents.policy.loading import load_model
from agentsgym.interop import prompt_dataset
from benchmarks.stock_trl import ANSWER_TOKENS, Echo, by_hand

NUM_EPISODES = 16
SETTINGS: dict[str, Any] = {
    "max_steps": 1,
    "learning_rate": 1e-7,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": NUM_EPISODES // 2,
    "num_generations": NUM_EPISODES,
    "max_completion_length": 4000,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def no_reward(prompts: list[Any], **_: Any) -> Any:
    """Return TRL's rewards, which do not matter here."""
    return [0.0] * len(prompts)


def build(name: str, num_turns: int, folder: str) -> Any:
    """Create a trainer of one step."""
    model, tokenizer = load_model("smollm2", dtype=torch.bfloat16)
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
    rows: list[dict[str, Any]] = [{"task_data": {"seed": 0}}]
    if name == "agentsgym":
        config = {"max_steps_per_episode": num_turns, "system_prompt": "You are playing a game."}
        args = GRPOEnvConfig(folder, max_turn_tokens=ANSWER_TOKENS, **SETTINGS)
        dataset = cast("Any", Dataset).from_dict({"task_data": [row["task_data"] for row in rows]})
        return GRPOEnvTrainer(model, Echo(tokenizer, config), args, train_dataset=dataset, peft_config=lora)
    return GRPOTrainer(
        model,
        no_reward,
        GRPOConfig(folder, **SETTINGS),
        prompt_dataset(rows),
        processing_class=tokenizer,
        rollout_func=by_hand(num_turns),
        peft_config=lora,
    )


def measure(num_turns: int, repeats: int) -> dict[str, Any]:
    """Take steps of both trainers in turn, and compare their times."""
    wall: dict[str, list[float]] = {"by_hand": [], "agentsgym": []}
    cpu: dict[str, list[float]] = {"by_hand": [], "agentsgym": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            for name in ("by_hand", "agentsgym"):
                trainer = build(name, num_turns, folder)
                starts = time.perf_counter(), time.process_time()
                trainer.train()
                wall[name].append(time.perf_counter() - starts[0])
                cpu[name].append(time.process_time() - starts[1])
                print(num_turns, name, round(wall[name][-1], 1), round(cpu[name][-1], 1), flush=True)
    found: dict[str, Any] = {"episodes": NUM_EPISODES, "turns": num_turns}
    for clock, seconds in (("wall", wall), ("cpu", cpu)):
        counted = {name: values[1:] or values for name, values in seconds.items()}
        found |= {f"{clock}_s_{name}": round(median(values), 1) for name, values in counted.items()}
        pairs = zip(counted["by_hand"], counted["agentsgym"], strict=True)
        found[f"{clock}_times_faster"] = round(median(hand / ours for hand, ours in pairs), 2)
    return found


def main() -> None:
    """Print one line of JSON for each number of turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[8, 32], help="default: 8 32")
    parser.add_argument("--repeats", type=int, default=3, help="default: 3, the first of which does not count")
    options = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    for num_turns in options.turns:
        print(json.dumps(measure(num_turns, options.repeats)), flush=True)


if __name__ == "__main__":
    main()
