"""Trainings that act at a turn of a rank's: signal themselves, or let others wait."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from number_games import GuessNumber

from benchmarks.fault_scenarios.runs import train

SETTINGS = {"save_steps": 100, "preemption_grace_s": 0.0}
TURN = (
    34  # of the second generation batch at the earliest, also where it is played ahead, and of the third at the latest
)


def training(
    act: Callable[[int, int], None] = lambda rank, turn: None, run: Callable[..., None] = train, **changes: Any
) -> Callable[[Path], None]:
    """What a rank does: train, and act at each turn, given the rank and the number of the turn."""

    def acting_run(folder: Path) -> None:
        rank, turns = int(os.environ.get("RANK", "0")), iter(range(1, 10_000))
        step = GuessNumber._step_episode

        def acting(*args: Any) -> Any:
            act(rank, next(turns))
            return step(*args)

        GuessNumber._step_episode = acting  # type: ignore[method-assign]  # of this process alone
        run(folder, **{**SETTINGS, **changes})

    return acting_run


def at_rank_1(rank: int, turn: int) -> None:
    """The last rank is signaled in its rollouts."""
    if rank == 1 and turn == TURN:
        signal.raise_signal(signal.SIGTERM)


def while_rank_0_waits(rank: int, turn: int) -> None:
    """The first rank is signaled when it has played its rollouts, which the other rank takes long for."""
    if rank == 0 and turn == TURN:
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    if rank == 1 and turn >= TURN:
        time.sleep(1.0)


def checkpoints(folder: Path) -> list[str]:
    """The names of the checkpoints of a run."""
    return sorted(path.name for path in folder.glob("checkpoint-*"))
