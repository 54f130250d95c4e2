"""Rows of like length share a micro-batch, and no gradient knows."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from games import logged, trainer_of
from test_resume import unseeded

from agentsgym.training import trainer as trainer_module
from agentsgym.training._trl import TRLInterface
from agentsgym.training.loss import sort_by_length
from agentsgym.training.trainer import GRPOEnvTrainer

SCHEDULES: list[dict[str, int]] = [
    {"gradient_accumulation_steps": 4},
    {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    {"gradient_accumulation_steps": 4, "num_iterations": 2},
]
# Plain steps: Adam makes large ones of gradients that are all but 0, where only rounding names which way.
SIZES = {"per_device_train_batch_size": 2, "max_steps": 4, "optim": "sgd", "learning_rate": 0.1}


def sorted_batches(trainer: GRPOEnvTrainer, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sort_by_length(batches, trainer.args, has_aux_loss=TRLInterface(trainer).has_aux_loss)


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
    ordered, widths = run(tmp_path, **changes)
    window = changes["gradient_accumulation_steps"]
    for start in range(0, len(widths), window):
        lengths = [length for rows in widths[start : start + window] for length in rows]
        assert lengths == sorted(lengths, reverse=True)
    monkeypatch.setattr(trainer_module, "sort_by_length", lambda batches, **_: batches)
    shuffled, others = run(tmp_path, **changes)
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
