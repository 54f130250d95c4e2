"""The example, shortened, as a person runs it with vLLM generating."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import example_run
from transformers import AutoModelForCausalLM

from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, TwentyQuestionsEnv
from agentsgym.tiny import tiny_policy

GAME = {"objects": list(DEMO_OBJECTS), "properties": list(DEMO_PROPERTIES), "final_guess": True}
SHORT = ["--num_games", "64", "--max_steps", "8", "--max_turn_tokens", "12", "--per_device_train_batch_size", "16"]
VLLM = ["--use_vllm", "--vllm_mode", "colocate", "--vllm_max_model_length", "512", "--use_cpu"]


def test_the_example_trains_with_vllm_generating(tmp_path: Path) -> None:
    # Heads as wide as vLLM's attention on a CPU wants them.
    for part in tiny_policy(TwentyQuestionsEnv(env_config=GAME), hidden_size=64, num_heads=2):
        part.save_pretrained(tmp_path / "policy")
    command = [sys.executable, example_run.__file__, "--model", str(tmp_path / "policy"), *SHORT, *VLLM]
    command += ["--output_dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["settings"]["use_vllm"] is True
    assert summary["after"]["num_episodes"] == 64
    assert summary["interrupted"] is False
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("policy", "run/model"))
    moved = [(one - other).abs().max() for one, other in zip(before.parameters(), after.parameters(), strict=True)]
    assert max(moved) > 0
