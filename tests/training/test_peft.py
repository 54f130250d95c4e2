"""Adapters: the policy is sampled and trained with them, the reference is without them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, logged, policy, settings, tasks, weights
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

from agentsgym import ConfigError, DirectOutputAgent, GRPOEnvTrainer
from agentsgym.agents.policy.merged import MergedPolicyAgent
from agentsgym.training import model_checks
from agentsgym.training._trl import TRLInterface


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **changes)


def trainer_of(folder: Path, model: Any = None, **arguments: Any) -> GRPOEnvTrainer:
    base, tokenizer = policy()
    changes = {key: arguments.pop(key) for key in [*arguments] if key not in ("peft_config", "agent")}
    args = settings(folder, **changes)
    return GRPOEnvTrainer(model or base, GuessNumber(tokenizer), args, train_dataset=tasks(), **arguments)


def logprobs(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Of every agent token, by a plain forward pass of a model that TRL has not touched."""
    ids, attention_mask = batch["prompt_completion_ids"], batch["attention_mask"]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention_mask).logits[:, :-1]
    scored = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return torch.cat([scored.new_zeros(len(ids), 1), scored], dim=1)[batch["agent_token_mask"] == 1]


def test_adapters_are_trained_and_the_weights_under_them_stay(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, peft_config=lora())
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    moved = {name for name, tensor in trainer.model.state_dict().items() if not torch.equal(before[name], tensor)}
    assert moved
    assert all("lora_" in name for name in moved)
    original = policy()[0].state_dict()
    assert all(
        torch.equal(tensor, original[name.removeprefix("base_model.model.").replace("base_layer.", "")])
        for name, tensor in trainer.model.state_dict().items()
        if "lora_" not in name
    )


def test_the_policy_is_sampled_with_its_adapters_and_the_reference_is_without(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, peft_config=lora(), beta=0.1, num_iterations=2)
    batch = trainer._generate_and_score_completions(list(tasks(8)))
    mask = batch["agent_token_mask"] == 1
    adapters = {name: tensor for name, tensor in trainer.model.state_dict().items() if "lora_" in name}
    with_adapters: Any = get_peft_model(policy()[0], lora())
    with_adapters.load_state_dict(adapters, strict=False)
    with_adapters.eval()
    without = policy()[0].eval()
    torch.testing.assert_close(batch["old_per_token_logps"][mask], logprobs(with_adapters, batch), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch["ref_per_token_logps"][mask], logprobs(without, batch), atol=1e-5, rtol=0)
    assert (batch["old_per_token_logps"] - batch["ref_per_token_logps"])[mask].abs().max() > 1e-2


def test_rollouts_are_sampled_with_merged_adapters_and_corrected_for_their_rounding(tmp_path: Path) -> None:
    given = {"peft_config": lora(), "drift_interval": 1, "merge_adapters_for_sampling": True}
    trainer = trainer_of(tmp_path, **given)
    assert isinstance(trainer.generator.agent, MergedPolicyAgent)
    assert trainer.args.importance_correction is not None
    before = weights(trainer)
    trainer.train()
    moved = {name for name, tensor in weights(trainer).items() if not torch.equal(before[name], tensor)}
    assert moved
    assert all("lora_" in name for name in moved)
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    plain = trainer_of(tmp_path, **given | {"merge_adapters_for_sampling": False})
    plain.train()
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-4)


def test_merging_adapters_is_refused_where_there_are_none_and_left_out_where_memory_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"not possible: the model has no adapters inside its layers; leave it out$"):
        trainer_of(tmp_path, merge_adapters_for_sampling=True)
    given = {"peft_config": lora(), "merge_adapters_for_sampling": True}
    with pytest.raises(ConfigError, match=r"an agent was given, which samples by itself"):
        trainer_of(tmp_path, agent=DirectOutputAgent(lambda _: "4"), **given)
    monkeypatch.setattr(model_checks, "free_memory", lambda: 100)
    trainer = trainer_of(tmp_path, **given)
    assert not isinstance(trainer.generator.agent, MergedPolicyAgent)
    assert "adapters are not merged for sampling: the merged weights need 0.0 GB" in caplog.text


def test_a_fresh_adapter_begins_without_divergence_and_then_has_some(tmp_path: Path) -> None:
    fresh = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = trainer_of(tmp_path, peft_config=fresh, beta=0.1, max_steps=3, learning_rate=0.1)
    trainer.train()
    first, *_, last = logged(trainer, "kl")
    assert first == pytest.approx(0.0, abs=1e-6)
    assert last > 1e-4


def test_an_adapter_that_came_with_the_model_is_its_own_reference(tmp_path: Path) -> None:
    torch.manual_seed(1)  # of the adapter
    model = get_peft_model(policy()[0], lora())
    trainer = trainer_of(tmp_path, copy.deepcopy(model), beta=0.1)
    trainer.train()
    batch = trainer._generate_and_score_completions(list(tasks(8)))
    mask = batch["agent_token_mask"] == 1
    torch.testing.assert_close(batch["ref_per_token_logps"][mask], logprobs(model.eval(), batch), atol=1e-5, rtol=0)
    assert logged(trainer, "kl")[-1] > 0
    with TRLInterface(trainer).reference_model():
        pass
    assert trainer.model.active_adapter == "default"


def test_a_trained_adapter_is_saved_and_loaded(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, peft_config=lora())
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(policy()[0], str(tmp_path / "adapter"))
    ids = torch.arange(5)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, copy.deepcopy(trainer.model)(ids).logits, atol=1e-6, rtol=0)


def test_an_adapter_that_puts_tokens_in_front_of_prompts_is_refused(tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ConfigError, match=r"PromptTuningConfig prepends virtual tokens"):
        trainer_of(tmp_path, peft_config=config)
    with pytest.raises(ConfigError, match=r"use LoRA"):
        trainer_of(tmp_path, get_peft_model(policy()[0], config))
