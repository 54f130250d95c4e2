"""What the handling of faults costs where nothing fails: this checkout beside an older one, in turns.

The other is the revision that ``AGENTSGYM_BASELINE`` names, by default the last one before faults were handled like
this. Both play the same game and train the same steps; a ratio is of two runs that follow each other, so that what else
the machine does hits both alike.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from fault_scenarios.outcome import Outcome

ROOT = Path(__file__).parents[2]
BASELINE = os.environ.get("AGENTSGYM_BASELINE", "15731fa")
NUM_BLOCKS = 10
MAX_RATIO = 1.01
WORKS = {"rollout": ("64 rollouts of 16 turns", 400), "step": ("2 training steps", 60)}  # and how many pairs


class Checkout:
    """A process that measures one checkout."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "cost_worker.py"), str(folder)],
            env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            text=True,
        )

    def seconds(self, work: str) -> float:
        """Do it once; returns its CPU seconds."""
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        self.process.stdin.write(f"{work}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self.process.communicate(timeout=60)


def run(*, quick: bool) -> Iterator[Outcome]:
    """Measure both, in pairs whose order changes from one to the next, in several processes each."""
    num_blocks = 2 if quick else NUM_BLOCKS
    with _worktree() as folder:
        for work, (words, num_pairs) in WORKS.items():
            start = time.monotonic()
            ratios = sorted(_block(folder, work, num_pairs // NUM_BLOCKS) for _ in range(num_blocks))
            yield Outcome(
                scenario=f"{words} in which nothing fails, beside {BASELINE}",
                asked=f"CPU time at most {MAX_RATIO} times",
                seen=f"{statistics.median(ratios):.3f} times (medians of {len(ratios)} pairs of processes: "
                f"{', '.join(f'{ratio:.3f}' for ratio in ratios)})",
                passed=(ratios[0] if quick else statistics.median(ratios)) <= MAX_RATIO,
                seconds=time.monotonic() - start,
            )


def _block(folder: Path, work: str, num_pairs: int) -> float:
    """The median ratio of one pair of processes: where their objects happen to lie makes some percent of difference."""
    with _started(ROOT) as now, _started(folder) as before:
        for checkout in (now, before):
            checkout.seconds(work)  # the first is of caches that fill
        pairs = [_pair(now, before, work, index) for index in range(num_pairs)]
    return statistics.median(one / other for one, other in pairs)


def _pair(now: Checkout, before: Checkout, work: str, index: int) -> tuple[float, float]:
    if index % 2:
        other = before.seconds(work)
        return now.seconds(work), other
    return now.seconds(work), before.seconds(work)


@contextlib.contextmanager
def _started(folder: Path) -> Generator[Checkout]:
    checkout = Checkout(folder)
    try:
        yield checkout
    finally:
        checkout.close()


@contextlib.contextmanager
def _worktree() -> Generator[Path]:
    """Check out the older revision in a separate folder."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(folder), BASELINE], check=True, capture_output=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True, capture_output=True)
