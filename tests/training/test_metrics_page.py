"""Every key that a run logs has its line in ``docs/metrics.md``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from games import correcting, tasks, trainer_of

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
# What transformers sums up of a whole run, which its own pages tell.
OF_TRANSFORMERS = {
    *("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos"),
    *("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_loss", "eval_model_preparation_time"),
}
RUNS: list[dict[str, Any]] = [
    {"advantage_estimator": "gigpo", "num_iterations": 2},
    {"loss_type": "cispo", "entropy_coef": 0.01},
    {"loss_type": "vespo", **correcting("token_mask")},
    {"drift_interval": 1, "zero_variance_groups": "resample", "episode_retries": 1},
    {"advantage_estimator": "turn_gae", "value_head": "shared"},
    {"eval_dataset": tasks(2), "eval_strategy": "steps", "eval_steps": 1},
]


@pytest.mark.parametrize("changes", RUNS)
def test_every_key_has_a_line(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **changes)
    trainer.train()
    keys = {key for log in trainer.state.log_history for key in log} - OF_TRANSFORMERS - {"step"}
    assert len(keys) > 40
    named = {re.sub(r"turn_\d+$", "turn_00", key) for key in keys}
    missing = {key for key in named if f"`{key}`" not in PAGE and f"`{key.removeprefix('eval_')}`" not in PAGE}
    assert not missing
