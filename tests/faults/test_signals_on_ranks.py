"""Signals in processes of their own: at one of two ranks, and what the status of the process states."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from signaled import TURN, at_rank_1, checkpoints, training, while_rank_0_waits

from benchmarks.fault_scenarios.runs import Run, train


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


def hung_up(rank: int, turn: int) -> None:
    """The terminal closes, which the kernel reports the process at once."""
    if turn == TURN:
        os.close(int(os.environ["TERMINAL"]))


def in_a_terminal(folder: Path, **changes: Any) -> None:
    """Train in a terminal of the process's own, which it prints to."""
    os.setsid()
    terminal, own_end = os.openpty()
    fcntl.ioctl(own_end, termios.TIOCSCTTY, 0)
    for stream in (0, 1, 2):
        os.dup2(own_end, stream)
    os.environ["TERMINAL"] = str(terminal)
    sys.stdout = sys.stderr = os.fdopen(1, "w")
    train(folder, **changes)


def test_a_run_whose_terminal_closes_saves_although_it_prints(straight: Any, tmp_path: Path) -> None:
    first = Run(tmp_path / "run", 1, training(hung_up, in_a_terminal, preemption_grace_s=None))
    assert first.wait()
    assert [*first.statuses.values()] == [129], first.result()
    assert len(checkpoints(tmp_path / "run")) == 1
    second = Run(tmp_path / "run", 1, training())
    assert second.wait()
    assert second.result() == straight(1)


def test_the_status_is_preempted_where_nobody_catches_it() -> None:
    code = (
        "import signal\n"
        "from agentsgym.training.lifecycle.preemption import PreemptedByUser\n"
        "raise PreemptedByUser(signal.SIGINT, 3, None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (130, False)  # imported packages may write there
