"""Sampling with merged adapters: the same answers, and weights in training that stay what they are."""

import copy
from typing import Any

import pytest
import torch
from peft import LNTuningConfig, LoraConfig, get_peft_model
from policy_sessions import TOKENIZER, Session, new_model, play

from agentsgym import ConfigError, PolicyAgent, SamplingParams
from agentsgym.agents.policy.merged import MergedPolicyAgent

ADAPTERS = {
    "lora": {},
    "rank-stabilized, of two layers": {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "dora": {"use_dora": True},
    "of a parameter": {"target_modules": ["q_proj"], "target_parameters": ["v_proj.weight"]},
    "with a trained head": {"modules_to_save": ["lm_head"]},
}


def adapted(seed: int = 1, **changes: Any) -> Any:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **changes}
    return get_peft_model(new_model("llama"), LoraConfig(task_type="CAUSAL_LM", **options)).eval()


def merged(model: Any, **options: Any) -> MergedPolicyAgent:
    return MergedPolicyAgent(model, TOKENIZER, sampling=SamplingParams(**options))


def conversations(agent: PolicyAgent, num_turns: int = 3) -> list[list[float]]:
    sessions = [Session(name) for name in range(3)]
    logprobs: list[list[float]] = []
    for _ in range(num_turns):
        logprobs += [list(action.logprobs or ()) for action in play(agent, sessions, 6)]
    return [*([float(one) for one in session.token_ids] for session in sessions), *logprobs]


@pytest.mark.parametrize("kind", ADAPTERS)
def test_conversations_are_those_of_the_model_with_adapters_and_its_weights_stay_bit_for_bit(kind: str) -> None:
    model = adapted(**ADAPTERS[kind])
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    agent = merged(model)
    first = conversations(agent)
    for one, other in zip(first, conversations(PolicyAgent(model, TOKENIZER)), strict=True):
        assert one == pytest.approx(other, abs=2e-4)
    agent.finish()
    assert all(
        (tensor.data_ptr(), True) == (before[name][0], torch.equal(tensor, before[name][1]))
        for name, tensor in model.state_dict().items()
    )
    assert not agent._merged


def test_a_forward_pass_while_sampling_computes_no_adapter() -> None:
    model, called = adapted(), list[str]()
    for name, part in model.named_modules():
        if name.endswith(("lora_A.default", "lora_B.default")):
            part.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    conversations(merged(model))
    assert called == []
    conversations(PolicyAgent(model, TOKENIZER))
    assert called


def test_weights_that_change_between_two_turns_are_merged_anew() -> None:
    model = adapted()
    agent, sessions = merged(model, temperature=0), [Session(0), Session(1)]
    play(agent, sessions, 6)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.mul_(-3.0)
    others = copy.deepcopy(sessions)
    for session in others:
        session.state = None
    given = [action.token_ids for action in play(agent, sessions, 6)]
    fresh = PolicyAgent(model, TOKENIZER, sampling=SamplingParams(temperature=0))
    assert given == [action.token_ids for action in play(fresh, others, 6)]


def test_a_failed_turn_leaves_the_weights_and_the_adapters_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    ids = torch.arange(60, 70)[None]
    with torch.no_grad():
        before = model(ids).logits
    agent = merged(model)
    conversations(agent, 1)
    monkeypatch.setattr(agent, "_sample_from", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        conversations(agent, 1)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            {"target_modules": ["lm_head"]},
            r"tied weights cannot be merged: .*embed_tokens.* and .*lm_head.* are the same",
        ),
        ({"target_modules": ["q_proj"], "lora_bias": True}, r"cannot be merged for sampling: .*set merge_adapters_for"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # PEFT's, of the same
def test_what_cannot_be_merged_is_named(adapter: dict[str, Any], message: str) -> None:
    base = new_model("llama")
    base.config.tie_word_embeddings = True
    base.tie_weights()
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, **adapter))
    with pytest.raises(ConfigError, match=message):
        conversations(merged(model), 1)


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
def test_adapters_that_exchange_modules_are_refused_and_left_in_place() -> None:
    config = LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm"])
    model = get_peft_model(new_model("llama"), config).eval()
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    with pytest.raises(ConfigError, match=r"cannot be merged for sampling: it would exchange modules; set merge"):
        conversations(merged(model), 1)
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == trained


def test_without_its_adapters_the_model_is_sampled_as_it_is_and_with_them_again_merged() -> None:
    model = adapted()
    agent, sessions = merged(model, temperature=0), [Session(0)]
    play(agent, sessions, 4)
    with model.disable_adapter():
        plain, others = PolicyAgent(model, TOKENIZER, sampling=SamplingParams(temperature=0)), [Session(1)]
        theirs = [Session(1)]
        for _ in range(3):
            assert play(agent, others, 4)[0].token_ids == play(plain, theirs, 4)[0].token_ids
    agent.finish()
    assert conversations(agent)[:3] == conversations(merged(adapted(), temperature=0))[:3]


def test_merged_weights_that_are_not_finite_end_the_run_with_the_cause() -> None:
    model = adapted()
    with torch.no_grad():
        next(weight for name, weight in model.named_parameters() if "lora_B" in name)[0] = float("nan")
    with pytest.raises(ConfigError, match=r"cannot be merged for sampling: NaNs detected"):
        conversations(merged(model), 1)
