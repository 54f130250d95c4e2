"""maj@k against drawing every choice of k rollouts."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.statistics.passing import maj_at_k, winning_chances
from agentsgym.types import StopReason, Trajectory


def rollout(answer: Any, success: bool, task_index: int = 0, *, failed: bool = False) -> Trajectory:
    return Trajectory(
        token_ids=(),
        turns=(),
        messages=(),
        final_reward=float(success),
        stop_reason=StopReason.FAILED if failed else StopReason.DONE,
        task_index=task_index,
        info={"success": success} if answer is None else {"success": success, "answer": answer},
    )


def drawn(votes: list[str | None], k: int, right: str) -> float:
    """The definition: over all choices of k, the chance that a most frequent answer, taken at random, is right."""
    chances: list[float] = []
    for chosen in itertools.combinations(votes, k):
        counts = Counter(vote for vote in chosen if vote is not None)
        best = [vote for vote, count in counts.items() if count == max(counts.values())]
        chances.append(best.count(right) / len(best) if best else 0.0)
    return sum(chances) / len(chances)


@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8), st.data())
def test_it_is_the_mean_over_all_choices(votes: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(votes)))
    rollouts = [rollout(vote, vote == "a") for vote in votes]
    if any(vote is not None for vote in votes):
        assert maj_at_k(rollouts, k) == pytest.approx(drawn(votes, k, "a"))


def test_tasks_are_averaged_and_failed_rollouts_left_out() -> None:
    rollouts = [
        *(rollout(answer, answer == "7") for answer in ("7", "7", "8")),
        *(rollout(answer, answer == "7", 1) for answer in ("8", "8", "7")),
        rollout("7", True, 1, failed=True),
    ]
    assert maj_at_k(rollouts, 3) == 0.5


def test_answers_that_are_lists_vote_too() -> None:
    assert maj_at_k([rollout([1, 2], True), rollout([1, 2], True), rollout([3], False)], 3) == 1.0


def test_chances_are_of_a_whole_for_many_rollouts() -> None:
    assert sum(winning_chances([200, 190, 60, 50, 12], 101)) == pytest.approx(1.0)


@pytest.mark.parametrize("k", [0, 3])
def test_there_must_be_enough_rollouts(k: int) -> None:
    with pytest.raises(ValueError, match=rf"any task \(2\), got {k}"):
        maj_at_k([rollout("a", True), rollout("b", False)], k)


def test_there_must_be_answers() -> None:
    with pytest.raises(ValueError, match="which no rollout has"):
        maj_at_k([rollout(None, True)], 1)
