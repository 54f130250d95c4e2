"""What a generation batch is summarized to: exact numbers on rollouts drawn by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from agentsgym.batch.layouts import trajectory_rows
from agentsgym.credit.scored import ScoredRollout
from agentsgym.statistics.metrics import summarize
from agentsgym.training.metrics.rollouts import CompletionRow, RolloutSummary, evaluation_metrics, rollout_metrics
from agentsgym.types import StopReason, Trajectory, Turn


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
