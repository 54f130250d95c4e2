"""Compute, by a cost model, how long a training step takes by the way generation and learning are combined.

``python -m benchmarks.scaling_model`` prints the tables of ``docs/scaling.md``; ``--write`` puts them there and draws
its plots. The same seed gives the same numbers. The costs of engines, learners and episodes are assumptions, in
``benchmarks/scaling_engine.py``; environments never wait for a free processor, and all ranks learn equally long.

The ways:

- *lockstep, one server*: the episodes of all ranks take each turn together.
- *lockstep, by rank*: the episodes of each rank take each turn together, on its own engine.
- *continuous, by rank*: each episode continues as soon as it can, on the engine of its rank.
- *one batch ahead*: some GPUs play a batch while the others learn from the one before; each waits for the other.
- *no barrier*: a new episode begins as soon as there is room; learning takes the episodes that are finished. An
  episode is learned from at most ``max_staleness`` updates after the weights of its first turn: those that would
  become older are waited for, and no more begin than can be learned from in time. None begins while a whole batch of
  finished ones waits for learning. An update clears the engines' caches: what is in play is prefilled anew.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.credit_report import markdown_table
from benchmarks.scaling_engine import (
    STALENESS,
    TASKS,
    Batch,
    Cluster,
    Episode,
    Play,
    Step,
    Task,
    batches_of,
    generation,
)

PAGE: Final = Path(__file__).parent.parent / "docs" / "scaling.md"
BEGIN, END = "<!-- scaling-model:begin -->", "<!-- scaling-model:end -->"
SHARES: Final = (0.375, 0.5, 0.625, 0.75, 0.875)  # fractions of GPUs that generate while the others learn
NUM_WARM, NUM_MEASURED = 5, 4  # updates of a run without a barrier


def together(way: str, task: Task, batches: Sequence[Batch], cluster: Cluster) -> Step:
    """A step in which all GPUs generate, then all learn."""
    ends = [generation(way, task, batch, cluster.num_gpus, cluster.engine) for batch in batches]
    generate_s = fmean(one[-1] for one in ends)
    learn_s = fmean(cluster.learn_s(task, batch, cluster.num_gpus) for batch in batches)
    return Step(
        way=way,
        generate_s=generate_s,
        step_s=generate_s + learn_s + cluster.learner.update_s,
        tail=fmean(_tail(one) for one in ends),
    )


def one_batch_ahead(task: Task, batches: Sequence[Batch], cluster: Cluster, num_generating: int) -> Step:
    """A step in which some GPUs play a batch while the others learn from the one before."""
    num_learning = cluster.num_gpus - num_generating
    ends = [generation("continuous, shared", task, batch, num_generating, cluster.engine) for batch in batches]
    steps = [
        max(one[-1], cluster.learn_s(task, batch, num_learning)) + cluster.learner.update_s
        for one, batch in zip(ends, batches, strict=True)
    ]
    return Step(
        way="one batch ahead",
        step_s=fmean(steps),
        generate_s=fmean(one[-1] for one in ends),
        tail=fmean(_tail(one) for one in ends),
        num_generating=num_generating,
        staleness=(1.0, 1),
    )


def _tail(ends: Sequence[float]) -> float:
    return 1 - ends[math.ceil(0.9 * len(ends)) - 1] / ends[-1]


class NoBarrier:
    """A run whose engines are never drained.

    Args:
        task: The kind of the episodes.
        cluster: What there is.
        num_generating: GPUs that generate; the others learn.
        max_staleness: Updates between the weights of an episode's first turn and learning from it, at most.
        seed: Of the episodes.
    """

    def __init__(self, task: Task, cluster: Cluster, num_generating: int, max_staleness: int, seed: int) -> None:
        self.task, self.cluster, self.max_staleness, self.seed = task, cluster, max_staleness, seed
        self.num_learning = cluster.num_gpus - num_generating
        self.play = Play(task, num_generating, cluster.engine)
        self.version = 0
        self.updates: list[float] = []  # when each was made
        self.staleness: list[int] = []  # of each episode that was learned from, in order
        self._episodes: dict[int, Episode] = {}
        self._begun: dict[int, int] = {}  # by episode that was not yet learned from, in order: the version at its start
        self._finished: dict[int, None] = {}  # in the order of their ends
        self.num_begun = 0

    def run(self, num_updates: int) -> None:
        """Play and learn until a number of updates is reached."""
        learned_at = math.inf
        while len(self.updates) < num_updates:
            if math.isinf(learned_at) and self._is_ready():
                learned_at = self.play.now + self._learn()
            self._fill()
            if learned_at <= self.play.next_time():
                self.play.until(learned_at)
                self.play.clear_caches()
                self.updates.append(learned_at)
                self.version += 1
                learned_at = math.inf
            elif (ended := self.play.advance()) is not None:
                self._finished[ended] = None

    def is_outstanding(self, index: int) -> bool:
        """Tell whether an episode has begun and was not yet learned from."""
        return index in self._begun

    def _fill(self) -> None:
        """Begin as many episodes as there is room for, and as can be learned from in time."""
        size = self.cluster.num_episodes
        most = size * (self.version + self.max_staleness + 1)
        while self.play.num_live < size and len(self._finished) < size and self.num_begun < most:
            index = self.num_begun
            self.num_begun += 1
            self._episodes[index] = self.task.episode("scaling", self.seed, index // size, index % size)
            self._begun[index] = self.version
            self.play.begin(index, self._episodes[index])

    def _due(self) -> Iterator[int]:
        """Give the episodes that would be too old after the next update; those that began first stand first."""
        return takewhile(lambda index: self.version - self._begun[index] >= self.max_staleness, self._begun)

    def _is_ready(self) -> bool:
        """Tell whether a batch is finished, and with it all that is due."""
        return len(self._finished) >= self.cluster.num_episodes and all(one in self._finished for one in self._due())

    def _learn(self) -> float:
        """Take what is due, and then what ended first; returns how long learning from them takes."""
        due = dict.fromkeys(self._due())
        chosen = [*due, *(index for index in self._finished if index not in due)][: self.cluster.num_episodes]
        for index in chosen:
            del self._finished[index]
        self.staleness += [self.version - self._begun.pop(index) for index in chosen]
        batch = [self._episodes.pop(index) for index in chosen]
        return self.cluster.learn_s(self.task, batch, self.num_learning) + self.cluster.learner.update_s


def no_barrier(task: Task, cluster: Cluster, num_generating: int, max_staleness: int, *, seed: int) -> Step:
    """A step of a run without a barrier, once it is under way."""
    run = NoBarrier(task, cluster, num_generating, max_staleness, seed)
    run.run(NUM_WARM + NUM_MEASURED)
    step_s = (run.updates[-1] - run.updates[NUM_WARM - 1]) / NUM_MEASURED
    stale = run.staleness[NUM_WARM * cluster.num_episodes :]
    return Step(
        way=_no_barrier_of(max_staleness),
        step_s=step_s,
        generate_s=step_s,
        num_generating=num_generating,
        staleness=(fmean(stale), max(stale)),
    )


def simulate(
    task: Task, cluster: Cluster, shares: Mapping[str, float] | None = None, *, num_batches: int, seed: int
) -> list[Step]:
    """All ways.

    Args:
        task: The kind of the episodes.
        cluster: What there is.
        shares: By way the share of the GPUs that generates, where they are divided; None for the fastest of some.
        num_batches: How many batches a number is a mean over, where there are batches.
        seed: Of the episodes.
    """
    batches = batches_of(task, cluster.num_episodes, num_batches, seed)
    steps = [
        together(way, task, batches, cluster)
        for way in ("lockstep, one server", "lockstep, by rank", "continuous, by rank")
    ]

    def splits(way: str) -> list[int]:
        wanted = SHARES if shares is None else (shares[way],)
        return sorted({min(cluster.num_gpus - 1, max(1, round(share * cluster.num_gpus))) for share in wanted})

    ahead = "one batch ahead"
    steps.append(min((one_batch_ahead(task, batches, cluster, split) for split in splits(ahead)), key=_by_time))
    for bound in STALENESS:
        runs = [no_barrier(task, cluster, split, bound, seed=seed) for split in splits(_no_barrier_of(bound))]
        steps.append(min(runs, key=_by_time))
    return steps


def _no_barrier_of(max_staleness: int) -> str:
    return f"no barrier, max_staleness {max_staleness}"


def _by_time(step: Step) -> float:
    return step.step_s


def table(name: str, cluster: Cluster, steps: Sequence[Step]) -> str:
    """Return the steps of one kind of episode as a table with a headline."""
    slowest = steps[0].step_s
    header = [
        "mode",
        "step, s",
        "times as fast",
        "generation",
        "tail, share of generation",
        "GPUs that generate",
        "staleness",
    ]
    rows = [
        [
            step.way,
            f"{step.step_s:,.0f}",
            f"{slowest / step.step_s:.1f}",
            f"{step.generate_s / step.step_s:.0%}" if step.num_generating is None else "",
            "" if step.tail is None else f"{step.tail:.0%}",
            "all" if step.num_generating is None else str(step.num_generating),
            "0" if step.staleness is None else f"{step.staleness[0]:.1f}, at most {step.staleness[1]}",
        ]
        for step in steps
    ]
    title = f"**{name[0].upper()}{name[1:]}, {cluster.num_gpus} GPUs, {cluster.num_episodes:,} episodes per step**"
    return f"{title}\n\n{markdown_table(header, rows)}"


def page_with(page: str, tables: str) -> str:
    """Put the tables between the page's markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Compute the tables, and print or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64], help="default: 8 64")
    parser.add_argument("--per-gpu", type=int, default=64, help="episodes of a step for each GPU; default: 64")
    parser.add_argument("--batches", type=int, default=4, help="batches that a number is a mean over; default: 4")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--write", action="store_true", help="write pictures and the first tables to docs/scaling.md")
    options = parser.parse_args()
    found: dict[tuple[str, int], list[Step]] = {}
    tables: list[str] = []
    for num_gpus in options.gpus:
        cluster = Cluster(num_gpus=num_gpus, per_gpu=options.per_gpu)
        for name, task in TASKS.items():
            shares = _shares_of(found, name)
            found[name, num_gpus] = simulate(task, cluster, shares, num_batches=options.batches, seed=options.seed)
            print(f"{table(name, cluster, found[name, num_gpus])}\n", flush=True)
            if num_gpus == options.gpus[0]:  # the page's pictures show the others
                tables.append(table(name, cluster, found[name, num_gpus]))
    if options.write:
        from benchmarks.scaling_plots import draw_all  # noqa: PLC0415  # matplotlib is not needed to print

        PAGE.write_text(page_with(PAGE.read_text(), "\n\n".join(tables)))
        draw_all(found, PAGE.parent, per_gpu=options.per_gpu, seed=options.seed)


def _shares_of(found: Mapping[tuple[str, int], Sequence[Step]], name: str) -> dict[str, float] | None:
    """Return the best shares of the first number of GPUs, since a search on many GPUs takes long."""
    for (task, num_gpus), steps in found.items():
        if task == name:
            return {step.way: step.num_generating / num_gpus for step in steps if step.num_generating is not None}
    return None


if __name__ == "__main__":
    main()
