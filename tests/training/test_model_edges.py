"""Models that would be sampled or trained inexactly in silence: they are refused before play, or end in time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from exactness import Talk, played
from peft import LoraConfig, VeraConfig
from zoo import TOKENIZER, build

from agentsgym import ConfigError, GRPOEnvConfig, GRPOEnvTrainer, PolicyAgent, TrainingRun, Trajectory, imitate
from agentsgym.training.selection.imitate import imitation_config

LENGTH = 40


@pytest.mark.parametrize("family", ["llama4_text", "inkling_text logit_scale"])
def test_conversations_end_where_a_model_scales_attention_by_the_place_in_the_cache(family: str) -> None:
    model = build(family)
    config = model.config.get_text_config()
    if family == "llama4_text":
        config.floor_scale = LENGTH + 1
        for layer in model.model.layers:
            layer.self_attn.floor_scale = LENGTH + 1
    else:
        config.log_scaling_n_floor = LENGTH + 1
    assert PolicyAgent(model, TOKENIZER).context_length == LENGTH
    assert played(model).error < 1e-4


def trajectories(num_turns: int = 6) -> list[Trajectory]:
    agent = PolicyAgent(build("llama"), TOKENIZER, max_turn_tokens=9)
    return Talk(TOKENIZER).rollout([{"seed": seed} for seed in (5, 11)], agent)


def loss_by_hand(model: Any, played: list[Trajectory]) -> float:
    losses: list[torch.Tensor] = []
    for trajectory in played:
        ids = torch.tensor([list(trajectory.token_ids)])
        with torch.no_grad():
            logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        places = [place for turn in trajectory.turns for place in range(turn.start, turn.stop)]
        losses += [-logprobs[place - 1, ids[0, place]] for place in places]
    return float(torch.stack(losses).mean())


def test_imitation_trains_the_experts_that_are_sampled(tmp_path: Path) -> None:
    args = imitation_config()
    args.max_steps, args.learning_rate, args.logging_steps, args.output_dir = 1, 0.0, 1, str(tmp_path)
    model = build("phimoe")
    state = imitate(model, trajectories(), TOKENIZER, args)
    assert state.log_history[0]["loss"] == pytest.approx(loss_by_hand(model, trajectories()), rel=1e-4)


def test_a_loss_that_leaves_a_cap_out_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    model = build("recurrent_gemma")
    args = GRPOEnvConfig(str(tmp_path), use_cpu=True, report_to="none")
    refused = pytest.raises(ConfigError, match="TRL's loss computes other log-probabilities than RecurrentGemma")
    with refused:
        imitate(model, trajectories(), TOKENIZER)
    with refused:
        TrainingRun((model, TOKENIZER), args)
    assert "forward" not in vars(model)


def test_demonstrations_beyond_the_frequencies_of_rope_are_refused() -> None:
    model = build("phi3 LongRoPE")
    assert max(len(one.token_ids) for one in trajectories()) > 64
    with pytest.raises(ConfigError, match=r"a trajectory has \d+ tokens, but beyond 64 the frequencies"):
        imitate(model, trajectories(), TOKENIZER)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_adapters_on_all_linear_layers_leave_routers_alone(family: str, tmp_path: Path) -> None:
    args = GRPOEnvConfig(str(tmp_path), use_cpu=True, report_to="none", router_aux_loss_coef=0.0, num_generations=8)
    rows = Dataset.from_list([{"task_data": {"seed": 3}}])
    trainer = GRPOEnvTrainer(
        build(family), Talk(TOKENIZER), args, rows, peft_config=LoraConfig(target_modules="all-linear")
    )
    trained = {name for name, one in trainer.model.named_parameters() if one.requires_grad}
    assert any("experts" in name for name in trained)
    assert not any("gate." in name for name in trained)


def test_adapters_of_a_kind_without_exclude_modules_are_trained(tmp_path: Path) -> None:
    args = GRPOEnvConfig(str(tmp_path), use_cpu=True, report_to="none", num_generations=8)
    rows = Dataset.from_list([{"task_data": {"seed": 3}}])
    adapters = VeraConfig(target_modules=["q_proj", "o_proj"], r=4)
    trainer = GRPOEnvTrainer(build("llama"), Talk(TOKENIZER), args, rows, peft_config=adapters)
    assert any(one.requires_grad for name, one in trainer.model.named_parameters() if "vera" in name)


def test_float64_is_sampled_though_some_layers_compute_in_float32() -> None:
    assert played(build("qwen3_5_text").double()).error < 5e-4
