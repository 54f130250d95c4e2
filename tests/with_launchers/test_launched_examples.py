"""The example of examples/launch trains on two ranks under each of its configurations, as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched_runs import LAUNCH, check_as_one_process, make_policy, run_file, train_alone, train_on_two_ranks

KINDS = {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}
AGENTS = {"ddp": "PolicyAgent", "fsdp2": "ShardedPolicyAgent"}


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that all training begins with."""
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Path:
    """The run in one process."""
    return train_alone(tmp_path_factory.mktemp("alone") / "run", policy_folder)


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_train_what_one_process_does(name: str, alone: Path, policy_folder: Path, tmp_path: Path) -> None:
    printed = train_on_two_ranks(name, tmp_path / "run", policy_folder)
    assert f"{KINDS[name]}, 2 processes: step 2" in printed
    check_as_one_process(name, tmp_path / "run", alone, agent=AGENTS[name])


def test_a_warm_start_is_sent_to_the_command_that_makes_it(tmp_path: Path) -> None:
    run = run_file(tmp_path / "run", "tiny", 1)
    run.write_text(run.read_text() + "warm_start: {player: imitation}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(LAUNCH / "train.py"), str(run)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert (
        "warm_start is only supported by agentsgym train: run it first, and set 'model' to the saved model"
        in done.stderr
    )
