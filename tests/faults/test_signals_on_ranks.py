"""SIGTERM in processes of their own: at one of two ranks, and what the status of the process says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from number_games import GuessNumber

from benchmarks.fault_scenarios.runs import Run, train

SETTINGS = {"save_steps": 100, "preemption_grace_s": 0.0}
TURN = 40  # of the second or third generation batch


def training(act: Callable[[int, int], None] = lambda rank, turn: None, **changes: Any) -> Callable[[Path], None]:
    """What a rank does: train, and act at each turn, given the rank and the number of the turn."""

    def run(folder: Path) -> None:
        rank, turns = int(os.environ.get("RANK", "0")), iter(range(1, 10_000))
        step = GuessNumber._step_episode

        def acting(*args: Any) -> Any:
            act(rank, next(turns))
            return step(*args)

        GuessNumber._step_episode = acting  # type: ignore[method-assign]  # of this process alone
        train(folder, **{**SETTINGS, **changes})

    return run


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
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """What uninterrupted runs came to, by the number of ranks."""
    results: dict[int, Any] = {}

    def run(num_ranks: int) -> Any:
        if num_ranks not in results:
            started = Run(tmp_path_factory.mktemp("straight") / "run", num_ranks, training())
            assert started.wait()
            results[num_ranks] = started.result()
        return results[num_ranks]

    return run


@pytest.mark.parametrize("act", [at_rank_1, while_rank_0_waits])
def test_a_signal_at_one_rank_ends_both_and_both_go_on_exactly(act: Any, straight: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = Run(folder, 2, training(act))
    assert first.wait()
    assert [*first.statuses.values()] == [143, 143], first.result()
    assert len(checkpoints(folder)) == 1
    assert checkpoints(folder) < ["checkpoint-4"]  # that of the rollouts that were broken off, not of the next step
    second = Run(folder, 2, training())
    assert second.wait()
    assert second.result() == straight(2)


def twice_while_rank_0_waits(rank: int, turn: int) -> None:
    """The first rank is signaled twice while it waits for the other, which hangs in one step."""
    if rank == 0 and turn == TURN:
        for delay_s in (0.5, 2.0):
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM)).start()
    if rank == 1 and turn == TURN:
        time.sleep(600)


def test_a_second_signal_ends_a_rank_that_waits_for_another(tmp_path: Path) -> None:
    started = Run(tmp_path / "run", 2, training(twice_while_rank_0_waits))
    while not started.is_over and not started.statuses:
        time.sleep(0.05)
    assert [*started.statuses.values()] == [143]
    started.signal(signal.SIGKILL, rank=1)
    assert started.wait()
    assert checkpoints(tmp_path / "run") == []


def test_the_status_says_preempted_where_nobody_catches_it() -> None:
    code = (
        "import signal\n"
        "from agentsgym.training.lifecycle.preemption import PreemptedByUser\n"
        "raise PreemptedByUser(signal.SIGINT, 3, None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")
