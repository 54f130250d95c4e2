"""Axolotl, which has its own TRL and transformers, trains an environment through its YAML; `make test-axolotl`."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentsgym import PolicyAgent, tiny_policy
from agentsgym.envs import TwentyQuestionsEnv

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "axolotl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, with its data, in a folder of its own."""
    copied = Path(shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("axolotl") / "example"))
    example: dict[str, Any] = runpy.run_path(str(copied / "twenty_questions_axolotl.py"))
    example["main"](copied / "data", 64, 60)
    return copied


def axolotl(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Run the example's YAML with other lines."""
    config = folder / "run.yaml"
    text = (folder / "twenty_questions.yaml").read_text()
    for line in lines:
        key = line.partition(":")[0]
        kept = [one for one in text.splitlines() if one.strip().partition(":")[0] != key.strip()]
        text = "\n".join([*kept, line]) + "\n"
    config.write_text(text)
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "HF_HUB_OFFLINE": "1",
        "AXOLOTL_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [str(Path(sys.executable).parent / "axolotl"), "train", config.name, "--launcher", "python"]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def test_its_yaml_trains_the_example(folder: Path) -> None:
    ran = axolotl(folder, "max_steps: 2")
    assert ran.returncode == 0, ran.stderr[-4000:]
    output = ran.stdout + ran.stderr
    assert output.count("'rewards/environment_reward/mean'") == 2
    assert "'final_reward'" in output
    before = load_file(folder / "data" / "policy" / "model.safetensors")
    after = load_file(folder / "outputs" / "axolotl" / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_setting_that_would_go_wrong_is_named(folder: Path) -> None:
    text = (folder / "twenty_questions.yaml").read_text()
    wrong = text.replace("  use_vllm: false", "  use_vllm: false\n  mask_truncated_completions: true")
    (folder / "twenty_questions.yaml").write_text(wrong)
    try:
        ran = axolotl(folder, "max_steps: 1")
    finally:
        (folder / "twenty_questions.yaml").write_text(text)
    assert ran.returncode != 0
    assert "GRPOConfig(mask_truncated_completions=True) is not supported with rollout_func" in ran.stdout + ran.stderr


def test_the_policy_is_sampled_with_its_cache_kept_on_older_transformers(caplog: pytest.LogCaptureFixture) -> None:
    env_config = {"max_steps_per_episode": 6, "error_allowance": 6}
    model, tokenizer = tiny_policy(TwentyQuestionsEnv(env_config=env_config))
    env = TwentyQuestionsEnv(tokenizer, env_config)
    task = dict(env.get_train_dataset(size=1)[0]["task_data"])
    [played] = env.rollout([task], PolicyAgent(model, tokenizer, max_turn_tokens=8))
    assert played.exact
    ids = torch.tensor([played.token_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    for place, (is_agent, logprob) in enumerate(zip(played.agent_token_mask, played.logprobs or (), strict=True)):
        if is_agent:
            assert logprob == pytest.approx(float(logprobs[place - 1]), abs=1e-4)
    assert "the cache of" not in caplog.text  # which would report that it is not kept
