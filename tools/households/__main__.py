"""Write households from the command line: ``python -m tools.households FOLDER --train 100``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agentsgym.errors import AgentsGymError
from tools.households.generate import SPLITS, generate_households
from tools.households.plans import TASK_TYPES
from tools.households.rooms import SIZES


def main(arguments: Sequence[str] | None = None) -> int:
    """Write households; return the exit code: 2 for invalid arguments, 1 for a missing dependency or a failed write."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.households",
        description="Write small households that ALFWorld's engine plays, in the layout of ALFWorld's own data.",
    )
    parser.add_argument("folder", type=Path, help="folder to write to: empty, or created")
    for split in SPLITS:
        parser.add_argument(f"--{split.replace('_', '-')}", type=int, default=0, metavar="N", help=f"games of {split}")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    parser.add_argument("--size", choices=[*SIZES], default="small", help="size of the rooms (default: small)")
    parser.add_argument(
        "--task-types", nargs="+", choices=TASK_TYPES, metavar="TYPE", help="task types (default: all six)"
    )
    parser.add_argument("--searching", action="store_true", help="walkthroughs search for the objects")
    options = parser.parse_args(arguments)
    sizes = {split: getattr(options, split) for split in SPLITS if getattr(options, split)}
    try:
        made = generate_households(
            options.folder,
            sizes,
            seed=options.seed,
            size=options.size,
            task_types=options.task_types,
            searching=options.searching,
        )
    except (AgentsGymError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    for split, counts in made.task_types.items():
        types = ", ".join(f"{count} {task_type}" for task_type, count in counts.items())
        print(f"{split}: {len(made.games[split])} games ({types})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
