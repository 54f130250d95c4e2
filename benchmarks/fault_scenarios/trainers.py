"""Make one trainer with a pool after the other, and count what they leave behind."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PrinterCallback

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, TwentyQuestionsEnv
from agentsgym.tiny import tiny_policy
from fault_scenarios.breaking import processes_below
from fault_scenarios.outcome import Outcome

ENV_CONFIG: dict[str, Any] = {
    "objects": list(DEMO_OBJECTS),
    "properties": list(DEMO_PROPERTIES),
    "max_steps_per_episode": 3,
}


def run(*, quick: bool) -> Iterator[Outcome]:
    """Train and evaluate with trainers that have pools."""
    for pool in ("threads", "processes"):
        yield _one_after_the_other(pool, 3 if quick else 10)


def _one_after_the_other(pool: str, num_trainers: int) -> Outcome:
    began = time.monotonic()
    counts: list[tuple[int, int]] = []
    for _ in range(num_trainers):
        with tempfile.TemporaryDirectory() as folder:
            trainer = _trainer(folder, pool)
            trainer.train()
            trainer.evaluate()  # pyright: ignore[reportUnknownMemberType]
        counts.append((len(processes_below(os.getpid())), threading.active_count()))
    processes, threads = zip(*counts, strict=True)
    return Outcome(
        scenario=f"{num_trainers} trainers with env_pool = {pool!r}, each trained and evaluated",
        asked="as many processes and threads after each as after the first",
        seen=f"{_numbers(processes)} processes, {_numbers(threads)} threads",
        passed=len(set(counts)) == 1,
        seconds=time.monotonic() - began,
    )


def _numbers(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"


def _trainer(folder: str, pool: str) -> GRPOEnvTrainer:
    env = TwentyQuestionsEnv(env_config=ENV_CONFIG)
    model, tokenizer = tiny_policy(env, hidden_size=32, num_heads=2, seed=0)
    args = GRPOEnvConfig(
        output_dir=folder,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        max_steps=1,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_generations=4,
        max_turn_tokens=4,
        env_pool=pool,
        env_pool_kwargs={"num_workers": 3},
    )
    dataset = env.get_train_dataset(env_config=ENV_CONFIG)
    rows = env.get_eval_dataset(env_config=ENV_CONFIG)
    trainer = GRPOEnvTrainer(
        model, TwentyQuestionsEnv(tokenizer, ENV_CONFIG), args, train_dataset=dataset, eval_dataset=rows
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
