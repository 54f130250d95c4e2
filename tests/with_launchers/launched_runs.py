"""Runs of examples/launch in one process and on two ranks, and how the two are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import launched_example
import pytest
import torch
import yaml
from launch import launch
from transformers import AutoModelForCausalLM

from agentsgym.envs.TwentyQuestions import ImitationPlayer, TwentyQuestionsEnv
from agentsgym.tiny import tiny_policy
from agentsgym.training.selection.imitate import imitate, tiny_imitation_config

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
GAME: dict[str, Any] = {"objects": ["cat", "dog", "apple", "clock"], "max_steps_per_episode": 4, "system_prompt": ""}
SCRIPT = Path(launched_example.__file__)
SHARDED = ("fsdp2", "zero3")  # configurations under which no rank holds all weights


def make_policy(folder: Path) -> Path:
    """Save a policy that poses sensible questions now and then, and return its folder."""
    model, tokenizer = tiny_policy(TwentyQuestionsEnv(None, GAME))
    env = TwentyQuestionsEnv(tokenizer, GAME)
    games = [{"solution": name, "seed": seed} for name in GAME["objects"] for seed in range(16)]
    imitate(model, env.rollout(games, ImitationPlayer(env, 0)), tokenizer, tiny_imitation_config(80, disable_tqdm=True))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_file(folder: Path, model: Path | str, num_ranks: int, **changes: Any) -> Path:
    """A small run: 16 rollouts a step however many ranks play them."""
    folder.mkdir()
    values = {
        "model": str(model),
        "environments": [{"class": "TwentyQuestions", "env_config": GAME, "dataset": {"split": "all"}}],
        "training": {
            "output_dir": str(folder / "out"),
            "max_steps": 2,
            "per_device_train_batch_size": 16 // num_ranks,
            "per_device_eval_batch_size": 8 // num_ranks,
            "num_generations": 8,
            "max_turn_tokens": 12,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            **changes,
        },
        "evaluation": {"num_tasks": 8},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def weights(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    return torch.cat([one.flatten() for one in model.parameters()])


def train_alone(folder: Path, model: Path | str, **changes: Any) -> Path:
    """Train in one process, and return the folder of the run."""
    run = run_file(folder, model, 1, **changes)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), str(folder), str(run)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def train_on_two_ranks(
    name: str, folder: Path, model: Path | str, variables: Mapping[str, str] | None = None, **changes: Any
) -> str:
    """Train under a configuration of examples/launch, and return what the ranks printed."""
    run = run_file(folder, model, 2, **changes)
    config = LAUNCH / "accelerate" / f"{name}.yaml"
    done = launch(SCRIPT, folder, str(run), config=config, timeout_s=900, variables=variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def check_as_one_process(name: str, folder: Path, alone: Path, *, agent: str) -> None:
    """Check that two ranks sharded what they should, and trained what one process did."""
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2))
    expected = json.loads((alone / "rank0.json").read_text())
    assert first["sharded"] is second["sharded"] is (name in SHARDED)
    assert first["agent"] == agent
    for key in ("loss", "grad_norm", "evaluated"):
        assert len(expected[key]) in {1, 2}
        assert first[key] == pytest.approx(expected[key], abs=1e-6)
    assert any(norm > 1e-3 for norm in expected["grad_norm"])
    torch.testing.assert_close(weights(folder), weights(alone), atol=1e-4, rtol=0)
