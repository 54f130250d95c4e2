"""Runs on two ranks under ZeRO survive what runs under DDP do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rank_faults import EACH_STEP, Ahead, RankFaults, Start
from signaled import training
from test_zero import write_config
from zero_run import gathered

from agentsgym import AgentsGymError, ConfigError, GRPOEnvTrainer
from benchmarks.fault_scenarios.runs import tell


class UnderZero(RankFaults):
    """What holds for each stage.

    Attributes:
        stage: Of ZeRO.
    """

    stage: ClassVar[int]
    changes: ClassVar[Mapping[str, Any]] = {"use_cpu": False, "bf16": False}
    of_gradient = "step 2: the gradients contain NaN or infinity"

    @classmethod
    def environment(cls, folder: Path) -> Mapping[str, str]:
        return {
            "DS_ACCELERATOR": "cpu",
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(write_config(folder, cls.stage)),
            "ACCELERATE_MIXED_PRECISION": "no",
        }

    @classmethod
    def weights(cls, trainer: GRPOEnvTrainer) -> list[torch.Tensor]:
        weights: list[torch.Tensor] = []
        for parameter in trainer.model.parameters():
            with gathered(parameter):
                weights.append(parameter.detach().clone())
        return weights

    @classmethod
    def refused(cls, folder: Path) -> None:
        """Train where the number of ranks is another one than before."""
        kind = ConfigError if os.environ["RANK"] == "0" else AgentsGymError  # which reads the folder
        with pytest.raises(kind, match=r"was saved by 2 ranks under DeepSpeed.* but this run has 4"):
            cls.train(folder, num_generations=2)
        tell(folder, "refused")

    def test_another_number_of_ranks_is_refused(self, start: Start, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        assert start(folder, training(run=self.train, **EACH_STEP, max_steps=1, num_generations=2)).wait()
        wider = start(folder, self.refused, num_ranks=4)
        assert wider.wait()
        assert wider.result() == "refused", wider.result()


class TestZero1(UnderZero):
    """The optimizer's state is shared."""

    stage = 1


class TestZero2(UnderZero):
    """And the gradients."""

    stage = 2


class TestZero3(UnderZero):
    """And the weights."""

    stage = 3


class TestZero3InStep(UnderZero):
    """And they are never gathered as a whole: the ranks sample in step."""

    stage = 3
    changes: ClassVar[Mapping[str, Any]] = {**UnderZero.changes, "ds3_gather_for_generation": False}


class TestZero2Ahead(Ahead, UnderZero):
    """And a copy of the weights samples while the policy is trained."""

    stage = 2
