"""Names and callables become bound estimators, with options that are checked before anything is played."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from scored_batches import rollout

from agentsgym import ConfigError, ScoredRollout
from agentsgym.credit.advantages import ESTIMATORS, BoundEstimator, Scale, get_estimator, gigpo, grpo, rae
from agentsgym.credit.ema import EMABaselines

KEEPS_SOMETHING = {"rae"}


def mine(rollouts: Sequence[ScoredRollout], *, discount: float, scale: Scale, bonus: float = 1.0) -> list[list[float]]:
    return [[discount * bonus] * len(one.turn_rewards) for one in rollouts]


def takes_anything(rollouts: Sequence[ScoredRollout], **settings: Any) -> list[list[float]]:
    return [[settings["bonus"]] for _ in rollouts]


def remembers(
    rollouts: Sequence[ScoredRollout], *, discount: float, scale: Scale, state: EMABaselines
) -> list[list[float]]:
    state.update("calls", 1.0, decay=0.5)
    return [[state.get("calls")] for _ in rollouts]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_are_found_by_name_and_can_be_copied(name: str) -> None:
    found = get_estimator(name)
    assert (found.function, found.options) == (ESTIMATORS[name], {})
    assert isinstance(found, BoundEstimator)
    assert found.name == name
    assert (found.state == EMABaselines()) == (name in KEEPS_SOMETHING)
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found


def test_only_a_moving_average_is_remembered() -> None:
    assert get_estimator("return_to_go", baseline="role_ema").state == EMABaselines()
    for baseline in ("none", "batch", "others"):
        assert get_estimator("return_to_go", baseline=baseline).state is None


def test_options_are_bound() -> None:
    batch = [rollout([0.0, 1.0], keys="ss"), rollout([0.0], keys="s")]
    bound = get_estimator("gigpo", baseline="others", step_weight=0.5)
    expected = gigpo(batch, discount=0.5, scale="none", baseline="others", step_weight=0.5)
    assert bound(batch, discount=0.5, scale="none") == expected
    assert expected != gigpo(batch, discount=0.5, scale="none")


def test_each_is_given_a_memory_of_its_own() -> None:
    one, other = get_estimator("rae", decay=0.5), get_estimator(rae, decay=0.5)
    one([rollout([1.0])], discount=1.0, scale="none")
    assert one([rollout([1.0])], discount=1.0, scale="none") == [[0.5]]
    assert other([rollout([1.0])], discount=1.0, scale="none") == [[1.0]]


def test_a_callable_is_bound_like_a_name() -> None:
    batch = [rollout([1.0, 1.0])]
    assert get_estimator(mine)(batch, discount=0.5, scale="none") == [[0.5, 0.5]]
    assert get_estimator(mine, bonus=4.0)(batch, discount=0.5, scale="none") == [[2.0, 2.0]]
    assert get_estimator(takes_anything, bonus=3.0)(batch, discount=1.0, scale="none") == [[3.0]]
    keeps = get_estimator(remembers)
    assert [keeps(batch, discount=1.0, scale="none") for _ in range(2)] == [[[0.5]], [[0.75]]]


def test_a_partial_is_taken_apart() -> None:
    bound = get_estimator(partial(gigpo, baseline="others", step_weight=2.0), step_weight=3.0)
    assert (bound.function, bound.options) == (gigpo, {"baseline": "others", "step_weight": 3.0})
    positional = partial(lambda bonus, rollouts, *, discount, scale: [[bonus] for _ in rollouts], 7.0)
    assert get_estimator(positional)([rollout([1.0])], discount=1.0, scale="none") == [[7.0]]


def test_what_is_bound_already_stays_as_it_is() -> None:
    bound = get_estimator("rae", decay=0.5)
    assert get_estimator(bound) is bound
    with pytest.raises(ConfigError, match="options are already bound, got 'decay'"):
        get_estimator(bound, decay=0.9)


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'grppo'; did you mean 'grpo'\?"):
        get_estimator("grppo")
    with pytest.raises(
        ConfigError, match=r"must be a known name or a callable, got 3; valid names: 'bilevel_gae', 'gigpo'"
    ):
        get_estimator(3)
    with pytest.raises(ConfigError, match=r"estimator 'gigpo' has no option 'base_line'; did you mean 'baseline'\?"):
        get_estimator("gigpo", base_line="self")
    with pytest.raises(ConfigError, match=r"estimator 'grpo' has no option 'baseline' \(it has no options\)"):
        get_estimator(grpo, baseline="self")
    with pytest.raises(ConfigError, match=r"'mine' has no option 'bonsu'; did you mean 'bonus'\?"):
        get_estimator(mine, bonsu=1.0)
    for reserved in ("discount", "scale", "state"):
        with pytest.raises(ConfigError, match=f"has no option '{reserved}'"):
            get_estimator("return_to_go", **{reserved: None})
        with pytest.raises(ConfigError, match=f"has no option '{reserved}'"):
            get_estimator(takes_anything, **{reserved: None})
    with pytest.raises(ConfigError, match="'grpo' has no option 'scale': set scale_rewards in the trainer's settings"):
        get_estimator("grpo", scale="none")


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("return_to_go", "baseline", "self"),
        ("return_to_go", "decay", 2),
        ("gigpo", "baseline", "batch"),
        ("gigpo", "baseline", []),
        ("gigpo", "step_weight", None),
        ("mt_grpo", "turn_weight", "1"),
        ("rae", "decay", -1),
        ("turn_gae", "gae_lambda", 2.0),
        ("bilevel_gae", "token_discount", -1.0),
    ],
)
def test_impossible_values_are_refused_before_anything_is_played(name: str, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option} (cannot|must) be"):
        get_estimator(name, **{option: value})


def test_a_compiled_function_that_hides_its_signature_is_taken() -> None:
    assert get_estimator(min).options == {}
    assert get_estimator(rae).state is not None


@pytest.mark.parametrize("name", [["grpo"], None, 3])
def test_a_name_that_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="must be a known name or a callable"):
        get_estimator(name)


def needy(rollouts: Sequence[ScoredRollout], *, discount: float, scale: Scale, weight: float) -> list[list[float]]:
    return mine(rollouts, discount=discount, scale=scale, bonus=weight)


def test_an_option_that_is_needed_is_named() -> None:
    with pytest.raises(ConfigError, match="the estimator 'needy' requires the option 'weight'"):
        get_estimator(needy)
    assert get_estimator(needy, weight=2.0).options == {"weight": 2.0}


class Mine:
    """A callable that is no function."""

    def __call__(self, rollouts: Sequence[ScoredRollout], *, discount: float, scale: Scale) -> list[list[float]]:
        return mine(rollouts, discount=discount, scale=scale)


def with_two(weight: float, rollouts: Sequence[ScoredRollout], *, discount: float, scale: Scale) -> list[list[float]]:
    return mine(rollouts, discount=discount, scale=scale, bonus=weight)


def test_a_name_is_the_same_in_every_process() -> None:
    assert get_estimator(partial(with_two, 2.0)).name == "with_two"
    assert get_estimator(partial(partial(mine, bonus=2.0))).name == "mine"
    assert get_estimator(Mine()).name == "Mine"
