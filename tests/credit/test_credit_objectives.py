"""Named rewards: weights, the two ways to combine components, and what each is unbiased for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import two_seats
from hypothesis import given
from hypothesis import strategies as st
from scored_batches import QUARTERS, Batch, assert_close, batches, discounts, rollout, scales
from tabular import Play, at_turns, expected, fit, game, largest

from agentsgym import ConfigError, ScoredRollout, StopReason, Trajectory, Turn
from agentsgym.credit.assignment import PENALTY, AdvantageAssigner, filter_rollouts
from agentsgym.credit.components import amounts_of, by_name, sum_components
from agentsgym.credit.objectives import add_component, component, weighted
from agentsgym.credit.registry import ESTIMATORS
from agentsgym.credit.rewards import TURN_CREDITS, RewardComponent, credited_components, credited_rewards
from agentsgym.credit.settings import CreditSettings

SEPARATE = "normalize_then_sum"
COMPARING = ("grpo", "rloo", "return_to_go", "rebn", "mt_grpo", "gigpo")
STATEFUL = {"rae": {}, "return_to_go": {"baseline": "role_ema"}}
OTHERS = {"return_to_go": [{}, {"baseline": "batch"}, {"baseline": "none"}], "gigpo": [{}, {"baseline": "others"}]}
CASES = [(name, options) for name in (*COMPARING, "rae") for options in OTHERS.get(name, [{}])]
WITHOUT_VALUES = [name for name in ESTIMATORS if name not in {"turn_gae", "bilevel_gae"}]

weights = st.fixed_dictionaries({}, optional={name: st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]) for name in "ab"})


def advantages(rollouts: Sequence[ScoredRollout], name: str, **settings: Any) -> list[list[float]]:
    options = settings.pop("options", {})
    assigner = AdvantageAssigner(CreditSettings(advantage_estimator=name, options=options, **settings))
    prepared = weighted(rollouts, settings.get("reward_weights"))
    return [list(turns) for turns in assigner.turn_advantages(prepared, is_training=True)]


def as_component(one: ScoredRollout) -> RewardComponent:
    return RewardComponent(turn_rewards=one.turn_rewards, final_reward=one.final_reward)


def split(one: ScoredRollout, parts: list[tuple[list[float], float]], names: str = "ab") -> ScoredRollout:
    """Give a rollout these components, whose sum its rewards become."""
    named = {
        name: RewardComponent(turn_rewards=rewards[: len(one.turn_rewards)], final_reward=final)
        for name, (rewards, final) in zip(names, parts, strict=True)
    }
    totals = [sum(own.turn_rewards[k] for own in named.values()) for k in range(len(one.turn_rewards))]
    return replace(
        one, turn_rewards=totals, final_reward=sum(own.final_reward for own in named.values()), components=named
    )


parts = st.tuples(st.lists(st.sampled_from(QUARTERS), min_size=4, max_size=4), st.sampled_from(QUARTERS))


@st.composite
def named_batches(draw: st.DrawFn) -> Batch:
    return [split(one, draw(st.lists(parts, min_size=2, max_size=2))) for one in draw(batches)]


@given(batches, scales, discounts, st.sampled_from(["sum_then_normalize", SEPARATE]))
@pytest.mark.parametrize(("name", "options"), CASES)
def test_one_component_is_the_plain_number(
    name: str, options: dict[str, Any], rollouts: Batch, scale: str, discount: float, aggregation: str
) -> None:
    settings: dict[str, Any] = {"options": options, "scale_rewards": scale, "discount": discount}
    settings["multi_objective_aggregation"] = aggregation
    named = [replace(one, components={"a": as_component(one)}) for one in rollouts]
    assert advantages(named, name, **settings) == advantages(rollouts, name, **settings)


@given(batches, scales)
@pytest.mark.parametrize("name", WITHOUT_VALUES)
def test_without_weights_only_the_sum_counts(name: str, rollouts: Batch, scale: str) -> None:
    noise = RewardComponent(turn_rewards=[5.0, 7.0, 1.0, 3.0], final_reward=9.0)
    named = [
        replace(
            one, components={"a": as_component(one), "b": replace(noise, turn_rewards=[1.0] * len(one.turn_rewards))}
        )
        for one in rollouts
    ]
    assert advantages(named, name, scale_rewards=scale) == advantages(rollouts, name, scale_rewards=scale)


@given(named_batches(), weights, scales, discounts)
@pytest.mark.parametrize("name", COMPARING)
def test_a_weighted_sum_is_a_plain_reward(
    name: str, rollouts: Batch, weights: dict[str, float], scale: str, discount: float
) -> None:
    plain = [
        replace(
            one,
            turn_rewards=[
                sum(weights.get(key, 1) * own.turn_rewards[k] for key, own in one.components.items())
                for k in range(len(one.turn_rewards))
            ],
            final_reward=sum(weights.get(key, 1) * own.final_reward for key, own in one.components.items()),
            components={},
        )
        for one in rollouts
    ]
    settings = {"scale_rewards": scale, "discount": discount}
    assert advantages(rollouts, name, reward_weights=weights, **settings) == advantages(plain, name, **settings)


@given(named_batches(), weights, scales, discounts)
@pytest.mark.parametrize("name", COMPARING)
def test_each_component_has_its_own_baseline_and_scale(
    name: str, rollouts: Batch, weights: dict[str, float], scale: str, discount: float
) -> None:
    settings = {"scale_rewards": scale, "discount": discount}
    total = [np.zeros(len(one.turn_rewards)) for one in rollouts]
    for key in "ab":
        only = [
            replace(
                one,
                turn_rewards=one.components[key].turn_rewards,
                final_reward=one.components[key].final_reward,
                components={},
            )
            for one in rollouts
        ]
        for i, turns in enumerate(advantages(only, name, **settings)):
            total[i] += weights.get(key, 1) * np.array(turns)
    squares = [
        np.mean(turns**2)
        for one, turns in zip(rollouts, total, strict=True)
        if len(turns) and not one.failed and not one.dropped
    ]
    spread = np.sqrt(np.sum(squares) / max(len(squares) - 1, 1)) + 1e-4
    expected = [(turns if scale == "none" else turns / spread).tolist() for turns in total]
    found = advantages(rollouts, name, reward_weights=weights, multi_objective_aggregation=SEPARATE, **settings)
    assert_close(found, expected)


@given(batches, scales)
@pytest.mark.parametrize("name", COMPARING)
def test_a_constant_component_adds_nothing(name: str, rollouts: Batch, scale: str) -> None:
    """However large its weight, among episodes of one length, each of which can be compared with another."""
    even = [one for one in rollouts if len(one.turn_rewards) == 2] * 2
    alone = [replace(one, components={"a": as_component(one)}) for one in even]
    always = RewardComponent(turn_rewards=[0.0, 3.0], final_reward=3.0)
    both = [replace(one, components={"a": as_component(one), "b": always}) for one in even]
    settings: dict[str, Any] = {"scale_rewards": scale, "multi_objective_aggregation": SEPARATE}
    found = advantages(both, name, reward_weights={"b": 1000.0}, **settings)
    assert found == advantages(alone, name, **settings)


def trls_normalize_then_sum(rewards: np.ndarray, factors: np.ndarray, size: int) -> np.ndarray:
    """``GRPOTrainer._generate_and_score_completions`` of TRL, in double precision."""
    grouped = rewards.reshape(-1, size, rewards.shape[1])
    scaled = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, ddof=1, keepdims=True) + 1e-4)
    total = scaled.reshape(-1, rewards.shape[1]) @ factors
    return (total - total.mean()) / (total.std(ddof=1) + 1e-4)


def test_with_grpo_it_is_what_trl_computes() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.integers(0, 4, size=(12, 3)) * [1.0, 0.1, 20.0]
    factors = {"a": 1.0, "b": 0.2, "c": -0.5}
    rollouts = [
        split(rollout([0.0] * (1 + i % 3), group=i // 4), [([one] * 3, one) for one in row], "abc")
        for i, row in enumerate(rewards)
    ]
    found = advantages(rollouts, "grpo", reward_weights=factors, multi_objective_aggregation=SEPARATE)
    known = trls_normalize_then_sum(rewards, np.array([*factors.values()]), 4)
    assert [turns[0] for turns in found] == pytest.approx(known, abs=1e-12)
    assert all(len({*turns}) == 1 for turns in found)


def test_a_large_component_does_not_hide_a_small_one() -> None:
    rollouts = [
        split(rollout([0.0]), [([large], large), ([small], small)])
        for large, small in ((100.0, 0.0), (100.0, 1.0), (0.0, 0.0), (0.0, 1.0))
    ]
    [hidden], [shown], _, _ = advantages(rollouts, "grpo")
    assert shown - hidden < 0.02
    [without], [having], _, _ = advantages(rollouts, "grpo", multi_objective_aggregation=SEPARATE)
    assert having - without > 1.2


# --- expectations, by enumeration ---------------------------------------------------------------------------------

FACTORS = {"cost": 2.0, "prize": 0.5}
GAME = game(3)


def named(play: Play) -> ScoredRollout:
    """The game's costs and prizes as two components."""
    one = play.scored
    signs: dict[str, Callable[[float], float]] = {"cost": lambda r: min(r, 0.0), "prize": lambda r: max(r, 0.0)}
    own = {name: [sign(reward) for reward in one.turn_rewards] for name, sign in signs.items()}
    components = {name: RewardComponent(turn_rewards=r, final_reward=sum(r)) for name, r in own.items()}
    return replace(one, components=components)


def weighted_gradient(factors: Mapping[str, float]) -> np.ndarray:
    """The gradient of the mean weighted sum of the final components, ``Σ p·(Σ_n w_n·R_n)·∇log p``."""
    total = np.zeros(12)
    for play in GAME.plays:
        final = sum(factors[name] * own.final_reward for name, own in named(play).components.items())
        total += play.probability * final * play.scores.sum(0)
    return total


def estimate(name: str, aggregation: str, *, scale: str = "none", discount: float = 1.0, **options: Any) -> np.ndarray:
    settings: dict[str, Any] = {"options": options, "scale_rewards": scale, "discount": discount}
    settings |= {"reward_weights": FACTORS, "multi_objective_aggregation": aggregation}
    view = {play: named(play) for play in GAME.plays}
    return expected(at_turns(lambda rollouts: advantages(rollouts, name, **settings), view.__getitem__), horizon=3)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", SEPARATE])
@pytest.mark.parametrize(
    ("name", "options", "factor"),
    [("rloo", {}, 1.0), ("return_to_go", {}, 1.0), ("gigpo", {"baseline": "others"}, 2.0), ("grpo", {}, 0.5)],
)
def test_without_a_scale_both_are_unbiased_for_the_weighted_sum(
    name: str, options: dict[str, Any], factor: float, aggregation: str
) -> None:
    assert largest(estimate(name, aggregation, **options) - factor * weighted_gradient(FACTORS)) < 1e-12


def test_a_scale_of_its_own_lets_the_components_vote() -> None:
    """In pairs a group's scale leaves only who got more, of each component: the weights decide, and no amounts."""

    def scaled(difference: float) -> float:
        return difference / (abs(difference) * np.sqrt(2) + 1e-4)

    known = np.zeros(12)
    for play, other in product(GAME.plays, repeat=2):
        own, others = (named(one).components for one in (play, other))
        votes = [FACTORS[name] * scaled(own[name].final_reward - others[name].final_reward) for name in FACTORS]
        known += play.probability * other.probability * scaled(sum(votes)) * play.scores.sum(0)
    separate = estimate("grpo", SEPARATE, scale="group")
    assert fit(separate, known).off < 1e-3  # the constant that the divisors add is not the same
    assert fit(separate, weighted_gradient(FACTORS)).off > 0.1
    assert fit(separate, estimate("grpo", "sum_then_normalize", scale="group")).off > 0.1


def test_with_a_discount_each_component_is_discounted() -> None:
    total = np.zeros(12)
    for play in GAME.plays:
        for name, own in named(play).components.items():
            following = [
                sum(0.5**j * earned for j, earned in enumerate(own.turn_rewards[k:])) for k in range(len(play.steps))
            ]
            total += play.probability * FACTORS[name] * (np.array(following) @ play.turn_scores)
    for aggregation in ("sum_then_normalize", SEPARATE):
        assert largest(estimate("return_to_go", aggregation, discount=0.5) - total) < 1e-12


def seated(one: two_seats.Episode, factors: Mapping[str, float] | None = None) -> ScoredRollout:
    """An episode of the two seats whose rewards have two names: what is given on the way, and what at the end."""
    last = len(one.moves) - 1
    earned = [
        {role: {"end" if k == last else "way": sign * amount} for role, sign in (("X", 1), ("O", -1))}
        for k, amount in enumerate(one.earned_to_x)
    ]
    if factors is not None:
        earned = [
            {role: {name: factors[name] * amount for name, amount in own.items()} for role, own in step.items()}
            for step in earned
        ]
    turns = [
        Turn(
            start=k,
            stop=k + 1,
            reward=0.0,
            role=two_seats.ROLES[k],
            role_rewards={role: sum(own.values()) for role, own in step.items()},
            role_components=step,
            state_key=one.moves[:k],
        )
        for k, step in enumerate(earned)
    ]
    settled, finals = two_seats.attribute_rewards(turns)
    own = [turn for turn in settled if turn.role == "X"]
    record = Trajectory(
        token_ids=list(range(len(turns))),
        turns=settled,
        messages=[],
        final_reward=finals["X"],
        final_rewards=finals,
        final_components=sum_components((turn.reward, turn.components) for turn in own),
        stop_reason=StopReason.DONE,
    )
    return ScoredRollout.from_trajectory(record, group=0, environment="two seats")


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", SEPARATE])
@pytest.mark.parametrize(
    ("name", "options", "factor"),
    [("rloo", {}, 1.0), ("return_to_go", {}, 1.0), ("return_to_go", {"baseline": "batch"}, 1.0)],
)
def test_each_seat_climbs_the_weighted_sum_of_its_own_rewards(
    name: str, options: dict[str, Any], factor: float, aggregation: str
) -> None:
    factors = {"way": 0.5, "end": -2.0}
    gradient = np.zeros(two_seats.LOGITS.size)
    for one in two_seats.episodes():
        finals = seated(one, factors).final_rewards
        for k, scores in enumerate(one.scores):
            gradient += one.probability * finals[two_seats.ROLES[k]] * scores
    settings = CreditSettings(
        advantage_estimator=name,
        options=options,
        scale_rewards="none",
        reward_weights=factors,
        multi_objective_aggregation=aggregation,
    )
    assigner = AdvantageAssigner(settings)

    def found(plays: Sequence[two_seats.Episode]) -> Any:
        return assigner.estimate([seated(one) for one in plays], is_training=False).entries

    for num_rollouts in (1, 2):
        assert np.abs(two_seats.expected(found, num_rollouts) - factor * gradient).max() < 1e-12


# --- conversions and checks ---------------------------------------------------------------------------------------

rewards = st.one_of(
    st.sampled_from(QUARTERS), st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(QUARTERS), min_size=1)
)


@given(st.lists(st.tuples(rewards, st.sampled_from(["X", "O"])), max_size=5), st.sampled_from([*TURN_CREDITS]), rewards)
def test_components_add_up_to_the_rewards(given: list[tuple[Any, str]], turn_credit: str, final: Any) -> None:
    def pair(one: Any) -> tuple[float, Any]:
        return (sum(one.values()), one) if isinstance(one, dict) else (one, None)

    turns = [
        Turn(start=k, stop=k + 1, reward=pair(one)[0], components=pair(one)[1], role=role)
        for k, (one, role) in enumerate(given)
    ]
    record = Trajectory(
        token_ids=[0] * len(turns),
        turns=turns,
        messages=[],
        final_reward=pair(final)[0],
        final_components=pair(final)[1],
        stop_reason=StopReason.DONE,
    )
    found = credited_components(record, turn_credit)
    if not any(isinstance(one, dict) for one in (*(one for one, _ in given), final)):
        assert found == {}
        return
    total = np.sum([own.turn_rewards for own in found.values()], axis=0)
    assert total.tolist() == pytest.approx(credited_rewards(record, turn_credit), abs=1e-12)
    assert sum(own.final_reward for own in found.values()) == pytest.approx(record.final_reward)
    for name in found:
        assert amounts_of(name, [pair(final)]) == [by_name(*pair(final)).get(name, 0.0)]


def test_averages_are_kept_per_component() -> None:
    won = split(rollout([0.0], environment=("maze", "{}"), roles=["X"]), [([1.0], 1.0), ([4.0], 4.0)])
    settings = CreditSettings(
        advantage_estimator="rae", options={"decay": 0.5}, scale_rewards="none", multi_objective_aggregation=SEPARATE
    )
    assigner = AdvantageAssigner(settings)
    assert [assigner.turn_advantages([won], is_training=True) for _ in range(2)] == [[[5.0]], [[2.5]]]
    assert assigner.turn_advantages([won], is_training=False) == [[1.25]]
    assert assigner.estimator.state is not None
    assert assigner.estimator.state.state_dict() == {
        "baselines": [[[["maze", "{}", "a"], "X"], 0.75], [[["maze", "{}", "b"], "X"], 3.0]]
    }


def test_a_penalty_is_a_component_of_its_own() -> None:
    cut = replace(rollout([1.0, 2.0]), truncated=True)
    found = add_component(cut, PENALTY, -0.5)
    assert (found.turn_rewards, found.final_reward) == ([1.0, 1.5], 2.5)
    assert {name: list(one.turn_rewards) for name, one in found.components.items()} == {
        "reward": [1.0, 2.0],
        PENALTY: [0.0, -0.5],
    }
    args = CreditSettings(truncation="penalize", truncation_penalty=0.5, multi_objective_aggregation=SEPARATE)
    [kept], _ = filter_rollouts([cut], args)
    assert kept == found
    assert list(component(kept, PENALTY).turn_rewards) == [0.0, -0.5]


def test_a_reward_may_have_the_name_of_the_penalty() -> None:
    one, other = (split(rollout([0.0]), [([amount], amount)], "a") for amount in (5.0, 0.0))
    cut, whole = (replace(each, components={"truncation_penalty": each.components["a"]}) for each in (one, other))
    args = CreditSettings(
        truncation="penalize",
        truncation_penalty=1.0,
        multi_objective_aggregation=SEPARATE,
        scale_rewards="none",
        reward_weights={"truncation_penalty": 2.0},
    )
    found = AdvantageAssigner(args).estimate([replace(cut, truncated=True), whole], is_training=True)
    assert found.entries == [[9.0], [-9.0]]  # 2 * 5 - 1, against 0


def test_a_group_is_flat_only_if_every_component_is() -> None:
    traded = [split(rollout([0.0]), [([one], one), ([-one], -one)]) for one in (1.0, 2.0)]
    for aggregation, names, kept in (("sum_then_normalize", {}, 0), (SEPARATE, {}, 1), (SEPARATE, {"a": 0, "b": 0}, 0)):
        args = CreditSettings(
            zero_variance_groups="drop", multi_objective_aggregation=aggregation, reward_weights=names or None
        )
        rollouts, metrics = filter_rollouts(weighted(traded, names), args)
        assert metrics == {"frac_reward_zero_std": 1 - kept, "groups/kept": kept}
        assert [one.dropped for one in rollouts] == [not kept] * 2


def test_a_weight_for_an_unknown_name_is_refused() -> None:
    rollouts = [split(rollout([0.0]), [([1.0], 1.0), ([2.0], 2.0)], names="ab")]
    assigner = AdvantageAssigner(CreditSettings(reward_weights={"a": 1.0, "corect": 2.0}))
    sentence = "reward_weights has a weight for 'corect', but the rewards of the first batch have only the components"
    with pytest.raises(ConfigError, match=sentence):
        assigner.assign(rollouts, range(0), [], [1], is_training=True)
    AdvantageAssigner(CreditSettings(reward_weights={"reward": 2.0})).assign(
        [rollout([1.0])], range(0), [], [1], is_training=True
    )


def test_a_name_that_some_rollouts_lack_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    one, other = (split(rollout([0.0], environment="maze"), [([1.0], 1.0)], names=name) for name in "ab")
    elsewhere = split(rollout([0.0], environment="chess", group=1), [([1.0], 1.0)], names="c")
    assigner = AdvantageAssigner(CreditSettings(scale_rewards="none", reward_weights={"a": 2.0}))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assigner.assign([one, other, elsewhere], range(0), [], [1, 1, 1], is_training=True)
    assert caplog.messages == [
        f"only some rollouts of maze have the reward {name!r}; in the others it counts as 0" for name in "ab"
    ]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"advantage_estimator": "reward", "reward_weights": {"a": 2.0}}, "per-token rewards unchanged"),
        ({"advantage_estimator": "reward", "multi_objective_aggregation": SEPARATE}, "per-token rewards unchanged"),
        ({"advantage_estimator": "turn_gae", "multi_objective_aggregation": SEPARATE}, "a value head predicts"),
        ({"value_head": "shared", "multi_objective_aggregation": SEPARATE}, "a value head predicts"),
        ({"potential_weight": 1.0, "multi_objective_aggregation": SEPARATE}, "omit potential_weight"),
    ],
)
def test_what_cannot_be_done_per_component_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        AdvantageAssigner(CreditSettings(**settings))


def test_settings_are_kept() -> None:
    settings = CreditSettings(reward_weights={"a": 0.5}, multi_objective_aggregation=SEPARATE)
    assert CreditSettings.from_dict(settings.as_dict()) == settings
    assert "reward_weights" not in CreditSettings().as_dict()


def test_all_pairs_of_weights_and_names_are_finite() -> None:
    rollouts = [split(rollout([0.0]), [([a], a), ([b], b)]) for a, b in product((0.0, 1.0), repeat=2)]
    found = advantages(rollouts, "grpo", reward_weights={"a": 0.0, "b": 0.0}, multi_objective_aggregation=SEPARATE)
    assert found == [[0.0]] * 4
