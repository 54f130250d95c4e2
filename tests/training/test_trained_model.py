"""What training leaves behind: a model that is saved, generates and is copied like any other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from games import RECOMPUTED, GuessNumber, trainer_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentsgym.agents.policy.agent import PolicyAgent, SamplingParams


@pytest.mark.parametrize("changes", [{}, RECOMPUTED, {"num_iterations": 2}])
def test_a_trained_model_is_saved_as_it_plays(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **changes)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    trained, reloaded = trainer.model, AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert trained.config.use_cache
    assert reloaded.config.use_cache
    games = []
    for model in (trained, reloaded):
        agent = PolicyAgent(model, tokenizer, sampling=SamplingParams(temperature=0.0), max_turn_tokens=4)
        played = GuessNumber(tokenizer).rollout([{"seed": seed} for seed in range(4)], agent)
        games.append([game.token_ids for game in played])
    assert games[0] == games[1]
    ids = torch.tensor([games[0][0]])
    with torch.no_grad():
        assert torch.equal(trained.eval()(input_ids=ids).logits, reloaded(input_ids=ids).logits)


def test_a_trained_model_generates_with_its_cache(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.train()
    widths: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    prompt = {"input_ids": torch.tensor([[6, 7, 8]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    trainer.model.eval().generate(**prompt, do_sample=False, max_new_tokens=4, min_new_tokens=4)
    assert widths == [3, 1, 1, 1]


@pytest.mark.parametrize("bf16", [False, True])
def test_a_copy_of_a_trained_model_runs_on_its_own_weights(bf16: bool, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, bf16=bf16)
    trainer.train()
    model, ids = trainer.model.eval(), torch.tensor([[6, 7, 8]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        twin = copy.deepcopy(model)
        assert torch.allclose(twin(input_ids=ids).logits, before, atol=0.1 if bf16 else 0.0)
        twin.lm_head.weight.zero_()
        assert (twin(input_ids=ids).logits == 0).all()
        assert torch.equal(model(input_ids=ids).logits, before)
