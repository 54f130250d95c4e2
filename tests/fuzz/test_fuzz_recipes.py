"""Recipes as values and as YAML; checkpoints that were damaged, or written by something else."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from crafted_stores import put
from hypothesis import given
from hypothesis import strategies as st
from outcomes import fuzzed, survives
from safetensors.torch import save_file
from trl import ModelConfig, SFTConfig
from values import anything, plain, texts

from agentsgym.envs.config import COMMON_FIELDS
from agentsgym.recipes.recipe import EvaluationPart, WarmStart, read_recipe
from agentsgym.recipes.train import prepare
from agentsgym.tiny import tiny_model
from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.lifecycle.checkpoint_files import MANIFEST, checkpoints_in, write_manifest
from agentsgym.training.lifecycle.resuming import ResumePoint, facts_of, find_resume_point

_SOUND: dict[str, Any] = {
    "environments": [{"class": "PriceList", "env_config": {"max_price": 5}, "dataset": {"size": 3}, "weight": 1}],
    "model": "tiny",
    "tiny": {"hidden_size": 8, "num_layers": 1, "num_heads": 1},
    "model_settings": {"use_peft": False},
    "warm_start": {"player": "random", "num_episodes": 2, "settings": {"learning_rate": 1e-3}},
    "training": {"max_steps": 1, "output_dir": "outputs", "per_device_train_batch_size": 2, "num_generations": 2},
    "num_train_tasks": 2,
    "evaluation": {"num_tasks": 1, "env_config": {"max_price": 4}},
}


def _names(settings: Any) -> list[str]:
    return sorted(one.name for one in dataclasses.fields(settings) if one.init)


_NAMES: dict[str, list[str]] = {
    "training": _names(GRPOEnvConfig),
    "model_settings": _names(ModelConfig),
    "settings": _names(SFTConfig),
    "env_config": [*COMMON_FIELDS, "max_price", "tools", "answer"],
    "dataset": ["size", "seed", "part"],
    "tiny": [name for name, one in inspect.signature(tiny_model).parameters.items() if one.kind is one.KEYWORD_ONLY],
    "warm_start": _names(WarmStart),
    "evaluation": _names(EvaluationPart),
    "filters": ["final_reward", "task_data", "success", "step"],
}
_small = st.sampled_from(
    [0, 1, -1, 2, 3, 1.5, 1e200, "auto", "no", "steps", "epoch", True, None, [], {}, ["a"], {"min": 0}]
)


@st.composite
def recipes(draw: st.DrawFn, values: st.SearchStrategy[Any] = anything) -> Any:
    """A recipe that is nearly sound."""
    recipe = copy.deepcopy(_SOUND)
    for _ in range(draw(st.integers(1, 2))):
        place: Any = recipe
        name: Any = ""
        while isinstance(place, dict) and (not name or draw(st.integers(0, 5))):
            known = sorted({*place, *_NAMES.get(name, ())}, key=str) or ["x"]
            name = draw(st.sampled_from(known)) if draw(st.integers(0, 9)) else draw(texts)
            inner = place.get(name)
            inner = inner[0] if isinstance(inner, list) and inner else inner
            if not isinstance(inner, dict):
                break
            if not draw(st.integers(0, 3)):
                break
            place = inner
        if draw(st.integers(0, 5)):
            place[name] = draw(_small | values)
        else:
            place.pop(name, None)
    return recipe


@fuzzed(400)
@given(recipes())
def test_recipes_of_values(recipe: Any) -> None:
    survives(prepare, recipe)


@fuzzed(400)
@given(
    recipes(),
    st.sampled_from(
        ["training.max_steps", "environments.0.weight", "environments[9]", "a..b", "", "training", "environments.x"]
    ),
    anything,
)
def test_overrides(recipe: Any, place: str, value: Any) -> None:
    survives(read_recipe, recipe, {place: value})


_SNIPPETS = [
    "&a [*a]",
    "&x {<<: *x}",
    "!!python/object:os.system x",
    "!!binary zz=",
    "!!binary /w==",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "2020-13-45",
    "2020-01-01",
    "1e400",
    "0o9",
    "0x",
    "190:20:30",
    "? [a]\n: b",
    "{a: 1, a: 2}",
    "[" * 400,
    "[" * 4000,
    "- " * 400,
    "&a a: *b",
    "!!timestamp x",
    "!!int x",
    "!!float x",
    "!!bool x",
    "!!null x",
    "--- a\n--- b",
    "\t- a",
    "%YAML 9.9\n---",
    "!foo bar",
    "&a {a: &b [*a, *b]}",
    "{[]: 1}",
    "{{}: 1}",
    "{? {a: 1} : 2}",
    "<<: 3",
    "<<: [1]",
    "'\\ud800'",
    '"\\ud800"',
    "\x00",
    "\x85",
    "a: !!str 3",
    "=",
    "!!value =",
    "9" * 5000,
    ".inf",
    ".nan",
    "0b2",
    "!!merge x",
    "1_000",
    "!<tag:yaml.org,2002:int> 9z",
    "{" + "a: {" * 300 + "}" * 301,
    "&l1 [x,x,x,x]\nb: &l2 [*l1,*l1,*l1,*l1]",
]


@fuzzed(150)
@given(recipes(plain), st.sampled_from(_SNIPPETS), st.integers(0, 500), st.integers(0, 3))
def test_recipes_of_yaml(recipe: Any, snippet: str, place: int, kind: int) -> None:
    try:
        text = yaml.safe_dump(recipe, allow_unicode=True, sort_keys=False)
    except (yaml.YAMLError, ValueError):
        return
    rows = text.split("\n")
    row = place % len(rows)
    if kind == 0:
        key, colon, _ = rows[row].partition(":")
        rows[row] = f"{key}{colon} {snippet}"
    elif kind == 1:
        rows.insert(row, snippet)
    data = "\n".join(rows).encode("utf-8", "surrogatepass")
    if kind == 2:
        data = data[: place % len(data)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_bytes(data)
        survives(prepare, path)


@fuzzed(1000)
@given(st.dictionaries(st.sampled_from(_NAMES["training"]), _small | anything, max_size=2))
def test_settings(values: dict[str, Any]) -> None:
    survives(GRPOEnvConfig, **{"output_dir": "outputs", "report_to": "none", "use_cpu": True} | values)


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
