"""What `accelerate launch` runs to train a folder of a model of images and text, as `agentsgym train` does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from accelerate import PartialState
from launch import leave
from sharded_run import shard_on_cpu
from whole_models import configured

import agentsgym
from agentsgym import GRPOEnvTrainer

if __name__ == "__main__":
    changes = json.loads(sys.argv[3])
    if "fsdp" in changes:
        PartialState(cpu=True)
        shard_on_cpu(GRPOEnvTrainer)
    agentsgym.train(configured(Path(sys.argv[1]), sys.argv[2], **changes))
    leave()
