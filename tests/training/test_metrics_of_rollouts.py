"""What a generation batch, and a rollout sent between ranks, is summarized to: exact, on rollouts drawn by hand."""

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

from agentsgym import ScoredRollout, StopReason, Trajectory, Turn
from agentsgym.batch.layouts import trajectory_rows
from agentsgym.credit.advantages import step_group_sizes
from agentsgym.credit.returns import gigpo
from agentsgym.statistics.metrics import summarize
from agentsgym.training.generation.batch import packed_values, short_key, short_summaries, unpacked_values
from agentsgym.training.metrics.rollouts import CompletionRow, RolloutSummary, evaluation_metrics, rollout_metrics


def drawn(picture: str, rewards: list[float], stop_reason: StopReason = StopReason.DONE, **fields: Any) -> Trajectory:
    """'.' is an environment token, any letter an agent token, one letter a turn; a capital letter an invalid one."""
    letters = sorted(set(picture) - {"."}, key=picture.index)
    turns = [
        Turn(
            start=picture.index(letter),
            stop=picture.rindex(letter) + 1,
            reward=reward,
            invalid=letter.isupper(),
            exact=fields.get("exact", True),
        )
        for letter, reward in zip(letters, rewards, strict=True)
    ]
    success = fields.get("success")
    return Trajectory(
        token_ids=list(range(len(picture))),
        turns=turns,
        messages=[],
        final_reward=sum(rewards),
        stop_reason=stop_reason,
        info={} if success is None else {"success": success},
    )


def summaries(*trajectories: Trajectory) -> list[RolloutSummary]:
    """What the ranks exchange of rollouts."""
    return [
        RolloutSummary.of(one, trajectory_rows(0, one), ScoredRollout.from_trajectory(one, group=0))
        for one in trajectories
    ]


def test_numbers_of_info_are_averaged_over_the_rollouts_that_have_them() -> None:
    infos = [{"calls": 2, "ok": True}, {"calls": 5}, {"ok": False, "note": "x"}, {"calls": 99}]
    batch = [replace(drawn("..a", [1.0]), info=info) for info in infos[:3]]
    batch.append(replace(drawn("..a", [1.0], StopReason.FAILED), info=infos[3]))
    metrics = rollout_metrics(summaries(*batch))
    assert {name: value for name, value in metrics.items() if name.startswith("info/")} == {
        "info/calls": 3.5,
        "info/ok": 0.5,
    }
    evaluated = evaluation_metrics(summarize(batch))
    assert evaluated["info/calls_low"] <= evaluated["info/calls"] == 3.5 <= evaluated["info/calls_high"]


def test_every_number_of_a_batch() -> None:
    batch = [
        drawn("..aaa.bb.c", [0.0, 0.5, 1.0], success=True),
        drawn("..a.BBBB", [1.0, -1.0], StopReason.MAX_TURNS, success=False),
        drawn("..a", [0.5], StopReason.INVALID, success=False, exact=False),
        drawn("..aaaaaaa", [9.0], StopReason.FAILED, success=True),
    ]
    assert rollout_metrics(summaries(*batch)) == pytest.approx(
        {
            "stop/done": 1 / 4,
            "stop/max_turns": 1 / 4,
            "stop/max_tokens": 0.0,
            "stop/invalid": 1 / 4,
            "failed": 1 / 4,
            "reward": (1.5 + 0.0 + 0.5) / 3,
            "reward_std": math.sqrt(7 / 12),
            "completions/mean_length": (8 + 6 + 1) / 3,
            "completions/min_length": 1.0,
            "completions/max_length": 8.0,
            "completions/clipped_ratio": 1 / 3,
            "exact": 2 / 3,
            "win_rate": 1 / 3,
            "turns/mean": 2.0,
            "turns/min": 1.0,
            "turns/max": 3.0,
            "invalid_turns": 1 / 6,
            "unplaced_rewards": 0.0,
            "reward/turn_00": 0.5,
            "active_fraction/turn_00": 1.0,
            "reward/turn_01": -0.25,
            "active_fraction/turn_01": 2 / 3,
            "reward/turn_02": 1.0,
            "active_fraction/turn_02": 1 / 3,
            "tokens/agent_per_turn": (6 + 5 + 1) / 6,
            "tokens/environment_per_turn": (4 + 3 + 2) / 6,
        }
    )


def test_a_game_that_names_no_winner_has_no_win_rate() -> None:
    metrics = rollout_metrics(summaries(drawn("..a", [1.0]), drawn("..a", [0.0])))
    assert "win_rate" not in metrics
    assert metrics["reward"] == 0.5


def test_where_everything_failed_only_the_stop_reasons_are_reported() -> None:
    metrics = rollout_metrics(summaries(drawn("..a", [1.0], StopReason.FAILED)))
    assert metrics["failed"] == 1.0
    assert all(value == 0.0 for name, value in metrics.items() if name != "failed")
    assert not any(name.startswith(("turns/", "reward", "win_rate")) for name in metrics)


def test_one_rollout_has_no_spread() -> None:
    failed = drawn("..a", [1.0], StopReason.FAILED)
    assert "reward_std" not in rollout_metrics(summaries(drawn("..a", [1.0]), failed))


def test_a_rollout_without_turns_has_no_completion() -> None:
    metrics = rollout_metrics(summaries(drawn("....", [], StopReason.MAX_TOKENS), drawn("..a.b", [0.0, 1.0])))
    lengths = [metrics[f"completions/{name}_length"] for name in ("mean", "min", "max")]
    assert lengths == [1.5, 0.0, 3.0]
    assert metrics["completions/clipped_ratio"] == 0.5


def test_an_evaluation_in_plain_numbers() -> None:
    games = [drawn("..a", [1.0]), drawn("..a.b", [0.0, 0.0]), drawn("..a", [9.0], StopReason.FAILED)]
    evaluation = summarize(games)
    metrics = evaluation_metrics(evaluation)
    assert (metrics["num_episodes"], metrics["num_failed"]) == (evaluation.num_episodes, 1)
    assert metrics["reward"] == evaluation.reward.mean
    assert (metrics["turns_low"], metrics["turns_high"]) == (evaluation.turns.low, evaluation.turns.high)
    assert "win_rate" not in metrics


def test_the_completions_table_shows_escape_sequences_and_obeys_none() -> None:
    trajectory = Trajectory(
        token_ids=[],
        turns=[],
        messages=[{"role": "user", "content": "\x1b[2Jline\nnext"}],
        final_reward=0.0,
        stop_reason=StopReason.DONE,
    )
    assert CompletionRow.of(trajectory, []).prompt == [{"role": "user", "content": "\\x1b[2Jline\nnext"}]
    assert trajectory.messages[0]["content"] == "\x1b[2Jline\nnext"


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
