"""Fill the disk while a run saves its checkpoints, make room, and resume the run."""

from __future__ import annotations

import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from fault_scenarios.outcome import Outcome
from fault_scenarios.runs import Run, train

CHECKPOINT_KB = 450  # of the small policy


def run(*, quick: bool) -> Iterator[Outcome]:
    """Fill the disk at another place of a checkpoint each time."""
    num_times = 3 if quick else 20
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        straight = Run(Path(folder) / "straight")
        straight.wait()
        wanted = straight.result()
        is_mounted, seen = False, list[bool]()
        wrong: list[str] = []
        for k in range(num_times):
            place = Path(folder) / f"run-{k}"
            place.mkdir()
            room_kb = 2 * CHECKPOINT_KB + (k + 1) * CHECKPOINT_KB // (num_times + 1)
            is_mounted = _mount(place, room_kb)
            first = Run(place, function=train if is_mounted else partial(_train_with_room, room_kb=room_kb))
            first.wait()
            seen.append(_ran_out(first.logs))
            if is_mounted:
                subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
            last = Run(place)
            last.wait()
            if last.result() != wanted:
                wrong.append(str(last.result()))
            if is_mounted:
                subprocess.run(["umount", "--lazy", str(place)], check=True)
    how = "file systems too small" if is_mounted else "files that may not grow"
    yield Outcome(
        scenario=f"{num_times} full disks ({how}) while a checkpoint is written",
        asked="the run stops and says so; the previous checkpoint resumes and ends with equal weights",
        seen=f"{sum(seen)} runs stopped with CheckpointError; {num_times - len(wrong)} equal{''.join(wrong[:1])}",
        passed=all(seen) and not wrong and "weights" in wanted,
        seconds=time.monotonic() - began,
    )


def _mount(place: Path, size_kb: int) -> bool:
    """Put a file system of that size there; False where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _train_with_room(folder: Path, *, room_kb: int) -> None:
    """Train where no file may grow beyond a part of a checkpoint."""
    limit = room_kb % CHECKPOINT_KB * 1024 // 3
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    train(folder)


def _ran_out(logs: Path) -> bool:
    error = logs / "error-0.txt"
    return error.exists() and "CheckpointError" in error.read_text()
