"""Learn the games of ``benchmarks/credit.py`` with TRL's own trainer, by each way to hand it credit, beside ours.

::

    python -m benchmarks.stock_credit --games maze --seeds 0 1 2     # from the repository's root
    python -m benchmarks.stock_credit --report

All arms of a game and a seed begin from the same weights and play the same tasks, eight rollouts of each.
"""

# pyright: reportUnknownMemberType=false
# transformers and datasets leave parts of their signatures untyped.

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from agentsgym import PolicyAgent, evaluate
from agentsgym.interop import environment_reward, prompt_dataset, rollout_func
from agentsgym.seeding import derive_seed
from benchmarks.credit import ARMS, GAMES, MAX_TURN_TOKENS, NUM_ROLLOUTS, Game, score_of, trainer_of, warm_start


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """One way to train a game in a stock trainer.

    Attributes:
        rows: Rows of a task group beside those of the rollouts themselves: what ``credit="turn"`` spends on turns; None
            for ``credit="final"``.
    """

    rows: int | None


DOORS: Final[Mapping[str, Door | None]] = {
    "ours": None,
    "final": Door(rows=None),
    "mean": Door(rows=1),
    "turns_33": Door(rows=33 - NUM_ROLLOUTS),
    "turns_65": Door(rows=65 - NUM_ROLLOUTS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StockRun:
    """What one run came to.

    Attributes:
        game: Which game.
        door: How it was trained.
        seed: Of the run.
        fraction: Of optimal play beyond random play, after training.
        cpu_s: CPU time of the training.
    """

    game: str
    door: str
    seed: int
    fraction: float
    cpu_s: float


def stock_trainer(game: Game, door: Door, seed: int, policy: Path, num_episodes: int) -> tuple[Any, Any]:
    """TRL's trainer of a game, from the policy that lies in a folder, and what it plays in."""
    tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(policy)
    env = game.make(tokenizer)
    num_batches = num_episodes // game.batch_size
    num_groups = game.batch_size // NUM_ROLLOUTS
    by_turn = door.rows is not None
    group = NUM_ROLLOUTS + (door.rows or 0)
    args = GRPOConfig(
        output_dir=str(policy / "run"),  # nothing is written there
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        seed=seed,
        max_steps=num_batches * game.num_updates,
        per_device_train_batch_size=num_groups * group // game.num_updates,
        steps_per_generation=game.num_updates,
        num_generations=group,
        max_completion_length=4096,
        learning_rate=game.learning_rate,
        lr_scheduler_type="constant",
        scale_rewards="none" if by_turn else "group",
    )
    tasks = game.tasks("training", seed, num_batches * num_groups)
    options: dict[str, Any] = {"credit": "turn", "rollouts_per_group": NUM_ROLLOUTS} if by_turn else {}
    trainer = GRPOTrainer(
        cast("Any", AutoModelForCausalLM).from_pretrained(policy),
        reward_funcs=environment_reward,
        args=args,
        train_dataset=prompt_dataset(tasks),
        processing_class=tokenizer,
        rollout_func=rollout_func(env, max_turn_tokens=MAX_TURN_TOKENS, **options),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, env


def learn(name: str, door_name: str, seed: int, folder: Path, num_episodes: int | None) -> StockRun:
    """Learn a game through one door, and play it afterwards."""
    game, door = GAMES[name], DOORS[door_name]
    policy = warm_start(name, seed, folder)
    start = time.process_time()
    count = num_episodes or game.num_episodes
    trainer: Any
    if door is None:
        trainer, env = trainer_of(game, ARMS["return_to_go"], seed, policy, count)
    else:
        trainer, env = stock_trainer(game, door, seed, policy, count)
    trainer.train()
    seconds = time.process_time() - start
    tokenizer: Any = env.tokenizer
    agent = PolicyAgent(trainer.model, tokenizer, seed=derive_seed("evaluation", seed), max_turn_tokens=MAX_TURN_TOKENS)
    played = evaluate(env, agent, game.tasks("evaluation", seed, game.num_evaluated), max_concurrent=256)
    anchors = env.anchors()
    score = fmean(score_of(one.info) for one in played.trajectories)
    fraction = (score - anchors["random_reward"]) / (anchors["optimal_reward"] - anchors["random_reward"])
    return StockRun(game=name, door=door_name, seed=seed, fraction=round(fraction, 4), cpu_s=round(seconds, 1))


def read(path: Path) -> list[StockRun]:
    """The runs that are there."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [StockRun(**json.loads(line)) for line in lines]


def report(runs: list[StockRun]) -> str:
    """A table: the mean over seeds of the fraction of optimal play, the seeds' own numbers, and the time."""
    lines = ["| game | trained by | of optimal | seeds | CPU s |", "| --- | --- | --- | --- | --- |"]
    for game, door in product(GAMES, DOORS):
        own = sorted((run for run in runs if (run.game, run.door) == (game, door)), key=lambda run: run.seed)
        if own:
            seeds = ", ".join(f"{run.fraction:.2f}" for run in own)
            seconds = fmean(run.cpu_s for run in own)
            lines.append(f"| {game} | {door} | {fmean(run.fraction for run in own):.2f} | {seeds} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Play what is not there yet, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", choices=GAMES, default=["maze", "apples"], help="default: maze, apples")
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=list(DOORS), help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 to 2")
    parser.add_argument("--episodes", type=int, help="episodes of each run; default: the game's own")
    parser.add_argument("--out", type=Path, default=Path("outputs/stock_credit"), help="default: outputs/stock_credit")
    parser.add_argument("--report", action="store_true", help="print the table of what is there")
    options = parser.parse_args()
    path = options.out / "runs.jsonl"
    if options.report:
        print(report(read(path)))
        return
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)  # a second thread gains nothing on so small a model
    transformers_logging.set_verbosity_error()
    for seed, name, door in product(options.seeds, options.games, options.doors):
        if (name, door, seed) in {(run.game, run.door, run.seed) for run in read(path)}:
            continue
        run = learn(name, door, seed, options.out, options.episodes)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")
        print(f"{name} {door} seed {seed}: {run.fraction:.0%} of optimal after {run.cpu_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
