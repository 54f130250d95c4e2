"""GAE over turns and tokens: against closed forms, plain forward sums, and the gradient of an enumerated game."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scored_batches import valued

from agentsgym import ConfigError, ScoredRollout
from agentsgym.credit.gae import bilevel_gae, gae, turn_gae
from agentsgym.credit.registry import get_estimator

Array = NDArray[np.float64]
ESTIMATORS: tuple[Any, ...] = (turn_gae, bilevel_gae)
both = pytest.mark.parametrize("estimator", ESTIMATORS)
near = partial(pytest.approx, abs=1e-9)
amounts = st.floats(-4, 4).map(lambda number: round(number, 3))
shares = st.sampled_from([0.0, 0.3, 0.95, 1.0])


@st.composite
def rollouts(draw: st.DrawFn, min_tokens: int = 0) -> ScoredRollout:
    turns = draw(st.lists(st.tuples(amounts, st.lists(amounts, min_size=min_tokens, max_size=3)), max_size=5))
    rewards = [earned if draw(st.booleans()) else 0.0 for earned, _ in turns]
    flags = {"failed": True} if draw(st.integers(0, 4)) == 0 else {}
    return valued(rewards, [values for _, values in turns], **flags)


def targets_of(
    estimator: Any, batch: Sequence[ScoredRollout], discount: float, **options: Any
) -> list[list[list[float]]]:
    return get_estimator(estimator, **options).value_targets(batch, discount=discount)


def flat(nested: Any) -> list[float]:
    return [nested] if isinstance(nested, float) else [number for part in nested for number in flat(part)]


def first_values(one: ScoredRollout) -> list[float]:
    return [values[0] for values in one.values]


def lambda_returns(rewards: Sequence[float], values: Sequence[float], discount: float, decay: float) -> list[float]:
    """``(1-λ) Σ_n λ^{n-1} G^(n)``, the rest of the weight on the whole return: the forward view, by plain loops."""
    found: list[float] = []
    for k in range(len(rewards)):
        left = len(rewards) - k

        def n_step(n: int, k: int = k, left: int = left) -> float:
            earned = sum(discount**j * rewards[k + j] for j in range(n))
            return earned + (discount**n * values[k + n] if n < left else 0.0)

        mixed = (1 - decay) * sum(decay ** (n - 1) * n_step(n) for n in range(1, left))
        found.append(mixed + decay ** (left - 1) * n_step(left))
    return found


@given(rollouts(min_tokens=1), shares, shares)
def test_an_advantage_is_the_lambda_return_minus_the_value(one: ScoredRollout, discount: float, decay: float) -> None:
    values = first_values(one)
    expected = lambda_returns(one.turn_rewards, values, discount, decay)
    found = gae(one.turn_rewards, values, discount=discount, gae_lambda=decay)
    assert found == near([wanted - value for wanted, value in zip(expected, values, strict=True)])


@given(st.lists(rollouts(min_tokens=1), max_size=3), shares)
def test_the_limits_of_lambda(batch: list[ScoredRollout], discount: float) -> None:
    whole = turn_gae(batch, discount=discount, scale="none", gae_lambda=1.0)
    one_step = turn_gae(batch, discount=discount, scale="none", gae_lambda=0.0)
    for one, monte_carlo, temporal in zip(batch, whole, one_step, strict=True):
        values = first_values(one)
        returns = [
            sum(discount**j * earned for j, earned in enumerate(one.turn_rewards[k:]))
            for k in range(len(one.turn_rewards))
        ]
        following = [*values[1:], 0.0][: len(values)]
        turns = list(zip(returns, one.turn_rewards, values, following, strict=True))
        assert monte_carlo == near([one.included * (total - value) for total, _, value, _ in turns])
        assert temporal == near([one.included * (earned + discount * then - value) for _, earned, value, then in turns])


@given(amounts, st.lists(amounts, min_size=1, max_size=4), shares, shares)
def test_bilevel_of_one_turn_is_gae_over_its_tokens(
    earned: float, values: list[float], discount: float, decay: float
) -> None:
    found = bilevel_gae(
        [valued([earned], [values])], scale="none", token_discount=discount, token_gae_lambda=decay, gae_lambda=0.3
    )
    expected = lambda_returns([0.0] * (len(values) - 1) + [earned], values, discount, decay)
    assert found == [[near([wanted - value for wanted, value in zip(expected, values, strict=True)])]]


@given(rollouts(), shares, shares)
def test_bilevel_without_decay_in_turns_moves_the_turns_advantage_to_each_token(
    one: ScoredRollout, discount: float, decay: float
) -> None:
    [of_turns] = turn_gae([one], discount=discount, scale="none", gae_lambda=decay)
    [of_tokens] = bilevel_gae([one], discount=discount, scale="none", gae_lambda=decay)
    expected = [
        [one.included * (advantage + values[0] - value) for value in values]
        for advantage, values in zip(of_turns, one.values, strict=True)
    ]
    assert flat(of_tokens) == near(flat(expected))
    assert [len(turn) for turn in of_tokens] == [len(values) for values in one.values]


def test_bilevel_worked_out_by_hand() -> None:
    one = valued([0.0, 2.0], [[1.0, 3.0], [0.5]])
    # Turns: δ = (0 + .5·.5 - 1, 2 - .5) = (-.75, 1.5); A_0 = -.75 + .5·.5·1.5 = -.375, so that turn 0 was worth .625.
    # Tokens of turn 0: δ = (.5·3 - 1, .625 - 3) = (.5, -2.375); the first gets .5 + .5·.5·-2.375.
    halves = {"discount": 0.5, "gae_lambda": 0.5, "token_discount": 0.5, "token_gae_lambda": 0.5}
    assert turn_gae([one], discount=0.5, scale="none", gae_lambda=0.5) == [near([-0.375, 1.5])]
    assert bilevel_gae([one], scale="none", **halves) == [[near([-0.09375, -2.375]), near([1.5])]]


@pytest.mark.parametrize("decay", [0.0, 0.7, 1.0])
def test_a_turn_that_is_rewarded_nothing_is_a_turn_of_its_own(decay: float) -> None:
    values = [[0.1, 0.2], [0.4, 0.8], [0.3]]
    [found] = bilevel_gae([valued([0.0, 0.0, 1.0], values)], scale="none", gae_lambda=decay)
    last = 0.7
    middle = 0.3 - 0.4 + decay * last
    first = 0.4 - 0.1 + decay * middle
    assert found == [near([first, first - 0.1]), near([middle, middle - 0.4]), near([last])]


@both
@given(rollouts(min_tokens=1), st.integers(0, 5), amounts, shares)
def test_a_turn_without_tokens_only_gives_its_reward_a_turn_earlier(
    estimator: Any, one: ScoredRollout, index: int, earned: float, decay: float
) -> None:
    """Without a discount, λ apart, it is as if the turn before had been rewarded for both."""
    index = 1 + index % max(len(one.values), 1)
    if not one.values:
        return
    rewards, values = list(one.turn_rewards), list(one.values)
    rewards.insert(index, earned)
    values.insert(index, [])
    with_it = estimator([valued(rewards, values)], scale="none", gae_lambda=decay)[0]
    joined = list(one.turn_rewards)
    joined[index - 1] += earned
    without = estimator([valued(joined, one.values)], scale="none", gae_lambda=decay)[0]
    if decay in {0.0, 1.0}:
        assert flat(with_it[:index]) == near(flat(without[:index]))
    assert flat(with_it[index + 1 :]) == near(flat(without[index:]))
    assert with_it[index] == (0.0 if estimator is turn_gae else [])


@both
@given(st.lists(rollouts(), max_size=4), st.randoms(use_true_random=False), st.sampled_from(["none", "group", "batch"]))
def test_order_does_not_matter(estimator: Any, batch: list[ScoredRollout], random: Any, scale: Any) -> None:
    order = random.sample(range(len(batch)), len(batch))
    shuffled = estimator([batch[i] for i in order], scale=scale)
    straight = estimator(batch, scale=scale)
    assert flat(shuffled) == near(flat([straight[i] for i in order]))


@both
def test_the_scale_is_the_root_mean_square_of_what_is_learnt(estimator: Any) -> None:
    batch = [
        valued([1.0, -2.0], [[0.0], [0.0]]),
        valued([0.0, 3.0], [[], [0.0]]),
        valued([9.0], [[0.0]], failed=True),
        valued([9.0], [[0.0]], dropped=True),
    ]
    raw = flat(estimator(batch, scale="none"))
    assert sorted(filter(None, raw)) == near([-2.0, -0.9, 3.0])  # λ of .95: 1 - .95·2
    spread = math.sqrt((0.9**2 + 2.0**2 + 3.0**2) / 2) + 1e-4
    for scale in ("group", "batch"):
        assert flat(estimator(batch, scale=scale)) == near([number / spread for number in raw])


@both
def test_group_is_all_that_shares_game_and_role_and_batch_is_everything(estimator: Any) -> None:
    small = [valued([1.0, -2.0], [[0.0], [0.0]], roles=["left", "left"]), valued([0.5], [[0.0]], roles=["left"])]
    large = [valued([earned], [[0.0]], roles=[role]) for earned, role in ((100.0, "left"), (300.0, "right"))]
    mixed = [*small, *(replace(one, environment="other") for one in large)]
    expected = [number for own in (small, large[:1], large[1:]) for number in flat(estimator(own))]
    assert flat(estimator(mixed, scale="group")) == near(expected)
    raw = flat(estimator(mixed, scale="none"))
    spread = math.sqrt(sum(number**2 for number in raw) / (len(raw) - 1)) + 1e-4
    assert flat(estimator(mixed, scale="batch")) == near([number / spread for number in raw])


@both
def test_advantages_that_are_all_alike_stay_of_the_size_of_one(estimator: Any) -> None:
    batch = [valued([1.0], [[0.0]]) for _ in range(8)]
    assert flat(estimator(batch)) == pytest.approx([1.0] * 8, rel=0.1)


@both
@given(rollouts(), rollouts())
def test_a_failed_or_dropped_rollout_gets_nothing_and_changes_nothing(
    estimator: Any, one: ScoredRollout, other: ScoredRollout
) -> None:
    for flags in ({"failed": True}, {"dropped": True}):
        out = valued(other.turn_rewards, other.values, **flags)
        found, nothing = estimator([one, out])
        assert flat(found) == flat(estimator([one])[0])
        assert not any(flat(nothing))
        assert [len(part) for part in targets_of(estimator, [out], 1.0)[0]] == [len(part) for part in out.values]
        assert np.isnan(flat(targets_of(estimator, [out], 1.0))).all()


@both
def test_nothing_gives_nothing(estimator: Any) -> None:
    assert estimator([]) == []
    assert estimator([valued([], [])]) == [[]]
    assert targets_of(estimator, [], 1.0) == []
    assert flat(estimator([valued([1.0], [[]])])) in ([], [0.0])


@given(rollouts(), shares, shares)
def test_the_targets_of_turns_are_their_lambda_returns_at_the_first_token(
    one: ScoredRollout, discount: float, decay: float
) -> None:
    [targets] = targets_of(turn_gae, [one], discount, gae_lambda=decay)
    [advantages] = turn_gae([one], discount=discount, scale="none", gae_lambda=decay)
    for target, values, advantage in zip(targets, one.values, advantages, strict=True):
        wanted = [advantage + values[0]] if values and one.included else [math.nan] * bool(values)
        assert target == near(wanted + [math.nan] * (len(values) - 1), nan_ok=True)


@given(rollouts(), shares, shares, shares)
def test_the_targets_of_tokens_are_their_advantages_and_values(
    one: ScoredRollout, discount: float, decay: float, token_decay: float
) -> None:
    options = {"gae_lambda": decay, "token_discount": 0.9, "token_gae_lambda": token_decay}
    targets = targets_of(bilevel_gae, [one], discount, **options)
    advantages = bilevel_gae([one], discount=discount, scale="none", **options)
    expected = np.array(flat(advantages)) + np.array(flat(one.values)) + (0.0 if one.included else math.nan)
    assert flat(targets) == near(expected.tolist(), nan_ok=True)


def test_the_targets_have_the_estimators_own_defaults() -> None:
    one = valued([1.0, 0.0, 2.0], [[0.3, 0.1], [0.7], [0.2, 0.9]])
    [turns] = turn_gae([one], scale="none")
    assert [target[0] for target in targets_of(turn_gae, [one], 1.0)[0]] == near(
        [advantage + value for advantage, value in zip(turns, first_values(one), strict=True)]
    )
    tokens = np.array(flat(bilevel_gae([one], scale="none"))) + np.array(flat(one.values))
    assert flat(targets_of(bilevel_gae, [one], 1.0)) == near(tokens.tolist())


@both
def test_without_values_it_names_what_to_set(estimator: Any) -> None:
    bare = ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None])
    for call in (partial(estimator, [bare]), partial(targets_of, estimator, [bare], 1.0)):
        with pytest.raises(ConfigError, match=r"set value_head to 'shared' or 'separate'"):
            call()


@both
def test_what_is_no_share_or_no_scale_is_refused(estimator: Any) -> None:
    with pytest.raises(ConfigError, match=r"gae_lambda must be a number in \[0, 1\], got 1.5"):
        estimator([], gae_lambda=1.5)
    with pytest.raises(ConfigError, match="did you mean 'group'"):
        estimator([], scale="groups")


def test_what_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_discount"):
        bilevel_gae([], token_discount=-0.1)
    with pytest.raises(ConfigError, match="token_gae_lambda"):
        bilevel_gae([], token_gae_lambda=math.nan)


# A game of two turns and at most two tokens a turn, over two words. Word 1 ends a turn, and the game where a turn
# consists of nothing else; a turn is rewarded by what was answered and by what was answered before.
Turn = tuple[int, ...]
History = tuple[Turn, ...]
Context = tuple[History, Turn]  # the turns so far, and what has been answered in this one
TURNS: list[Turn] = [(1,), (0, 0), (0, 1)]
EPISODES: list[History] = [((1,),), *itertools.product(TURNS[1:], TURNS)]
CONTEXTS = sorted(
    {(episode[:k], turn[:t]) for episode in EPISODES for k, turn in enumerate(episode) for t in range(len(turn))}
)
LOGIT: dict[Context, float] = {context: math.sin(3 * index + 1) for index, context in enumerate(CONTEXTS)}
PAID: dict[History, float] = {  # what the last turn of a history is given
    history: round(2 * math.cos(5 * index), 2) if index % 3 else 0.0
    for index, history in enumerate(sorted({episode[: k + 1] for episode in EPISODES for k in range(len(episode))}))
}


def chance(context: Context, word: int, logits: dict[Context, float]) -> float:
    one = 1 / (1 + math.exp(-logits[context]))
    return one if word else 1 - one


def steps(episode: History) -> list[list[tuple[Context, int]]]:
    """The context and the word of each token, by turn."""
    return [[((episode[:k], turn[:t]), word) for t, word in enumerate(turn)] for k, turn in enumerate(episode)]


def probability(episode: History, logits: dict[Context, float]) -> float:
    return math.prod(chance(*step, logits) for turn in steps(episode) for step in turn)


def rewards_of(episode: History) -> list[float]:
    return [PAID[episode[: k + 1]] for k in range(len(episode))]


def objective(logits: dict[Context, float]) -> float:
    return sum(probability(episode, logits) * sum(rewards_of(episode)) for episode in EPISODES)


def slope(context: Context) -> float:
    """d objective / d logit, by finite differences."""
    step = 1e-5
    high, low = (objective({**LOGIT, context: LOGIT[context] + shift}) for shift in (step, -step))
    return (high - low) / (2 * step)


def exact_value(context: Context) -> float:
    """What is still to come, in expectation, where the words so far are those of the context."""
    before, begun = context
    reached = [
        episode
        for episode in EPISODES
        if episode[: len(before)] == before
        and len(episode) > len(before)
        and episode[len(before)][: len(begun)] == begun
    ]
    weights = [probability(episode, LOGIT) for episode in reached]
    to_come = [sum(rewards_of(episode)[len(before) :]) for episode in reached]
    return float(np.dot(weights, to_come)) / sum(weights)


def wrong_value(context: Context) -> float:
    return math.cos(7 * CONTEXTS.index(context)) * 3


def expected_gradient(estimator: Any, value: Callable[[Context], float]) -> dict[Context, float]:
    """E[Σ A ∇ log π], one rollout a batch."""
    total = dict.fromkeys(CONTEXTS, 0.0)
    for episode in EPISODES:
        weight = probability(episode, LOGIT)
        turns = steps(episode)
        one = valued(rewards_of(episode), [[value(context) for context, _ in turn] for turn in turns])
        [advantages] = estimator([one], scale="none")
        for turn, numbers in zip(turns, advantages, strict=True):
            of_tokens: Any = [numbers] * len(turn) if isinstance(numbers, float) else numbers
            for (context, word), advantage in zip(turn, of_tokens, strict=True):
                total[context] += weight * advantage * (word - chance(context, 1, LOGIT))
    return total


def whole_reward(batch: Sequence[ScoredRollout], *, scale: str) -> list[list[float]]:
    return [[one.final_reward] * len(one.turn_rewards) for one in batch]


def error(estimator: Any, value: Callable[[Context], float]) -> float:
    truth, found = expected_gradient(whole_reward, value), expected_gradient(estimator, value)
    return max(abs(truth[context] - found[context]) for context in CONTEXTS)


def test_the_enumerated_game_is_complete_and_its_gradient_right() -> None:
    assert sum(probability(episode, LOGIT) for episode in EPISODES) == pytest.approx(1.0, abs=1e-12)
    gradient = expected_gradient(whole_reward, wrong_value)
    assert gradient == near({context: slope(context) for context in CONTEXTS})
    assert max(map(abs, gradient.values())) > 0.05
    assert 0.0 in PAID.values()


@both
@pytest.mark.parametrize("value", [exact_value, wrong_value])
def test_with_a_lambda_of_one_the_gradient_is_exact_whatever_the_values(estimator: Any, value: Any) -> None:
    assert error(partial(estimator, gae_lambda=1.0), value) < 1e-12


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_with_exact_values_the_gradient_is_exact_whatever_lambda(decay: float) -> None:
    assert error(partial(turn_gae, gae_lambda=decay), exact_value) < 1e-12
    assert error(partial(bilevel_gae, gae_lambda=decay, token_gae_lambda=decay), exact_value) < 1e-12


def test_below_one_wrong_values_bend_the_gradient() -> None:
    assert error(partial(turn_gae, gae_lambda=0.5), wrong_value) > 0.01
    assert error(partial(bilevel_gae, gae_lambda=1.0, token_gae_lambda=0.5), wrong_value) > 0.01
