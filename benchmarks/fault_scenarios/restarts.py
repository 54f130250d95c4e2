"""Start a run again that is finished, as the loop of a queue does."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fault_scenarios.outcome import Outcome
from fault_scenarios.runs import Run


def run(*, quick: bool) -> Iterator[Outcome]:
    """Finish a run, and start it three times more."""
    for num_ranks in (1,) if quick else (1, 2):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "run"
            starts: list[tuple[object, list[int], set[tuple[str, float]]]] = []
            for _ in range(4):
                one = Run(folder, num_ranks)
                one.wait()
                saved = {(path.name, path.stat().st_mtime) for path in folder.glob("checkpoint-*")}
                starts.append((one.result(), [*one.statuses.values()], saved))
        first, *others = starts
        is_equal = all(other == first for other in others) and set(first[1]) == {0}
        yield Outcome(
            scenario=f"a finished run started three times more, {num_ranks} rank{'s' * (num_ranks > 1)}",
            asked="status 0, the same weights and checkpoints",
            seen="as asked" if is_equal else str(starts),
            passed=is_equal,
            seconds=time.monotonic() - began,
        )
