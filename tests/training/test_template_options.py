"""The trainer's options of the chat template: the default of every environment that it builds from rows."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from games import GuessNumber, policy

from agentsgym.envs.datasets.environments import Environments
from agentsgym.envs.datasets.registry import register
from agentsgym.errors import ConfigError
from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.model_checks import build_environments

TOKENIZER = policy()[1]
GUESS = "tests.GuessNumber"
OPTIONS = {"enable_thinking": False}


@pytest.fixture
def _games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentsgym.envs.dataset_rows._registered", {})
    register(GuessNumber, GUESS)


def options_of(environments: Environments, row: dict[str, Any]) -> Any:
    return environments.of({"env_class_path": GUESS, "task_data": {"target": 1}, **row}).env_config[
        "chat_template_kwargs"
    ]


@pytest.mark.usefixtures("_games")
def test_they_are_the_default_of_rows_that_give_none() -> None:
    environments = Environments(None, TOKENIZER, template_options=OPTIONS)
    assert options_of(environments, {}) == OPTIONS
    assert options_of(environments, {"env_config": {"max_steps_per_episode": 2}}) == OPTIONS
    assert options_of(environments, {"env_config": {"chat_template_kwargs": None}}) == OPTIONS
    assert options_of(environments, {"env_config": {"chat_template_kwargs": {"depth": 2}}}) == {"depth": 2}
    assert options_of(Environments(None, TOKENIZER), {}) == {}


@pytest.mark.usefixtures("_games")
def test_settings_pass_them_on(tmp_path: Path) -> None:
    args = GRPOEnvConfig(
        output_dir=str(tmp_path),
        chat_template_kwargs=OPTIONS,
        num_generations=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    row = {"env_class_path": GUESS, "task_data": {"target": 1}}
    environments = build_environments(None, TOKENIZER, args, Dataset.from_list([row]), None)
    assert options_of(environments, {}) == OPTIONS


def test_an_environment_that_was_built_with_others_is_refused() -> None:
    same = GuessNumber(TOKENIZER, {"chat_template_kwargs": OPTIONS})
    row: dict[str, Any] = {"task_data": {"target": 1}}
    assert Environments(same, TOKENIZER, template_options=OPTIONS).of(row) is same
    assert Environments(same, TOKENIZER).of(row) is same
    for other in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
        with pytest.raises(ConfigError, match=r"chat_template_kwargs=.* and env, which was built with .* differ"):
            Environments(GuessNumber(TOKENIZER, other), TOKENIZER, template_options=OPTIONS)
