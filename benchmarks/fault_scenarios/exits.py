"""End two-rank runs whose communication threads get little of the processor, and count the aborts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fault_scenarios.outcome import Outcome

_RANKS = Path(__file__).with_name("exits_ranks.py")


def run(*, quick: bool) -> Iterator[Outcome]:
    """Train a step on two ranks, close the trainer, and look at how both processes end."""
    num_runs, start = 6 if quick else 100, time.monotonic()
    # A separate process: the runs are forked from it, which costs no imports and must happen before any thread starts.
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(_RANKS), str(num_runs), folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=7200)
    statuses: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    num_bad = sum(any(pair) for pair in statuses)
    yield Outcome(
        scenario=f"{num_runs} exits of two ranks with starved threads",
        asked="status 0 of both",
        seen=f"{num_runs - num_bad} with status 0, {num_bad} without",
        passed=len(statuses) == num_runs and not num_bad,
        seconds=time.monotonic() - start,
    )
