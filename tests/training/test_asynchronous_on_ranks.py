"""Two ranks whose rollouts run ahead: each plays groups of its own, and both train alike."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import ahead_run
from launch import launch


def test_each_rank_plays_its_own_groups_and_both_end_with_one_policy(tmp_path: Path) -> None:
    done = launch(Path(ahead_run.__file__), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert one["order"] == other["order"] == {"low": 20, "above": []}
    assert one["weights"] == other["weights"]
    assert one["draw"] != other["draw"]  # equal prompts are not answered alike
    assert all(0 <= age <= 2 for age in [*one["ages"], *other["ages"]])
    assert max(one["staleness"]) > 0
    seeds = Counter(one["seeds"]) + Counter(other["seeds"])
    assert sum(seeds.values()) == 5 * 16
    assert set(seeds.values()) <= {8, 12}  # two passes and a half over eight tasks, four rollouts each
