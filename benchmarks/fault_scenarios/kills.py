"""Kill training with SIGKILL, half of the times while it saves, and resume it until it is done."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fault_scenarios.outcome import Outcome
from fault_scenarios.runs import Run

KILLS_A_RUN = 5


def run(*, quick: bool) -> Iterator[Outcome]:
    """Kill runs on one rank, then on two."""
    for num_ranks, num_kills in ((1, 10), (2, 5)) if quick else ((1, 120), (2, 80)):
        with tempfile.TemporaryDirectory() as folder:
            yield _kill(Path(folder), num_ranks, num_kills)


def _kill(folder: Path, num_ranks: int, num_kills: int) -> Outcome:
    began = time.monotonic()
    straight = Run(folder / "straight", num_ranks)
    straight.wait()
    wanted, draws = straight.result(), random.Random(num_ranks)
    length_s = time.monotonic() - began
    num_done = num_in_saves = num_runs = 0
    wrong: list[str] = []
    while num_done < num_kills:
        place = folder / f"run-{num_runs}"
        num_runs += 1
        for _ in range(min(KILLS_A_RUN, num_kills - num_done)):
            one = Run(place, num_ranks)
            is_aimed = num_done % 2 == 0
            num_in_saves += _hit(one, draws, length_s / 2, is_aimed=is_aimed)
            num_done += 1
        last = Run(place, num_ranks)
        last.wait()
        if last.result() != wanted:
            wrong.append(str(last.result()))
        shutil.rmtree(place)
    ranks = "one rank" if num_ranks == 1 else f"{num_ranks} ranks, one of which is killed"
    return Outcome(
        scenario=f"{num_kills} SIGKILLs of training, {ranks}, {KILLS_A_RUN} a run, across three passes",
        asked="every run resumes unaided and ends with the weights of the uninterrupted one, bit for bit",
        seen=f"{num_in_saves} hit a save; {num_runs - len(wrong)} of {num_runs} runs equal{''.join(wrong[:1])}",
        passed=not wrong and "weights" in wanted,
        seconds=time.monotonic() - began,
    )


def _hit(one: Run, draws: random.Random, length_s: float, *, is_aimed: bool) -> bool:
    """Kill a rank at a random moment, or a moment after a save has begun; returns whether it was saving."""
    unfinished = one.folder / "_unfinished"
    until = time.monotonic() + draws.uniform(0.3, length_s)
    while time.monotonic() < until and not one.is_over:
        time.sleep(0.001)
    while is_aimed and not unfinished.exists() and not one.is_over:
        time.sleep(0.0002)
    if is_aimed:
        time.sleep(draws.uniform(0, 0.015))
    one.signal(signal.SIGKILL, draws.randrange(len(one.pids)))
    was_saving = unfinished.exists()
    one.wait(timeout_s=10)
    return was_saving
