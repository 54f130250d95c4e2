"""Compare training with and without forks by the tokens that they cost, not by episodes.

::

    python -m benchmarks.forks --seeds 0 1 2 3 4        # from the repository's root; prints a JSON line per run
    python -m benchmarks.forks --report outputs/forks/runs.jsonl

Every arm starts from the same warm start per seed, as in :mod:`benchmarks.credit`, and plays the same tasks. The bill
of a generation batch contains the tokens *sampled* by the policy, *prefilled* (all others of its rollouts, and for
forks the prompt of each forked turn once and the later observations), and *trained* (tokens of all training rows, so
the prompt of a fork counts once more for each fork).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from transformers.utils import logging as transformers_logging

from agentsgym.statistics.metrics import fraction_of_optimal
from agentsgym.training.observing import BatchObserver, ObservedBatch
from benchmarks import credit
from benchmarks.credit import GAMES, Arm, trainer_of, warm_start
from benchmarks.credit_report import first_crossing, markdown_table, median_over_seeds

WINDOW: Final = 256  # episodes
THRESHOLDS: Final = (0.6, 0.8, 0.9)


class Forked(NamedTuple):
    """An arm: how credit is given, and how many rollouts a task has, of how many tasks."""

    arm: Arm
    num_rollouts: int = 8
    num_tasks: int = 8


def _tree(paid: str, budget: int, weights: str = "equal", scale: str = "group", **options: Any) -> Arm:
    settings: dict[str, Any] = {"layout": "turn", "fork_budget": budget, "fork_kwargs": options or None}
    settings["estimator_kwargs"] = {"weights": weights}
    return Arm(scale=scale, estimator="tree", paid=cast("Any", paid), settings=settings)


ARMS: Final[Mapping[str, Forked]] = {
    "win_grpo": Forked(Arm(estimator="grpo", paid="win")),
    "win_return_to_go": Forked(Arm(estimator="return_to_go", paid="win")),
    "win_forks_uniform": Forked(_tree("win", 100, at="uniform"), 4),
    "win_forks_entropy": Forked(_tree("win", 100, at="entropy"), 4),
    "win_forks_value": Forked(_tree("win", 100, at="value"), 4),
    "win_forks_value_7": Forked(_tree("win", 100, at="value", width=7), 4),
    "win_forks_value_1": Forked(_tree("win", 100, at="value", width=1), 4),
    "win_forks_value_shared": Forked(_tree("win", 100, "shared", at="value"), 4),
    "win_forks_value_batch": Forked(_tree("win", 100, scale="batch", at="value"), 4),
    "win_forks_many": Forked(_tree("win", 150, at="value"), 4, 6),
    "win_tree": Forked(_tree("win", 0)),
    "mt_grpo": Forked(Arm(estimator="mt_grpo")),
    "return_to_go": Forked(Arm(estimator="return_to_go")),
    "forks_uniform": Forked(_tree("turns", 100, at="uniform"), 4),
    "forks_value_shared": Forked(_tree("turns", 100, "shared", at="value"), 4),
    "forks_value_batch": Forked(_tree("turns", 100, scale="batch", at="value"), 4),
    "forks_value": Forked(_tree("turns", 100, at="value"), 4),
}


@dataclass(slots=True)
class Bill(BatchObserver):
    """Adds up what each generation batch costs, and how well its unforked rollouts did."""

    rows: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def on_batch(self, observed: ObservedBatch) -> None:
        """Add a batch."""
        batch = observed.batch
        played = [one for one in batch.rollouts if not one.failed]
        forks = batch.forks
        sampled = sum(one.num_agent_tokens for one in batch.summaries)
        own = sum(one.num_agent_tokens for one in batch.rollouts)
        self.rows.append(
            {
                "episodes": len(batch.rollouts),
                "forks": len(forks.summaries) if forks else 0,
                "sampled": sampled,
                "prefilled": sum(one.num_tokens for one in batch.rollouts)
                - own
                + (forks.num_prefilled if forks else 0),
                "trained": sum(one.num_row_tokens for one in batch.summaries),
                "score": sum(one.metrics.get("score", float(bool(one.success))) for one in played) / len(played),
            }
        )


def learn(name: str, game_name: str, seed: int, folder: Path, num_batches: int) -> dict[str, Any]:
    """Learn a game with one arm; return its bill and scores by generation batch."""
    forked = ARMS[name]
    game = GAMES[game_name]
    game = replace(game, batch_size=forked.num_rollouts * forked.num_tasks)
    start_folder = warm_start(game_name, seed, folder)
    start = time.process_time()
    credit.NUM_ROLLOUTS = forked.num_rollouts
    trainer, env = trainer_of(game, forked.arm, seed, start_folder, num_batches * game.batch_size)
    bill = Bill()
    trainer.observers.append(bill)
    trainer.train()
    anchors = env.anchors()
    return {
        "game": game_name,
        "arm": name,
        "seed": seed,
        "random": anchors["random_reward"],
        "optimal": anchors["optimal_reward"],
        "batches": bill.rows,
        "cpu_s": round(time.process_time() - start, 1),
    }


def curve(run: Mapping[str, Any], by: Sequence[str]) -> list[tuple[float, float]]:
    """(sum of what was spent, fraction of optimal of the last 256 episodes), one point a generation batch."""
    spent, points, last = 0.0, list[tuple[float, float]](), list[Mapping[str, float]]()
    for batch in run["batches"]:
        spent += sum(batch[name] for name in by)
        last.append(batch)
        while sum(one["episodes"] for one in last[1:]) >= WINDOW:
            last.pop(0)
        if sum(one["episodes"] for one in last) >= WINDOW:
            score = sum(one["score"] * one["episodes"] for one in last) / sum(one["episodes"] for one in last)
            points.append((spent, fraction_of_optimal(score, random=run["random"], optimal=run["optimal"])))
    return points


def report(runs: Sequence[Mapping[str, Any]], reference: str) -> str:
    """Tabulate what each arm spends to reach a level, as a ratio to the reference, with a 90 % interval."""
    lines: list[list[str]] = []
    seeds = {arm: {run["seed"]: run for run in runs if run["arm"] == arm} for arm in ARMS}
    for arm, own in seeds.items():
        shared = sorted(own.keys() & seeds[reference].keys())
        for height in THRESHOLDS if shared else ():
            cells: list[str] = []
            for by in (("episodes",), ("sampled",), ("sampled", "prefilled"), ("trained",)):
                spent, over = (
                    [first_crossing(curve(group[seed], by), height) for seed in shared]
                    for group in (own, seeds[reference])
                )
                ratio = median_over_seeds(spent, over)
                cells.append(f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]")
            lines.append([f"`{arm}`", str(len(shared)), f"{height:.0%}", *cells])
    return markdown_table(["arm", "seeds", "level", "episodes", "sampled", "sampled + prefilled", "trained"], lines)


def main() -> None:
    """Run or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="twenty_questions", choices=GAMES)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--batches", type=int, default=160)
    parser.add_argument("--out", type=Path, default=Path("outputs/forks"))
    parser.add_argument("--report", type=Path, help="a file of printed runs: write the table, and play nothing")
    parser.add_argument("--reference", default="win_grpo", choices=ARMS)
    options = parser.parse_args()
    if options.report:
        runs = [json.loads(line) for line in options.report.read_text(encoding="utf-8").splitlines() if line[:1] == "{"]
        print(report([run for run in runs if run["game"] == options.game], options.reference))
        return
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    for seed in options.seeds:
        for arm in options.arms:
            print(json.dumps(learn(arm, options.game, seed, options.out, options.batches)), flush=True)


if __name__ == "__main__":
    main()
