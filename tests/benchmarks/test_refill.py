"""The benchmark of refilled places: small, and every way plays every episode."""

from __future__ import annotations

import json

import pytest

from benchmarks.refill import main, make_tasks


def test_every_way_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--episodes", "6", "--places", "2", "--repeats", "1"])
    row = json.loads(capsys.readouterr().out)
    assert row["turns"] == sum(task["turns"] for task in make_tasks(6))
    assert min(row["waves_s"], row["refilled_s"], row["all_at_once_s"]) > 0
