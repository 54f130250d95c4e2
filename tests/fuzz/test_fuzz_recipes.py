"""Recipes of training runs, as values and as YAML."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st
from outcomes import fuzzed, survives
from trl import ModelConfig, SFTConfig
from values import anything, plain, texts

from agentsgym.envs.config import COMMON_FIELDS
from agentsgym.recipes.recipe import EvaluationPart, WarmStart, read_recipe
from agentsgym.recipes.train import prepare
from agentsgym.tiny import tiny_model
from agentsgym.training.config import GRPOEnvConfig

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
