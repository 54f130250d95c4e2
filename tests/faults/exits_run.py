"""What `accelerate launch` runs for the tests of numbers and exits on two ranks: one file of results a rank."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from games import has_moved, trainer_of

from agentsgym import AgentsGymError, GRPOEnvTrainer

SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 1}


def threads() -> list[str]:
    """The names of this process's threads that serve the group."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sorted(name for name in names if "gloo" in name or "tcpstore" in name)


def broken(trainer: GRPOEnvTrainer, break_loss: Callable[[Any], Any] = lambda loss: loss * math.nan) -> str:
    """What a rank raises when the loss of rank 1 alone is NaN, or otherwise broken."""
    if PartialState().process_index == 1:
        compute_loss = trainer.compute_loss
        trainer.compute_loss = lambda *args, **kwargs: break_loss(compute_loss(*args, **kwargs))
    try:
        trainer.train()
    except AgentsGymError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(target: Path) -> None:
    """Break, train, and leave."""
    first = trainer_of(target / "first", **SETTINGS)
    results: dict[str, Any] = {"broken": broken(first), "moved": has_moved(first)}
    trainer = trainer_of(target / "second", **SETTINGS)
    trainer.train()
    first.close()
    results["while_one_is_open"] = threads()
    trainer.close()
    results["after"] = threads()
    trainer.close()  # again
    target.joinpath(f"rank{PartialState().process_index}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
