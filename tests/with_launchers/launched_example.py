"""What `accelerate launch` runs here: examples/launch/train.py as it stands, on ranks that have no GPU.

Accelerate shards models for accelerators alone, so on request the ranks pass for the kind it wants;
weights are sharded and gradients reduced as they are anywhere.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from sharded_run import shard_on_cpu
from torch.distributed.tensor import DTensor

from agentsgym.training.trainer import GRPOEnvTrainer
from agentsgym.training.zero import is_in_pieces

EXAMPLE = Path(__file__).parents[2] / "examples" / "launch" / "train.py"


def main(folder: Path, arguments: list[str]) -> None:
    """Train, and write what this rank's weights and logs were."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState(cpu=True)
        shard_on_cpu(GRPOEnvTrainer)
    save = GRPOEnvTrainer.save_model

    def save_and_report(self: GRPOEnvTrainer, *args: Any, **kwargs: Any) -> None:
        save(self, *args, **kwargs)
        found = {
            "sharded": any(isinstance(one, DTensor) or is_in_pieces(one) for one in self.model.parameters()),
            "loss": [log["loss"] for log in self.state.log_history if "loss" in log],
            "grad_norm": [log["grad_norm"] for log in self.state.log_history if "grad_norm" in log],
            "evaluated": [log["eval_reward"] for log in self.state.log_history if "eval_reward" in log],
            "agent": type(self.agent).__name__,
        }
        (folder / f"rank{self.accelerator.process_index}.json").write_text(json.dumps(found))

    GRPOEnvTrainer.save_model = save_and_report
    sys.argv = [str(EXAMPLE), *arguments]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
