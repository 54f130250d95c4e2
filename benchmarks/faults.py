"""Break runs on purpose, and print what was lost: ``python benchmarks/faults.py`` (an hour), or with ``--quick``.

``docs/reliability.md`` summarizes its table. The status is 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it: small models, many processes

from fault_scenarios.outcome import Outcome

SCENARIOS = ("kills", "stores", "disks", "signals", "restarts", "workers", "exits", "trainers", "soak", "cost")


def main() -> int:
    """Run the scenarios that were named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="scenario", help=f"some of {', '.join(SCENARIOS)}")
    parser.add_argument("--quick", action="store_true", help="few repetitions: minutes, not an hour")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    args = parser.parse_args()
    if unknown := set(args.scenarios) - set(SCENARIOS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; valid names: {', '.join(SCENARIOS)}")
    outcomes: list[Outcome] = []
    for name in args.scenarios or SCENARIOS:
        for outcome in importlib.import_module(f"fault_scenarios.{name}").run(quick=args.quick):
            outcomes.append(outcome)
            if not args.json:
                print(_row(outcome), flush=True)
    if args.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _row(outcome: Outcome) -> str:
    held = "yes" if outcome.passed else "**no**"
    return f"| {outcome.scenario} | {outcome.asked} | {outcome.seen} | {held} | {outcome.seconds:.0f} s |"


if __name__ == "__main__":
    sys.exit(main())
