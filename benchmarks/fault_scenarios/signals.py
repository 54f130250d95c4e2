"""Send SIGTERM to training at random moments, on one rank and on one of two, and resume the run."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fault_scenarios.outcome import Outcome
from fault_scenarios.runs import GuessNumber, Run, train

PREEMPTED = 128 + signal.SIGTERM
LOST = -1  # killed by the signal before it was done, and nothing was saved
GRACES_S = (0.0, 25.0)  # break off at once, or finish what fits


def run(*, quick: bool) -> Iterator[Outcome]:
    """Half of the signals go to runs of one rank, half to one rank of two."""
    count = 4 if quick else 20
    draws = random.Random(0)
    for num_ranks in (1, 2):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            statuses, num_equal = _signaled(Path(folder), num_ranks, count // 2, draws)
        seen = ", ".join(f"{number} of {status}" for status, number in sorted(statuses.items(), reverse=True))
        yield Outcome(
            scenario=f"{count // 2} SIGTERMs in training, {'at one of two ranks' if num_ranks > 1 else 'one rank'}",
            asked=f"the run goes on to the same weights, bit for bit; status {PREEMPTED} if it was not over",
            seen=f"{num_equal} runs of {count // 2} with equal weights; statuses of the ranks {seen}",
            passed=num_equal == count // 2 and set(statuses) <= {PREEMPTED, 0, -signal.SIGTERM},
            seconds=time.monotonic() - began,
        )


def _signaled(folder: Path, num_ranks: int, count: int, draws: random.Random) -> tuple[Counter[int], int]:
    """Signal runs and resume them; returns the statuses of all ranks, and how many ended with the same weights."""
    straight = Run(folder / "straight", num_ranks, partial(_train, grace_s=None))
    length_s = _play(straight)
    straight.wait()
    wanted = straight.result()
    statuses, num_equal = Counter[int](), 0
    for index in range(count):
        place, grace_s = folder / f"run-{index}", GRACES_S[index % 2]
        signaled = Run(place, num_ranks, partial(_train, grace_s=grace_s))
        _play(signaled, draws.uniform(0.0, length_s))
        signaled.signal(signal.SIGTERM, rank=draws.randrange(num_ranks))
        ended = signaled.wait()
        statuses.update(_status(signaled, rank) for rank in range(num_ranks))
        resumed = Run(place, num_ranks, partial(_train, grace_s=grace_s))
        num_equal += ended and resumed.wait() and "weights" in wanted and resumed.result() == wanted
    return statuses, num_equal


def _status(signaled: Run, rank: int) -> int:
    """A rank's status; a process that the signal killed has a status of its own unless it had already finished."""
    status = signaled.statuses[signaled.pids[rank]]
    is_done = (signaled.folder / f"result-{rank}.json").exists()
    return LOST if status == -signal.SIGTERM and not is_done else status


def _play(started: Run, for_s: float | None = None) -> float:
    """Wait until all ranks play, and then for a time or until the end; returns how long they played."""
    while len([*started.folder.glob("playing-*")]) < len(started.pids) and not started.is_over:
        time.sleep(0.002)
    began = time.monotonic()
    while not started.is_over and (for_s is None or time.monotonic() - began < for_s):
        time.sleep(0.002)
    return time.monotonic() - began


def _train(folder: Path, *, grace_s: float | None) -> None:
    """Train without periodic checkpoints, and leave a mark at the first turn."""
    mark = folder / f"playing-{os.environ.get('RANK', '0')}"
    step: Any = GuessNumber._step_episode  # pyright: ignore[reportPrivateUsage]

    def marking(*args: Any) -> Any:
        mark.touch()
        return step(*args)

    GuessNumber._step_episode = marking  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]  # here alone
    train(folder, save_steps=100, preemption_grace_s=grace_s)
