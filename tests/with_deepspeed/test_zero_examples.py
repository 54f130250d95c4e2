"""The example of examples/launch trains on two ranks under its configurations of DeepSpeed, as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched_runs import check_as_one_process, make_policy, train_alone, train_on_two_ranks


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that all training begins with."""
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Path:
    """The run in one process."""
    return train_alone(tmp_path_factory.mktemp("alone") / "run", policy_folder)


@pytest.mark.parametrize(
    ("name", "is_gathered", "agent"),
    [("zero2", True, "PolicyAgent"), ("zero3", True, "PolicyAgent"), ("zero3", False, "ShardedPolicyAgent")],
)
def test_two_ranks_train_what_one_process_does(
    name: str, is_gathered: bool, agent: str, alone: Path, policy_folder: Path, tmp_path: Path
) -> None:
    on_cpu = {"use_cpu": False, "bf16": False, "ddp_backend": "gloo", "ds3_gather_for_generation": is_gathered}
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    printed = train_on_two_ranks(name, tmp_path / "run", policy_folder, variables, **on_cpu)
    assert "DEEPSPEED, 2 processes: step 2" in printed
    check_as_one_process(name, tmp_path / "run", alone, agent=agent)
