"""Games of several seats: every estimator is right for each role by itself, by enumeration and against loops."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import two_seats
from hypothesis import given, settings
from hypothesis import strategies as st
from scored_batches import (
    SCALES,
    Batch,
    Entry,
    Numbers,
    assert_close,
    batches,
    compared_by_loops,
    held_against_by_loops,
    placed,
    rollout,
    scales,
)
from two_seats import LOGITS, ROLES, Episode, episodes, expected, scored, seat_gradient, value

from agentsgym import ConfigError, ScoredRollout
from agentsgym.credit.advantages import ESTIMATORS, Scale, get_estimator, step_group_sizes, zero_variance_groups
from agentsgym.credit.gae import turn_gae
from agentsgym.credit.returns import gigpo, return_to_go
from agentsgym.credit.roles import split_roles

TOLERANCE = 1e-12
GRADIENT = np.add(seat_gradient("X"), seat_gradient("O"))


def bound(name: str, *, scale: Scale = "none", **options: Any) -> Callable[[Batch], Any]:
    """A built-in estimator, as :func:`get_estimator` gives it."""
    return partial(get_estimator(name, **options), discount=1.0, scale=scale)


def test_the_seat_gradients_are_those_of_finite_differences() -> None:
    step = 1e-5
    for role in "XO":
        for index in range(LOGITS.size):
            shift = np.zeros(LOGITS.size)
            shift[index] = step
            there, back = (value(role, {"X": LOGITS, "O": LOGITS, role: LOGITS + sign * shift}) for sign in (1, -1))
            assert (there - back) / (2 * step) == pytest.approx(seat_gradient(role)[index], abs=1e-9)
    assert len(episodes()) == 8
    assert sum(one.probability for one in episodes()) == pytest.approx(1.0, abs=1e-15)
    assert np.abs(GRADIENT).max() > 0.1


# --- expectations -------------------------------------------------------------------------------------------------


def remembering(name: str, **options: Any) -> Any:
    """With the baselines of an earlier batch, which no call changes for the next."""
    bound = get_estimator(name, decay=0.3, **options)
    bound([scored(one) for one in episodes()], discount=1.0, scale="none")
    assert bound.state is not None
    assert {key[1] for key, _ in bound.state.state_dict()["baselines"]} == {"X", "O"}
    return lambda rollouts: deepcopy(bound)(rollouts, discount=1.0, scale="none")


def shaped(function: Any, **options: Any) -> Any:
    return partial(get_estimator(partial(function, **options), potential_weight=0.8), discount=1.0, scale="none")


# An estimator, and how many times the sum of the two seats' gradients it is in expectation.
UNBIASED: dict[str, tuple[Any, float]] = {
    "rloo": (bound("rloo"), 1.0),
    "rae": (remembering("rae"), 1.0),
    "return_to_go_others": (bound("return_to_go"), 1.0),
    "return_to_go_batch": (bound("return_to_go", baseline="batch"), 1.0),
    "return_to_go_role_ema": (remembering("return_to_go", baseline="role_ema"), 1.0),
    "return_to_go_none": (bound("return_to_go", baseline="none"), 1.0),
    "gigpo_others": (bound("gigpo", baseline="others"), 2.0),
    "turn_gae": (bound("turn_gae", gae_lambda=1.0), 1.0),
    "bilevel_gae": (
        lambda rollouts: [[number for [number] in row] for row in bound("bilevel_gae", gae_lambda=1.0)(rollouts)],
        1.0,
    ),
    "shaped_return_to_go": (shaped(return_to_go), 1.0),
    "shaped_gigpo_others": (shaped(gigpo, baseline="others"), 2.0),
    "shaped_turn_gae": (shaped(turn_gae, gae_lambda=1.0), 1.0),
}


def seen(estimator: Callable[[Batch], Any]) -> Callable[[Sequence[Episode]], Any]:
    return lambda plays: estimator([scored(one) for one in plays])


@pytest.mark.parametrize("num_rollouts", [1, 2, 3])
@pytest.mark.parametrize("name", UNBIASED)
def test_the_expected_gradient_is_each_seats_own(name: str, num_rollouts: int) -> None:
    estimator, factor = UNBIASED[name]
    assert np.abs(expected(seen(estimator), num_rollouts) - factor * GRADIENT).max() < TOLERANCE


@pytest.mark.parametrize("num_rollouts", [1, 2, 3])
def test_the_mean_of_all_shrinks_each_seats_gradient_by_the_size_of_its_group(num_rollouts: int) -> None:
    away = sum(one.probability for one in episodes() if len(one.moves) == 1)  # X ends it, and O does not move
    of_o = 0.0
    for others in range(num_rollouts):  # how many of the others O moves in
        ways = [1, 1, 1] if num_rollouts == 1 else [[1, 1], [1, 2, 1]][num_rollouts - 2]
        of_o += ways[others] * away ** (num_rollouts - 1 - others) * (1 - away) ** others * others / (others + 1)
    right = (num_rollouts - 1) / num_rollouts * np.array(seat_gradient("X")) + of_o * np.array(seat_gradient("O"))
    assert np.abs(expected(seen(bound("grpo")), num_rollouts) - right).max() < TOLERANCE


@pytest.mark.parametrize(("num_rollouts", "cosine"), [(2, 0.9960), (3, 0.9982)])
def test_the_mean_of_all_bends_the_sum_where_a_seat_does_not_always_move(num_rollouts: int, cosine: float) -> None:
    """Its own mean shrinks O, which moves in fewer of the rollouts, more than X; the mean of the others neither."""
    found = {name: expected(seen(bound(name)), num_rollouts) for name in ("grpo", "rloo")}
    cosines = {name: one @ GRADIENT / np.linalg.norm(one) / np.linalg.norm(GRADIENT) for name, one in found.items()}
    assert cosines == {"grpo": pytest.approx(cosine, abs=1e-4), "rloo": pytest.approx(1.0, abs=TOLERANCE)}


def test_the_mean_of_all_is_exact_where_every_seat_always_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(two_seats.ACTIONS, (0,), 2)
    monkeypatch.setitem(two_seats.PAID_TO_X, (0, 0), -0.75)
    monkeypatch.setitem(two_seats.PAID_TO_X, (0, 1), 1.5)
    right = np.add(*(two_seats.seat_gradient.__wrapped__(role) for role in "XO")) / 2
    assert np.abs(expected(seen(bound("grpo")), 2) - right).max() < TOLERANCE


def test_without_the_owners_the_gradient_would_be_another() -> None:
    def together(plays: Sequence[Episode]) -> Numbers:
        one_seat = [replace(scored(one, reported=False), roles=[]) for one in plays]
        return return_to_go(one_seat, scale="none")

    assert np.abs(expected(together, 2) - GRADIENT).max() > 0.1


def test_exact_values_of_each_seat_may_be_trusted() -> None:
    def worth(role: str, moves: tuple[int, ...]) -> float:
        """What a role can expect from its turn on, after these moves; O's first turn bears what came before."""
        going = [one for one in episodes() if one.moves[: len(moves)] == moves]
        total = sum(one.probability * one.earned_from(len(moves)) for one in going)
        assert ROLES[len(moves)] == role
        return total / sum(one.probability for one in going)

    def trusting(plays: Sequence[Episode]) -> Numbers:
        known = [
            replace(scored(one), values=[[worth(ROLES[k], one.moves[:k])] for k in range(len(one.moves))])
            for one in plays
        ]
        return bound("turn_gae", gae_lambda=0.0)(known)

    assert np.abs(expected(trusting, 1) - GRADIENT).max() < TOLERANCE


# --- loops --------------------------------------------------------------------------------------------------------

Game = list[tuple[str, float, float]]  # whose move, what X is given for it, what O is given
moves = st.tuples(st.sampled_from("XO"), st.sampled_from([-1.0, 0.0, 0.5]), st.sampled_from([-0.5, 0.0, 1.0]))
games = st.lists(st.tuples(st.integers(0, 1), st.lists(moves, min_size=1, max_size=5)), min_size=1, max_size=5)


def played(game: Game, group: int) -> ScoredRollout:
    """As the trial records it, each turn with what its role was given by a loop of its own."""
    rewards = []
    for k, (role, _, _) in enumerate(game):
        later = [j for j in range(k + 1, len(game)) if game[j][0] == role]
        is_first = all(other != role for other, _, _ in game[:k])
        bears = game[0 if is_first else k : later[0] if later else len(game)]
        rewards.append(sum(move["XO".index(role) + 1] for move in bears))
    final = {role: sum(move["XO".index(role) + 1] for move in game) for role in "XO"}
    roles = [role for role, _, _ in game]
    states = [k % 2 for k in range(len(game))]
    return rollout(rewards, group=group, final=final[roles[0]], roles=roles, keys=states, final_rewards=final)


def entries_of(
    rollouts: Batch, value_of: Callable[[ScoredRollout, int], float], group_of: Callable[[ScoredRollout, int], Hashable]
) -> tuple[list[Entry], list[tuple[int, int]]]:
    """One entry a turn: value, owner, and the group with the role, and its place."""
    places = [(i, k) for i, one in enumerate(rollouts) for k in range(len(one.turn_rewards))]
    kept = [(i, k) for i, k in places if group_of(rollouts[i], k) is not None]
    entries = [(value_of(rollouts[i], k), i, (group_of(rollouts[i], k), rollouts[i].roles[k])) for i, k in kept]
    return entries, kept


def future(one: ScoredRollout, k: int) -> float:
    return sum(earned for earned, role in zip(one.turn_rewards[k:], one.roles[k:], strict=True) if role == one.roles[k])


def own_index(one: ScoredRollout, k: int) -> tuple[int, int]:
    return one.group, list(one.roles[:k]).count(one.roles[k])


def finals(rollouts: Batch, *, others: bool, scale: Scale) -> Numbers:
    """The final reward of each role against those of the same task and role, for all of its turns."""
    pairs = [(i, role) for i, one in enumerate(rollouts) for role in dict.fromkeys(one.roles)]
    entries: list[Entry] = [(rollouts[i].final_rewards[role], i, (rollouts[i].group, role)) for i, role in pairs]
    numbers = dict(zip(pairs, compared_by_loops(entries, others=others, scale=scale), strict=True))
    return [[numbers[i, role] for role in one.roles] for i, one in enumerate(rollouts)]


def step(rollouts: Batch, value_of: Any, group_of: Any, *, others: bool, scale: Scale) -> Numbers:
    entries, places = entries_of(rollouts, value_of, group_of)
    return placed(rollouts, places, compared_by_loops(entries, others=others, scale=scale))


def total(one: Numbers, other: Numbers) -> Numbers:
    return [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)]


@settings(deadline=None)
@given(games, scales)
def test_every_comparison_is_with_the_same_role(given_games: list[tuple[int, Game]], scale: Scale) -> None:
    batch = [played(game, group) for group, game in given_games]
    by_turn, by_state = own_index, lambda one, k: (one.group, one.state_keys[k])
    assert_close(bound("grpo", scale=scale)(batch), finals(batch, others=False, scale=scale))
    assert_close(bound("rloo", scale=scale)(batch), finals(batch, others=True, scale=scale))
    expected_numbers = step(batch, future, by_turn, others=True, scale=scale)
    assert_close(bound("return_to_go", scale=scale)(batch), expected_numbers)
    expected_numbers = step(batch, future, lambda _one, _k: "all", others=True, scale=scale)
    assert_close(bound("return_to_go", scale=scale, baseline="batch")(batch), expected_numbers)
    assert_close(
        bound("rebn", scale=scale)(batch), step(batch, future, lambda _one, _k: "all", others=False, scale=scale)
    )
    steps = step(batch, future, by_state, others=False, scale=scale)
    assert_close(bound("gigpo", scale=scale)(batch), total(finals(batch, others=False, scale=scale), steps))
    before_last = step(
        batch,
        lambda one, k: one.turn_rewards[k],
        lambda one, k: own_index(one, k) if one.roles[k] in one.roles[k + 1 :] else None,
        others=False,
        scale=scale,
    )
    assert_close(bound("mt_grpo", scale=scale)(batch), total(finals(batch, others=False, scale=scale), before_last))


@settings(deadline=None)
@given(games, scales)
def test_moving_averages_are_of_one_role(given_games: list[tuple[int, Game]], scale: Scale) -> None:
    batch = [played(game, group) for group, game in given_games]
    estimators = get_estimator("rae", decay=0.5), get_estimator("return_to_go", baseline="role_ema", decay=0.5)
    kept: dict[Hashable, float] = {}
    for _ in range(2):
        pairs = [(i, role) for i, one in enumerate(batch) for role in dict.fromkeys(one.roles)]
        entries: list[Entry] = [(batch[i].final_rewards[role], i, role) for i, role in pairs]
        own = held_against_by_loops(entries, lambda role: kept.get(role, 0.0), scale=scale)
        numbers = dict(zip(pairs, own, strict=True))
        expected_numbers = [[numbers[i, role] for role in one.roles] for i, one in enumerate(batch)]
        assert_close(estimators[0](batch, discount=1.0, scale=scale), expected_numbers)
        for reward, _, role in entries:
            kept[role] = 0.5 * kept.get(role, 0.0) + 0.5 * reward
    state = estimators[1].state
    assert state is not None
    estimators[1](batch, discount=1.0, scale=scale)
    returns, _ = entries_of(batch, future, lambda _one, _k: "all")
    for role in {entry[2][1] for entry in returns}:  # type: ignore[index]
        mean = np.mean([reward for reward, _, key in returns if key == ("all", role)])
        assert state.get((None, role)) == pytest.approx(mean / 2)


# --- invariances --------------------------------------------------------------------------------------------------

STATELESS = [name for name in ESTIMATORS if name not in {"rae", "turn_gae", "bilevel_gae"}]


@settings(deadline=None, max_examples=30)
@given(games, scales, st.randoms(use_true_random=False))
@pytest.mark.parametrize("name", STATELESS)
def test_the_order_of_rollouts_does_not_matter(
    name: str, given_games: list[tuple[int, Game]], scale: Scale, shuffling: Any
) -> None:
    batch = [played(game, group) for group, game in given_games]
    order = list(range(len(batch)))
    shuffling.shuffle(order)
    numbers = get_estimator(name)(batch, discount=1.0, scale=scale)
    again = get_estimator(name)([batch[i] for i in order], discount=1.0, scale=scale)
    assert_close([list(row) for row in again], [list(numbers[i]) for i in order])  # type: ignore[arg-type]


@settings(deadline=None, max_examples=30)
@given(games, scales)
@pytest.mark.parametrize("name", [*STATELESS, "rae"])
def test_the_parts_by_themselves_give_the_same(name: str, given_games: list[tuple[int, Game]], scale: Scale) -> None:
    batch = [played(game, group) for group, game in given_games]
    split = split_roles(batch)
    parts = get_estimator(name)(split.rollouts, discount=1.0, scale=scale)
    assert split.merge(parts) == get_estimator(name)(batch, discount=1.0, scale=scale)
    assert split_roles(split.rollouts).rollouts == split.rollouts  # they are not taken apart again


@settings(deadline=None, max_examples=50)
@given(batches)
def test_rollouts_of_one_role_pass_through_untouched(rollouts: Batch) -> None:
    split = split_roles(rollouts)
    assert all(part is one for part, one in zip(split.rollouts, rollouts, strict=True))
    assert split.merge([one.turn_rewards for one in rollouts]) == [list(one.turn_rewards) for one in rollouts]
    assert split.task_groups({one.group for one in rollouts}) == {one.group for one in rollouts}
    assert split.included(rollouts) == [one.included for one in rollouts]


def test_the_loser_is_not_rewarded_for_the_winners_move() -> None:
    won = {"X": 1.0, "O": -1.0}
    game = rollout([0.0, 0.0, 0.0, -1.0, 1.0], final=1.0, roles="XOXOX", final_rewards=won)
    assert bound("return_to_go", baseline="none")([game]) == [[1.0, -1.0, 1.0, -1.0, 1.0]]
    draw = rollout([0.0] * 4, final=0.0, roles="XOXO", final_rewards={"X": 0.0, "O": 0.0})
    for name in set(ESTIMATORS) - {"turn_gae", "bilevel_gae", "reward"}:
        for scale in SCALES:
            [numbers, _] = get_estimator(name)([game, draw], discount=1.0, scale=scale)
            assert all(number >= 0 for number in numbers[::2])
            assert all(number <= 0 for number in numbers[1::2])
            assert numbers[1] < 0 < numbers[0]


# --- what is unknown, filters, targets ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"reward"}))
def test_roles_that_share_one_reward_are_refused(name: str) -> None:
    untold = rollout([0.0, 1.0], roles="XO", environment=("chess", 7))
    for one in (untold, replace(untold, turn_rewards=[0.0, 0.0])):
        with pytest.raises(ConfigError, match=r"of chess has turns of the roles 'X' and 'O'.*return info\['rewards'\]"):
            get_estimator(name)([one], discount=1.0, scale="none")


def test_what_is_known_without_being_given_is_not_refused() -> None:
    untold = rollout([0.0, 1.0], roles="XO")
    assert get_estimator("reward")([untold], discount=1.0, scale="none") == [[0.0, 1.0]]
    for one in (replace(untold, failed=True), replace(untold, turn_rewards=[0.0, 0.0], final_reward=0.0)):
        assert bound("return_to_go")([one]) == [[0.0, 0.0]]
    together = replace(untold, turn_rewards=[1.0, 1.0], final_rewards={"X": 1.0, "O": 1.0})
    assert bound("return_to_go")([together]) == [[1.0, 1.0]]


def test_final_rewards_must_be_known_of_every_role() -> None:
    with pytest.raises(
        ValueError, match=r"final_rewards must have a reward for each role that has a turn, but has none for {'O'}"
    ):
        rollout([0.0, 1.0], roles="XO", final_rewards={"X": 1.0})


def test_a_task_group_has_no_variance_where_no_role_has_any() -> None:
    def game(x: float, o: float, group: int) -> ScoredRollout:
        return rollout([x, o], group=group, final=x, roles="XO", final_rewards={"X": x, "O": o}, keys=["s", "s"])

    batch = [game(1, 0, 0), game(1, 2, 0), game(1, 0, 1), game(1, 0, 1), rollout([3.0], group=2)]
    split = split_roles(batch)
    assert split.task_groups(zero_variance_groups(split.rollouts)) == {1, 2}
    assert step_group_sizes(split.rollouts) == [2, 2, 2, 2]  # each role has states of its own


def test_an_estimator_of_ones_own_sees_roles_apart() -> None:
    def mine(rollouts: Batch, *, discount: float, scale: str) -> Numbers:
        return [[discount * one.final_reward] * len(one.turn_rewards) for one in rollouts]

    game = rollout([0.0, -1.0, 1.0], final=1.0, roles="XOX", final_rewards={"X": 1.0, "O": -1.0})
    assert get_estimator(mine)([game], discount=1.0, scale="none") == [[1.0, -1.0, 1.0]]


def test_targets_are_what_the_role_earns() -> None:
    game = rollout([0.0, -1.0, 1.0], final=1.0, roles="XOX", final_rewards={"X": 1.0, "O": -1.0})
    valued = [replace(game, values=[[0.0], [0.0], [0.0]])]
    targets = get_estimator("turn_gae", gae_lambda=1.0).value_targets(valued, discount=1.0)
    assert targets == [[[1.0], [-1.0], [1.0]]]
    shaping = get_estimator("turn_gae", potential_weight=1.0)
    known = replace(game, values=[[0.0], [0.0], [0.0]], potentials=[0.5, 0.25, 0.5])
    assert shaping.value_targets([known], discount=1.0)[0][1] == [-1.25]


def test_value_targets_are_per_role_even_for_an_estimator_of_token_rewards() -> None:
    played = ScoredRollout(
        turn_rewards=[0.0, 1.0, 1.0, 2.0],
        final_reward=4.0,
        group=0,
        state_keys=[None] * 4,
        roles=["a", "b", "a", "b"],
        token_counts=[1] * 4,
        values=[[0.0]] * 4,
        final_rewards={"a": 1.0, "b": 3.0},
    )
    (targets,) = get_estimator("reward").value_targets([played], discount=1.0)
    assert np.ravel(targets).tolist() == [1.0, 3.0, 1.0, 2.0]
