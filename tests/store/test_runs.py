"""One run, one folder: what a new and a resumed run do with the rollouts and the folders that are there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from stored import indices_of, rollout, run_python

from agentsgym import ConfigError, RolloutStore
from agentsgym.store import runs
from agentsgym.store.runs import claim, held


def write(folder: Path, run: str = "training-a", source: str = "training", group: int | None = 0) -> None:
    """Six rollouts in one file, of the steps 0 to 5."""
    with RolloutStore.writer(folder, run=run, source=source, group=group) as writer:
        for step in range(6):
            writer.add(rollout(step), step=step)


def broken(*_: object) -> None:
    raise OSError("the machine stopped here")


def test_a_crash_while_rollouts_are_taken_out_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_late(row: Mapping[str, Any]) -> bool:
        return row["step"] > 2

    write(tmp_path)
    write(tmp_path, "evaluation-b", "evaluation")
    for owner, name in ((runs.shutil, "copyfile"), (Path, "rename"), (Path, "replace")):
        monkeypatch.setattr(owner, name, broken)
        with pytest.raises(OSError, match="stopped here"):
            claim(tmp_path, "", is_late)
        monkeypatch.undo()
        assert indices_of(RolloutStore(tmp_path)) == [*range(6), *range(6)]
    assert claim(tmp_path, "", is_late) == "training-a"
    store = RolloutStore(tmp_path)
    assert (indices_of(store), store.skipped) == ([0, 1, 2, *range(6)], {})
    assert {len(pq.read_table(file)) for file in tmp_path.glob("*.superseded")} == {6}
    claim(tmp_path, "", lambda _: True)
    assert indices_of(RolloutStore(tmp_path)) == [*range(6)]


def test_an_attempt_that_ended_before_training_is_continued(tmp_path: Path) -> None:
    write(tmp_path / "rollouts", source="evaluation", group=None)
    assert claim(tmp_path / "rollouts", "", lambda row: row["group"] is None, output=tmp_path) == "training-a"
    assert not len(RolloutStore(tmp_path / "rollouts"))


@pytest.mark.parametrize("place", ["out/rollouts", "shared"])
def test_a_new_run_is_refused_or_moves_the_earlier_one(place: str, tmp_path: Path) -> None:
    output, store = tmp_path / "out", tmp_path / place
    write(store)
    assert claim(store, "training-a") == "training-a"  # its own
    with pytest.raises(ConfigError, match=rf"{store} holds a run already \(training-a\): .*overwrite=True"):
        claim(store, output=output)
    (output / "checkpoint-1").mkdir(parents=True)
    with held(output):
        code = "import pathlib, sys; from agentsgym.store.runs import claim; output = pathlib.Path(sys.argv[1])\n"
        refused = run_python(f"{code}claim(None, output=output, overwrite=True)", output)
    assert "another process is training into" in refused.stderr
    assert claim(store, output=output, overwrite=True) != "training-a"
    assert not output.exists()
    assert not store.exists()
    assert (tmp_path / "out.1/checkpoint-1").exists()
    assert len(RolloutStore(tmp_path / ("shared.1" if place == "shared" else "out.1/rollouts"))) == 6


def test_the_working_directory_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "summary.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cannot be moved aside because it is the working directory"):
        claim(None, output=Path(), overwrite=True)
