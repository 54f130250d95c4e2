"""Moving baselines and the estimator that lives on them: read before written, kept exactly, equal in any process."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_batches import Batch, assert_close, batches, held_against_by_loops, placed, rollout, scales

from agentsgym.credit.advantages import Scale, get_estimator, rae
from agentsgym.credit.ema import EMABaselines
from agentsgym.errors import ConfigError

plain_keys = st.one_of(st.none(), st.text(max_size=3), st.integers(), st.booleans(), st.floats(allow_nan=False))
keys = st.recursive(plain_keys, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
updates = st.lists(st.tuples(keys, st.floats(-1e6, 1e6)), max_size=6)


def filled(values: list[tuple[object, float]]) -> EMABaselines:
    state = EMABaselines()
    for key, value in values:
        state.update(key, value, decay=0.9)
    return state


def test_an_average_by_hand() -> None:
    state = EMABaselines()
    assert state.get("a") == 0.0
    state.update("a", 8.0, decay=0.75)
    state.update("a", 4.0, decay=0.5)
    assert (state.get("a"), state.get("b")) == (3.0, 0.0)


@given(updates)
def test_averages_come_back_exactly_from_json_and_from_copies(values: list[tuple[object, float]]) -> None:
    state = filled(values)
    loaded = filled([("forgotten", 1.0)])
    loaded.load_state_dict(json.loads(json.dumps(state.state_dict())))
    for twin in (loaded, copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert twin == state
        assert all(twin.get(key) == state.get(key) for key, _ in values)
        assert twin.state_dict() == state.state_dict()
        twin.update("forgotten", 1.0, decay=0.5)
        assert twin != state
    assert state == filled(values)


def test_a_key_that_json_would_change_is_refused_before_it_is_kept() -> None:
    state = EMABaselines()
    for key in (frozenset("a"), ("chess", b"white")):
        with pytest.raises(ConfigError, match="must be None, a str, a number or a tuple of these, got"):
            state.update(key, 1.0, decay=0.5)
    assert state == EMABaselines()


# --- rae ----------------------------------------------------------------------------------------------------------


def test_rae_by_hand() -> None:
    estimator = get_estimator("rae", decay=0.5)
    state = estimator.state
    assert state is not None
    batch = [
        rollout([0.0, 0.0], final_rewards={"white": 1.0, "black": 1.0}, roles=["white", "black"], environment="chess"),
        rollout([0.0], final=-1.0, roles=["white"], environment="chess"),
        rollout([0.0], final=5.0, roles=["white"], environment="go"),
        rollout([], final=9.0, environment="chess"),
        rollout([0.0], final=9.0, roles=["white"], environment="go", failed=True),
    ]
    assert estimator(batch, discount=1.0, scale="none") == [[1.0, 1.0], [-1.0], [5.0], [], [0.0]]
    kept = {("chess", "white"): -0.25, ("chess", "black"): 0.5, ("go", "white"): 2.5}  # white: 0.5, then -0.25
    assert {key: state.get(key) for key in kept} == kept
    assert len(state.state_dict()["baselines"]) == 3
    assert estimator(batch, discount=1.0, scale="none") == [[1.25, 0.5], [-0.75], [2.5], [], [0.0]]


def test_the_numbers_of_the_paper() -> None:
    state = EMABaselines()
    advantages = [rae([rollout([1.0])], scale="none", state=state)[0][0] for _ in range(3)]
    assert advantages == pytest.approx([1.0, 0.95, 0.95**2])  # b is 1 - 0.95^n


def test_a_rollout_moves_its_role_once_however_many_turns_it_has() -> None:
    one, many = EMABaselines(), EMABaselines()
    rae([rollout([1.0])], state=one)
    rae([rollout([0.0, 0.0, 0.0, 1.0])], state=many)
    assert one == many


def test_a_spread_about_the_baseline_keeps_equal_rewards_finite() -> None:
    state = filled([((None, None), 10.0)])  # 1.0
    lost = [rollout([0.0]) for _ in range(3)]
    spread = math.sqrt(3 / 2) + 1e-4
    assert_close(rae(lost, state=copy.deepcopy(state)), [[-1 / spread]] * 3)
    assert_close(rae(lost[:1], state=state), [[-1 / 1.0001]])
    assert rae([rollout([0.0])]) == [[0.0]]


@given(st.lists(batches, max_size=3), scales, st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_rae_equals_the_loops(played: list[Batch], scale: Scale, decay: float) -> None:
    state, averages = EMABaselines(), {}
    for rollouts in played:
        entries, turns = [], []
        for i, one in enumerate(rollouts):
            for role in sorted(set(one.roles)) if one.included else ():
                entries.append((one.final_reward, i, (one.environment, role)))
                turns.append([(i, k) for k, own in enumerate(one.roles) if own == role])
        numbers = held_against_by_loops(entries, lambda key: averages.get(key, 0.0), scale=scale)
        spread = [number for number, own in zip(numbers, turns, strict=True) for _ in own]
        expected = placed(rollouts, chain.from_iterable(turns), spread)
        assert_close(rae(rollouts, scale=scale, decay=decay, state=state), expected)
        for value, _, key in entries:
            averages[key] = decay * averages.get(key, 0.0) + (1 - decay) * value
        assert all(state.get(key) == pytest.approx(average) for key, average in averages.items())


@pytest.mark.parametrize(("name", "options"), [("rae", {}), ("return_to_go", {"baseline": "role_ema"})])
@given(rollouts=batches, scale=scales)
def test_memory_is_read_before_it_is_written(name: str, options: dict[str, str], rollouts: Batch, scale: Scale) -> None:
    estimator = get_estimator(name, **options)
    rehearsal = copy.deepcopy(estimator)
    rehearsed = rehearsal(rollouts, discount=1.0, scale=scale)
    assert estimator.state == EMABaselines()  # the copy's calls are its own
    assert estimator(rollouts, discount=1.0, scale=scale) == rehearsed
    assert estimator.state == rehearsal.state
    assert rehearsed == get_estimator(name, **options)(rollouts, discount=1.0, scale=scale)


@pytest.mark.parametrize(("name", "options"), [("rae", {}), ("return_to_go", {"baseline": "role_ema"})])
@given(rollouts=batches)
def test_rollouts_that_do_not_count_leave_no_trace(name: str, options: dict[str, str], rollouts: Batch) -> None:
    estimator = get_estimator(name, **options)
    estimator([replace(one, dropped=True) for one in rollouts], discount=1.0, scale="none")
    assert estimator.state == EMABaselines()


@given(st.lists(batches, min_size=2, max_size=3), scales)
def test_a_run_that_is_taken_up_again_goes_on_as_if_it_had_not_stopped(played: list[Batch], scale: Scale) -> None:
    through, before, after = (get_estimator("rae") for _ in range(3))
    results = [through(rollouts, discount=1.0, scale=scale) for rollouts in played]
    before(played[0], discount=1.0, scale=scale)
    assert before.state is not None
    assert after.state is not None
    after.state.load_state_dict(json.loads(json.dumps(before.state.state_dict())))
    assert [after(rollouts, discount=1.0, scale=scale) for rollouts in played[1:]] == results[1:]


def test_impossible_decay_is_refused() -> None:
    for decay in (-0.1, 1.1, "0.9", True, math.nan):
        with pytest.raises(ConfigError, match=r"decay must be a number in \[0, 1\], got"):
            rae([], decay=decay)
