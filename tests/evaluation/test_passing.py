"""pass@k and pass^k with their intervals: by hand, and against drawing every choice and every resample."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.statistics.metrics import pass_at_k, pass_at_k_interval, pass_hat_k, pass_hat_k_interval, summarize
from agentsgym.statistics.passing import max_k
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


def rollouts(*tasks: str) -> list[Trajectory]:
    """One task a text: ``1`` a win, ``0`` a loss, ``x`` a rollout that failed."""
    return [
        Trajectory(
            token_ids=(),
            turns=(),
            messages=(),
            final_reward=float(letter == "1"),
            stop_reason=StopReason.FAILED if letter == "x" else StopReason.DONE,
            task_index=index,
            info={"success": letter == "1"},
        )
        for index, task in enumerate(tasks)
        for letter in task
    ]


def drawn(task: str, k: int, count: Callable[[list[bool]], bool]) -> float:
    """The definition: the share of all choices of k rollouts that count."""
    choices = [count([letter == "1" for letter in chosen]) for chosen in itertools.combinations(task, k)]
    return sum(choices) / len(choices)


TASKS = st.lists(st.text("01", min_size=1, max_size=6), min_size=1, max_size=5)


@given(TASKS, st.data())
def test_both_are_the_mean_over_all_choices(tasks: list[str], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, min(map(len, tasks))))
    assert pass_hat_k(rollouts(*tasks), k) == pytest.approx(sum(drawn(t, k, all) for t in tasks) / len(tasks))
    for estimate, count in ((pass_at_k_interval, any), (pass_hat_k_interval, all)):
        expected = sum(drawn(task, k, count) for task in tasks) / len(tasks)
        found = estimate(rollouts(*tasks), k)
        assert found.mean == pytest.approx(expected)
        assert 0.0 <= found.low <= found.mean <= found.high <= 1.0


def test_the_mean_is_that_of_the_plain_functions_and_failed_rollouts_are_left_out() -> None:
    played = rollouts("110x", "100", "0001x")
    assert max_k(played) == 3
    assert pass_at_k_interval(played, 2).mean == pytest.approx(pass_at_k(played, 2))
    assert pass_hat_k(played, 2) == pytest.approx((1 / 3 + 0 + 0) / 3)
    with pytest.raises(
        ValueError, match=r"pass\^k requires k .* smallest number of non-failed rollouts of any task \(3\), got 4"
    ):
        pass_hat_k(played, 4)


def test_the_interval_is_that_of_all_resamples_of_the_tasks() -> None:
    tasks = ("11", "10", "00", "10", "11")
    values = [drawn(task, 2, all) for task in tasks]
    means = sorted(sum(chosen) / 5 for chosen in itertools.product(values, repeat=5))
    found = pass_hat_k_interval(rollouts(*tasks), 2, confidence=0.8)
    expected = np.quantile(means, [0.1, 0.9])
    assert [found.low, found.high] == pytest.approx(expected, abs=1e-9)


def test_the_interval_of_one_task_speaks_of_its_rollouts() -> None:
    found = pass_hat_k_interval(rollouts("1110"), 1)
    exact = [sum(math.comb(4, w) * 0.75**w * 0.25 ** (4 - w) for w in range(c + 1)) for c in range(5)]
    assert found.mean == 0.75
    assert exact[0] < 0.025 < exact[1]  # so that the lower quantile is one win of four
    assert (found.low, found.high) == (0.25, 1.0)
    certain = pass_hat_k_interval(rollouts("11"), 2)
    assert (certain.low, certain.mean, certain.high) == (pytest.approx(0.025), 1.0, 1.0)  # both, each at 0.025 ** 0.5


def test_an_evaluation_shows_both() -> None:
    evaluation = summarize(rollouts("11", "10", "00"))
    assert evaluation.pass_hat_k(2) == evaluation.pass_hat_k_interval(2).mean == pytest.approx(1 / 3)
    assert evaluation.pass_at_k(2) == pytest.approx(2 / 3)
