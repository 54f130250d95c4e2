"""Measure ``import agentsgym`` in fresh interpreters, beside an interpreter that imports nothing."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time


def seconds(statement: str) -> float:
    """Wall seconds of one fresh interpreter that runs the statement."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def measure(num_runs: int) -> dict[str, float | int]:
    """Medians over ``num_runs`` interpreters, in seconds; the first run of each, which fills caches, is left out."""
    bare, with_import = (
        statistics.median([seconds(statement) for _ in range(num_runs + 1)][1:])
        for statement in ("pass", "import agentsgym")
    )
    return {
        "num_runs": num_runs,
        "interpreter_s": round(bare, 4),
        "interpreter_and_import_s": round(with_import, 4),
        "import_s": round(max(0.0, with_import - bare), 4),
    }


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_runs", type=int, default=11, help="interpreters started for each figure (default: 11)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = measure(options.num_runs)
    if options.json:
        print(json.dumps(result))
    else:
        print(f"import agentsgym: {1000 * result['import_s']:.0f} ms (median of {options.num_runs} fresh interpreters)")


if __name__ == "__main__":
    main()
