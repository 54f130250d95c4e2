"""Adapters on weights of 4 bits: what is trained is what was sampled, and the adapters are saved alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from games import WORDS, GuessNumber, settings, tasks
from transformers import AutoModelForCausalLM
from trl import ModelConfig

from agentsgym import ConfigError, TrainingRun, tiny_policy
from agentsgym.recipes.scripts import load_policy

pytest.importorskip("bitsandbytes")
SETTINGS = ModelConfig(
    dtype="float32", load_in_4bit=True, use_peft=True, lora_r=4, lora_target_modules=["q_proj", "v_proj", "up_proj"]
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model, tokenizer = tiny_policy(WORDS, hidden_size=64, num_heads=2)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_adapters_on_weights_of_4_bits_are_trained_and_saved_alone(base: Path, tmp_path: Path) -> None:
    policy = load_policy(str(base), SETTINGS)
    packed = policy[0].model.layers[0].mlp.up_proj.weight
    assert packed.dtype == torch.uint8
    before = packed.clone()
    run = TrainingRun(policy, settings(tmp_path / "out", max_steps=3, drift_interval=1), SETTINGS)
    state = run.learn(GuessNumber(run.tokenizer), tasks())
    assert state is not None
    gaps = [log["sampling/sampling_logp_difference/max"] for log in state.log_history if "loss" in log]
    assert max(gaps) < 1e-4
    assert max(log["grad_norm"] for log in state.log_history if "loss" in log) > 1e-3  # through packed weights too
    assert torch.equal(run.model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight, before)
    saved = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert "adapter_model.safetensors" in saved
    assert "model.safetensors" not in saved
    whole = AutoModelForCausalLM.from_pretrained(base)
    whole.load_adapter(str(tmp_path / "out" / "model"))
    adapters = {name: one for name, one in whole.named_parameters() if "lora_B" in name}
    assert any(float(one.abs().max()) > 0 for one in adapters.values())
    found = run.evaluate("after", GuessNumber(run.tokenizer), [{"seed": seed} for seed in range(4)])
    assert found.num_episodes == 4


def test_vllm_is_refused_with_weights_of_4_bits(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentsgym.training.model_checks.find_spec", lambda name: name)  # as if it were installed
    policy = load_policy(str(base), SETTINGS)
    with pytest.raises(ConfigError, match="load_in_4bit cannot be combined with use_vllm"):
        TrainingRun(policy, settings(tmp_path / "run", use_vllm=True), SETTINGS)
