"""Two ranks resume from every checkpoint of three passes, with whole weights and with sharded ones."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import resume_run
from launch import launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left."""
    folder = tmp_path_factory.mktemp("ranks")
    done = launch(Path(resume_run.__file__), folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks reports."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", resume_run.SHARDINGS)
def test_every_checkpoint_is_resumed_exactly(name: str, ranks: list[dict[str, Any]]) -> None:
    for reported in ranks:
        straight = reported[name]["straight"]
        assert len(straight["losses"]) == straight["step"] == resume_run.NUM_STEPS
        assert any(abs(loss) > 1e-3 for loss in straight["losses"])
        assert len(reported[name]) > 4
        for run in reported[name].values():
            assert run == straight


def test_one_process_goes_on_where_two_ranks_stopped(
    folder: Path, ranks: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        alone = resume_run.trained(tmp_path, folder / "replicated" / "checkpoint-4", per_device_train_batch_size=8)
    assert "was saved by 2 ranks, but this run has 1" in caplog.text
    assert alone["losses"] == pytest.approx(ranks[0]["replicated"]["straight"]["losses"], abs=1e-4)
