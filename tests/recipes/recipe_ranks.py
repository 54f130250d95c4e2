"""What `accelerate launch` runs for the test of a recipe on two ranks, and what each rank is left with."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from accelerate import PartialState
from launch import leave

import agentsgym


def main(folder: Path) -> None:
    """Train, and write the hash of this rank's policy."""
    run = agentsgym.train(folder / "two.yaml")
    digest = hashlib.sha256()
    for tensor in run.model.state_dict().values():
        digest.update(tensor.detach().cpu().numpy().tobytes())
    found = {"weights": digest.hexdigest(), "is_main": run.is_main, "games": run.evaluations["after"].num_episodes}
    (folder / f"rank{PartialState().process_index}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
