"""The benchmark of search, shortened: its corpus is the same each time, and every figure is there."""

from __future__ import annotations

import pytest

from agentsgym.envs.Search import corpus
from benchmarks import search


def test_it_measures_a_small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_MIN_CACHED_PASSAGES", 100)
    result = search.measure(num_passages=300, num_queries=5)
    assert result["num_passages"] == 300
    assert 0 < result["query_median_ms"] <= result["query_worst_ms"]
    assert result["open_kept_s"] > 0
    assert search.corpus(50) == search.corpus(50)
