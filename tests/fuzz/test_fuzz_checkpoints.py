"""Checkpoints that were damaged, or written by something else, and settings that changed since."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from crafted_stores import put
from hypothesis import given
from hypothesis import strategies as st
from outcomes import fuzzed, survives
from safetensors.torch import save_file
from values import plain, texts

from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.lifecycle.checkpoint_files import MANIFEST, checkpoints_in, write_manifest
from agentsgym.training.lifecycle.resuming import ResumePoint, facts_of, find_resume_point

_STATE = {"global_step": 2, "epoch": 0.5, "log_history": [], "max_steps": 8}
_ROWS = [{"task_data": {"seed": 1}}] * 8


@cache
def _args(optim: str = "adamw_torch", save_only_model: bool = False) -> GRPOEnvConfig:
    batch = {"per_device_train_batch_size": 2, "num_generations": 2, "report_to": "none", "use_cpu": True}
    return GRPOEnvConfig("outputs", optim=optim, save_only_model=save_only_model, **batch)


def _checkpoint(folder: Path) -> dict[str, Any]:
    """Write a whole checkpoint, and return its manifest."""
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({}, folder / name)
    (folder / "trainer_state.json").write_text(json.dumps(_STATE))
    write_manifest(folder, **facts_of(_args(), _ROWS))
    return json.loads((folder / MANIFEST).read_text())


@st.composite
def _spoiled(draw: st.DrawFn, value: dict[str, Any]) -> Any:
    value = json.loads(json.dumps(value))
    for place in draw(
        st.lists(st.sampled_from([value, *(one for one in value.values() if isinstance(one, dict))]), max_size=2)
    ):
        name = draw(st.sampled_from(sorted(place)) if place and draw(st.integers(0, 5)) else texts)
        place[name] = draw(plain)
    return value if draw(st.integers(0, 9)) else draw(plain)


def _written(value: Any) -> bytes:
    return json.dumps(value).encode()


_FILES = ["trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", MANIFEST]
_damage = st.tuples(
    st.sampled_from(_FILES),
    st.sampled_from(["folder", "loop", "dangling", "fifo", "other"])
    | st.binary(max_size=9)
    | plain.map(_written)
    | _spoiled(_STATE).map(_written)
    | st.none()
    | st.just(("[" * 9000).encode()),
)


@fuzzed(200)
@given(
    st.data(),
    st.none() | _damage,
    st.sampled_from(["adamw_torch", "sgd", "adafactor", "adamw_torch_fused"]),
    st.sampled_from([True, "auto", "place", "", 3, "missing"]),
    st.booleans(),
)
def test_checkpoints(data: st.DataObject, damage: Any, optim: str, requested: Any, is_manifest_right: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / data.draw(st.sampled_from(["checkpoint-2", "checkpoint-" + "9" * 200, "_unfinished"]))
        manifest = _checkpoint(place)
        if damage is not None:
            path, content = place / damage[0], damage[1]
            path.unlink()
            if content is not None:
                put(path, content)
        path = place / MANIFEST
        if data.draw(st.booleans()) and path.is_file():
            path.write_bytes(_written(data.draw(_spoiled(manifest))))
        elif is_manifest_right and path.is_file():
            path.unlink()
            if all((place / name).is_file() for name in _FILES if name != MANIFEST):
                write_manifest(place, **facts_of(_args(), _ROWS))
        args = _args(optim)
        wanted = place if requested == "place" else requested
        found = survives(find_resume_point, wanted, Path(folder), args, facts_of(args, _ROWS), 8)
        assert isinstance(found, ResumePoint | Exception)
        survives(checkpoints_in, Path(folder))
