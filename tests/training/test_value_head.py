"""The value head: what it reads, what it learns, whose gradients it touches, and that it is no part of the policy."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import value_heads
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import get_total_norm
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig
from trl import GRPOConfig, GRPOTrainer
from value_heads import (
    MASK,
    gradients,
    loss_of,
    policy,
    reference_values,
    some_ids,
    some_targets,
    value_model,
    with_some_head,
)

from agentsgym import ConfigError, tiny_policy
from agentsgym.training.objectives.value_head import VALUE_HEAD_FILE, ValueLoss

both = pytest.mark.parametrize("kind", ["shared", "separate"])


def adapted(seed: int = 0) -> Any:
    """With an adapter that does something."""
    torch.manual_seed(seed)
    return get_peft_model(policy(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def gpt2() -> GPT2LMHeadModel:
    """With dropout, and with layer norms that keep double precision."""
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=16))


@both
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_the_value_of_a_token_is_read_where_the_token_before_it_ends(kind: str, batch_size: int) -> None:
    model = policy()
    own = with_some_head(model, kind)
    found = own.values(some_ids(model), MASK, batch_size)
    torch.testing.assert_close(found, reference_values(own, model), atol=1e-5, rtol=0)
    assert found.dtype == torch.float32
    assert not found.requires_grad


@both
def test_at_first_every_value_is_zero(kind: str) -> None:
    model = policy()
    assert not value_model(model, kind).values(some_ids(model), MASK, 8).any()


@both
def test_a_value_knows_nothing_of_its_own_token_or_of_later_ones(kind: str) -> None:
    model = policy()
    own = with_some_head(model, kind)
    ids = some_ids(model)
    before = own.values(ids, MASK, 8)
    ids[0, 5] = (ids[0, 5] + 1) % model.config.vocab_size
    after = own.values(ids, MASK, 8)
    torch.testing.assert_close(after[0, :6], before[0, :6], atol=1e-5, rtol=0)
    assert (after[0, 6:9] - before[0, 6:9]).abs().min() > 1e-3


@both
def test_values_are_without_dropout_and_leave_the_modes_as_they_were(kind: str) -> None:
    model = gpt2()
    model.transformer.drop.eval()  # frozen in evaluation by its owner
    modes = {name: module.training for name, module in model.named_modules()}
    own = with_some_head(model, kind)
    first, second = (own.values(some_ids(model), MASK, 8) for _ in range(2))
    torch.testing.assert_close(first, second)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert own.training


@both
@pytest.mark.parametrize("num_targets", [None, 40, torch.tensor(40), 0.25])  # few may be spread over many steps
def test_the_loss_is_half_the_squared_error_over_the_targets_of_the_step(kind: str, num_targets: Any) -> None:
    model, targets = policy(), some_targets()
    own = with_some_head(model, kind, loss_weight=0.25)
    found = loss_of(own, model, targets, num_targets)
    learnt = targets.isfinite()
    errors = (reference_values(own, model) - targets)[learnt]
    assert learnt.sum() == 9
    torch.testing.assert_close(found, 0.25 * 0.5 * errors.square().sum() / float(num_targets or 9))


@both
def test_rows_add_up_over_micro_batches(kind: str) -> None:
    model, targets, ids = policy(), some_targets(), some_ids(policy())
    own = with_some_head(model, kind)
    parts = []
    for row in range(len(ids)):
        rows = slice(row, row + 1)
        with own.capture_hidden_states():
            model(input_ids=ids[rows], attention_mask=MASK[rows])
        parts.append(own.loss(ids[rows], MASK[rows], targets[rows]) / targets.isfinite().sum())
    torch.testing.assert_close(sum(parts), loss_of(own, model, targets))


@both
def test_the_gradient_is_that_of_finite_differences(kind: str) -> None:
    model = gpt2().double().eval()
    own = with_some_head(model, kind).double().eval()
    targets = some_targets().double()
    loss_of(own, model, targets).backward()
    trunk: Any = model.transformer if own.trunk is None else own.trunk
    for weight in (own.head.weight, own.head.bias, trunk.h[0].mlp.c_fc.weight, trunk.wte.weight):
        index, step = int(weight.grad.abs().argmax()), 1e-6
        entries = weight.detach().view(-1)
        original = entries[index].item()
        sides: list[float] = []
        for shift in (step, -step):
            entries[index] = original + shift
            sides.append(loss_of(own, model, targets).item())
        entries[index] = original
        slope = (sides[0] - sides[1]) / (2 * step)
        assert slope == pytest.approx(weight.grad.view(-1)[index].item(), rel=1e-5)
        assert abs(slope) > 1e-3


def test_a_shared_head_teaches_the_policys_trunk_and_not_its_lm_head() -> None:
    model = policy()
    own = with_some_head(model, "shared")
    loss_of(own, model, some_targets()).backward()
    found = gradients(model)
    assert {name for name, _ in model.named_parameters() if name.startswith("model.")} == found.keys()
    assert gradients(own).keys() == {"head.weight", "head.bias"}


def test_a_separate_head_leaves_the_policy_alone() -> None:
    model = policy()
    own = with_some_head(model, "separate")
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([own.parameter_group()], lr=1.0)
    loss_of(own, model, some_targets()).backward()
    optimizer.step()
    assert not gradients(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert "trunk.layers.0.mlp.up_proj.weight" in gradients(own)
    assert not any("lm_head" in name for name in own.state_dict())


@both
@pytest.mark.parametrize("count", [1, torch.tensor(0.25)])
def test_without_targets_the_loss_is_exactly_zero_and_has_a_graph(kind: str, count: Any) -> None:
    model = policy()
    own = with_some_head(model, kind)
    found = loss_of(own, model, torch.full(MASK.shape, math.nan), count)
    found.backward()
    assert found.item() == 0.0
    assert own.head.weight.grad is not None
    assert not gradients(own)
    assert not gradients(model)


@both
def test_the_policy_does_not_know_of_the_head(kind: str) -> None:
    model = policy()
    before = [name for name, _ in model.named_parameters()], list(model.state_dict()), len(list(model.modules()))
    own = value_model(model, kind)
    assert ([name for name, _ in model.named_parameters()], [*model.state_dict()], len([*model.modules()])) == before
    assert not set(map(id, own.parameters())) & set(map(id, model.parameters()))
    with own.capture_hidden_states():
        assert len(model.model._forward_hooks) == (kind == "shared")
    assert not model.model._forward_hooks


def test_what_was_captured_is_used_once() -> None:
    model, targets = policy(), some_targets()
    own = value_model(model, "shared")
    with pytest.raises(RuntimeError, match=r"inside capture_hidden_states\(\) first"):
        own.loss(some_ids(model), MASK, targets)
    loss_of(own, model, targets)
    with pytest.raises(RuntimeError, match=r"inside capture_hidden_states\(\) first"):
        own.loss(some_ids(model), MASK, targets)


def rows_and_worth(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Words, each worth something; a state is worth the mean of those that have been answered."""
    ids = torch.randint(4, 8, (16, 8), generator=generator)
    worth = ((ids - 4) / 3).cumsum(1) / torch.arange(1, 9)
    return ids, torch.cat([torch.full((16, 1), math.nan), worth[:, :-1]], 1)


@both
def test_it_learns_what_states_are_worth(kind: str) -> None:
    model = policy(num_layers=1)
    own = value_model(model, kind, learning_rate=1e-2)
    trained = [own.parameter_group()]
    if kind == "shared":
        trained.append({"params": list(model.model.parameters()), "lr": 1e-2})
    optimizer = torch.optim.Adam(trained, lr=0.0)
    generator = torch.Generator().manual_seed(3)
    for _ in range(100):
        ids, targets = rows_and_worth(generator)
        with own.capture_hidden_states():
            model(input_ids=ids)
        loss = own.loss(ids, torch.ones_like(ids), targets) / targets.isfinite().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids, targets = rows_and_worth(generator)
    errors = (own.values(ids, torch.ones_like(ids), 8) - targets)[:, 1:]
    assert errors.square().mean() < 1e-3
    assert targets[:, 1:].var() > 0.03


@both
def test_gradient_checkpointing_changes_nothing(kind: str) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for checkpointing in (False, True):
        model = policy().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        own = with_some_head(model, kind)
        loss_of(own, model, some_targets()).backward()
        found.append(gradients(model) | gradients(own))
        torch.testing.assert_close(own.values(some_ids(model), MASK, 8), reference_values(own, model.eval()))
    torch.testing.assert_close(found[1], found[0])


@both
@pytest.mark.parametrize("autocast", [False, True])
def test_a_policy_in_half_precision_has_a_head_in_single_precision(kind: str, autocast: bool) -> None:
    model = policy() if autocast else policy().to(torch.bfloat16)
    context = partial(torch.autocast, "cpu", torch.bfloat16) if autocast else nullcontext
    own = with_some_head(model, kind, context=context)
    with context():
        found = loss_of(own, model, some_targets())
        values = own.values(some_ids(model), MASK, 8)
        expected = reference_values(own, model)
    found.backward()
    assert found.dtype == values.dtype == own.head.weight.grad.dtype == torch.float32
    torch.testing.assert_close(values, expected, atol=0.05, rtol=0.05)
    # The head adds nothing of its own to what the trunk rounds: its values need more bits than those of half precision.
    assert not torch.equal(values, values.to(torch.bfloat16).float())


def test_with_adapters_a_shared_head_teaches_them_alone() -> None:
    model = adapted()
    own = with_some_head(model, "shared")
    loss_of(own, model, some_targets()).backward()
    found = gradients(model)
    assert found
    assert all("lora_" in name for name in found)
    torch.testing.assert_close(own.values(some_ids(model), MASK, 8), reference_values(own, model), atol=1e-5, rtol=0)


def test_with_adapters_a_separate_trunk_begins_with_them_and_trains_all_of_its_weights() -> None:
    model = adapted()
    own = with_some_head(model, "separate")
    torch.testing.assert_close(own.values(some_ids(model), MASK, 8), reference_values(own, model), atol=1e-5, rtol=0)
    with model.disable_adapter():
        assert (own.values(some_ids(model), MASK, 8) - reference_values(own, model)).abs().max() > 0.01
    loss_of(own, model, some_targets()).backward()
    assert not gradients(model)
    assert gradients(own).keys() == dict(own.named_parameters()).keys()


@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trls_own_forward_is_observed_with_its_gradient(
    with_adapters: bool, checkpointing: bool, tmp_path: Path
) -> None:
    model, tokenizer = tiny_policy(["a b c d e f g h"], hidden_size=16, num_heads=2)
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            str(tmp_path), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=checkpointing
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False) if with_adapters else None,
    )
    trainer.model.train()
    own = with_some_head(trainer.accelerator.unwrap_model(trainer.model), "shared")
    targets, ids = some_targets(), some_ids(model)
    with own.capture_hidden_states():
        logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, MASK, ids.shape[1] - 2)
    assert logps.requires_grad
    loss = own.loss(ids, MASK, targets) / 9
    plain = loss_of(own, trainer.model, targets)
    torch.testing.assert_close(loss, plain)
    parameters = [part for part in trainer.model.parameters() if part.requires_grad]
    found, expected = (
        torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=True) for value in (loss, plain)
    )
    torch.testing.assert_close(found, expected)
    assert any(gradient is not None and gradient.any() for gradient in found)
    logps.sum().backward()  # what was kept is no copy: the policy still learns from the same forward


@both
def test_the_group_of_the_optimizer(kind: str) -> None:
    model = policy()
    own = value_model(model, kind, learning_rate=3e-4)
    group = own.parameter_group()
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, group], lr=1e-6)
    assert optimizer.param_groups[1]["lr"] == 3e-4
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    assert set(group["params"]) == set(own.parameters())
    assert len(group["params"]) == (2 if kind == "shared" else 2 + len(list(model.model.parameters())))


@both
def test_gradients_are_clipped_to_a_norm(kind: str) -> None:
    model = policy()
    own = with_some_head(model, kind)
    loss_of(own, model, some_targets()).backward()
    norms: list[float] = []
    for max_grad_norm in (0.0, 0.1):
        args, unused = SimpleNamespace(max_grad_norm=max_grad_norm), cast("Any", None)
        ValueLoss(own, unused).on_pre_optimizer_step(args, SimpleNamespace(global_step=0), unused)
        norms.append(float(get_total_norm([one.grad for one in own.parameters() if one.grad is not None])))
    assert norms[0] > 0.1
    assert norms[1] == pytest.approx(0.1, rel=1e-3)


@both
@pytest.mark.parametrize("make", [policy, adapted])
def test_what_is_saved_is_loaded(kind: str, make: Callable[[], Any], tmp_path: Path) -> None:
    own = with_some_head(make(), kind)
    if own.trunk is not None:
        nn.init.normal_(next(own.trunk.parameters()))
    own.save(tmp_path)
    again = value_model(make(), kind)
    again.load(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [VALUE_HEAD_FILE]
    torch.testing.assert_close(again.state_dict(), own.state_dict(), atol=0, rtol=0)
    ids = some_ids(policy())
    torch.testing.assert_close(again.values(ids, MASK, 8), own.values(ids, MASK, 8))


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"value_head\.safetensors is missing"):
        value_model(policy()).load(tmp_path)
    value_model(policy()).save(tmp_path)
    with pytest.raises(ConfigError, match=r"head\.weight must be of shape \(1, 32\), got of shape \(1, 16\)"):
        value_model(policy(hidden_size=32)).load(tmp_path)
    with pytest.raises(ConfigError, match=r"trunk\.embed_tokens\.weight must be of shape .*, got absent"):
        value_model(policy(), "separate").load(tmp_path)
    value_model(policy(), "separate").save(tmp_path)
    with pytest.raises(ConfigError, match=r"trunk\.embed_tokens\.weight must be absent, got of shape"):
        value_model(policy()).load(tmp_path)


def test_what_cannot_have_a_head_is_refused() -> None:
    model = policy()
    model.is_quantized = True
    value_model(model, "shared")
    with pytest.raises(ConfigError, match="quantized"):
        value_model(model, "separate")


def test_a_policy_without_a_trunk_of_its_own_is_refused() -> None:
    class Whole(type(policy())):  # type: ignore[misc]
        """All in one, as some models from the hub are."""

        base_model_prefix = "missing"

        def get_decoder(self) -> Any:
            return self

    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    with pytest.raises(ConfigError, match="got a Whole"):
        value_model(Whole(config))


def test_two_ranks_have_the_gradient_of_one_process(tmp_path: Path) -> None:
    script = Path(value_heads.__file__)
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2])}
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path)], env=environment) for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    own = with_some_head(policy(), "separate")
    loss_of(own, policy(), some_targets()).backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(found, [parameter.grad for parameter in own.parameters()])
