"""Train notes: a waiter takes orders, hears remarks until the history is replaced by a note, and serves.

    python benchmarks/notes.py --seeds 0 1 2 3 4    # some minutes; prints a table

The warm start imitates a waiter who serves what the note contains, and writes each order down correctly seven times in
ten. The embedded policy is then trained with a reward for each guest who is served right: with credit for notes, and
with notes that are not trained on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any, Final, cast

from transformers import PrinterCallback

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer, PolicyAgent, evaluate, imitate, tiny_policy
from agentsgym.credit.advantages import Scale, return_to_go
from agentsgym.credit.scored import ScoredRollout
from agentsgym.training import tiny_imitation_config
from benchmarks.credit_report import markdown_table
from benchmarks.named_rewards import with_interval
from examples.waiter import ImitationPlayer, WaiterEnv

SMALL: Final[dict[str, Any]] = {"system_prompt": "", "summarize_over_tokens": 30}


def learn(seed: int, num_steps: int, *, trains_notes: bool) -> dict[str, Any]:
    """Train from the warm start of a seed; return the fractions of guests served right before and after."""
    model, tokenizer = tiny_policy(WaiterEnv(env_config=SMALL), seed=seed)
    env = WaiterEnv(tokenizer, SMALL)
    started = time.process_time()
    shown = env.rollout(env.tasks(1024, seed=2 * seed), ImitationPlayer(env, seed))
    imitate(model, shown, tokenizer, tiny_imitation_config(800, seed=seed, disable_tqdm=True, report_to="none"))
    agent = PolicyAgent(model, tokenizer, max_turn_tokens=8, seed=seed)
    fresh = WaiterEnv.get_eval_dataset(SMALL, size=256)
    before = evaluate(env, agent, fresh).metrics["right"].mean
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOEnvConfig(
            output_dir=folder,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=seed,
            layout="turn",
            max_steps=num_steps,
            per_device_train_batch_size=64,
            num_generations=8,
            max_turn_tokens=8,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            advantage_estimator=cast("Any", "return_to_go" if trains_notes else without_notes),
        )
        rows = WaiterEnv.get_train_dataset(SMALL, size=8 * num_steps, seed=2 * seed + 1)
        trainer = GRPOEnvTrainer(model, env, args, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    after = evaluate(env, agent, fresh)
    right = after.metrics["right"].mean
    return {
        "seed": seed,
        "trains_notes": trains_notes,
        "before": round(before, 3),
        "after": round(right, 3),
        "notes": round(after.metrics["num_notes"].mean, 2),
        "cpu_s": round(time.process_time() - started, 1),
    }


def without_notes(rollouts: Sequence[ScoredRollout], *, discount: float, scale: Scale) -> list[list[float]]:
    """Credit by returns, but none for notes."""
    advantages = return_to_go(rollouts, discount=discount, scale=scale)
    return [
        [
            0.0 if isinstance(key, tuple) and isinstance(key[1], tuple) else one
            for key, one in zip(keys, own, strict=True)
        ]
        for keys, own in zip((rollout.state_keys for rollout in rollouts), advantages, strict=True)
    ]


def main() -> None:
    """Train with and without credit for notes, print a line of JSON per run, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="default: 0 to 4")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps; default: 150")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed, trains in product(options.seeds, (True, False)):
        runs.append(learn(seed, options.steps, trains_notes=trains))
        print(json.dumps(runs[-1]), flush=True)
    rows = [
        [name, f"{fmean(run['before'] for run in own):.0%}", with_interval([run["after"] for run in own])]
        for name, trains in (("trained", True), ("not trained", False))
        for own in [[run for run in runs if run["trains_notes"] == trains]]
    ]
    print(markdown_table(["notes", "served right, warm start", "after training"], rows))


if __name__ == "__main__":
    main()
