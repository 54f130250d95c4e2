"""The interface to TRL: what its loss does with our rows, and that it still has what we read from it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from games import trainer_of
from trl import GRPOTrainer
from trl.trainer import base_trainer

from agentsgym.training import _trl
from agentsgym.training._trl import TRLInterface
from agentsgym.training.loss import loss_inputs
from agentsgym.training.trainer import GRPOEnvTrainer

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"]  # what a token gives is its own affair
ALL_LOSS_TYPES = [*LOSS_TYPES, "vespo"]  # whose weight is a row's
CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
EPSILON = 0.2
ROWS = [{"task_data": {"seed": seed}} for seed in (0, 0, 0, 0, 1, 1, 1, 1)]
ROWS_WITH_FAILURES = [*ROWS[:6], *({"task_data": {"seed": 1, "breaks": True, "secret": -1}} for _ in range(2))]
Batch = dict[str, Any]


def prepared(folder: Path, **changes: Any) -> GRPOEnvTrainer:
    """A trainer as it stands in the middle of training."""
    trainer = trainer_of(folder, max_failed_fraction=1.0, **changes)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def played(trainer: GRPOEnvTrainer, rows: list[dict[str, Any]] = ROWS_WITH_FAILURES) -> Batch:
    """A generation batch, with an advantage of its own for each agent token."""
    batch = trainer._generate_and_score_completions(rows)
    generator = torch.Generator().manual_seed(0)
    batch["advantages"] = torch.randn(batch["advantages"].shape, generator=generator) * batch["agent_token_mask"]
    return batch


def only(batch: Batch, rows: slice) -> Batch:
    """The micro-batch of some rows."""
    return {key: value if value is None or value.dim() == 0 else value[rows] for key, value in batch.items()}


def logp_gradient(trainer: GRPOEnvTrainer, batch: Batch) -> torch.Tensor:
    """d loss / d log-probability of every token, (B, L), 0.0 where the loss does not look."""
    leaves: list[torch.Tensor] = []
    original = trainer._get_per_token_logps_and_entropies

    def recorded(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        logps, *others = original(*args, **kwargs)
        leaves.append(logps.detach().requires_grad_())
        return leaves[-1], *others

    trainer._get_per_token_logps_and_entropies = recorded  # type: ignore[method-assign]
    try:
        trainer.compute_loss(trainer.model, batch).backward()
    finally:
        trainer._get_per_token_logps_and_entropies = original  # type: ignore[method-assign]
    [leaf] = leaves
    last = max(2, int(batch["attention_mask"].sum(1).max()))
    gradient = torch.zeros(batch["advantages"].shape)
    gradient[:, last - leaf.shape[1] : last] = leaf.grad
    return gradient


def token_weight(loss_type: str, trainer: GRPOEnvTrainer, batch: Batch) -> torch.Tensor:
    """What each loss type divides an agent token by, from its paper, before accumulation; (B, 1)."""
    mask = batch["agent_token_mask"]
    num_rows, per_row = len(mask), mask.sum(1, keepdim=True).clamp(min=1).float()
    window = batch["num_items_in_batch"] / trainer.args.steps_per_generation
    weights = {
        "grpo": 1 / (num_rows * per_row),
        "sapo": 1 / (num_rows * per_row),
        "bnpo": 1 / mask.sum(),
        "dr_grpo": torch.tensor(1 / (num_rows * trainer.args.max_completion_length)),
        "dapo": 1 / window,
        "cispo": 1 / window,
        "vespo": 1 / window,
        "luspo": torch.tensor(1 / num_rows),
    }
    return weights[loss_type].expand(num_rows, 1) / trainer.args.gradient_accumulation_steps


def parameter_gradients(trainer: GRPOEnvTrainer, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(trainer.model.parameters())))


@pytest.mark.parametrize("steps", [{}, {"gradient_accumulation_steps": 4, "steps_per_generation": 2}])
@pytest.mark.parametrize("loss_type", ALL_LOSS_TYPES)
def test_each_agent_token_pulls_by_its_own_advantage_and_no_other_token_at_all(
    loss_type: str, steps: dict[str, int], tmp_path: Path
) -> None:
    trainer = prepared(tmp_path, loss_type=loss_type, per_device_train_batch_size=4 if steps else 8, **steps)
    batch = only(played(trainer), slice(2, 8))
    assert [row.any().item() for row in batch["agent_token_mask"]] == [True] * 4 + [False] * 2
    ratio = EPSILON if loss_type == "cispo" else 1.0  # CISPO's weight is the ratio, at most epsilon_high
    expected = -ratio * batch["advantages"] * token_weight(loss_type, trainer, batch)
    gradient = logp_gradient(trainer, batch)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)
    assert (gradient[batch["agent_token_mask"] == 0] == 0).all()
    assert (gradient[batch["agent_token_mask"] == 1] != 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_off_policy_tokens_are_weighted_and_clipped_one_by_one(loss_type: str, tmp_path: Path) -> None:
    trainer = prepared(tmp_path, loss_type=loss_type)
    batch = played(trainer)
    mask, advantages = batch["agent_token_mask"], batch["advantages"]
    scored = batch["prompt_completion_ids"], batch["attention_mask"], mask
    # Inside and outside the clip on both sides, by column, so that every row has all of them.
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.1, 1.5]).repeat(mask.shape[1])[: mask.shape[1]].expand(mask.shape)
    batch["old_per_token_logps"] = TRLInterface(trainer).score(*scored)[0] - ratio.log()
    is_clipped = torch.where(advantages > 0, ratio > 1 + EPSILON, ratio < 1 - EPSILON)
    factor = ratio * ~is_clipped
    if loss_type == "cispo":
        factor = ratio.clamp(max=EPSILON)
    if loss_type == "sapo":  # d/dlogp of sigmoid(t (r - 1)) 4/t
        args = trainer.args
        temperature = torch.where(advantages > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
        gate = torch.sigmoid(temperature * (ratio - 1))
        factor = 4 * gate * (1 - gate) * ratio
    expected = -factor * advantages * token_weight(loss_type, trainer, batch)
    torch.testing.assert_close(logp_gradient(trainer, batch), expected, rtol=1e-4, atol=1e-8)
    if loss_type in CLIPPED:
        assert (is_clipped & (mask == 1)).any()
        assert trainer._metrics["train"]["clip_ratio/region_mean"][-1] == pytest.approx(
            (is_clipped & (mask == 1)).sum().item() / mask.sum().item()
        )


def scalar_loss(trainer: GRPOEnvTrainer, batch: Batch, advantages: torch.Tensor) -> torch.Tensor:
    """TRL's own loss on rows that nothing is cut from and with labels that nothing is masked in."""
    ids, attention_mask = batch["prompt_completion_ids"], batch["attention_mask"]
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": attention_mask[:, :1],
        "completion_ids": ids[:, 1:],
        "completion_mask": attention_mask[:, 1:],
        "tool_mask": batch["agent_token_mask"][:, 1:],
        "advantages": advantages,
        "num_items_in_batch": batch["num_items_in_batch"],
    }
    return GRPOTrainer.compute_loss(trainer, trainer.model, inputs)


@pytest.mark.parametrize("loss_type", ALL_LOSS_TYPES)
def test_constant_rows_are_trls_own_scalar_advantages(loss_type: str, tmp_path: Path) -> None:
    trainer = prepared(tmp_path, loss_type=loss_type)
    batch = only(played(trainer), slice(1, 7))
    scalars = torch.linspace(-2, 1.5, 6)
    batch["advantages"] = scalars[:, None] * batch["agent_token_mask"]
    ours, theirs = trainer.compute_loss(trainer.model, batch), scalar_loss(trainer, batch, scalars)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    for one, other in zip(parameter_gradients(trainer, ours), parameter_gradients(trainer, theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("loss_type", ALL_LOSS_TYPES)
def test_narrowing_and_masked_labels_change_nothing(loss_type: str, tmp_path: Path) -> None:
    trainer = prepared(tmp_path, loss_type=loss_type)
    whole = played(trainer)
    lengths = whole["attention_mask"].sum(1)
    shorter = [row for row in range(8) if lengths[row] < lengths.max()]
    batch = {key: value if value is None or value.dim() == 0 else value[shorter] for key, value in whole.items()}
    ours = trainer.compute_loss(trainer.model, batch)
    theirs = scalar_loss(trainer, batch, batch["advantages"][:, 1:])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    for one, other in zip(parameter_gradients(trainer, ours), parameter_gradients(trainer, theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    entropies = trainer._metrics["train"]["entropy"]
    assert entropies[0] == pytest.approx(entropies[1], rel=1e-6)


def test_only_the_columns_that_matter_reach_the_model(tmp_path: Path) -> None:
    trainer = prepared(tmp_path)
    batch = only(played(trainer), slice(0, 3))
    seen: list[tuple[Any, ...]] = []
    original = trainer._get_per_token_logps_and_entropies

    def recorded(model: Any, ids: torch.Tensor, mask: torch.Tensor, num_kept: int, **kwargs: Any) -> Any:
        seen.append((ids.shape[1], num_kept))
        return original(model, ids, mask, num_kept, **kwargs)

    trainer._get_per_token_logps_and_entropies = recorded  # type: ignore[method-assign]
    trainer.compute_loss(trainer.model, batch)
    first = int(batch["agent_token_mask"].any(0).nonzero()[0])
    last = int(batch["attention_mask"].sum(1).max())
    assert first > 1
    assert seen == [(last, last - first)]


def test_narrowing_keeps_to_the_multiple(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, pad_to_multiple_of=16)
    batch = only(played(trainer), slice(1, 4))
    widths: list[int] = []
    original = trainer._get_per_token_logps_and_entropies

    def recorded(model: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        widths.append(ids.shape[1])
        return original(model, ids, *args, **kwargs)

    trainer._get_per_token_logps_and_entropies = recorded  # type: ignore[method-assign]
    ours = trainer.compute_loss(trainer.model, batch)
    longest = int(batch["attention_mask"].sum(1).max())
    assert longest % 16
    assert widths == [longest + -longest % 16]
    torch.testing.assert_close(ours, scalar_loss(trainer, batch, batch["advantages"][:, 1:]), rtol=1e-6, atol=1e-7)


def test_masked_labels_leave_agent_tokens_as_they_were(tmp_path: Path) -> None:
    trainer = prepared(tmp_path)
    batch = played(trainer)
    ids, attention_mask, mask = batch["prompt_completion_ids"], batch["attention_mask"], batch["agent_token_mask"]
    masked = TRLInterface(trainer).score(ids, attention_mask, mask)[0]
    unmasked = TRLInterface(trainer).score(ids, attention_mask, attention_mask)[0]
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=attention_mask).logits[:, :-1]
    by_hand = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    for scored in (masked, unmasked):
        torch.testing.assert_close(scored[:, 1:] * mask[:, 1:], by_hand * mask[:, 1:], rtol=0, atol=1e-5)
    assert (masked[:, 0] == 0).all()


def test_environment_tokens_have_no_gradient_whatever_they_are_given(tmp_path: Path) -> None:
    trainer = prepared(tmp_path)
    batch = played(trainer)
    is_environment = batch["agent_token_mask"] == 0
    noise = torch.randn(is_environment.shape, generator=torch.Generator().manual_seed(1)) * is_environment
    scrambled = {**batch, "advantages": batch["advantages"] + 9 * noise}
    first, second = (trainer.compute_loss(trainer.model, one) for one in (batch, scrambled))
    assert first.item() == second.item()
    for one, other in zip(parameter_gradients(trainer, first), parameter_gradients(trainer, second), strict=True):
        assert torch.equal(one, other)


def test_observations_of_other_words_get_no_gradient_either(tmp_path: Path) -> None:
    trainer = prepared(tmp_path)
    batch = played(trainer)
    ids, mask = batch["prompt_completion_ids"], batch["agent_token_mask"]
    is_text = (mask == 0) & (batch["attention_mask"] == 1) & (ids > 5)  # behind the control tokens
    other = {**batch, "prompt_completion_ids": torch.where(is_text, ids.flip(0).clamp(min=6), ids)}
    assert not torch.equal(other["prompt_completion_ids"], ids)
    torch.testing.assert_close(logp_gradient(trainer, other), logp_gradient(trainer, batch))


@pytest.mark.parametrize("name", ["_metrics", "_logs", "_step", "_buffered_inputs"])
def test_trl_still_has_the_attribute(name: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    assert hasattr(trainer, name), f"TRL no longer has GRPOTrainer.{name}: mend agentsgym/training/_trl.py"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_generate_and_score_completions", ["self", "inputs"]),
        ("compute_loss", ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]),
        ("_prepare_inputs", ["self", "generation_batch"]),
        ("_get_per_token_logps_and_entropies", ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]),
    ],
)
def test_trl_still_has_the_method(name: str, arguments: list[str]) -> None:
    method = getattr(GRPOTrainer, name, None)
    assert method is not None, f"TRL no longer has GRPOTrainer.{name}: mend agentsgym/training"
    given = list(inspect.signature(inspect.unwrap(method)).parameters)[: len(arguments)]
    assert given == arguments, f"TRL's GRPOTrainer.{name} now takes {given}: mend agentsgym/training"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (
            "get_off_policy_mask",
            ["advantages", "per_token_logps", "sampling_per_token_logps", "mask", "off_policy_threshold"],
        ),
        (
            "get_gamma_weights",
            [
                *("advantages", "log_ratio_per_token", "mask", "importance_sampling_ratio"),
                *("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
            ],
        ),
    ],
)
def test_trl_still_has_the_rule_for_whole_rows(name: str, arguments: list[str]) -> None:
    """Ours take ``advantages`` and ``mask`` by name and hand on what else there is."""
    assert isinstance(inspect.getattr_static(GRPOTrainer, name), staticmethod)
    given = list(inspect.signature(inspect.unwrap(getattr(GRPOTrainer, name))).parameters)
    assert given == arguments, f"TRL's GRPOTrainer.{name} now takes {given}: mend agentsgym/training/trainer.py"


@pytest.mark.parametrize(
    ("name", "changes"),
    [("get_off_policy_mask", {"off_policy_mask_threshold": 0.1}), ("get_gamma_weights", {"loss_type": "vespo"})],
)
def test_trls_loss_calls_the_rule_for_whole_rows_once_and_by_name(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    trainer = prepared(tmp_path, num_iterations=2, **changes)
    calls: list[dict[str, Any]] = []
    original = getattr(trainer, name)

    def recorded(**given: Any) -> torch.Tensor:
        calls.append(given)
        return original(**given)

    setattr(trainer, name, recorded)
    batch = played(trainer)
    trainer.compute_loss(trainer.model, batch)
    [given] = calls
    assert {"advantages", "mask"} <= given.keys()
    assert given["advantages"].shape == given["mask"].shape
    assert original(**given).shape == (len(batch["advantages"]), 1)


def test_trls_forward_gives_log_probabilities_entropies_and_the_auxiliary_loss(tmp_path: Path) -> None:
    trainer = prepared(tmp_path)
    batch = played(trainer)
    ids, attention_mask = batch["prompt_completion_ids"], batch["attention_mask"]
    scored = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, attention_mask, 5, compute_entropy=True, compute_aux_loss=False
    )
    assert len(scored) == 3, "TRL now returns something else: mend agentsgym/training/_trl.py"
    logps, entropies, auxiliary = scored
    assert (logps.shape, entropies.shape, auxiliary) == ((8, 5), (8, 5), None)
    assert logps.dtype == entropies.dtype == torch.float32


def test_the_forward_of_the_loss_is_as_before_once_it_was_looked_at(tmp_path: Path) -> None:
    trainer = prepared(tmp_path)
    name = "_get_per_token_logps_and_entropies"
    batch = played(trainer)

    def refuse(*_: Any) -> None:
        raise RuntimeError("seen")

    with pytest.raises(RuntimeError, match="seen"), TRLInterface(trainer).intercept_logprobs(refuse):
        GRPOTrainer.compute_loss(trainer, trainer.model, loss_inputs(batch, 1, batch["advantages"].shape[1]))
    assert name not in vars(trainer)
    own = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = own  # type: ignore[method-assign]
    trainer.compute_loss(trainer.model, batch)
    assert vars(trainer)[name] is own


def test_what_trl_keeps_has_the_form_that_we_fill(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, num_generations_eval=2)
    assert set(trainer._metrics) >= {"train", "eval"}
    assert set(trainer._logs) >= {"prompt", "completion", "rewards", "advantages", "extra"}
    assert (trainer.num_generations, trainer.num_generations_eval) == (4, 2)
    trainer._logs["rewards"][_trl.unused_reward.__name__].append(1.0)
    trainer._logs["extra"]["anything"].append(1.0)
    trainer._metrics["train"]["anything"].append(1.0)


def test_trl_calls_no_reward_function(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="must never be called"):
        _trl.unused_reward(prompts=[], completions=[])
    trainer_of(tmp_path, max_steps=1).train()


def test_a_trainer_reports_nothing_about_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(base_trainer, "send_telemetry", lambda **report: sent.append(report))
    monkeypatch.delenv("CI", raising=False)
    trainer = trainer_of(tmp_path)
    assert not sent
    GRPOTrainer._send_telemetry(trainer)
    assert [report["library_name"] for report in sent] == ["trl"]  # it is still this method that sends
