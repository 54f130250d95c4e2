"""Credit along a tree of calls: against plain recursion, with the roles of a tree, and where its direction is wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_batches import QUARTERS, discounts, scales

from agentsgym import ConfigError, ScoredRollout, StopReason, Trajectory, Turn
from agentsgym.credit.advantages import Scale, get_estimator, return_to_go
from agentsgym.credit.assignment import AdvantageAssigner
from agentsgym.credit.returns import call_returns, discounted_returns
from agentsgym.credit.settings import CreditSettings

Parents = list[int | None]


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[float], Parents]:
    """The rewards and the parents of up to eight calls."""
    rewards = draw(st.lists(st.sampled_from(QUARTERS), max_size=8))
    return rewards, [draw(st.none() | st.integers(0, k - 1)) if k else None for k in range(len(rewards))]


def rollout(rewards: Sequence[float], parents: Sequence[int | None] = (), **fields: Any) -> ScoredRollout:
    values = {"group": 0, "final_reward": sum(rewards), "state_keys": [None] * len(rewards), **fields}
    return ScoredRollout(turn_rewards=rewards, parents=parents, **values)


def recursive_return(k: int, rewards: list[float], parents: Parents, discount: float) -> float:
    children = [recursive_return(c, rewards, parents, discount) for c in range(len(rewards)) if parents[c] == k]
    return rewards[k] + (discount * sum(children) / len(children) if children else 0.0)


# --- the returns --------------------------------------------------------------------------------------------------


@given(trees(), discounts)
def test_returns_are_those_of_the_recursion(tree: tuple[list[float], Parents], discount: float) -> None:
    rewards, parents = tree
    expected = [recursive_return(k, rewards, parents, discount) for k in range(len(rewards))]
    assert call_returns(rewards, parents, discount=discount) == pytest.approx(expected, abs=1e-12)
    kept = [*rewards]
    call_returns(rewards, parents, discount=discount)
    assert rewards == kept


@given(st.lists(st.sampled_from(QUARTERS), max_size=6), discounts)
def test_a_chain_has_exactly_the_discounted_returns(rewards: list[float], discount: float) -> None:
    chain = [k - 1 if k else None for k in range(len(rewards))]
    assert call_returns(rewards, chain, discount=discount) == discounted_returns(rewards, discount=discount)


@given(st.lists(st.tuples(st.lists(st.sampled_from(QUARTERS), max_size=4), st.integers(0, 1)), max_size=5), scales)
def test_rollouts_that_are_chains_have_the_same_advantages_either_way(
    batch: list[tuple[list[float], int]], scale: Scale
) -> None:
    rollouts = [
        rollout(rewards, [k - 1 if k else None for k in range(len(rewards))], group=group) for rewards, group in batch
    ]
    for baseline in ("others", "batch", "role_ema", "none"):
        found, plain = (
            return_to_go(rollouts, scale=scale, baseline=baseline, discount=0.5, follow=follow)
            for follow in ("calls", "turns")
        )
        assert found == plain


def test_roots_are_trees_of_their_own_by_hand() -> None:
    # 0 ─┬ 1 ─ 3      2 and 4 ─ 5 are other trees
    #    └ 6
    tree = rollout([1, 0, 5, 4, 0, 3, 2], [None, 0, None, 1, None, 4, 0])
    assert return_to_go([tree], scale="none", follow="calls") == [[4.0, 4.0, 5.0, 4.0, 3.0, 3.0, 2.0]]
    halved = return_to_go([tree], scale="none", follow="calls", discount=0.5)
    assert halved == [[2.0, 2.0, 5.0, 4.0, 1.5, 3.0, 2.0]]
    alone = rollout([1, 2])
    assert return_to_go([alone], scale="none", follow="calls") == [[1, 2]]


# --- its direction ------------------------------------------------------------------------------------------------

FINISH = rollout([1.5], [None])
CHANCE = 0.25  # of going on instead


def expected_derivative(going_on: ScoredRollout, follow: Any) -> float:
    """The expected gradient in the logit of going on, by enumeration of all groups of two rollouts."""
    total = 0.0
    for choices in itertools.product([True, False], repeat=2):
        probability = math.prod(CHANCE if one else 1 - CHANCE for one in choices)
        own = return_to_go([going_on if one else FINISH for one in choices], scale="none", follow=follow)
        scores = [(1 - CHANCE) if one else -CHANCE for one in choices]
        total += probability * sum(score * row[0] for score, row in zip(scores, own, strict=True)) / 2
    return total


def test_the_mean_over_branches_is_not_the_gradient_of_the_total_reward() -> None:
    requests_two = rollout([0.0, 1.0, 1.0], [None, 0, 0])  # 2 in total
    slope = CHANCE * (1 - CHANCE)
    assert expected_derivative(requests_two, "turns") == pytest.approx(slope * (2.0 - 1.5))
    assert expected_derivative(requests_two, "calls") == pytest.approx(slope * (1.0 - 1.5))  # the wrong way


def test_the_direction_is_exact_where_no_turn_has_two_children() -> None:
    retries = rollout([0.5, 1.5], [None, 0])
    for follow in ("turns", "calls"):
        assert expected_derivative(retries, follow) == pytest.approx(CHANCE * (1 - CHANCE) * (2.0 - 1.5))


# --- from trajectories to advantages ------------------------------------------------------------------------------


def trajectory(parents: Parents, rewards: Sequence[float], **fields: Any) -> Trajectory:
    turns = [Turn(start=0, stop=0, reward=r, parent=p) for r, p in zip(rewards, parents, strict=True)]
    values = {"token_ids": [], "messages": [], "final_reward": sum(rewards), "stop_reason": StopReason.DONE, **fields}
    return Trajectory(turns=turns, **values)


def test_a_trajectory_passes_its_parents_on() -> None:
    assert ScoredRollout.from_trajectory(trajectory([None, 0, 0], [1, 2, 3]), group=0).parents == [None, 0, 0]
    assert ScoredRollout.from_trajectory(trajectory([None, None], [1, 2]), group=0).parents == ()


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([0, None], r"parents\[0\] must be the index of an earlier turn or None, got 0"),
        ([None, -1], "parents must be a list of ints >= 0 or None"),
        ([None], "parents must be empty or have one entry per turn, got 1 for 2"),
    ],
)
def test_parents_that_are_no_earlier_turns_are_refused(parents: Parents, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rollout([1, 2], parents)


@given(trees(), st.data())
def test_a_role_follows_its_own_nearest_ancestors(tree: tuple[list[float], Parents], data: st.DataObject) -> None:
    rewards, parents = tree
    roles = data.draw(st.lists(st.sampled_from("XO"), min_size=len(rewards), max_size=len(rewards)))
    game = rollout(rewards, parents, roles=roles, final_rewards=dict.fromkeys(roles, 0.0))

    def nearest(k: int) -> int | None:
        ancestor = parents[k]
        while ancestor is not None and roles[ancestor] != roles[k]:
            ancestor = parents[ancestor]
        return ancestor

    own = [nearest(k) for k in range(len(rewards))]  # a tree that never leaves a role
    [found] = get_estimator("return_to_go", follow="calls", baseline="none")([game], discount=1.0, scale="none")
    assert found == pytest.approx(call_returns(rewards, own, discount=1.0), abs=1e-12)


def assigner(**options: Any) -> AdvantageAssigner:
    return AdvantageAssigner(CreditSettings(options=options, scale_rewards="none"))


def assign(assigner: AdvantageAssigner, rewards: Sequence[float], parents: Parents) -> None:
    one = trajectory(parents, rewards)
    scored = ScoredRollout.from_trajectory(one, group=0)
    assigner.assign([scored], [0], [one], [0], is_training=True)


def test_a_first_batch_without_parents_is_refused_if_calls_are_followed() -> None:
    with pytest.raises(ConfigError, match="'return_to_go' follows a tree of calls, but no turn of these rollouts has"):
        assign(assigner(follow="calls"), [0, 1], [None, None])
    assign(assigner(), [0, 1], [None, None])
    following = assigner(follow="calls")
    assign(following, [0, 1], [None, 0])
    assign(following, [0, 1], [None, None])  # one batch may well have single calls only
    assign(assigner(follow="calls"), [1], [None])


def test_what_cannot_be_combined_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="follow cannot be 'call'; did you mean 'calls'"):
        get_estimator("return_to_go", follow="call")
    with pytest.raises(ConfigError, match="omit potential_weight, or set follow='turns'"):
        get_estimator("return_to_go", follow="calls", potential_weight=0.5)
