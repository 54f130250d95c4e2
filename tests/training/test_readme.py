"""The trainer of the README trains."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, cast

import pytest
from trl import GRPOConfig

from agentsgym import GRPOEnvConfig, tiny_policy

README = Path(__file__).parents[2] / "README.md"
# What a game returns, and numbers that a policy may answer.
TEXTS = [
    "Guess a number from 1 to 20.",
    "Name one number.",
    "Right.",
    "Higher.",
    "Lower.",
    *(f"Is it {number}?" for number in range(1, 21)),
]
SHORTER = {
    "max_steps=200": 'max_steps=2, logging_steps=1, use_cpu=True, report_to="none"',
    "max_turn_tokens=64": "max_turn_tokens=4",
}


def test_the_trainer_of_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    game, _, training = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    for given, shorter in SHORTER.items():
        assert training.count(given) == 1
        training = training.replace(given, shorter)
    training = training.replace("Qwen/Qwen3-0.6B", "model")
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tiny_policy(TEXTS, hidden_size=32, num_heads=2)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    names: dict[str, Any] = {"__name__": "readme"}
    exec(game, names)
    exec(training, names)
    trainer = names["trainer"]
    log = [log for log in trainer.state.log_history if "loss" in log][-1]
    assert trainer.state.global_step == 2
    assert math.isfinite(log["loss"])
    assert 0.0 <= log["win_rate"] <= 1.0
    assert 1 <= log["turns/mean"] <= 8
    grown = [weight for name, weight in trainer.model.named_parameters() if "lora_B" in name]  # they begin at 0
    assert any(weight.abs().max() > 0 for weight in grown)


def test_a_step_of_the_readme_has_several_tasks_and_a_rate_of_its_own() -> None:
    *_, training = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for line in training.splitlines() if line.startswith(("batch =", "args ="))]
    names: dict[str, Any] = {"GRPOEnvConfig": GRPOEnvConfig}
    exec("\n".join(lines), names)
    args: GRPOEnvConfig = names["args"]
    assert args.learning_rate > GRPOConfig.learning_rate
    assert cast("int", args.generation_batch_size) // args.num_generations == 8
    assert args.steps_per_cycle == 1
