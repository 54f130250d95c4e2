"""Train the embedded policy at Twenty Questions with rollouts that run ahead, from one imitation for all bounds."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers leaves parts of its signatures untyped.

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer
from agentsgym.agents.policy.copied import CopiedPolicyAgent
from benchmarks.credit import GAMES, MAX_TURN_TOKENS, NUM_ROLLOUTS, played_by, warm_start

NAME = "twenty_questions"
GAME = replace(GAMES[NAME], num_demonstrations=4000, warm_start_steps=1000)  # with much left to learn


def train(folder: Path, seed: int, max_staleness: int, num_episodes: int) -> dict[str, Any]:
    """Train once, and play afterwards.

    Args:
        folder: Where the imitation of a seed is kept.
        seed: Of model, tasks and draws.
        max_staleness: 0 waits.
        num_episodes: Episodes that are trained on.
    """
    game, start = GAME, warm_start(NAME, seed, folder, {NAME: GAME})
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForCausalLM.from_pretrained(start)
    env = game.make(tokenizer)
    args = GRPOEnvConfig(
        output_dir=str(folder / "run"),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        seed=seed,
        max_steps=num_episodes // game.batch_size * game.num_updates,
        per_device_train_batch_size=game.batch_size // game.num_updates,
        steps_per_generation=game.num_updates,
        num_generations=NUM_ROLLOUTS,
        max_turn_tokens=MAX_TURN_TOKENS,
        learning_rate=game.learning_rate,
        lr_scheduler_type="constant",
        max_staleness=max_staleness,
    )
    tasks = game.tasks("training", seed, num_episodes // NUM_ROLLOUTS)
    agent = CopiedPolicyAgent(model, tokenizer, seed=seed, max_turn_tokens=MAX_TURN_TOKENS) if max_staleness else None
    rows = Dataset.from_list([{"task_data": task} for task in tasks])
    trainer = GRPOEnvTrainer(model, env, args, train_dataset=rows, agent=agent)
    trainer.remove_callback(PrinterCallback)
    began = time.perf_counter()
    trainer.train()
    took_s = time.perf_counter() - began
    logs = [log for log in trainer.state.log_history if "win_rate" in log]
    quarters = [fmean(log["win_rate"] for log in logs[i * len(logs) // 4 : (i + 1) * len(logs) // 4]) for i in range(4)]
    afterwards = played_by(trainer.model, env, game.tasks("evaluation", seed, game.num_evaluated), seed)
    row = {
        "game": NAME,
        "seed": seed,
        "max_staleness": max_staleness,
        "episodes": num_episodes,
        "win_rate_by_quarter": [round(quarter, 3) for quarter in quarters],
        "win_rate_afterwards": round(fmean(bool(one.success) for one in afterwards), 3),
        "s": round(took_s, 1),
    }
    if max_staleness:
        row["staleness_mean"] = round(fmean(log["staleness/mean"] for log in logs), 2)
        row["staleness_max"] = max(log["staleness/max"] for log in logs)
        row["effective_sample_size_of_tokens"] = round(
            fmean(log["sampling/effective_sample_size_of_tokens"] for log in logs), 3
        )
    return row
