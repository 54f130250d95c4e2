"""The example of examples/launch trains on two ranks under each of its configurations, as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
from agentsgym.training.imitate import imitate, tiny_imitation_config

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
GAME: dict[str, Any] = {"objects": ["cat", "dog", "apple", "clock"], "max_steps_per_episode": 4, "system_prompt": ""}


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that asks sensible questions now and then."""
    folder = tmp_path_factory.mktemp("policy")
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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run = run_file(folder, policy_folder, 1)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, launched_example.__file__, str(folder), str(run)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_ranks_train_what_one_process_does(name: str, alone: Path, policy_folder: Path, tmp_path: Path) -> None:
    run = run_file(tmp_path / "run", policy_folder, 2)
    script, config = Path(launched_example.__file__), LAUNCH / "accelerate" / f"{name}.yaml"
    done = launch(script, run.parent, str(run), config=config)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    kind = {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}[name]
    assert f"{kind}, 2 processes: step 2" in done.stdout
    first, second = (json.loads((run.parent / f"rank{rank}.json").read_text()) for rank in range(2))
    expected = json.loads((alone / "rank0.json").read_text())
    assert first["sharded"] is second["sharded"] is (name == "fsdp2")
    assert first["agent"] == ("ShardedPolicyAgent" if name == "fsdp2" else "PolicyAgent")
    for key in ("loss", "grad_norm", "evaluated"):
        assert len(expected[key]) in {1, 2}
        assert first[key] == pytest.approx(expected[key], abs=1e-6)
    assert any(norm > 1e-3 for norm in expected["grad_norm"])
    torch.testing.assert_close(weights(run.parent), weights(alone), atol=1e-4, rtol=0)


def test_a_warm_start_is_sent_to_the_command_that_makes_it(tmp_path: Path) -> None:
    run = run_file(tmp_path / "run", "tiny", 1)
    run.write_text(run.read_text() + "warm_start: {player: imitation}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(LAUNCH / "train.py"), str(run)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "warm_start is for agentsgym train; name the model that it saved as 'model' here" in done.stderr
