"""The interval of pass@k: what it is by hand, that it covers, and what it does where nothing varies."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.statistics.metrics import pass_at_k, pass_at_k_interval, summarize
from agentsgym.types import StopReason, Trajectory


def game(task: int, won: bool, **fields: Any) -> Trajectory:
    values: dict[str, Any] = {"stop_reason": StopReason.DONE, "info": {"success": won}} | fields
    return Trajectory(token_ids=[], turns=[], messages=[], final_reward=float(won), task_index=task, **values)


def games(*wins: str) -> list[Trajectory]:
    """One string a task, '1' for a rollout that was won."""
    return [game(task, letter == "1") for task, letters in enumerate(wins) for letter in letters]


@given(st.lists(st.text("01", min_size=2, max_size=4), min_size=1, max_size=6), st.integers(1, 2))
def test_the_mean_is_pass_at_k_and_lies_inside(wins: list[str], k: int) -> None:
    rows = games(*wins)
    estimate = pass_at_k_interval(rows, k)
    assert estimate.mean == pytest.approx(pass_at_k(rows, k), abs=1e-12)
    assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1
    assert pass_at_k_interval(rows, k) == estimate


def test_it_is_the_bootstrap_over_tasks() -> None:
    chances = [1.0, 5 / 6, 0.0]  # of 2 of 4 rollouts, of which 3, 2 and none were won
    rows = games("1110", "1100", "0000")
    drawn = [np.mean(draw) for draw in itertools.product(chances, repeat=3)]  # every draw there is, each as likely
    low, high = np.quantile(drawn, [0.1, 0.9])
    estimate = pass_at_k_interval(rows, 2, confidence=0.8)
    assert estimate.mean == pytest.approx(np.mean(chances))
    assert (estimate.low, estimate.high) == (pytest.approx(low), pytest.approx(high))


def test_tasks_of_a_cluster_are_drawn_together() -> None:
    rows = games(*["11"] * 4, *["00"] * 4)
    apart = pass_at_k_interval(rows, 1)
    together = pass_at_k_interval(rows, 1, clusters=[one.task_index // 4 for one in rows])
    assert (together.low, together.high) == (0.0, 1.0)
    assert 0 < apart.low < apart.high < 1


def test_equal_tasks_get_the_exact_interval() -> None:
    won = pass_at_k_interval(games(*["10"] * 20), 2)
    assert (won.mean, won.low, won.high) == (1.0, pytest.approx(0.025 ** (1 / 20)), 1.0)
    lost = pass_at_k_interval(games(*["00"] * 20), 2)
    assert (lost.mean, lost.low, lost.high) == (0.0, 0.0, pytest.approx(1 - 0.025 ** (1 / 20)))


def test_a_single_task_is_bounded_by_its_own_rollouts() -> None:
    mixed = pass_at_k_interval(games("1100110000"), 2)
    assert 0 < mixed.low < mixed.mean < mixed.high <= 1
    lost = pass_at_k_interval(games("0000000000"), 2)
    assert (lost.mean, lost.low) == (0.0, 0.0)
    assert lost.high == pytest.approx(1 - (0.025 ** (1 / 10)) ** 2)  # one of two, at the highest chance to win one


def test_the_interval_covers_as_often_as_it_states() -> None:
    generator, covered = np.random.default_rng(0), 0
    chances = generator.beta(1, 2, size=100_000)
    truth = float(np.mean(1 - (1 - chances) ** 2))
    for run in range(200):
        rows = games(
            *("".join("01"[int(one)] for one in generator.random(4) < chances[100 * run + i]) for i in range(40))
        )
        estimate = pass_at_k_interval(rows, 2, seed=run)
        covered += estimate.low <= truth <= estimate.high
    assert 0.89 <= covered / 200 <= 0.99


def test_failed_rollouts_are_left_out_and_what_is_missing_is_reported() -> None:
    rows = [*games("11", "00"), game(0, won=False, stop_reason=StopReason.FAILED)]
    assert pass_at_k_interval(rows, 2).mean == 0.5
    with pytest.raises(
        ValueError, match=r"pass@k requires k .* smallest number of non-failed rollouts of any task \(2\), got 3"
    ):
        pass_at_k_interval(rows, 3)
    with pytest.raises(ValueError, match="clusters must have one entry per trajectory, got 1 for 5"):
        pass_at_k_interval(rows, 1, clusters=[0])


def test_an_evaluation_knows_its_clusters_and_its_confidence() -> None:
    rows = games(*["11"] * 4, *["00"] * 4)
    clusters = [one.task_index // 4 for one in rows]
    evaluation = summarize(rows, clusters=clusters, confidence=0.9)
    assert evaluation.pass_at_k_interval(2) == pass_at_k_interval(rows, 2, clusters=clusters, confidence=0.9)
    assert evaluation.pass_at_k_interval(2).mean == evaluation.pass_at_k(2)
    assert summarize(rows).pass_at_k_interval(2) == pass_at_k_interval(rows, 2)
