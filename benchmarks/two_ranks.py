"""Train Twenty Questions on two ranks (``accelerate launch``, gloo) and on one, with the same global batch.

Games last differently long and task groups straddle the ranks. Losses, gradient norms and final weights should be
those of one process; wall times are printed, but mean little if both ranks share two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, ImitationPlayer, TwentyQuestionsEnv
from agentsgym.tiny import tiny_policy
from agentsgym.training.selection.imitate import imitate, tiny_imitation_config

NUM_ROWS, NUM_ROLLOUTS = 24, 8  # three groups: the middle one straddles the two ranks
ENV_CONFIG: dict[str, Any] = {
    "objects": list(DEMO_OBJECTS),
    "properties": list(DEMO_PROPERTIES),
    "max_steps_per_episode": 6,
}
COMPARED = ("loss", "grad_norm", "reward", "turns/mean", "entropy")


def train(folder: Path, num_steps: int, num_ranks: int) -> dict[str, Any]:
    """Train on this rank; returns what is compared."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    args = GRPOEnvConfig(
        output_dir=str(folder),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        max_steps=num_steps,
        per_device_train_batch_size=NUM_ROWS // num_ranks,
        num_generations=NUM_ROLLOUTS,
        max_turn_tokens=12,
        advantage_estimator="gigpo",
        learning_rate=1e-3,
    )
    env = TwentyQuestionsEnv(tokenizer, ENV_CONFIG)
    rows = TwentyQuestionsEnv.get_train_dataset(ENV_CONFIG)
    with GRPOEnvTrainer(model, env, args, train_dataset=rows) as trainer:
        start = time.perf_counter()
        trainer.train()
        wall_s, history = time.perf_counter() - start, trainer.state.log_history
    return {
        "wall_s": wall_s,
        "weights": torch.cat([tensor.detach().flatten() for tensor in model.parameters()]).tolist(),
        "min_turns": min(log["turns/min"] for log in history if "turns/min" in log),
        "max_turns": max(log["turns/max"] for log in history if "turns/max" in log),
        **{name: [log[name] for log in history if name in log] for name in COMPARED},
    }


def save_policy(folder: Path, num_warm_steps: int) -> None:
    """Make a small policy that sometimes asks sensible questions, so that games differ in length."""
    env = TwentyQuestionsEnv(None, ENV_CONFIG)
    tasks = list(TwentyQuestionsEnv.get_train_dataset(ENV_CONFIG)["task_data"])
    games = env.rollout(tasks, ImitationPlayer(env, seed=0), 20)
    texts = [message["content"] for game in games for message in game.messages]
    model, tokenizer = tiny_policy(texts, hidden_size=64, num_heads=2)
    env = TwentyQuestionsEnv(tokenizer, ENV_CONFIG)
    games = env.rollout(tasks, ImitationPlayer(env, seed=0), 20)
    imitate(model, games, tokenizer, tiny_imitation_config(num_warm_steps, disable_tqdm=True))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def launch(folder: Path, num_ranks: int, num_steps: int) -> list[dict[str, Any]]:
    """Run this file under ``accelerate launch``; returns what each rank came to."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1"]
    command += ["--num_processes", str(num_ranks), "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--num_cpu_threads_per_process", "1", "--main_process_port", "0"]
    command += ["--multi_gpu"] if num_ranks > 1 else ["--cpu"]  # with --cpu it starts one process alone
    subprocess.run(
        [*command, __file__, "--rank_folder", str(folder), "--num_steps", str(num_steps)],
        check=True,
        stdout=sys.stderr,
        timeout=900,
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def measure(num_steps: int, num_warm_steps: int) -> dict[str, Any]:
    """Both runs, and how far apart they are."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_policy(folder / "model", num_warm_steps)
        [one], two = launch(folder, 1, num_steps), launch(folder, 2, num_steps)

    def gap(name: str) -> float:
        return max(abs(a - b) for a, b in zip(one[name], two[0][name], strict=True))

    return {
        "num_steps": num_steps,
        "rows": NUM_ROWS,
        "rollouts_a_task": NUM_ROLLOUTS,
        "turns": [one["min_turns"], one["max_turns"]],
        "largest_loss": max(map(abs, one["loss"])),
        **{f"{name}_gap": gap(name) for name in (*COMPARED, "weights")},
        "ranks_hold_equal_weights": two[0]["weights"] == two[1]["weights"],
        "wall_s": {"one": round(one["wall_s"], 2), "two": round(two[0]["wall_s"], 2)},
    }


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--num_steps", type=int, default=20, help="optimizer steps of each run (default: 20)")
    parser.add_argument("--num_warm_steps", type=int, default=800, help="imitation before them (default: 800)")
    parser.add_argument("--rank_folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_folder:
        rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        result = train(Path(options.rank_folder), options.num_steps, num_ranks)
        Path(options.rank_folder, f"{rank}.json").write_text(json.dumps(result))
        return
    result = measure(options.num_steps, options.num_warm_steps)
    lines = [f"{name}: {value}" for name, value in result.items()]
    print(json.dumps(result) if options.json else "\n".join(lines))


if __name__ == "__main__":
    main()
