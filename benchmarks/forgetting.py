"""How much a policy forgets of what it imitated but does not meet in reinforcement learning, and what prevents it.

    python benchmarks/forgetting.py --seed 1 --weight 0.3 >> forgetting.jsonl    # from the repository's root

The tiny policy imitates games of Twenty Questions about 32 objects, and then learns from rewards with 24 of them. A run
evaluates it on both parts before and after. ``--weight`` keeps imitating the demonstrations (all 32 objects),
``--beta`` adds a KL term, and ``--held-out 0`` trains on all objects. The policy after the warm start is kept in
``--folder``, and later runs of the same seed start from it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from trl import ModelConfig

from agentsgym import Demonstrations, GRPOEnvConfig, TrainingRun, tiny_policy
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, ImitationPlayer, TwentyQuestionsEnv
from agentsgym.recipes.scripts import load_policy, quiet_logging
from examples.twenty_questions import TINY_DEFAULTS, GameOptions, game_config, make_tasks

GAME = GameOptions()
CONFIG = game_config(GAME)
NUM_KEPT = 2048  # demonstrations that are imitated during training


def started(folder: Path, args: GRPOEnvConfig) -> Path:
    """Return the folder of the policy after the warm start, which the first run of a seed trains."""
    start = folder / f"start-{args.seed}"
    if not start.exists():
        policy = tiny_policy(TwentyQuestionsEnv(env_config=CONFIG), seed=args.seed)
        run = TrainingRun(policy, args, unit="game")
        run.warm_start(demonstrations(run, GAME.num_demonstrations), GAME.warm_start_steps, observation_loss=True)
        parts: Any = run
        parts.model.save_pretrained(start)
        parts.tokenizer.save_pretrained(start)
    return start


def demonstrations(run: TrainingRun, count: int) -> list[Any]:
    """Play games about all objects, to be imitated."""
    env, seed = TwentyQuestionsEnv(run.tokenizer, CONFIG), run.args.seed
    return run.play(
        "demonstrations", env, make_tasks(DEMO_OBJECTS, "demonstrations", count, seed), ImitationPlayer(env, seed=seed)
    )


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Train on a part of the objects, and return the win rates on both parts before and after."""
    held_out = list(DEMO_OBJECTS)[:: 32 // options.held_out] if options.held_out else []
    used = [name for name in DEMO_OBJECTS if name not in held_out]
    name = f"{options.seed}-{options.held_out}-{options.weight}-{options.beta}"
    settings: dict[str, Any] = {**TINY_DEFAULTS, "beta": options.beta}
    quiet: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "use_cpu": True}
    args = GRPOEnvConfig(str(options.folder / name), seed=options.seed, **settings, **quiet)
    run = TrainingRun(load_policy(str(started(options.folder, args)), ModelConfig()), args, unit="game")
    env = TwentyQuestionsEnv(run.tokenizer, CONFIG)
    found: dict[str, Any] = {
        "seed": options.seed, "held_out": len(held_out), "weight": options.weight, "beta": options.beta,
    }  # fmt: skip

    def evaluate(when: str) -> None:
        for part, objects in (("used", used), ("held_out", held_out)):
            if objects:
                found[f"{when}_{part}"] = win_rate(run, env, f"{when} {part}", objects)

    evaluate("before")
    kept = None
    if options.weight:
        trajectories = demonstrations(run, NUM_KEPT)
        kept = Demonstrations(trajectories=trajectories, weight=options.weight, observation_loss=True)
    rows: Any = TwentyQuestionsEnv.get_train_dataset(CONFIG, size=2048, seed=options.seed, split="all")
    solutions = [task["solution"] for task in rows["task_data"]]
    rows = rows.select([index for index, solution in enumerate(solutions) if solution in used])
    start = time.process_time()
    run.learn(env, rows, demonstrations=kept)
    found["cpu_s"] = round(time.process_time() - start)
    evaluate("after")
    return found


def win_rate(run: TrainingRun, env: Any, label: str, objects: Sequence[str]) -> list[float]:
    """Return the win rate over 16 games per object, with its interval."""
    tasks = make_tasks(objects, "evaluation", 16 * len(objects), run.args.seed)
    rate: Any = run.evaluate(label, env, tasks, cluster_by="solution").win_rate
    return [round(value, 3) for value in (rate.mean, rate.low, rate.high)]


def main() -> None:
    """Run once, and print the result as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weight", type=float, default=0.0, help="of the loss on demonstrations during training")
    parser.add_argument("--beta", type=float, default=0.0, help="of the KL term")
    parser.add_argument("--held-out", type=int, choices=[0, 8], default=8, help="objects that training does not use")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("outputs/forgetting"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    quiet_logging()
    print(json.dumps(measured(options)))


if __name__ == "__main__":
    main()
