"""What `accelerate launch` runs for the tests of what goes wrong under ZeRO: one file of sentences a rank."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from launch import leave
from zero_run import TRAINED, trainer_of

from agentsgym.errors import AgentsGymError

VALUES = {"value_head": "shared", "advantage_estimator": "turn_gae"}


def told(act: Callable[[], Any]) -> str:
    """What an act raises, in words."""
    try:
        act()
    except AgentsGymError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(base: Path, target: Path, stage: str) -> None:
    """Do what is wrong, one thing after the other."""

    def trainer(name: str = "unclipped", **changes: Any) -> Any:
        return trainer_of(name, target / "runs", base, **changes)

    found = {
        "evaluated_first": told(trainer("evaluated").evaluate),
        "value_head": told(lambda: trainer(**VALUES)),
        "contradicted": told(lambda: trainer(max_grad_norm=0.25)),
    }
    if stage == "3":
        found["moving_reference"] = told(lambda: trainer(**{**TRAINED["moving_reference"]}))
    broken = trainer("dapo")
    compute_loss = broken.compute_loss
    if PartialState().process_index == 1:
        broken.compute_loss = lambda *args, **kwargs: compute_loss(*args, **kwargs) * math.nan
    found["nan_loss"] = told(broken.train)
    broken.close()
    place = target / "plain"
    found["without_deepspeed"] = told(lambda: trainer().train(resume_from_checkpoint=str(place)))
    saving = trainer(save_strategy="steps", save_steps=1, save_total_limit=1)
    saving.train()
    saving.close()
    target.joinpath(f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    gc.freeze()
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    leave()
