"""Notes are turns of their own rows, and get the credit of what follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from games import logged, trainer_of

from agentsgym.errors import ConfigError
from agentsgym.training.observing import BatchObserver

NOTED: dict[str, Any] = {"history": "summarize", "summarize_over_tokens": 10, "summary_prompt": "A number, please."}


def test_a_note_has_the_credit_of_the_turns_that_follow(tmp_path: Path) -> None:
    settings = {"layout": "turn", "scale_rewards": "none", "estimator_kwargs": {"baseline": "none"}}
    with trainer_of(tmp_path, env_config=NOTED, **settings) as trainer:
        trainer.model.train()
        rows = [{"task_data": {"seed": seed}} for seed in (0, 0, 0, 0, 1, 1, 1, 1)]
        batches: list[Any] = []
        trainer.observers.append(_Keeping(batches))
        columns = trainer._generate_and_score_completions(rows)
        trainer.observers.pop()
    [seen] = batches
    played = seen.batch.trajectories
    assert any(one.info["num_notes"] for one in played)
    for place, row in enumerate(seen.tokens.rows):
        one = played[row.rollout]
        for k, _ in row.turns:
            own = columns["advantages"][place][columns["turn_index"][place] == k]
            assert torch.allclose(own, torch.tensor(sum(turn.reward for turn in one.turns[k:])), atol=1e-5)


class _Keeping(BatchObserver):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def on_batch(self, observed: Any) -> None:
        self.batches.append(observed)


def test_a_run_trains_on_notes_and_logs_their_number(tmp_path: Path) -> None:
    with trainer_of(tmp_path, env_config=NOTED, layout="turn", max_steps=2) as trainer:
        trainer.train()
    assert all(value > 0 for value in logged(trainer, "info/num_notes"))
    assert all(value > 0 for value in logged(trainer, "grad_norm"))


def test_notes_need_rows_by_turn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'summarize' rewrites history.*use layout='turn'"):
        trainer_of(tmp_path, env_config=NOTED)
