"""pass^k against drawing every choice of k rollouts; intervals of pass@k and pass^k against drawing every resample."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.statistics.metrics import pass_at_k, pass_at_k_interval, pass_hat_k, pass_hat_k_interval, summarize
from agentsgym.statistics.passing import max_k
from agentsgym.types import StopReason, Trajectory


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
