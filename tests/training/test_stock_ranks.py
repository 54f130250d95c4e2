"""A stock trainer on two ranks is given what it would be given on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch import launch
from stock_ranks_run import batches

SCRIPT = Path(__file__).parent / "stock_ranks_run.py"


def test_two_ranks_together_play_what_one_plays_alone(tmp_path: Path) -> None:
    ran = launch(SCRIPT, tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    one = json.loads(json.dumps(batches(tmp_path / "alone", 1)))
    assert len(one) == len(ranks[0]) == len(ranks[1]) == 2
    for whole, first, second in zip(one, *ranks, strict=True):
        together: dict[str, list[Any]] = {name: first[name] + second[name] for name in whole}
        for name in ("prompt_ids", "completion_ids", "env_mask", "row_reward", "step_rewards", "stop_reason"):
            assert together[name] == whole[name], name
        for name in ("advantages", "logprobs"):  # a matrix of other height is rounded otherwise
            assert [value for row in together[name] for value in row] == pytest.approx(
                [value for row in whole[name] for value in row], abs=1e-5
            )
