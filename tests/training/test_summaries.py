"""What ranks send each other of a rollout: short, and as good as the whole."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.credit.advantages import step_group_sizes
from agentsgym.credit.returns import gigpo
from agentsgym.credit.scored import ScoredRollout
from agentsgym.training.generation.batch import packed_values, short_key, short_summaries, unpacked_values
from agentsgym.training.metrics.rollouts import RolloutSummary, rollout_metrics
from agentsgym.types import StopReason, Trajectory, Turn

LINES = [f"room {number}: " + "a long dark corridor with a door " * 4 for number in range(5)]


def trajectory(
    seed: int, num_turns: int = 32, *, turn_tokens: int = 8, error: str | None = None, own_lines: bool = False
) -> Trajectory:
    """A rollout of as many turns, each rewarded with a number of its own and known by a line of text."""
    draw = random.Random(seed)
    spans = [(turn * 2 * turn_tokens + turn_tokens, (turn + 1) * 2 * turn_tokens) for turn in range(num_turns)]
    lines = [f"{seed}, {start}, {LINES[0]}" for start, _ in spans] if own_lines else draw.choices(LINES, k=num_turns)
    turns = [
        Turn(start=start, stop=stop, reward=draw.random(), state_key=line)
        for (start, stop), line in zip(spans, lines, strict=True)
    ]
    return Trajectory(
        token_ids=[draw.randrange(50_000) for _ in range(2 * turn_tokens * num_turns)],
        turns=turns,
        messages=[{"role": "user", "content": LINES[0]}] * num_turns,
        final_reward=sum(turn.reward for turn in turns),
        stop_reason=StopReason.FAILED if error else StopReason.DONE,
        error=error,
    )


def summary(rollout: Trajectory, *, turn_credit: str = "step") -> RolloutSummary:
    scored = ScoredRollout.from_trajectory(rollout, group=0, turn_credit=turn_credit, environment=("a.b.Game", 17))
    return RolloutSummary.of(rollout, [], scored)


@pytest.mark.parametrize("turn_tokens", [8, 256])
def test_a_rollout_of_thirty_two_turns_is_reported_in_less_than_a_kilobyte_and_a_half(turn_tokens: int) -> None:
    rollouts = [summary(trajectory(seed, turn_tokens=turn_tokens, own_lines=True)) for seed in range(8)]
    assert len(pickle.dumps(rollouts)) > 8 * 4_500
    assert len(pickle.dumps(short_summaries(rollouts))) < 8 * 1_500


def test_estimator_step_groups_and_metrics_are_those_of_the_whole() -> None:
    rollouts = [summary(trajectory(seed)) for seed in range(8)]
    whole, short = ([one.scored for one in some] for some in (rollouts, short_summaries(rollouts)))
    assert short != whole
    assert gigpo(short) == gigpo(whole)
    assert step_group_sizes(short) == step_group_sizes(whole)
    assert rollout_metrics(short_summaries(rollouts)) == rollout_metrics(rollouts)


def test_rewards_before_turn_credit_are_kept_where_they_differ() -> None:
    [short] = short_summaries([whole := summary(trajectory(0, 3), turn_credit="final")])
    assert short.turn_rewards == whole.turn_rewards
    assert short.scored.turn_rewards == whole.scored.turn_rewards != whole.turn_rewards


def test_the_first_failure_of_a_rank_keeps_its_traceback_and_no_other() -> None:
    rollouts = [summary(trajectory(seed, 2, error=error)) for seed, error in enumerate((None, "one", "two"))]
    short = short_summaries(rollouts)
    assert [one.error for one in short] == [None, "one", None]
    assert [one.failed for one in short] == [False, True, True]


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.recursive(LEAVES, lambda inner: st.lists(inner).map(tuple) | st.frozensets(inner), max_leaves=20)


@given(one=KEYS, other=KEYS)
def test_short_keys_are_equal_where_keys_are(one: Hashable, other: Hashable) -> None:
    assert (short_key(one) == short_key(other)) == (one == other)
    again = pickle.loads(pickle.dumps(one))  # as another rank has it, with sets of another order
    assert short_key(again) == short_key(one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 0.5, "a" * 30), (True, 0.5, "a" * 30)),
        ((2.0, "a" * 30), (2, "a" * 30)),
        ((-0.0, "a" * 30), (0, "a" * 30)),
        ((1e300, "a" * 30), (int(1e300), "a" * 30)),
        (frozenset(map(str, range(40))), frozenset(map(str, reversed(range(40))))),
    ],
)
def test_keys_that_python_calls_equal_have_one_digest(one: Hashable, other: Hashable) -> None:
    assert one == other
    assert short_key(one) == short_key(other)
    assert isinstance(short_key(one), bytes)


def test_a_key_of_another_kind_stays_as_it_is() -> None:
    key: Any = (complex(1, 2), "a" * 100)
    assert short_key(key) is key


def test_values_come_back_in_their_own_precision() -> None:
    values = [[0.5, -1.25], [], [3.0]]
    assert unpacked_values(packed_values(values)) == values
    assert unpacked_values(packed_values([])) == []
    assert sum(len(part) * part.itemsize for part in packed_values([[0.0] * 1000])) == 4_004


@given(st.lists(st.lists(st.sampled_from([0.5, -1.25, 3.0]), max_size=4)))
def test_of_the_values_the_first_of_each_turn_may_be_sent_alone(values: list[list[float]]) -> None:
    packed = packed_values(values, first_only=True)
    assert sum(len(part) * part.itemsize for part in packed) <= 8 * len(values)
    for turn, found in zip(values, unpacked_values(packed), strict=True):
        assert found[:1] == turn[:1]
        assert len(found) == len(turn)
        assert all(map(math.isnan, found[1:]))


def test_a_summary_is_not_changed_by_shortening_it_twice() -> None:
    once = short_summaries([summary(trajectory(0))])
    assert short_summaries([replace(once[0])]) == once
