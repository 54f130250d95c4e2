"""Credit in task groups whose rollouts share their first turns: exact, by enumeration of all groups of a tiny game."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tabular import Array, Play, fit, game, largest

from agentsgym.credit.advantages import ScoredRollout, return_to_go
from agentsgym.credit.assignment import advantage_metrics
from agentsgym.credit.roles import split_roles
from agentsgym.credit.tree import tree
from agentsgym.errors import ConfigError

GAME = game(3)
Forked = tuple[Play, int, int]
"""An episode, whose first turns it shares with the episode of an index."""


def continuations(play: Play, turn: int) -> list[tuple[float, Play]]:
    """The episodes with the same turns before one, each with its conditional probability."""
    same = [one for one in GAME.plays if one.steps[:turn] == play.steps[:turn] and len(one.steps) > turn]
    total = math.fsum(one.probability for one in same)
    return [(one.probability / total, one) for one in same]


def groups(turn: int, width: int) -> Iterator[tuple[float, list[Forked]]]:
    """Every pair of independent episodes, the first of which is forked before a turn if it lasts until then."""
    for one, other in itertools.product(GAME.plays, repeat=2):
        pair: list[Forked] = [(one, 0, 0), (other, 1, 0)]
        forks = [continuations(one, turn)] * width if len(one.steps) > turn else []
        for drawn in itertools.product(*forks):
            chance = math.prod([one.probability, other.probability, *(chance for chance, _ in drawn)])
            yield chance, [*pair, *((play, 0, turn) for _, play in drawn)]


def seen(group: Sequence[Forked]) -> list[ScoredRollout]:
    return [
        replace(play.scored, owners=[parent] * turn + [place] * (len(play.steps) - turn))
        for place, (play, parent, turn) in enumerate(group)
    ]


def expected_gradient(turn: int, width: int, weights: str) -> Array:
    total = np.zeros(12)
    for chance, group in groups(turn, width):
        for (play, _, shared), own in zip(group, tree(seen(group), scale="none", weights=weights), strict=True):
            assert not any(own[:shared])
            total += chance * (np.array(own) @ play.turn_scores)
    return total


@pytest.mark.parametrize(("turn", "width"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_shared_weights_give_the_gradient_in_expectation(turn: int, width: int) -> None:
    assert largest(expected_gradient(turn, width, "shared") - 2 * GAME.gradient) < 1e-12


def test_equal_weights_count_the_turns_after_a_branch_more_often() -> None:
    assert fit(expected_gradient(1, 2, "equal"), GAME.gradient).off > 0.05


def test_forks_reduce_the_variance_of_the_turn_before_them() -> None:
    def variance(width: int) -> float:
        moments = np.zeros(3)
        for chance, group in groups(1, width):
            own = tree(seen(group), scale="none")[0][0]
            moments += chance * np.array([1, own, own**2])
        return float(moments[2] - moments[1] ** 2)

    assert variance(2) < variance(1) < variance(0)


rewards = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=4)


@given(
    st.lists(st.tuples(rewards, st.integers(0, 1)), min_size=1, max_size=6),
    st.sampled_from(["none", "group", "batch"]),
    st.sampled_from([1.0, 0.5]),
    st.booleans(),
)
def test_without_forks_it_is_return_to_go(
    rollouts: list[tuple[list[float], int]], scale: str, discount: float, names_owners: bool
) -> None:
    batch = [
        ScoredRollout(
            turn_rewards=own,
            final_reward=sum(own),
            group=group,
            state_keys=[None] * len(own),
            owners=[i] * len(own) if names_owners else (),
        )
        for i, (own, group) in enumerate(rollouts)
    ]
    expected = return_to_go(batch, scale=scale, discount=discount)
    assert [pytest.approx(row, abs=1e-9) for row in expected] == tree(batch, scale=scale, discount=discount)


def rollout(rewards: Sequence[float], owners: Sequence[int], **fields: object) -> ScoredRollout:
    return ScoredRollout(
        turn_rewards=rewards,
        final_reward=sum(rewards),
        group=0,
        state_keys=[None] * len(rewards),
        owners=owners,
        **fields,  # type: ignore[arg-type]
    )


def test_forks_of_forks_are_averaged_branch_by_branch() -> None:
    batch = [
        rollout([0, 0, 4], [0, 0, 0]),
        rollout([0, 0, 0], [0, 1, 1]),  # forked before turn 1
        rollout([0, 0, 8], [0, 1, 2]),  # and this one before turn 2 of the fork
        rollout([1], [3]),
    ]
    # Q of turn 2: 4; 0 and 8, so 4 for the fork's turn 1; (4 + 4) / 2 for turn 0.
    assert tree(batch, scale="none") == [[3, 0, 0], [0, 0, -8], [0, 0, 8], [-3]]
    assert tree(batch, scale="none", weights="shared") == [[3, 0, 0], [0, 0, -2], [0, 0, 2], [-3]]


def test_turns_after_a_branch_are_compared_with_what_followed_the_other_turns_of_the_branch() -> None:
    batch = [
        rollout([0, 1, 2, 5], [0, 0, 0, 0]),
        rollout([0, 3, 3], [0, 1, 1]),
        rollout([0, 0, 4], [0, 2, 2]),
        rollout([9, 9, 9, 9], [3, 3, 3, 3]),
    ]
    first = tree(batch, scale="none")[0]
    assert first == pytest.approx([(8 + 6 + 4) / 3 - 36, 8 - (6 + 4) / 2, 7 - (3 + 4) / 2, 5])


def test_a_failed_rollout_leaves_its_forks_and_their_turns() -> None:
    batch = [rollout([0, 9], [0, 0], failed=True), rollout([0, 1], [0, 1]), rollout([0, 3], [0, 2]), rollout([1], [3])]
    assert tree(batch, scale="none") == [[0, 0], [0, -2], [0, 2], [-1]]


def test_the_order_of_the_rollouts_does_not_matter() -> None:
    batch = seen(next(itertools.islice(groups(1, 2), 100, None))[1])
    forwards, backwards = tree(batch), tree(batch[::-1])
    assert forwards == [pytest.approx(row) for row in backwards[::-1]]


def test_metrics_leave_out_the_turns_that_forks_share() -> None:
    batch = [rollout([0, 1], [0, 0]), rollout([0, 3], [0, 1]), rollout([2, 2], [2, 2])]
    split = split_roles(batch)
    metrics = advantage_metrics(batch, tree(batch, scale="none"), split)
    assert metrics["advantage/turn_00"] == pytest.approx((-2 + 2) / 2)
    assert metrics["advantage_std/turn_00"] == pytest.approx(math.sqrt(8))


def test_unknown_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="weights cannot be 'all'; valid names: 'equal', 'shared'"):
        tree([rollout([0], [0])], weights="all")  # type: ignore[arg-type]
