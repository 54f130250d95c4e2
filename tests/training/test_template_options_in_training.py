"""``GRPOEnvConfig(chat_template_kwargs=…)`` reaches the prompt that the policy is called with, turn by turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from games import GuessNumber, policy, settings

from agentsgym.envs.datasets.registry import register
from agentsgym.training.trainer import GRPOEnvTrainer

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
