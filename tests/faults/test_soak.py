"""The soak of ``benchmarks/faults.py``, shorter: every kind of fault, in every way to play."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_every_kind_of_fault_fails_its_own_episode_and_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from fault_scenarios import soak  # noqa: PLC0415  # found there alone

    monkeypatch.setattr(soak, "QUICK_EPISODES", 2000)
    [outcome] = soak.run(quick=True)
    assert outcome.seen.startswith("0 wrong results; ")
    num_lines = int(outcome.seen.split("; ")[-1].split()[0])
    assert 0 < num_lines <= len(soak.FAULTS)
