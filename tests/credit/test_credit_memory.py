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
from agentsgym.credit.memory import MovingBaselines
from agentsgym.errors import ConfigError

plain_keys = st.one_of(st.none(), st.text(max_size=3), st.integers(), st.booleans(), st.floats(allow_nan=False))
keys = st.recursive(plain_keys, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
updates = st.lists(st.tuples(keys, st.floats(-1e6, 1e6)), max_size=6)


def filled(values: list[tuple[object, float]]) -> MovingBaselines:
    memory = MovingBaselines()
    for key, value in values:
        memory.update(key, value, decay=0.9)
    return memory


def test_an_average_by_hand() -> None:
    memory = MovingBaselines()
    assert memory.get("a") == 0.0
    memory.update("a", 8.0, decay=0.75)
    memory.update("a", 4.0, decay=0.5)
    assert (memory.get("a"), memory.get("b")) == (3.0, 0.0)


@given(updates)
def test_averages_come_back_exactly_from_json_and_from_copies(values: list[tuple[object, float]]) -> None:
    memory = filled(values)
    loaded = filled([("forgotten", 1.0)])
    loaded.load_state_dict(json.loads(json.dumps(memory.state_dict())))
    for twin in (loaded, copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert twin == memory
        assert all(twin.get(key) == memory.get(key) for key, _ in values)
        assert twin.state_dict() == memory.state_dict()
        twin.update("forgotten", 1.0, decay=0.5)
        assert twin != memory
    assert memory == filled(values)


def test_a_key_that_json_would_change_is_refused_before_it_is_kept() -> None:
    memory = MovingBaselines()
    for key in (frozenset("a"), ("chess", b"white")):
        with pytest.raises(ConfigError, match="must be None, a str, a number or a tuple of these, got"):
            memory.update(key, 1.0, decay=0.5)
    assert memory == MovingBaselines()


# --- rae ----------------------------------------------------------------------------------------------------------


def test_rae_by_hand() -> None:
    memory = MovingBaselines()
    batch = [
        rollout([0.0, 0.0], final=1.0, roles=["white", "black"], game="chess"),
        rollout([0.0], final=-1.0, roles=["white"], game="chess"),
        rollout([0.0], final=5.0, roles=["white"], game="go"),
        rollout([], final=9.0, game="chess"),
        rollout([0.0], final=9.0, roles=["white"], game="go", failed=True),
    ]
    assert rae(batch, scale="none", decay=0.5, memory=memory) == [[1.0, 1.0], [-1.0], [5.0], [], [0.0]]
    kept = {("chess", "white"): -0.25, ("chess", "black"): 0.5, ("go", "white"): 2.5}  # white: 0.5, then -0.25
    assert {key: memory.get(key) for key in kept} == kept
    assert len(memory.state_dict()["baselines"]) == 3
    assert rae(batch, scale="none", decay=0.5, memory=memory) == [[1.25, 0.5], [-0.75], [2.5], [], [0.0]]


def test_the_numbers_of_the_paper() -> None:
    memory = MovingBaselines()
    advantages = [rae([rollout([1.0])], scale="none", memory=memory)[0][0] for _ in range(3)]
    assert advantages == pytest.approx([1.0, 0.95, 0.95**2])  # b is 1 - 0.95^n


def test_a_rollout_moves_its_role_once_however_many_turns_it_has() -> None:
    one, many = MovingBaselines(), MovingBaselines()
    rae([rollout([1.0])], memory=one)
    rae([rollout([0.0, 0.0, 0.0, 1.0])], memory=many)
    assert one == many


def test_a_spread_about_the_baseline_keeps_equal_rewards_finite() -> None:
    memory = filled([((None, None), 10.0)])  # 1.0
    lost = [rollout([0.0]) for _ in range(3)]
    spread = math.sqrt(3 / 2) + 1e-4
    assert_close(rae(lost, memory=copy.deepcopy(memory)), [[-1 / spread]] * 3)
    assert_close(rae(lost[:1], memory=memory), [[-1 / 1.0001]])
    assert rae([rollout([0.0])]) == [[0.0]]


@given(st.lists(batches, max_size=3), scales, st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_rae_equals_the_loops(played: list[Batch], scale: Scale, decay: float) -> None:
    memory, averages = MovingBaselines(), {}
    for rollouts in played:
        entries, turns = [], []
        for i, one in enumerate(rollouts):
            for role in sorted(set(one.roles)) if one.counts else ():
                entries.append((one.final_reward, i, (one.game, role)))
                turns.append([(i, k) for k, own in enumerate(one.roles) if own == role])
        numbers = held_against_by_loops(entries, lambda key: averages.get(key, 0.0), scale=scale)
        spread = [number for number, own in zip(numbers, turns, strict=True) for _ in own]
        expected = placed(rollouts, chain.from_iterable(turns), spread)
        assert_close(rae(rollouts, scale=scale, decay=decay, memory=memory), expected)
        for value, _, key in entries:
            averages[key] = decay * averages.get(key, 0.0) + (1 - decay) * value
        assert all(memory.get(key) == pytest.approx(average) for key, average in averages.items())


@pytest.mark.parametrize(("name", "options"), [("rae", {}), ("return_to_go", {"baseline": "role_ema"})])
@given(rollouts=batches, scale=scales)
def test_memory_is_read_before_it_is_written(name: str, options: dict[str, str], rollouts: Batch, scale: Scale) -> None:
    estimator = get_estimator(name, **options)
    rehearsal = copy.deepcopy(estimator)
    rehearsed = rehearsal(rollouts, discount=1.0, scale=scale)
    assert estimator.memory == MovingBaselines()  # the copy's calls are its own
    assert estimator(rollouts, discount=1.0, scale=scale) == rehearsed
    assert estimator.memory == rehearsal.memory
    assert rehearsed == get_estimator(name, **options)(rollouts, discount=1.0, scale=scale)


@pytest.mark.parametrize(("name", "options"), [("rae", {}), ("return_to_go", {"baseline": "role_ema"})])
@given(rollouts=batches)
def test_rollouts_that_do_not_count_leave_no_trace(name: str, options: dict[str, str], rollouts: Batch) -> None:
    estimator = get_estimator(name, **options)
    estimator([replace(one, dropped=True) for one in rollouts], discount=1.0, scale="none")
    assert estimator.memory == MovingBaselines()


@given(st.lists(batches, min_size=2, max_size=3), scales)
def test_a_run_that_is_taken_up_again_goes_on_as_if_it_had_not_stopped(played: list[Batch], scale: Scale) -> None:
    through, before, after = (get_estimator("rae") for _ in range(3))
    results = [through(rollouts, discount=1.0, scale=scale) for rollouts in played]
    before(played[0], discount=1.0, scale=scale)
    assert before.memory is not None
    assert after.memory is not None
    after.memory.load_state_dict(json.loads(json.dumps(before.memory.state_dict())))
    assert [after(rollouts, discount=1.0, scale=scale) for rollouts in played[1:]] == results[1:]


def test_impossible_decay_is_refused() -> None:
    for decay in (-0.1, 1.1, "0.9", True, math.nan):
        with pytest.raises(ConfigError, match=r"decay must be a number in \[0, 1\], got"):
            rae([], decay=decay)
