"""``agentsgym train``: the file that ``new`` writes trains, and the exit code names what came of it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import ran
from transformers import TrainerCallback

from agentsgym.observers.learning_curve import LearningCurve, warn_without_plots

pytestmark = pytest.mark.filterwarnings("default")  # TRL trains

SHORT = (
    *(
        "--set",
        "training.max_steps=2",
        "--set",
        "training.logging_steps=1",
        "--set",
        "training.per_device_train_batch_size=8",
    ),
    *("--set", "training.use_cpu=true", "--set", "warm_start.settings.use_cpu=true"),
    *("--set", "warm_start.num_episodes=8", "--set", "warm_start.max_steps=2", "--set", "evaluation.num_tasks=5"),
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """What ``new`` writes, with its output beside it."""
    assert ran("new", "TrainIt", "--folder", tmp_path).code == 0
    sys.modules.pop("train_it", None)  # of the test before
    path = tmp_path / "train_it.yaml"
    path.write_text(path.read_text().replace("outputs/", f"{tmp_path}/outputs/"))
    return path


def test_what_new_writes_is_trained(config: Path) -> None:
    done = ran("train", config, *SHORT)
    assert done.code == 0, done.err
    rows = {line.split()[0]: line.split() for line in done.out.splitlines() if line.strip()}
    assert [rows[name][-1] for name in ("random", "reference", "before", "after")] == ["5", "5", "20", "20"]
    assert "transcripts_after.txt" in done.words
    assert re.search(r"step 2 of 2, 0:00:00 left: reward [-\d.]+, win rate \d+%", done.err)
    assert (config.parent / "outputs" / "train_it" / "model" / "model.safetensors").exists()


def test_training_without_matplotlib_draws_no_curve_and_names_the_extra_once(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    warn_without_plots.cache_clear()
    done = ran("train", config, *SHORT)
    assert done.code == 0, done.err
    written = {path.name for path in (config.parent / "outputs" / "train_it").iterdir()}
    assert written == {"model", "summary.json", "transcripts_before.txt", "transcripts_after.txt"}
    assert "model/, summary.json, transcripts_before.txt, transcripts_after.txt" in done.words
    assert done.err.count("pip install 'agentsgym[plots]'") == done.err.count("`agentsgym view`") == 1
    assert done.err.index("agentsgym[plots]") < done.err.index("step 1 of 2")


@pytest.mark.parametrize("options", [("--tools",), pytest.param(("--tools", "--mcp"), marks=pytest.mark.long)])
def test_an_environment_of_tools_that_new_writes_is_trained(options: tuple[str, ...], tmp_path: Path) -> None:
    config = _new_tools(tmp_path, *options)
    found = ran("train", config, *SHORT, "--json").json
    assert found["reference"]["win_rate"] == 1.0
    assert found["after"]["num_episodes"] == 50


@pytest.mark.long
def test_an_environment_of_tools_that_new_writes_is_learned(tmp_path: Path) -> None:
    found = ran("train", _new_tools(tmp_path, "--tools"), "--set", "training.use_cpu=true", "--json").json
    assert found["before"]["win_rate"] < 0.3
    assert found["after"]["win_rate"] > 0.7


def _new_tools(folder: Path, *options: str) -> Path:
    assert ran("new", "StockRoom", *options, "--folder", folder).code == 0
    for name in ("stock_room", "stock_room_server"):
        sys.modules.pop(name, None)  # of the test before
    path = folder / "stock_room.yaml"
    path.write_text(path.read_text().replace("outputs/", f"{folder}/outputs/"))
    return path


def test_json_is_the_summary_alone(config: Path) -> None:
    found = ran("train", config, *SHORT, "--set", "evaluation.num_rollouts=2", "--json").json
    assert found["after"]["num_episodes"] == 10
    assert found["output_dir"].endswith("train_it")


def test_of_several_environments_each_is_shown_beside_its_own_players(config: Path) -> None:
    other = {"class": "PriceList", "env_config": {"kinds": ["price"], "max_steps_per_episode": 2, "system_prompt": ""}}
    environments = [{"class": f"{config.parent / 'train_it.py'}", "label": "words"}, {**other, "label": "prices"}]
    done = ran("train", config, *SHORT, "--set", f"environments={json.dumps(environments)}")
    assert done.code == 0, done.err
    rows = [line.partition("  ")[0] for line in done.out.splitlines()]
    for who in ("random", "reference", "before", "after"):
        assert {f"{who}, words", f"{who}, prices"} <= {*rows}, done.out


def test_ctrl_c_in_an_evaluation_names_where_the_run_is(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("agentsgym.recipes.train.PreparedRun.learn", stopped)
    done = ran("train", config, *SHORT)
    assert done.code == 1
    assert "stopped; the files written so far are in" in done.words
    assert (config.parent / "outputs" / "train_it" / "summary.json").exists()


def test_ctrl_c_keeps_the_policy_and_is_a_failure(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopping(LearningCurve):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    assert issubclass(Stopping, TrainerCallback)
    monkeypatch.setattr("agentsgym.recipes.run.LearningCurve", Stopping)
    done = ran("train", config, *SHORT)
    assert done.code == 1
    assert "stopped; the policy at that point is in" in done.words
    assert "after" in done.out
    assert (config.parent / "outputs" / "train_it" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "training.max_stepps=2"], "training.max_stepps is unknown; did you mean 'max_steps'?"),
        (["--set", "environments.0.env_config.highest=1"], "env_config['highest'] must be an int of at least 2, got 1"),
        (["--set", "max_steps"], "--set must be KEY=VALUE"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_a_usage_error(arguments: list[str], message: str, config: Path) -> None:
    done = ran("train", config, *arguments)
    assert done.code == 2
    assert message in done.words


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    done = ran("train", tmp_path / "none.yaml")
    assert done.code == 2
    assert "cannot be read" in done.words
