"""What a generation batch holds: its columns, its log-probabilities, rollouts that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from games import TextAgent, tasks, trainer_of
from test_trl_interface import ROWS, ROWS_WITH_FAILURES, only, parameter_gradients, prepared

from agentsgym.training._trl import TRLInterface


def test_what_a_generation_batch_holds(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, beta=0.0)
    batch = trainer._generate_and_score_completions(ROWS_WITH_FAILURES)
    assert list(batch) == [
        "prompt_completion_ids",  # TRL reads the number of rows from the first value
        "attention_mask",
        "agent_token_mask",
        "advantages",
        "turn_index",
        "old_per_token_logps",
        "ref_per_token_logps",
        "sampling_per_token_logps",
        "importance_sampling_ratio",
        "num_items_in_batch",
        "num_rollouts",
    ]
    ids, attention_mask, mask = (batch[key] for key in list(batch)[:3])
    assert ids.shape == attention_mask.shape == mask.shape == batch["advantages"].shape
    assert len(ids) == len(ROWS_WITH_FAILURES)
    assert {tensor.dtype for tensor in (ids, attention_mask, mask)} == {torch.long}
    assert batch["advantages"].dtype == torch.float32
    assert (attention_mask.diff(dim=1) <= 0).all()  # padded on the right
    assert attention_mask.sum(1).max() == ids.shape[1]
    assert (ids[attention_mask == 0] == trainer.processing_class.pad_token_id).all()
    assert (mask <= attention_mask).all()
    assert (batch["advantages"][mask == 0] == 0).all()
    assert batch["num_items_in_batch"].dim() == 0
    assert batch["num_items_in_batch"] == mask.sum()
    for name in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"):
        assert batch[name] is None
    assert torch.equal(batch["turn_index"] >= 0, mask == 1)
    starts = (mask.diff(dim=1, prepend=torch.zeros(len(mask), 1)) == 1).cumsum(1)  # each turn is a run of agent tokens
    assert torch.equal(batch["turn_index"], torch.where(mask == 1, starts - 1, -1))
    assert mask.any(1).tolist() == [True] * 6 + [False] * 2
    assert attention_mask.any(1).all()  # a failed row stays, with its tokens


@pytest.mark.parametrize(
    ("changes", "are_needed"),
    [
        ({}, False),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, False),
        ({"steps_per_generation": 2}, True),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, True),
        ({"num_iterations": 2}, True),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2}, False),
    ],
)
def test_the_samplers_logprobs_are_the_old_ones_where_updates_lag_behind(
    changes: dict[str, int], are_needed: bool, tmp_path: Path
) -> None:
    trainer = prepared(tmp_path, per_device_train_batch_size=4, **changes)
    batch = trainer._generate_and_score_completions(ROWS_WITH_FAILURES)
    old, mask = batch["old_per_token_logps"], batch["agent_token_mask"]
    assert (old is not None) == are_needed
    if old is not None:
        scored = batch["prompt_completion_ids"], batch["attention_mask"], mask
        recomputed = TRLInterface(trainer).score(trainer.model, *scored)[0]
        torch.testing.assert_close(old * mask, recomputed * mask, rtol=0, atol=1e-5)
        assert not torch.equal(old * mask, recomputed * mask)  # recorded, not recomputed
        assert (old * mask)[mask == 1].max() < 0


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.5, "temperature": 1.3}])
def test_recorded_logprobs_are_those_that_trl_computes(sampling: dict[str, float], tmp_path: Path) -> None:
    trainer = prepared(tmp_path, num_iterations=2, **sampling)
    batch = trainer._generate_and_score_completions(ROWS)
    old, mask = batch["old_per_token_logps"], batch["agent_token_mask"]
    scored = batch["prompt_completion_ids"], batch["attention_mask"], mask
    recomputed = TRLInterface(trainer).score(trainer.model, *scored)[0]
    torch.testing.assert_close(old * mask, recomputed * mask, rtol=0, atol=1e-5)


def test_an_agent_without_logprobs_has_them_recomputed(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, num_iterations=2, agent=TextAgent())
    batch = trainer._generate_and_score_completions(ROWS)
    scored = (batch[key] for key in ("prompt_completion_ids", "attention_mask", "agent_token_mask"))
    assert torch.equal(batch["old_per_token_logps"], TRLInterface(trainer).score(trainer.model, *scored)[0])


def test_a_microbatch_of_failed_rollouts_alone_has_no_gradient(tmp_path: Path) -> None:
    trainer = prepared(tmp_path)
    batch = trainer._generate_and_score_completions(ROWS_WITH_FAILURES)
    loss = trainer.compute_loss(trainer.model, only(batch, slice(6, 8)))
    assert loss.item() == 0.0
    assert all((gradient == 0).all() for gradient in parameter_gradients(trainer, loss))


@pytest.mark.parametrize("task_data", [{"breaks": True}, {"cannot_start": True}])
def test_a_batch_of_failed_rollouts_alone_does_not_break_the_run(task_data: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, dataset=tasks(4, **task_data), max_failed_fraction=1.0, max_steps=1)
    weights = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    if "cannot_start" in task_data:
        assert trainer.state.log_history[0]["failed"] == 1.0
        assert all(map(torch.equal, weights, trainer.model.parameters()))
