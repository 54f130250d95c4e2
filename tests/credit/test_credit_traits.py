"""Traits: the table of the built-in ones, that it is true of what they compute, and those of one's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from scored_batches import SCALES, rollout, valued

from agentsgym import ConfigError, ScoredRollout, StopReason, Trajectory, Turn, estimator_traits
from agentsgym.credit.advantages import Scale, return_to_go, token_advantages
from agentsgym.credit.gae import turn_gae, turn_value_targets
from agentsgym.credit.registry import ESTIMATORS, EstimatorTraits, Use, get_estimator, traits_of

USES: tuple[Use, ...] = get_args(Use)
# Name, options, weight of potential shaping; words that are used, whether it compares in task groups.
TABLE: list[tuple[str, dict[str, Any], float, str, bool]] = [
    ("reward", {}, 0.0, "per_token_rewards", False),
    ("grpo", {}, 0.0, "final_reward", True),
    ("rloo", {}, 0.0, "final_reward", True),
    ("rae", {}, 0.0, "final_reward roles", False),
    ("return_to_go", {}, 0.0, "discount turn_rewards", True),
    ("return_to_go", {"baseline": "others"}, 0.0, "discount turn_rewards", True),
    ("return_to_go", {"baseline": "batch"}, 0.0, "discount turn_rewards", False),
    ("return_to_go", {"baseline": "role_ema"}, 0.0, "discount turn_rewards roles", False),
    ("return_to_go", {"baseline": "none"}, 0.0, "discount turn_rewards roles", False),
    ("return_to_go", {"follow": "calls"}, 0.0, "discount turn_rewards parents", True),
    ("rebn", {}, 0.0, "discount turn_rewards", False),
    ("mt_grpo", {}, 0.0, "turn_rewards final_reward", True),
    ("mt_grpo", {}, 0.5, "turn_rewards final_reward discount", True),
    ("gigpo", {}, 0.0, "discount turn_rewards final_reward state_keys", True),
    ("gigpo", {"baseline": "others"}, 0.0, "discount turn_rewards final_reward state_keys", True),
    ("turn_gae", {}, 0.0, "discount turn_rewards turn_values roles", False),
    ("turn_gae", {}, 0.5, "discount turn_rewards turn_values roles", False),
    ("bilevel_gae", {}, 0.0, "discount turn_rewards values roles", False),
]
built_in = pytest.mark.parametrize(
    ("name", "options", "weight"), [row[:3] for row in TABLE], ids=lambda part: str(part).strip("{}")
)
for_finding = settings(max_examples=2_000, phases=[Phase.generate], database=None, deadline=None, derandomize=True)
slow = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def made(name: str, options: dict[str, Any], weight: float) -> Any:
    estimator = get_estimator(name, **options)
    return get_estimator(estimator, potential_weight=weight) if weight else estimator


@pytest.mark.parametrize(("name", "options", "weight", "uses", "compares"), TABLE)
def test_the_traits_of_the_built_in_estimators(
    name: str, options: dict[str, Any], weight: float, uses: str, compares: bool
) -> None:
    expected = EstimatorTraits(
        uses=frozenset(uses.split()), compares_in_task_groups=compares, per_token=name == "bilevel_gae"
    )
    assert made(name, options, weight).traits == expected


def test_every_built_in_estimator_is_in_the_table() -> None:
    assert {row[0] for row in TABLE} == set(ESTIMATORS)


# --- they are true ------------------------------------------------------------------------------------------------

# Each turn and each rollout has two versions of everything, so that any part can be changed alone.
LEVELS = (-1.0, 0.0, 0.5, 2.0)
versions = st.sampled_from([*product(LEVELS, [None, "a", "b"], "lr", LEVELS, LEVELS)])
case_turns = st.lists(st.tuples(st.integers(1, 2), versions, versions), max_size=3)
case_frames = st.sampled_from([*product(LEVELS, LEVELS, range(2), range(2), ["chess", "go"], ["failed", "", "", ""])])
cases = st.lists(st.tuples(case_turns, case_frames), min_size=1, max_size=5)
Case = list[tuple[list[tuple[int, Any, Any]], Any]]


@dataclass(frozen=True)
class Played:
    """A rollout and its tokens, some of its parts in their second version."""

    scored: ScoredRollout
    trajectory: Trajectory


def played(turns: list[tuple[int, Any, Any]], frame: Any, changed: set[str], index: int = 0) -> Played:
    def version(place: int, part: str) -> list[Any]:
        return [(second if part in changed else first)[place] for _, first, second in turns]

    lengths = [length for length, _, _ in turns]
    finals, groups, environment, status = frame[:2], frame[2:4], frame[4], frame[5]
    first = version(3, "values" if "values" in changed else "turn_values")
    later = version(3, "values" if "values" in changed else "later_values")
    both = zip(lengths, first, later, strict=True)
    values = [[one, *(other + 0.25 * t for t in range(1, n))] for n, one, other in both]
    rewards = [level for n, level in zip(lengths, version(4, "per_token_rewards"), strict=True) for _ in range(n)]
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    scored = ScoredRollout(
        turn_rewards=version(0, "turn_rewards"),
        final_reward=finals["final_reward" in changed],
        group=groups["group" in changed],
        state_keys=version(1, "state_keys"),
        failed=status == "failed",
        environment=environment,
        roles=version(2, "roles")[:1] * len(turns),  # a rollout has one role
        potentials=[0.5 * k for k in range(len(turns))],
        token_counts=lengths,
        values=values,
        parents=[k - 1 if k and (k == 1 or "parents" in changed) else None for k in range(len(turns))],
    )
    trajectory = Trajectory(
        token_ids=range(sum(lengths)),
        turns=[Turn(start=at, stop=at + n, reward=0.0) for at, n in zip(starts, lengths, strict=True)],
        messages=[],
        final_reward=0.0,
        stop_reason=StopReason.FAILED if status else StopReason.DONE,
        per_token_rewards=rewards,
    )
    return Played(scored, trajectory)


def advantages(
    estimator: Any, case: Case, scale: Scale, changed: Sequence[str] = (), which: Any = lambda _frame: True
) -> list[list[list[float]]]:
    """The advantages of all tokens in two batches that are alike; the second knows what was kept of the first."""
    estimator = copy.deepcopy(estimator)
    batch = [
        played(turns, frame, set(changed) if which(frame) else set(), index)
        for index, (turns, frame) in enumerate(case)
    ]
    discount = 0.5 if "discount" in changed else 1.0
    found: list[list[list[float]]] = []
    for _ in range(2):
        numbers = estimator([one.scored for one in batch], discount=discount, scale=scale)
        found.append(
            [
                token_advantages(one.trajectory, own, estimator=estimator)
                for one, own in zip(batch, numbers, strict=True)
            ]
        )
    return found


def undeclared(uses: Collection[Use]) -> set[str]:
    """What an estimator may not look at; ``"turn_values"`` are a part of ``"values"``."""
    parts: set[str] = {use for use in USES if use not in uses}
    if "turn_values" in uses:
        return parts - {"values"} | {"later_values"}
    return parts - {"turn_values"} if "values" in uses else parts


@built_in
@slow
@given(case=cases, scale=st.sampled_from(SCALES))
def test_what_is_not_declared_changes_nothing(name: str, options: Any, weight: float, case: Case, scale: Scale) -> None:
    estimator = made(name, options, weight)
    groups = [] if estimator.traits.compares_in_task_groups else ["group"]
    plain = advantages(estimator, case, scale)
    for part in [*groups, *undeclared(estimator.traits.uses)]:
        assert advantages(estimator, case, scale, [part]) == plain, part


@built_in
def test_whatever_is_declared_can_change_the_result(name: str, options: Any, weight: float) -> None:
    estimator = made(name, options, weight)
    groups = ["group"] if estimator.traits.compares_in_task_groups else []
    for part in [*groups, *estimator.traits.uses]:
        find(
            cases,
            lambda case, part=part: any(
                advantages(estimator, case, scale, [part]) != advantages(estimator, case, scale) for scale in SCALES
            ),
            settings=for_finding,
        )  # raises if there is none


COMPARING = [row[:3] for row in TABLE if row[4]]
comparing = pytest.mark.parametrize(("name", "options", "weight"), COMPARING)
EVERYTHING = [use for use in USES if use != "discount"]


def of_group(case: Case, found: list[list[list[float]]], group: int) -> list[list[list[float]]]:
    return [[row for row, (_, frame) in zip(rows, case, strict=True) if frame[2] == group] for rows in found]


@comparing
@slow
@given(case=cases, scale=st.sampled_from(["none", "group"]))
def test_what_compares_in_task_groups_does_not_look_at_other_groups(
    name: str, options: Any, weight: float, case: Case, scale: Scale
) -> None:
    estimator = made(name, options, weight)
    changed = advantages(estimator, case, scale, EVERYTHING, which=lambda frame: frame[2] == 1)
    assert of_group(case, changed, 0) == of_group(case, advantages(estimator, case, scale), 0)


@comparing
def test_what_compares_in_task_groups_looks_at_the_others_of_the_group(name: str, options: Any, weight: float) -> None:
    estimator = made(name, options, weight)

    def another_matters(case: Case) -> bool:
        first, changed = (
            case[0][1],
            advantages(estimator, case, "none", EVERYTHING, which=lambda f: f is not case[0][1]),
        )
        peers = all(frame is not first and frame[2] == first[2] for _, frame in case[1:])
        return peers and changed[0][0] != advantages(estimator, case, "none")[0][0]

    find(cases, another_matters, settings=for_finding)


@built_in
@slow
@given(case=cases)
def test_one_number_a_token_is_given_where_that_is_declared(name: str, options: Any, weight: float, case: Case) -> None:
    estimator = made(name, options, weight)
    batch = [played(turns, frame, set()).scored for turns, frame in case]
    entries = [entry for own in estimator(batch, discount=1.0, scale="none") for entry in own]
    assert all(isinstance(entry, list) == estimator.traits.per_token for entry in entries)


# --- one's own ----------------------------------------------------------------------------------------------------


def plain(rollouts: Sequence[ScoredRollout], *, discount: float, scale: Scale) -> list[list[float]]:
    return [[one.final_reward] * len(one.turn_rewards) for one in rollouts]


@estimator_traits(uses=["discount", "turn_rewards"], compares_in_task_groups=True)
def declared(rollouts: Sequence[ScoredRollout], *, discount: float, scale: Scale, bonus: float = 0.0) -> list[Any]:
    return [[reward + bonus for reward in one.turn_rewards] for one in rollouts]


@estimator_traits(uses={"per_token_rewards"}, per_token=True)
class Declared:
    """A callable that is no function."""

    def __call__(self, rollouts: Sequence[ScoredRollout], *, discount: float, scale: Scale) -> list[list[float]]:
        return plain(rollouts, discount=discount, scale=scale)


DECLARED = EstimatorTraits(uses=frozenset({"discount", "turn_rewards"}), compares_in_task_groups=True)


def test_an_estimator_of_ones_own_declares_its_traits_or_has_none() -> None:
    assert get_estimator(plain).traits is None
    assert get_estimator(declared).traits == DECLARED
    assert get_estimator(declared, bonus=1.0).traits == DECLARED
    assert get_estimator(Declared()).traits == EstimatorTraits(uses=frozenset({"per_token_rewards"}), per_token=True)
    assert get_estimator(plain, potential_weight=1.0).traits is None


def test_traits_are_found_within_a_partial() -> None:
    assert get_estimator(partial(declared, bonus=1.0)).traits == DECLARED
    positional = partial(estimator_traits(uses=["values"])(lambda one, rollouts, *, discount, scale: []), 1.0)
    assert get_estimator(positional).traits == EstimatorTraits(uses=frozenset({"values"}))
    shaped = get_estimator(partial(return_to_go, baseline="none"), potential_weight=1.0)
    assert shaped.traits == get_estimator("return_to_go", baseline="none").traits
    own = estimator_traits(uses=["roles"])(partial(declared, bonus=1.0))
    assert get_estimator(own).traits == EstimatorTraits(uses=frozenset({"roles"}))
    assert get_estimator(own)([rollout([1.0])], discount=1.0, scale="none") == [[2.0]]


def test_what_is_declared_survives_a_copy() -> None:
    for estimator in (get_estimator(declared), get_estimator(Declared()), get_estimator("turn_gae")):
        for twin in (copy.deepcopy(estimator), pickle.loads(pickle.dumps(estimator))):
            assert twin.traits == estimator.traits


def test_per_token_rewards_take_the_place_of_what_an_estimator_of_ones_own_returns() -> None:
    one = played([(2, (1.0, None, "l", 0.0, 0.5), ())], (1.0, 1.0, 0, 0, "go", ""), set())
    assert token_advantages(one.trajectory, [7.0], estimator=get_estimator(Declared())) == [0.5, 0.5]
    assert token_advantages(one.trajectory, [7.0], estimator=get_estimator(declared)) == [7.0, 7.0]


def test_words_that_are_unknown_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^uses has the unknown name 'value'; did you mean 'values'\?$"):
        estimator_traits(uses=["discount", "value"])
    with pytest.raises(ConfigError, match=r"^uses has the unknown name 'owners': training no longer forks .*; leave"):
        estimator_traits(uses=["turn_rewards", "owners"])
    with pytest.raises(ConfigError, match=r"^uses must be a list or a set of names, got the string 'values'$"):
        estimator_traits(uses="values")


def test_shaping_that_an_estimator_of_ones_own_would_not_see_is_refused() -> None:
    blind = estimator_traits(uses=["values"])(lambda rollouts, *, discount, scale: [])
    with pytest.raises(
        ConfigError, match=r"potential_weight would have no effect .* it does not use the rewards of turns"
    ):
        get_estimator(blind, potential_weight=1.0)
    assert get_estimator(declared, potential_weight=1.0).traits == DECLARED


# --- value targets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [plain, declared, "grpo"])
def test_a_value_head_beside_another_estimator_is_trained_towards_the_returns(estimator: Any) -> None:
    batch = [valued([1.0, 2.0], [[0.3, 0.1], [0.7]])]
    targets = get_estimator(estimator).value_targets(batch, discount=0.5)
    [[(first, nothing), (second,)]] = targets
    assert (first, second) == pytest.approx((2.0, 2.0))
    assert nothing != nothing  # noqa: PLR0124  # NaN
    assert str(targets) == str(turn_value_targets(batch, discount=0.5, gae_lambda=1.0))


@pytest.mark.parametrize("estimator", [get_estimator(declared), declared, partial(declared, bonus=1.0)])
def test_targets_are_of_the_rewards_that_a_shaped_estimator_sees(estimator: Any) -> None:
    batch = [valued([1.0, 2.0], [[0.3], [0.7]], potentials=[-3.0, -1.0])]  # shaped: 1 - .5 + 3, 2 + 1
    assert get_estimator(estimator, potential_weight=1.0).value_targets(batch, discount=0.5) == [
        [[pytest.approx(5.0)], [pytest.approx(3.0)]]
    ]


def test_targets_know_the_options_of_a_wrapped_partial() -> None:
    batch = [valued([1.0, 2.0], [[0.25], [0.5]], potentials=[0.0, 0.0])]
    shaped = get_estimator(partial(turn_gae, gae_lambda=0.0), potential_weight=1.0)
    assert shaped.value_targets(batch, discount=1.0) == [[[1.5], [2.0]]]


def test_traits_of_a_bare_function_go_by_its_options() -> None:
    assert traits_of(return_to_go) == DECLARED
    assert traits_of(return_to_go, {"baseline": "none"}) == get_estimator("return_to_go", baseline="none").traits
    assert traits_of(plain) is None
