"""The head runs on labeled positions alone, a few at a time, and what comes of it is what full logits give."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportPrivateUsage=false, reportUnknownLambdaType=false, reportUnknownParameterType=false
# torch, transformers and vLLM leave parts of their signatures untyped.

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, policy, settings, tasks, trainer_of
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, RecurrentGemmaConfig
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head
from zoo import build

from agentsgym import ConfigError, GRPOEnvTrainer, logprob_gap
from agentsgym.training._trl import TRLInterface
from agentsgym.training.tensors import scoring
from agentsgym.training.tensors.scoring import check_head, head_logits, score_labeled_only, trunk_of

PICTURES = ["....AA..A.", "...AAAAAAA", "AA........"]  # '.' given, 'A' an agent's
TEMPERATURE = 0.7


class Largest(TorchDispatchMode):
    """Notes the most positions for which anything as wide as the vocabulary is computed at once."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.width, self.num_positions = vocabulary_size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_tensor(result) and result.dim() and result.shape[-1] == self.width:
            self.num_positions = max(self.num_positions, result.numel() // self.width)
        return result


def rows(vocabulary_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask and labels of rows of several lengths, (B, L)."""
    ids = torch.randint(vocabulary_size, (3, 10), generator=torch.Generator().manual_seed(0))
    attention_mask = torch.ones_like(ids)
    attention_mask[1, 8:] = 0
    agent = torch.tensor([[letter == "A" for letter in row] for row in PICTURES]) & (attention_mask == 1)
    return ids, attention_mask, ids.masked_fill(~agent, -100)


def fused(model: Any, *, labeled_alone: bool) -> Any:
    """The model with TRL's fused head, and with ours around it."""
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    if labeled_alone:
        score_labeled_only(model)
    return model


def scored(model: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities, entropies, and the gradient of a loss of both, one tensor a weight."""
    ids, attention_mask, labels = rows(model.config.vocab_size)
    output = model(input_ids=ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True)
    weight = torch.linspace(-1, 1, output.log_probs.numel()).view_as(output.log_probs)
    (output.log_probs * weight).sum().add(output.entropy.sum(), alpha=0.1).backward()
    return output.log_probs, output.entropy, [p.grad for p in model.parameters() if p.grad is not None]


def by_full_logits(model: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The same by the definition, from the logits of all positions."""
    ids, attention_mask, labels = rows(model.config.vocab_size)
    logits = model(input_ids=ids, attention_mask=attention_mask).logits[:, :-1] / TEMPERATURE
    spread = logits.log_softmax(-1)
    has_label = labels[:, 1:] != -100
    logprobs = spread.gather(2, ids[:, 1:, None])[..., 0] * has_label
    entropies = -(spread.exp() * spread).sum(-1) * has_label
    weight = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
    (logprobs * weight).sum().add(entropies.sum(), alpha=0.1).backward()
    return logprobs, entropies, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.parametrize("at_once", [4096, 3])
def test_numbers_and_gradients_are_those_of_full_logits(
    at_once: int, with_adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", at_once)

    def model(*, is_fused: bool) -> Any:
        torch.manual_seed(0)
        base: Any = policy()[0]
        if is_fused:
            fused(base, labeled_alone=True)
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        return get_peft_model(base, config) if with_adapters else base

    found, wanted = scored(model(is_fused=True)), by_full_logits(model(is_fused=False))
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)


def test_only_labeled_positions_reach_the_head() -> None:
    positions = []
    for labeled_alone in (False, True):
        model = fused(policy()[0], labeled_alone=labeled_alone)
        with Largest(model.config.vocab_size) as largest:
            scored(model)
        positions.append(largest.num_positions)
    num_labeled = int((rows(10)[2][:, 1:] != -100).sum())
    # The first call's are of its tile, whose rows the second's lacks.
    assert positions[0] >= 27
    assert positions[1] == max(num_labeled, model.config.hidden_size)  # or the embedding's own gradient


def test_without_any_label_there_are_zeros_and_a_graph() -> None:
    model = fused(policy()[0], labeled_alone=True)
    ids, attention_mask, labels = rows(model.config.vocab_size)
    nothing = torch.full_like(labels, -100)
    output = model(input_ids=ids, attention_mask=attention_mask, labels=nothing, fused_lm_head=True)
    assert output.log_probs.shape == output.entropy.shape == (3, 9)
    assert not output.log_probs.any()
    output.log_probs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_forward_that_wants_logits_is_the_models_own() -> None:
    model: Any = policy()[0]
    ids, attention_mask, labels = rows(model.config.vocab_size)
    arguments = {"input_ids": ids, "attention_mask": attention_mask}
    logits, loss = model(**arguments).logits, model(**arguments, labels=labels).loss
    fused(model, labeled_alone=True)
    torch.testing.assert_close(model(**arguments).logits, logits, atol=0, rtol=0)
    torch.testing.assert_close(model(**arguments, labels=labels).loss, loss, atol=0, rtol=0)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_head_is_handed_hidden_states_and_scales_and_caps_as_ever(family: str) -> None:
    model: Any = build(family)
    ids, attention_mask, _ = rows(model.config.vocab_size)
    states = trunk_of(model)(input_ids=ids, attention_mask=attention_mask).last_hidden_state
    logits = model(input_ids=ids, attention_mask=attention_mask).logits
    torch.testing.assert_close(head_logits(model, states[1]), logits[1], atol=1e-6, rtol=1e-6)


def test_a_comparison_scores_a_few_tokens_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path)
    env, model = trainer.environments.of({"task_data": {"seed": 0}}), copy.deepcopy(trainer.model)
    played = env.rollout([{"seed": 0}, {"seed": 1}], trainer.agent, 4)
    whole = logprob_gap(model, played)
    monkeypatch.setattr(scoring, "POSITIONS_AT_ONCE", 5)
    with Largest(model.config.vocab_size) as largest:
        pieces = logprob_gap(model, played)
    assert pieces.num_tokens == whole.num_tokens > 2 * model.config.hidden_size
    assert pieces.kl_k1 == pytest.approx(whole.kl_k1, abs=1e-7)
    assert max(pieces.largest_gap, whole.largest_gap) < 1e-5
    # One a row where the trunk runs, and then five; the weights of the head are a matrix as wide too.
    assert largest.num_positions == max(len(played), model.config.hidden_size)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_loss_and_the_scores_of_a_trainer_take_agent_tokens_alone(beta: float, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model, tokenizer = policy()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    args = settings(tmp_path, beta=beta, per_device_train_batch_size=4, max_turn_tokens=8)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    trainer = GRPOEnvTrainer(loaded, GuessNumber(tokenizer), args, train_dataset=tasks())
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions([{"task_data": {"seed": 0}}] * 4)
    mask = batch["agent_token_mask"]
    columns = batch["prompt_completion_ids"], batch["attention_mask"], mask
    size = trainer.model.config.vocab_size
    with Largest(size) as scoring:
        TRLInterface(trainer).score(*columns)
        TRLInterface(trainer).score_reference(*columns)
    with Largest(size) as loss:
        trainer.compute_loss(trainer.model, batch)
    assert scoring.num_positions == loss.num_positions == int(mask.sum()) < int(batch["attention_mask"].sum())


def test_a_model_that_caps_its_logits_under_a_name_of_its_own_is_refused_until_the_loss_reads_the_cap() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "lru_width": 16, "num_attention_heads": 2, "vocab_size": 50}
    config = RecurrentGemmaConfig(**sizes, num_hidden_layers=1, block_types=["recurrent"], logits_soft_cap=30.0)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"RecurrentGemmaForCausalLM, .*final_logit_softcapping"):
        check_head(fused(copy.deepcopy(model), labeled_alone=True), TEMPERATURE)
    model.config.final_logit_softcapping = config.logits_soft_cap
    check_head(fused(model, labeled_alone=True), TEMPERATURE)
