"""Compute what dropping stale task groups, in place of waiting for them, does to what is learned from.

``python -m benchmarks.asynchronous_bias``: groups of episodes as in ``benchmarks/scaling_engine.py``, played at a
steady pace while batches are learned from. Computed, in the time of the model; nothing is waited for.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from agentsgym.training.generation.in_flight import GroupsInFlight
from benchmarks.scaling_engine import TASKS, Episode, Task

GROUP = 8
TOKEN_S = 0.01  # what a sampled token takes: the load of the engine does not matter here


class Played(NamedTuple):
    """A task group: its episodes, how long it lasts, and the updates before it began."""

    episodes: Sequence[Episode]
    lasts_s: float
    begun: int


def group(task: Task, number: int, begun: int) -> Played:
    """Draw a group, the same one for the same number."""
    episodes = [task.episode("bias", number, rollout) for rollout in range(GROUP)]
    lasts = max(sum(turn.tokens * TOKEN_S + turn.env_s for turn in episode) for episode in episodes)
    return Played(episodes, lasts, begun)


def waited_for(task: Task, size: int, learn_s: float, max_staleness: int, batches: int) -> Iterator[Played]:
    """The groups that are learned from where those that would become too old are waited for, as the library does."""
    in_flight, groups, ends = GroupsInFlight(size, 1, max_staleness), list[Played](), list[tuple[float, int]]()
    now = 0.0

    def play(until: float | None, num_updates: int, next_batch: int) -> None:
        """Play until then, or for None until one more group is finished."""
        nonlocal now
        while True:
            while in_flight.may_begin(num_updates, next_batch, batches - 1):
                groups.append(group(task, len(groups), num_updates))
                in_flight.begin(len(groups) - 1, num_updates)
                heapq.heappush(ends, (now + groups[-1].lasts_s, len(groups) - 1))
            if not ends or (until is not None and ends[0][0] > until):
                now = now if until is None else until
                return
            now, number = heapq.heappop(ends)
            in_flight.finish(number)
            if until is None:
                return

    for batch in range(batches):
        while (taken := in_flight.take(batch)) is None:
            play(None, batch, batch)
        yield from (groups[number] for number in taken)
        play(now + learn_s, batch, batch + 1)


def dropped(task: Task, size: int, learn_s: float, max_staleness: int, batches: int) -> Iterator[Played]:
    """The groups that are learned from where those that are too old when they are finished are thrown away."""
    ends, finished = list[tuple[float, int, Played]](), deque[Played]()
    now, number = 0.0, 0
    for batch in range(batches):
        until, taken = now + (learn_s if batch else 0.0), 0
        while taken < size or now < until:
            while len(ends) < size and len(finished) < size:
                made = group(task, number, batch)
                heapq.heappush(ends, (now + made.lasts_s, number, made))
                number += 1
            if now >= until and finished:
                one = finished.popleft()
                if batch - one.begun <= max_staleness:
                    taken += 1
                    yield one
            elif ends and (now >= until or ends[0][0] <= until):
                now, _, one = heapq.heappop(ends)
                finished.append(one)
            else:
                now = until


def main() -> None:
    """Print one JSON object for each kind of episode and bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4, 6])
    parser.add_argument("--size", type=int, default=16, help="groups of a batch")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--learn", type=float, default=0.25, help="learning from a batch, by the mean time of a group")
    options = parser.parse_args()
    for name in options.tasks:
        task = TASKS[name]
        learn_s = options.learn * fmean(group(task, number, 0).lasts_s for number in range(200))
        fair = fmean(len(one) for number in range(2000) for one in group(task, number, 0).episodes)
        for bound in options.staleness:
            row: dict[str, Any] = {"task": name, "max_staleness": bound, "turns_of_all": round(fair, 2)}
            for way in (waited_for, dropped):
                groups = [*way(task, options.size, learn_s, bound, options.batches)]
                mean = fmean(len(one) for played in groups for one in played.episodes)
                row[f"turns_{way.__name__}"] = round(mean, 2)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
