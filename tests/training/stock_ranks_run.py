"""What `accelerate launch` runs for the test of a stock trainer on several ranks: what each rank was given to train."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from games import tasks
from launch import leave
from stock import stock_trainer

NUM_ROWS = 12  # over all ranks; three groups of four, so that the middle one straddles two ranks


def batches(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    """Train two steps, and give what this rank trained on."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    trainer = stock_trainer(
        folder / "run", rows=tasks(6), learning_rate=0.0, per_device_train_batch_size=NUM_ROWS // num_ranks
    )
    trainer.train()
    return [found for _, found in trainer.rollout_func.calls]


def main(folder: Path) -> None:
    """Write them."""
    found = batches(folder, int(os.environ["WORLD_SIZE"]))
    rank = PartialState().process_index  # known once the trainer has begun the group
    (folder / f"{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
