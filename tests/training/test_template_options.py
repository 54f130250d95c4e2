"""The trainer's options of the chat template: defaults of environments built from rows, and in every prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from games import GuessNumber, policy, settings

from agentsgym import ConfigError, GRPOEnvConfig, GRPOEnvTrainer, register
from agentsgym.envs.datasets.environments import Environments
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


OPENS, CLOSED = " red", " red blue"  # what a thought looks like in the words that the tiny tokenizer knows
THINKING = "{% if add_generation_prompt %}{{ ' red blue' if enable_thinking is false else ' red' }}{% endif %}"


@pytest.mark.parametrize(
    ("options", "row_config", "expected"),
    [
        (None, {}, OPENS),
        ({"enable_thinking": True}, {}, OPENS),
        ({"enable_thinking": False}, {}, CLOSED),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": True}}, OPENS),
    ],
)
def test_the_options_of_the_template_reach_the_prompts_that_are_trained_on(
    options: Any, row_config: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentsgym.envs.dataset_rows._registered", {})
    register(GuessNumber, "tests.GuessNumber")
    rows = [
        {"env_class_path": "tests.GuessNumber", "env_config": row_config, "task_data": {"seed": seed}}
        for seed in range(2)
    ]
    model, tokenizer = policy()
    tokenizer.chat_template = f"{tokenizer.chat_template}{THINKING}"
    args = settings(tmp_path, chat_template_kwargs=options)
    trainer = GRPOEnvTrainer(model, None, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    batch = trainer._generate_and_score_completions(list(trainer.train_dataset) * 4)
    requested = tokenizer("Guess a number from one to six.", add_special_tokens=False)["input_ids"]
    glue = tokenizer(f"<|assistant|>{expected}", add_special_tokens=False)["input_ids"]
    num_prompts = 0
    for ids, mask in zip(batch["prompt_completion_ids"].tolist(), batch["agent_token_mask"].tolist(), strict=True):
        starts = [at for at in range(1, len(ids)) if mask[at] and not mask[at - 1]]  # of what the policy answered
        assert ids[: starts[0]] == [*requested, *glue]
        assert all(ids[start - len(glue) : start] == glue for start in starts)
        num_prompts += len(starts)
    assert num_prompts > len(batch["prompt_completion_ids"]) == 8
