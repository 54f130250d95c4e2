"""The benchmark of judges plays with each scope of judge, and its judge grades every rollout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(name="benchmark")
def _benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import judges  # noqa: PLC0415

    yield judges
    del sys.modules["judges"]


@pytest.mark.parametrize("scope", [None, "episode", "group", "turn"])
def test_a_small_batch_is_played_and_judged(benchmark: Any, monkeypatch: pytest.MonkeyPatch, scope: Any) -> None:
    monkeypatch.setattr(benchmark, "NUM_EPISODES", 8)
    monkeypatch.setattr(benchmark, "turn_seconds", lambda number, turn: 0.001)
    monkeypatch.setattr(benchmark, "JUDGE_S", 0.001)
    assert all(benchmark.seconds(agent(), scope) > 0 for agent in (benchmark.OwnPace, benchmark.Together))
