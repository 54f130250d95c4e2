"""Rows that share a micro-batch, or are folded into weights: no gradient knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from games import TextAgent, correcting, logged, recording, trainer_of
from test_resume import unseeded
from test_sequence_losses import phi
from test_trl_interface import EPSILON, ROWS, ROWS_WITH_FAILURES, Batch, logp_gradient, only, prepared

from agentsgym import Action, ConfigError, GRPOEnvTrainer, PolicyAgent, Trajectory
from agentsgym.credit.weights import AGGREGATIONS
from agentsgym.training import trainer as trainer_module
from agentsgym.training._trl import TRLInterface
from agentsgym.training.loss import regroup_rows
from agentsgym.training.tensors.importance import CORRECTIONS

MAX_LENGTH = 100  # as games.settings has it
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])


class Noisy(PolicyAgent):
    """Misremembers how likely each token was, by the id of the token."""

    noise = 0.4

    def act(self, requests: Any) -> list[Action]:
        return [
            Action(
                text=action.text,
                token_ids=action.token_ids,
                logprobs=self._reported(action),
                agent_state=action.agent_state,
                finish_reason=action.finish_reason,
            )
            for action in super().act(requests)
        ]

    def _reported(self, action: Action) -> list[float]:
        pairs = zip(action.token_ids or (), action.logprobs or (), strict=True)
        return [logprob + self.noise * math.cos(token) for token, logprob in pairs]


class Forgetful(Noisy):
    """Does not know how likely its first token was in each turn."""

    def _reported(self, action: Action) -> list[float]:
        return [math.nan, *super()._reported(action)[1:]]


def generated(trainer: GRPOEnvTrainer, rows: Sequence[Any] = ROWS_WITH_FAILURES) -> tuple[Batch, list[Trajectory]]:
    """A generation batch, and the rollouts that it was made of."""
    played = recording(trainer)
    batch = trainer._generate_and_score_completions(list(rows))
    return batch, [*played[0].trajectories]


def logps_of(trainer: GRPOEnvTrainer, batch: Batch) -> torch.Tensor:
    """Log-probabilities from the model's own logits, with their graph, (B, L)."""
    ids = batch["prompt_completion_ids"]
    logits = trainer.model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, :-1]
    scored = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros(len(ids), 1), scored], dim=1)


def parts(batch: Batch, aggregation: str) -> torch.Tensor:
    """Each token's part of the loss, by the name of the aggregation, token by token, (B, L)."""
    mask, turn_index = batch["agent_token_mask"] == 1, batch["turn_index"]
    rows = torch.arange(len(mask))[:, None].expand_as(mask)
    units = {
        "token": torch.zeros_like(rows),
        "turn": rows * 1000 + turn_index,
        "trajectory": rows,
        "group": GROUPS[:, None].expand_as(rows),
    }
    if aggregation == "constant":
        return mask / (len(mask) * MAX_LENGTH)  # as Dr. GRPO, over all rollouts
    unit = units[aggregation]
    names, sizes = unit[mask].unique(return_counts=True)
    part = torch.zeros(mask.shape)
    for name, size in zip(names.tolist(), sizes.tolist(), strict=True):
        part[mask & (unit == name)] = 1 / (len(names) * size)
    return part


def loss_of_tokens(
    loss_type: str, logps: torch.Tensor, old: torch.Tensor | None, advantages: torch.Tensor
) -> torch.Tensor:
    """The loss of each token alone, from its paper, (B, L)."""
    ratio = (logps - (logps.detach() if old is None else old)).exp()
    if loss_type == "cispo":
        return -ratio.clamp(max=EPSILON).detach() * advantages * logps
    return -torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_that_of_the_loss_aggregated_as_requested(
    aggregation: str, loss_type: str, tmp_path: Path
) -> None:
    changes = {"loss_type": loss_type, "scale_rewards": "none"}
    plain = prepared(tmp_path, **changes)
    batch, _ = generated(plain)
    advantages, part = batch["advantages"], parts(batch, aggregation)
    assert len(advantages[batch["agent_token_mask"] == 1].unique()) > 3
    trainer = prepared(tmp_path, loss_aggregation=aggregation, **changes)
    weighed, _ = generated(trainer)
    assert torch.equal(weighed["prompt_completion_ids"], batch["prompt_completion_ids"])
    assert torch.equal(weighed["advantages"] == 0, advantages == 0)
    for is_off_policy in (False, True):
        logps = logps_of(trainer, batch)
        if is_off_policy:
            ratio = torch.tensor([0.5, 0.9, 1.0, 1.1, 1.5]).repeat(logps.shape[1])[: logps.shape[1]]
            weighed["old_per_token_logps"] = logps.detach() - ratio.log()
        losses = loss_of_tokens(loss_type, logps, weighed["old_per_token_logps"], advantages)
        expected = (part * losses).sum()
        ours = trainer.compute_loss(trainer.model, weighed)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
        parameters = list(trainer.model.parameters())
        for one, other in zip(
            torch.autograd.grad(ours, parameters), torch.autograd.grad(expected, parameters), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_vespo_weighs_a_row_by_the_sign_of_what_is_left_of_its_advantages(aggregation: str, tmp_path: Path) -> None:
    changes = {"loss_type": "vespo", "scale_rewards": "none"}
    batch, _ = generated(prepared(tmp_path, **changes))
    trainer = prepared(tmp_path, loss_aggregation=aggregation, **changes)
    weighed, _ = generated(trainer)
    log_ratio = torch.linspace(-0.02, 0.03, 8)[:, None].expand(batch["advantages"].shape)
    weighed["old_per_token_logps"] = logps_of(trainer, batch).detach() - log_ratio
    pulls = parts(batch, aggregation) * batch["advantages"]
    sums = (log_ratio * batch["agent_token_mask"]).sum(1).tolist()
    weights = [phi(trainer, one, is_positive=bool(own.sum() >= 0)) for one, own in zip(sums, pulls, strict=True)]
    assert max(weights) / min(weights) > 1.1
    expected = -torch.tensor(weights)[:, None] * pulls
    torch.testing.assert_close(logp_gradient(trainer, weighed), expected, rtol=1e-4, atol=1e-8)


def test_aggregations_differ_and_add_up_alike(tmp_path: Path) -> None:
    batch, _ = generated(prepared(tmp_path))
    found = {aggregation: parts(batch, aggregation) for aggregation in AGGREGATIONS}
    for one in AGGREGATIONS:
        assert one == "constant" or found[one].sum().item() == pytest.approx(1.0)
        assert not any(torch.allclose(found[one], found[other]) for other in AGGREGATIONS if other != one)


def test_an_aggregation_is_over_the_generation_batch_however_it_is_cut(tmp_path: Path) -> None:
    whole = prepared(tmp_path, loss_aggregation="turn")
    expected = logp_gradient(whole, generated(whole)[0])
    steps = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "per_device_train_batch_size": 4}
    trainer = prepared(tmp_path, loss_aggregation="turn", **steps)
    batch, _ = generated(trainer)
    pieces = [logp_gradient(trainer, only(batch, rows)) for rows in (slice(0, 4), slice(4, 8))]
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("aggregation", [None, "trajectory"])
@pytest.mark.parametrize("mode", ["mask", "mask_rollout"])
def test_masked_invalid_turns_pull_nothing_and_the_others_as_before(
    mode: str, aggregation: str | None, tmp_path: Path
) -> None:
    changes = {"loss_aggregation": aggregation, "scale_rewards": "none"}
    trainers = [prepared(tmp_path, invalid_turns=name, **changes) for name in ("keep", mode)]
    (batch, rollouts), (masked, _) = (generated(trainer, ROWS) for trainer in trainers)
    kept = torch.ones(batch["advantages"].shape)
    for row, rollout in enumerate(rollouts):
        for turn in rollout.turns:
            if turn.invalid and mode == "mask":
                kept[row, turn.start : turn.stop] = 0
            if turn.invalid and mode == "mask_rollout":
                kept[row] = 0
    mask = batch["agent_token_mask"] == 1
    assert {*kept[mask].tolist()} == {0.0, 1.0}
    assert torch.equal(masked["agent_token_mask"], batch["agent_token_mask"])
    assert torch.equal(masked["num_items_in_batch"], batch["num_items_in_batch"])
    before, after = (logp_gradient(*pair) for pair in zip(trainers, (batch, masked), strict=True))
    torch.testing.assert_close(after, before * kept)
    assert (after != 0).any()
    assert (before[kept == 0] != 0).any()


def correction_by_hand(mode: str, low: float | None, high: float | None, differences: list[float]) -> list[float]:
    """The weights of one row's agent tokens, in a loop over what each is off by."""
    if mode.startswith("sequence"):
        ratios = [math.exp(sum(differences))] * len(differences)
    elif mode.startswith("geometric"):
        ratios = [math.exp(sum(differences) / len(differences))] * len(differences)
    else:
        ratios = [math.exp(difference) for difference in differences]
    floor, ceiling = -math.inf if low is None else low, math.inf if high is None else high
    if mode.endswith("truncate"):
        return [min(max(ratio, floor), ceiling) for ratio in ratios]
    kept = [1.0] * len(ratios) if mode == "geometric_mask" else ratios
    return [weight if floor <= ratio <= ceiling else 0.0 for weight, ratio in zip(kept, ratios, strict=True)]


BOUNDS: dict[str, dict[str, float]] = {
    "token_truncate": {"low": 0.8, "high": 1.2},
    "token_mask": {"high": 1.3},  # the lower bound is the mode's own
    "sequence_truncate": {"high": 1.5},
    "sequence_mask": {"low": 0.5},
    "geometric_mask": {"low": 0.95, "high": 1.05},
}


def corrected(folder: Path, agent: type[PolicyAgent] = Noisy, **changes: Any) -> GRPOEnvTrainer:
    trainer = prepared(folder, scale_rewards="none", **changes)
    trainer.agent = agent(trainer.model, trainer.processing_class, max_turn_tokens=4)
    return trainer


def expected_ratio(batch: Batch, own: torch.Tensor, reported: list[Sequence[float]], args: Any) -> torch.Tensor:
    """What each agent token is to be weighed with, (B, L), 0.0 elsewhere."""
    mode = args.vllm_importance_sampling_mode
    low, high = CORRECTIONS[mode]
    low = low if args.vllm_importance_sampling_clip_min is None else args.vllm_importance_sampling_clip_min
    high = high if args.vllm_importance_sampling_clip_max is None else args.vllm_importance_sampling_clip_max
    ratio = torch.zeros(own.shape)
    for row, mask in enumerate(batch["agent_token_mask"]):
        places = mask.nonzero()[:, 0].tolist()
        differences = [own[row, place].item() - reported[row][place] for place in places]
        known = [0.0 if math.isnan(difference) else difference for difference in differences]
        if places:
            ratio[row, places] = torch.tensor(correction_by_hand(mode, low, high, known))
    return ratio


@pytest.mark.parametrize("agent", [Noisy, Forgetful])
@pytest.mark.parametrize("mode", CORRECTIONS)
def test_the_gradient_is_that_of_the_corrected_loss(mode: str, agent: type[Noisy], tmp_path: Path) -> None:
    plain, trainer = (corrected(tmp_path, agent, **changes) for changes in ({}, correcting(mode, **BOUNDS[mode])))
    (batch, rollouts), (weighed, _) = generated(plain), generated(trainer)
    assert torch.equal(weighed["prompt_completion_ids"], batch["prompt_completion_ids"])
    own = logps_of(trainer, batch).detach()
    mask = batch["agent_token_mask"]
    reported = [rollout.logprobs or [0.0] * len(rollout.token_ids) for rollout in rollouts]
    ratio = expected_ratio(batch, own, reported, trainer.args)
    weights = ratio[mask == 1]
    assert len(weights.unique()) > 1  # the bounds hold some and let others pass
    assert (weights == 0).any() == mode.endswith("mask")
    # The old log-probabilities are the model's, so that the ratio of the loss starts at 1 and the clip is its own.
    torch.testing.assert_close(weighed["old_per_token_logps"] * mask, own * mask, rtol=0, atol=1e-5)
    assert weighed["importance_sampling_ratio"] is None  # TRL would multiply with it once more under vLLM
    torch.testing.assert_close(
        logp_gradient(trainer, weighed), ratio * logp_gradient(plain, batch), rtol=1e-3, atol=1e-7
    )


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "cispo", "vespo"])
def test_a_correction_folds_into_other_losses_too(loss_type: str, tmp_path: Path) -> None:
    changes = {"loss_type": loss_type}
    plain = corrected(tmp_path, **changes)
    trainer = corrected(tmp_path, **correcting("token_truncate"), **changes)
    (batch, rollouts), (weighed, _) = generated(plain, ROWS), generated(trainer, ROWS)
    ratio = expected_ratio(
        batch, logps_of(trainer, batch).detach(), [rollout.logprobs or () for rollout in rollouts], trainer.args
    )
    torch.testing.assert_close(
        logp_gradient(trainer, weighed), ratio * logp_gradient(plain, batch), rtol=1e-3, atol=1e-7
    )


def test_a_correction_starts_from_the_models_own_log_probabilities_where_updates_lag_behind(tmp_path: Path) -> None:
    trainer = corrected(tmp_path, **correcting("token_truncate"), num_iterations=2)
    batch, _ = generated(trainer, ROWS)
    scored = (batch[key] for key in ("prompt_completion_ids", "attention_mask", "agent_token_mask"))
    assert torch.equal(batch["old_per_token_logps"], TRLInterface(trainer).score(*scored)[0])
    uncorrected, _ = generated(corrected(tmp_path, num_iterations=2), ROWS)
    assert not torch.allclose(uncorrected["old_per_token_logps"], batch["old_per_token_logps"], atol=0.1)


def test_the_sampler_that_is_the_model_is_not_corrected(tmp_path: Path) -> None:
    batch, _ = generated(prepared(tmp_path), ROWS)
    for mode in CORRECTIONS:
        weighed, _ = generated(prepared(tmp_path, **correcting(mode)), ROWS)
        torch.testing.assert_close(weighed["advantages"], batch["advantages"], rtol=1e-4, atol=1e-6)


def test_an_agent_that_gives_no_log_probabilities_cannot_be_corrected_for(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, agent=TextAgent(), **correcting("token_mask"))
    with pytest.raises(ConfigError) as refusal:
        trainer._generate_and_score_completions(list(ROWS))
    assert str(refusal.value) == (
        "vllm_importance_sampling_correction=True requires an agent that returns the log-probabilities of its tokens, "
        "but this agent does not"
    )


SCHEDULES: list[dict[str, int]] = [
    {"gradient_accumulation_steps": 4},
    {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    {"gradient_accumulation_steps": 4, "num_iterations": 2},
]
# Plain steps: Adam makes large ones of gradients that are all but 0, where only rounding names which way.
SIZES = {"per_device_train_batch_size": 2, "max_steps": 4, "optim": "sgd", "learning_rate": 0.1}


def sorted_batches(trainer: GRPOEnvTrainer, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return regroup_rows(batches, trainer.args, has_aux_loss=TRLInterface(trainer).has_aux_loss, shares=False)


def widths_of(trainer: GRPOEnvTrainer) -> list[list[int]]:
    """Watch the lengths of the rows of each micro-batch."""
    seen: list[list[int]] = []
    original = trainer.compute_loss

    def watched(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(inputs["attention_mask"].sum(1).tolist())
        return original(model, inputs, *args, **kwargs)

    trainer.compute_loss = watched  # type: ignore[method-assign]
    return seen


def run(folder: Path, **changes: Any) -> tuple[GRPOEnvTrainer, list[list[int]]]:
    trainer = trainer_of(folder, dataset=unseeded(), **{**SIZES, **changes})
    widths = widths_of(trainer)
    trainer.train()
    return trainer, widths


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_is_the_same_sorted_and_unsorted(
    schedule: dict[str, int], loss_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"loss_type": loss_type, **schedule}
    ordered, widths = run(tmp_path, shared_prefix="off", **changes)
    window = changes["gradient_accumulation_steps"]
    for start in range(0, len(widths), window):
        lengths = [length for rows in widths[start : start + window] for length in rows]
        assert lengths == sorted(lengths, reverse=True)
    monkeypatch.setattr(trainer_module, "regroup_rows", lambda batches, **_: batches)
    shuffled, others = run(tmp_path, shared_prefix="off", **changes)
    assert others != widths
    for start in range(0, len(widths), window):  # the same rows in each optimizer step
        one, other = (sorted(chain(*lists[start : start + window])) for lists in (widths, others))
        assert one == other
    assert logged(ordered, "grad_norm") == pytest.approx(logged(shuffled, "grad_norm"), rel=1e-4)
    first, second = ordered.model.state_dict(), shuffled.model.state_dict()
    assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "bnpo"},
        {"entropy_coef": 0.01},
        {"top_entropy_quantile": 0.5},
        {"gradient_accumulation_steps": 1, "steps_per_generation": 4},
    ],
)
def test_what_is_a_mean_over_a_microbatch_is_left_as_it_was_drawn(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **{"gradient_accumulation_steps": 4, **SIZES, **changes})
    batches = [{"attention_mask": torch.tensor([[1, 0], [1, 1]])} for _ in range(4)]
    assert sorted_batches(trainer, batches) is batches


def test_what_experts_are_held_to_in_a_microbatch_is_left_as_it_was_drawn(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=2, **SIZES)
    batches = [{"attention_mask": torch.tensor(mask)} for mask in ([[1, 0], [1, 1]], [[1, 1], [1, 0]])]
    assert sorted_batches(trainer, batches) is not batches
    trainer.aux_loss_enabled = True
    assert sorted_batches(trainer, batches) is batches
