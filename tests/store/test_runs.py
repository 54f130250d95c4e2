"""One run, one folder: what a new and a resumed run do with the rollouts and the folders that are there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from stored import indices_of, rollout

from agentsgym import ConfigError, RolloutStore
from agentsgym.store import runs
from agentsgym.store.runs import claim, held


def write(folder: Path, run: str = "training-a", **columns: Any) -> RolloutStore:
    """Six rollouts in one file, of the steps 0 to 5."""
    with RolloutStore.writer(folder, run=run, **{"source": "training", "group": 0, **columns}) as writer:
        for step in range(6):
            writer.add(rollout(step), step=step)
    return RolloutStore(folder)


def is_late(row: Mapping[str, Any]) -> bool:
    return row["step"] > 2


def broken(*_: object) -> None:
    raise OSError("the machine stopped here")


def test_what_is_played_again_is_taken_out_and_a_crash_at_any_point_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    write(tmp_path, run="evaluation-b", source="evaluation")
    for owner, name in ((runs.shutil, "copyfile"), (Path, "rename"), (runs, "encode"), (Path, "replace")):
        with monkeypatch.context() as crash:
            crash.setattr(owner, name, broken)
            with pytest.raises(OSError, match="stopped here"):
                claim(tmp_path, "", is_late)
        assert indices_of(RolloutStore(tmp_path)) == [*range(6), *range(6)]
    assert claim(tmp_path, "", is_late) == "training-a"
    store = RolloutStore(tmp_path)
    assert indices_of(store) == [0, 1, 2, *range(6)]
    assert not store.skipped
    [first, *_] = files = sorted(tmp_path.glob("*.superseded"))
    assert {len(pq.read_table(file)) for file in files} == {6}
    assert pq.read_schema(first).metadata == pq.read_schema(next(tmp_path.glob("*.parquet"))).metadata
    claim(tmp_path, "", lambda _: True)
    assert indices_of(RolloutStore(tmp_path)) == [*range(6)]


def test_an_attempt_that_ended_before_training_is_continued(tmp_path: Path) -> None:
    write(tmp_path / "rollouts", source="evaluation", group=None)
    assert claim(tmp_path / "rollouts", "", lambda row: row["group"] is None, output=tmp_path) == "training-a"
    assert not len(RolloutStore(tmp_path / "rollouts"))
    assert claim(tmp_path / "none", "", is_late) != claim(tmp_path / "none", "", is_late)


@pytest.mark.parametrize("place", ["out/rollouts", "shared"])
def test_a_new_run_is_refused_or_moves_the_earlier_one(place: str, tmp_path: Path) -> None:
    output, store = tmp_path / "out", tmp_path / place
    assert claim(store, output=output).startswith("training-")
    write(store)
    assert claim(store, "training-a") == "training-a"  # its own
    with pytest.raises(ConfigError, match=rf"{store} holds a run already \(training-a\): .*overwrite=True"):
        claim(store, output=output)
    (output / "checkpoint-1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"out holds a run already \(checkpoint-1\)"):
        claim(store, output=output)
    held_elsewhere = f"""
from pathlib import Path
from agentsgym.store.runs import held
with held(Path({str(output)!r})):
    print("held", flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", held_elsewhere], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process is training into"):
            claim(store, output=output, overwrite=True)
        other.communicate("\n")
    claim(store, output=output, overwrite=True)
    assert not output.exists()
    assert not store.exists()
    assert (tmp_path / "out.1/checkpoint-1").exists()
    assert len(RolloutStore(tmp_path / ("shared.1" if place == "shared" else "out.1/rollouts"))) == 6
    with held(output):
        (output / "summary.json").touch()
        claim(store, output=output, overwrite=True)
    assert (tmp_path / "out.2/summary.json").exists()


def test_the_working_directory_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "summary.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cannot be moved aside because it is the working directory"):
        claim(None, output=Path(), overwrite=True)
