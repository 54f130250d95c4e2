"""SmolLM2 on two ranks: under DDP, FSDP2 and (if it is installed) ZeRO-2 it trains what one process does."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from launched_runs import train_alone, train_on_two_ranks

SETTINGS: dict[str, Any] = {"max_steps": 1, "learning_rate": 1e-5, "bf16": False, "eval_strategy": "no"}
UNDER_ZERO = {"use_cpu": False, "ddp_backend": "gloo"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    return train_alone(tmp_path_factory.mktemp("alone") / "run", "smollm2", **SETTINGS)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", *(["zero2"] if find_spec("deepspeed") else [])])
def test_two_ranks_train_what_one_process_does(name: str, alone: Path, tmp_path: Path) -> None:
    changes = SETTINGS | (UNDER_ZERO if name == "zero2" else {})
    train_on_two_ranks(name, tmp_path / "run", "smollm2", {"DS_ACCELERATOR": "cpu"}, **changes)
    found, expected = (json.loads((folder / "rank0.json").read_text()) for folder in (tmp_path / "run", alone))
    assert found["sharded"] is (name == "fsdp2")
    assert expected["grad_norm"][0] > 1e-3
    for key in ("loss", "grad_norm"):
        assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5)
