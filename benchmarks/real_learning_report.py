"""Tables from the results of ``real_learning.py``, as Markdown.

    python benchmarks/real_learning_report.py benchmarks/real_learning.jsonl

Episodes to a threshold are counted until the mean win rate of five consecutive steps reaches it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.real_lessons import LESSONS

ROLLOUTS_PER_STEP = 32
WINDOW = 5
# Student's t for 95% of a mean over two and three seeds.
T_VALUES = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}

Run = dict[str, Any]


def percent(values: Sequence[float]) -> str:
    """Format a win rate with its interval.

    >>> percent([0.5, 0.38, 0.62])
    '50 % [38, 62]'
    """
    mean, low, high = (round(100 * value) for value in values)
    return f"{mean} % [{low}, {high}]"


def learning_table(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a row per environment, machine and seed: runs with the lesson's own settings."""
    yield "| environment | machine, seed | untrained | after imitation | after training | steps | CPU minutes |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for run in runs:
        lesson = LESSONS[run["lesson"]]
        own = lesson.learning_rate, lesson.training.get("discount", 1.0)
        if run["credit"] == "turn" and (run["learning_rate"], run["discount"]) == own and run["weights"] == "adapters":
            rates = " | ".join(percent(run[name]["win_rate"]) for name in ("untrained", "before", "after"))
            minutes = round(sum(run["cpu_s"].values()) / 60)
            yield f"| {run['lesson']} | {run['device']}, {run['seed']} | {rates} | {len(run['curve'])} | {minutes} |"


def episodes_to(threshold: float, run: Run) -> int | None:
    """Return the number of episodes after which the win rate first reaches a threshold; None if it never does."""
    rates = [step.get("win_rate", step["reward"]) for step in run["curve"]]
    for end in range(WINDOW, len(rates) + 1):
        if statistics.fmean(rates[end - WINDOW : end]) >= threshold:
            return end * ROLLOUTS_PER_STEP
    return None


def credit_table(runs: Sequence[Run], thresholds: Sequence[float]) -> Iterator[str]:
    """Yield a row per environment and threshold: episodes with either kind of credit, and their ratio."""
    yield "| environment | machine, discount | win rate | by turn, seed by seed | per rollout, seed by seed | ratio |"
    yield "| --- | --- | --- | --- | --- | --- |"
    own = [run for run in runs if run["weights"] == "adapters"]
    per_rollout = {place_of(run): run for run in own if run["credit"] == "rollout"}
    by_turn = [run for run in own if run["credit"] == "turn" and place_of(run) in per_rollout]
    for (name, device, discount), group in grouped(by_turn, lambda run: (*place_of(run)[:2], run["discount"])):
        pairs = [(run, per_rollout[place_of(run)]) for run in group]
        for threshold in thresholds:
            ours, theirs = ([episodes_to(threshold, run) for run in some] for some in zip(*pairs, strict=True))
            cells = " | ".join(", ".join(map(str, counts)) for counts in (ours, theirs))
            yield f"| {name} | {device}, {discount:g} | {threshold:.0%} | {cells} | {ratio(ours, theirs)} |"


def place_of(run: Run) -> tuple[str, str, float, int]:
    """Return what a pair of runs that differ in their credit has in common."""
    return run["lesson"], run["device"], run["learning_rate"], run["seed"]


def ratio(ours: Sequence[int | None], theirs: Sequence[int | None]) -> str:
    """Format the geometric mean of the ratios seed by seed, with a 95% interval (Student's t of the logarithms).

    >>> ratio([100, 100], [200, 200])
    '0.50 [0.50, 0.50]'
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a and b]
    logs = [math.log(a / b) for a, b in pairs]
    if len(logs) < len(ours) or len(logs) < 2:
        return f"not reached in {len(ours) - len(logs)} pairs"
    mean = statistics.fmean(logs)
    margin = T_VALUES[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.2f} [{math.exp(mean - margin):.2f}, {math.exp(mean + margin):.2f}]"


def rates_table(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a row per environment, kind of weights, learning rate and discount."""
    yield "| environment | trained | learning rate | discount | after training |"
    yield "| --- | --- | --- | --- | --- |"
    own = [run for run in runs if run["credit"] == "turn"]
    keys = "lesson", "weights", "learning_rate", "discount"
    for (name, weights, rate, discount), group in grouped(own, lambda run: tuple(run[key] for key in keys)):
        rates = ", ".join(percent(run["after"]["win_rate"]) for run in group)
        yield f"| {name} | {weights} | {rate:g} | {discount:g} | {rates} |"


def grouped(runs: Sequence[Run], key: Callable[[Run], Any]) -> Iterator[tuple[Any, list[Run]]]:
    """Yield the runs with equal keys, in the order of the keys and then of the seeds."""
    for value, group in groupby(sorted(runs, key=lambda run: (key(run), run["seed"])), key):
        yield value, list(group)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.3, 0.4, 0.5, 0.6])
    options = parser.parse_args()
    runs = [json.loads(line) for line in options.file.read_text().splitlines()]
    runs = [run for run in runs if not run.get("cold")]
    runs.sort(key=lambda run: (run["lesson"], run["seed"]))
    for table in (learning_table(runs), credit_table(runs, options.thresholds), rates_table(runs)):
        print("\n".join(table), end="\n\n")


if __name__ == "__main__":
    main()
