"""The emulated run ahead of training, and what dropping would do: small, on the library's own decisions."""

from __future__ import annotations

import json

import pytest

from benchmarks import asynchronous_bias
from benchmarks.asynchronous import GROUP, Setup, ahead, episode, main
from benchmarks.asynchronous_learning import WINDOW, by_part, first_at
from benchmarks.scaling_engine import TASKS

GAMES = TASKS["short games"]


def test_waiting_trains_on_every_group_and_dropping_on_none_that_is_too_old() -> None:
    waited = [*asynchronous_bias.waited_for(GAMES, 2, 20.0, 1, 12)]
    every = [asynchronous_bias.group(GAMES, number, 0) for number in range(24)]
    assert sorted(one.lasts_s for one in waited) == sorted(one.lasts_s for one in every)
    dropped = [*asynchronous_bias.dropped(GAMES, 2, 20.0, 0, 12)]
    assert len(dropped) == 24
    assert sum(one.lasts_s for one in dropped) < sum(one.lasts_s for one in waited)  # it is the long ones that go


def test_an_emulated_run_takes_at_least_as_long_as_what_it_waits_for() -> None:
    setup = Setup(task=GAMES, size=2, scale=100.0, batches=4)
    row = ahead(setup, 1, 40.0, 1)
    assert row["step_s"] >= 40.0
    assert 2 * GROUP <= row["turns_a_batch"] <= 2 * GROUP * GAMES.turns.most


def test_every_episode_is_played_as_long_as_it_is_planned() -> None:
    row = ahead(Setup(task=TASKS["software tasks"], size=1, scale=2000.0, batches=3), 1, 1.0, 1)
    planned = [len(episode(TASKS["software tasks"], group, i)) for group in (1, 2) for i in range(GROUP)]
    assert row["turns_a_batch"] == pytest.approx(sum(planned) / 2, abs=0.1)


def test_lockstep_and_each_bound_have_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tasks", "short games", "--gpus", "2", "--per_gpu", "16", "--scale", "200", "--batches", "4"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["way"] for row in rows] == ["lockstep", "max_staleness=1", "max_staleness=6"]
    assert all(row["step_s"] > 0 for row in rows)


def test_where_learning_takes_as_long_as_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--balanced", "--tasks", "short games", "--per_gpu", "16", "--scale", "200", "--batches", "4"])
    alone, overlapping, two_ahead = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [row["max_staleness"] for row in (alone, overlapping, two_ahead)] == [1, 1, 2]
    assert all(row["learn_s"] > 0 for row in (alone, overlapping, two_ahead))
    assert all(row["of_the_larger"] >= 0.99 for row in (alone, overlapping, two_ahead))


def test_a_curve_and_when_it_first_was_high_enough() -> None:
    wins = [0.0] * 100 + [1.0] * 2 * WINDOW
    assert by_part(wins[:200], 2) == [0.0, 1.0]
    assert first_at(wins, 1.0) == 100 + WINDOW
    assert first_at([0.0] * 2 * WINDOW, 0.1) is None
