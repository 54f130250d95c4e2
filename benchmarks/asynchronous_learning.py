"""Train the embedded policy at Twenty Questions with rollouts that run ahead, from one imitation for all bounds.

``python -m benchmarks.asynchronous --learning > rows.jsonl`` runs it; ``python -m benchmarks.asynchronous_learning
rows.jsonl curves.png`` draws the results.
"""

# pyright: reportUnknownMemberType=false
# matplotlib leaves **kwargs untyped, so strict checking knows none of its methods.

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from agentsgym.agents.policy.agent import CopiedPolicyAgent
from benchmarks.credit import GAMES, MAX_TURN_TOKENS, Arm, played_by, score_of, trainer_of, warm_start

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#4c78a8", "#54a24b", "#e45756", "#f58518")
NAME = "twenty_questions"
WINDOW = 256  # episodes that a point of a curve, and the first time at 80 %, are taken from


def train(folder: Path, seed: int, max_staleness: int, num_episodes: int) -> dict[str, Any]:
    """Train once, and play afterwards.

    Args:
        folder: Where the imitation of a seed is kept.
        seed: Of model, tasks and draws.
        max_staleness: 0 waits.
        num_episodes: Episodes that are trained on.
    """
    game, start = GAMES[NAME], warm_start(NAME, seed, folder)
    arm = Arm(estimator="mt_grpo", settings={"max_staleness": max_staleness})

    def copied(model: Any, tokenizer: Any) -> CopiedPolicyAgent:
        return CopiedPolicyAgent(model, tokenizer, seed=seed, max_turn_tokens=MAX_TURN_TOKENS)

    trainer, env = trainer_of(game, arm, seed, start, num_episodes, copied if max_staleness else None)
    metrics = list[dict[str, float]]()
    generator: Any = trainer.generator
    generate = generator.generate

    def noting(*args: Any, **kwargs: Any) -> Any:
        batch = generate(*args, **kwargs)
        metrics.append(batch.metrics)
        return batch

    generator.generate = noting
    began = time.perf_counter()
    trainer.train()
    took_s = time.perf_counter() - began
    wins = [score_of(info) for info in env.last_info.values()][:num_episodes]
    logs = trainer.state.log_history[-1]
    afterwards = played_by(trainer.model, env, game.tasks("evaluation", seed, game.num_evaluated), seed)
    row = {
        "game": NAME,
        "seed": seed,
        "max_staleness": max_staleness,
        "episodes": num_episodes,
        "win_rate_by_eighth": [round(rate, 3) for rate in by_part(wins, 8)],
        "episodes_to_80": first_at(wins, 0.8),
        "win_rate_afterwards": round(fmean(bool(one.success) for one in afterwards), 3),
        "s": round(took_s, 1),
    }
    if max_staleness:
        row["staleness/mean"] = round(fmean(batch["staleness/mean"] for batch in metrics), 2)
        row["staleness/max"] = max(batch["staleness/max"] for batch in metrics)
        row["sampling/effective_sample_size_of_tokens"] = round(logs["sampling/effective_sample_size_of_tokens"], 3)
    return row


def by_part(wins: list[float], parts: int) -> list[float]:
    """The mean of each part of a run."""
    return [fmean(wins[part * len(wins) // parts : (part + 1) * len(wins) // parts]) for part in range(parts)]


def first_at(wins: list[float], rate: float) -> int | None:
    """How many episodes had been played when the last ``WINDOW`` first were at this rate; None for never."""
    sums = [0.0]
    for win in wins:
        sums.append(sums[-1] + win)
    reached = (end for end in range(WINDOW, len(sums)) if sums[end] - sums[end - WINDOW] >= rate * WINDOW)
    return next(reached, None)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the win rate by episodes for each bound: the median of its seeds, and their range."""
    figure = Figure(figsize=(6.4, 3.6), dpi=130, layout="constrained")
    axes: Axes = figure.subplots()
    for bound, color in zip(sorted({row["max_staleness"] for row in rows}), COLORS, strict=False):
        curves = [row["win_rate_by_eighth"] for row in rows if row["max_staleness"] == bound]
        points = [*zip(*curves, strict=True)]
        places = [(part + 0.5) / len(points) * rows[0]["episodes"] for part in range(len(points))]
        axes.fill_between(places, [*map(min, points)], [*map(max, points)], color=color, alpha=0.12, linewidth=0)
        axes.plot(places, [*map(median, points)], color=color, marker="o", label=f"max_staleness={bound}")
    axes.set_xlabel("episodes")
    axes.set_ylabel("win rate")
    axes.set_ylim(0, 1)
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    draw([json.loads(line) for line in lines], Path(sys.argv[2]))
