"""Recipes, training settings and command lines that nobody means: nothing is trained, since each check comes before."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import yaml
from hostile import JSON, drawn, mappings, only_sentences, with_one_changed
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOConfig
from typer.testing import CliRunner

from agentsgym.cli.app import app
from agentsgym.recipes.recipe import read_recipe
from agentsgym.recipes.train import prepare
from agentsgym.training.config import GRPOEnvConfig

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]

GOOD: dict[str, Any] = {
    "model": "tiny",
    "tiny": {"hidden_size": 16, "num_hidden_layers": 1},
    "environments": [
        {"class": "TwentyQuestions", "env_config": {"max_steps_per_episode": 3}, "dataset": {}, "weight": 1.0},
        {"class": "Gymnasium:FrozenLake-v1"},
    ],
    "warm_start": {"player": "random", "num_episodes": 4, "max_steps": 1, "settings": {"learning_rate": 1e-3}},
    "training": {"max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 2, "use_cpu": True},
    "num_train_tasks": 4,
    "evaluation": {"num_tasks": 2},
}
OWN_SETTINGS = sorted(GRPOEnvConfig.__dataclass_fields__.keys() - GRPOConfig.__dataclass_fields__.keys())


@drawn(60)
@given(st.data())
def test_a_value_of_a_recipe(data: st.DataObject) -> None:
    with only_sentences():
        prepare(with_one_changed(copy.deepcopy(GOOD), data.draw))


@drawn(150)
@given(st.data())
def test_a_value_of_a_recipe_that_is_only_read(data: st.DataObject) -> None:
    with only_sentences():
        read_recipe(
            with_one_changed(copy.deepcopy(GOOD), data.draw),
            data.draw(mappings(["training.max_steps", "environments.0.weight", "a.b", ""])),
        )


@drawn(100)
@given(text=st.one_of(st.text(max_size=60), JSON.map(yaml.safe_dump)), at=st.integers(0, 400), cut=st.integers(0, 9))
def test_the_text_of_a_recipe(text: str, at: int, cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    good = yaml.safe_dump(GOOD)
    file.write_bytes((good[:at] + text + good[at + cut :]).encode("utf-8", "surrogatepass"))
    with only_sentences():
        read_recipe(file)


@drawn(150)
@given(mappings(OWN_SETTINGS))
def test_own_settings(changes: dict[Any, Any]) -> None:
    with only_sentences(ValueError):  # of TRL, for settings that contradict each other
        GRPOEnvConfig("unused", use_cpu=True, **{str(name): value for name, value in changes.items()})


@drawn(60)
@given(mappings(sorted(GRPOEnvConfig.__dataclass_fields__.keys() - {"output_dir"})))
def test_any_settings_of_a_recipe(changes: dict[Any, Any]) -> None:
    with only_sentences():
        prepare({**copy.deepcopy(GOOD), "training": {**GOOD["training"], **changes}})


OPTIONS = st.one_of(
    st.sampled_from(
        ["--env-config", "--agent", "-n", "--where", "--seed", "--json", "--out", "--set", "--split", "--to"]
    ),
    st.sampled_from(["TwentyQuestions", "Gymnasium:", "nothing", "x.py", "random", "{", "{}", "seed=1", "-1", "1e9"]),
    st.text(max_size=8).filter(lambda text: "\x00" not in text),
)
COMMANDS = ["audit", "check", "compare", "envs", "eval", "export", "replay", "train", "view", "pull", "push", "new"]


@drawn(60)
@given(command=st.sampled_from(COMMANDS), arguments=st.lists(OPTIONS, max_size=4))
def test_command_lines(command: str, arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    with contextlib.chdir(tmp_path_factory.mktemp("cwd")):
        result = CliRunner().invoke(app, [command, *arguments, *(["-n", "1"] if command == "eval" else [])])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.output, result.output
