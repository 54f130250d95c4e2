"""The benchmarks of refilled places and of search, small: every way plays every episode, and every figure is there."""

from __future__ import annotations

import json

import pytest

from agentsgym.envs.Search import corpus
from benchmarks import search
from benchmarks.refill import main, make_tasks


def test_every_way_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--episodes", "6", "--places", "2", "--repeats", "1"])
    row = json.loads(capsys.readouterr().out)
    assert row["turns"] == sum(task["turns"] for task in make_tasks(6))
    assert min(row["waves_s"], row["refilled_s"], row["all_at_once_s"]) > 0


def test_a_small_corpus_is_measured_and_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_MIN_CACHED_PASSAGES", 100)
    result = search.measure(num_passages=300, num_queries=5)
    assert result["num_passages"] == 300
    assert 0 < result["query_median_ms"] <= result["query_worst_ms"]
    assert result["open_kept_s"] > 0
    assert search.corpus(50) == search.corpus(50)
