"""Which rollouts are trained on: truncated ones, small groups, groups of one reward, and none at all."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
from games import TextAgent, has_moved, logged, recording, settings, tasks
from hypothesis import given
from hypothesis import strategies as st
from test_trl_interface import prepared

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer, ScoredRollout, StopReason, Trajectory, Turn
from agentsgym.credit.assignment import AdvantageAssigner, filter_rollouts, uninformative_task_groups
from agentsgym.credit.registry import get_estimator
from agentsgym.training.generation.batch import GenerationBatch

IMPOSSIBLE = 99  # no number that anybody can express, so that all rollouts of the task have one reward
ROWS = [{"task_data": {"seed": seed}} for seed in (0, 0, 0, 0, 1, 1, 1, 1)]
ROWS_WITHOUT_SPREAD = [*ROWS[:4], *({"task_data": {"seed": 1, "secret": IMPOSSIBLE}} for _ in range(4))]


def args(folder: Path = Path("nowhere"), **changes: Any) -> GRPOEnvConfig:
    return settings(folder, **changes)


def ended(reason: StopReason, *rewards: float) -> Trajectory:
    turns = [Turn(start=k + 1, stop=k + 2, reward=reward) for k, reward in enumerate(rewards)]
    return Trajectory(
        token_ids=range(len(rewards) + 1), turns=turns, messages=[], final_reward=sum(rewards), stop_reason=reason
    )


def scored(*trajectories: Trajectory, groups: list[int] | None = None) -> list[ScoredRollout]:
    groups = groups or [0] * len(trajectories)
    return [ScoredRollout.from_trajectory(row, group=group) for row, group in zip(trajectories, groups, strict=True)]


ENDED = [ended(reason, 0.5, 1.0) for reason in StopReason]
TRUNCATED = [reason in {StopReason.MAX_TURNS, StopReason.MAX_TOKENS} for reason in StopReason]


def trained_on(settings: GRPOEnvConfig) -> list[bool]:
    """Whether each of the rollouts that ended is trained on."""
    counts = [len(trajectory.turns) for trajectory in ENDED]
    assigner, mine = AdvantageAssigner(settings), range(len(ENDED))
    return list(assigner.assign(scored(*ENDED), mine, ENDED, counts, is_training=True).included)


def test_truncated_rollouts_are_kept_as_they_are() -> None:
    seen, _ = filter_rollouts(scored(*ENDED), args())
    assert seen == scored(*ENDED)
    assert trained_on(args()) == [not trajectory.failed for trajectory in ENDED]


def test_truncated_rollouts_alone_are_masked_and_an_estimator_sees_them() -> None:
    settings = args(truncated_rollouts="mask")
    seen, _ = filter_rollouts(scored(*ENDED), settings)
    assert seen == scored(*ENDED)
    masked = AdvantageAssigner(settings).estimate(scored(*ENDED), is_training=True).trained
    assert [rollout.dropped for rollout in masked] == TRUNCATED
    assert [rollout.turn_rewards for rollout in masked] == [[0.5, 1.0]] * len(ENDED)
    kept = [not (trajectory.failed or flag) for trajectory, flag in zip(ENDED, TRUNCATED, strict=True)]
    assert trained_on(settings) == kept


@pytest.mark.parametrize("penalty", [1.0, 0.25])
def test_a_penalty_comes_off_the_last_turn_and_the_final_reward_of_truncated_rollouts(penalty: float) -> None:
    settings = args(truncated_rollouts=penalty)
    treated, _ = filter_rollouts(scored(*ENDED), settings)
    for rollout, is_truncated in zip(treated, TRUNCATED, strict=True):
        taken = penalty if is_truncated else 0.0
        assert rollout.turn_rewards == [0.5, 1.0 - taken]
        assert rollout.final_reward == 1.5 - taken
        assert not rollout.dropped


def test_a_rollout_without_turns_is_penalized_in_its_final_reward() -> None:
    [rollout], _ = filter_rollouts(scored(ended(StopReason.MAX_TOKENS)), args(truncated_rollouts=1.0))
    assert (rollout.turn_rewards, rollout.final_reward) == ([], -1.0)


def test_the_option_of_trl_means_the_stop_reason() -> None:
    settings = args(mask_truncated_completions=True)
    assert settings.truncation == "mask"
    assert trained_on(settings) == trained_on(args(truncated_rollouts="mask"))
    assert (settings.mask_truncated_completions, settings.truncated_rollouts) == (True, "keep")  # as they were given


DONE, FAILED = StopReason.DONE, StopReason.FAILED


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({}, {3}),  # which has nothing that counts
        ({"min_group_size": 2}, {2, 3}),
        ({"min_group_size": 3}, {1, 2, 3}),
        ({"zero_variance_groups": "drop"}, {1, 2, 3}),
        ({"zero_variance_groups": "resample"}, {1, 2, 3}),
    ],
)
def test_groups_that_are_too_small_or_of_one_reward_are_uninformative(
    changes: dict[str, Any], groups: set[int]
) -> None:
    rows = [
        *(ended(DONE, 1.0), ended(DONE, 0.0), ended(DONE, 0.0)),
        *(ended(DONE, 0.7, -0.2), ended(DONE, 0.5), ended(FAILED, 9.0)),
        *(ended(FAILED, 1.0), ended(DONE, 0.0)),
        ended(FAILED, 1.0),
    ]
    rollouts = scored(*rows, groups=[0, 0, 0, 1, 1, 1, 2, 2, 3])
    assert uninformative_task_groups(rollouts, args(**changes)) == groups


@pytest.mark.parametrize(("truncated_rollouts", "groups"), [("keep", set()), ("mask", set()), (1.0, {0})])
def test_a_group_may_be_of_one_reward_once_it_is_penalized(truncated_rollouts: str | float, groups: set[int]) -> None:
    rows = [ended(DONE, 0.0), ended(StopReason.MAX_TURNS, 1.0)]
    settings = args(zero_variance_groups="drop", truncated_rollouts=truncated_rollouts)
    assert uninformative_task_groups(scored(*rows), settings) == groups


IN_PAIRS = args(min_group_size=2)


@given(groups=st.lists(st.integers(0, 3), max_size=8))
def test_whole_groups_are_dropped_and_nothing_else_changes(groups: list[int]) -> None:
    rollouts = scored(*(ended(DONE, float(i)) for i in range(len(groups))), groups=groups)
    kept, _ = filter_rollouts(rollouts, IN_PAIRS)
    assert [rollout.included for rollout in kept] == [groups.count(group) > 1 for group in groups]
    assert [rollout.final_reward for rollout in kept] == [rollout.final_reward for rollout in rollouts]


# Through the trainer


def recorded(trainer: GRPOEnvTrainer, rows: list[dict[str, Any]]) -> tuple[GenerationBatch, dict[str, Any]]:
    """A generation batch and what was played for it."""
    played = recording(trainer)
    batch = trainer._generate_and_score_completions(rows)
    return played[0], batch


def metric(trainer: GRPOEnvTrainer, name: str) -> float:
    return trainer._metrics["train"][name][-1]


def assert_only(
    played: GenerationBatch, batch: dict[str, Any], is_kept: list[bool], is_seen: list[bool] | None = None
) -> None:
    """Only these rollouts are trained on, with what an estimator gives that sees no others, or those that are seen."""
    mask = batch["agent_token_mask"]
    assert mask.any(1).tolist() == is_kept
    assert not batch["advantages"][mask == 0].any()
    kept = [i for i, flag in enumerate(is_kept) if flag]
    assert batch["num_items_in_batch"] == sum(sum(played.trajectories[i].agent_token_mask) for i in kept) > 0
    seen = [i for i, flag in enumerate(is_seen or is_kept) if flag]
    compared = [ScoredRollout.from_trajectory(played.trajectories[i], group=i // 4) for i in seen]
    numbers: Any = get_estimator("return_to_go", baseline="batch")(compared, discount=1.0, scale="batch")
    for i in kept:
        for turn, number in zip(played.trajectories[i].turns, numbers[seen.index(i)], strict=True):
            assert batch["advantages"][i, turn.start : turn.stop].tolist() == pytest.approx(
                [number] * (turn.stop - turn.start), abs=1e-6
            )


# Baseline and scale look at the whole batch, so that whatever is left out would be seen in them.
SEEING_ALL = {"estimator_kwargs": {"baseline": "batch"}, "scale_rewards": "batch"}


def test_groups_of_one_reward_are_in_no_baseline_and_not_trained_on(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, zero_variance_groups="drop", **SEEING_ALL)
    played, batch = recorded(trainer, ROWS_WITHOUT_SPREAD)
    assert_only(played, batch, [True] * 4 + [False] * 4)
    assert metric(trainer, "groups/kept") == 0.5
    assert metric(trainer, "frac_reward_zero_std") == 0.5  # of what was played
    assert metric(trainer, "reward") == pytest.approx(sum(rollout.final_reward for rollout in played.rollouts) / 8)


def test_without_the_filter_they_are_trained_on(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, **SEEING_ALL)
    played, batch = recorded(trainer, ROWS_WITHOUT_SPREAD)
    assert_only(played, batch, [True] * 8)
    assert metric(trainer, "groups/kept") == 1.0
    assert metric(trainer, "frac_reward_zero_std") == 0.5


@pytest.mark.parametrize(("min_group_size", "is_kept"), [(2, [True] * 6 + [False] * 2), (3, [True] * 4 + [False] * 4)])
def test_a_group_that_failures_made_too_small_is_left_out(
    min_group_size: int, is_kept: list[bool], tmp_path: Path
) -> None:
    trainer = prepared(tmp_path, min_group_size=min_group_size, **SEEING_ALL)
    rows = [*ROWS[:6], *({"task_data": {"seed": 1, "cannot_start": True}} for _ in range(2))]
    played, batch = recorded(trainer, rows)
    assert_only(played, batch, is_kept)


@pytest.mark.parametrize("changes", [{"truncated_rollouts": "mask"}, {"mask_truncated_completions": True}])
def test_what_a_budget_ended_is_masked_and_what_the_game_ended_is_not(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = prepared(tmp_path, **changes, **SEEING_ALL)
    played, batch = recorded(trainer, ROWS)
    is_kept = [row.stop_reason is StopReason.DONE for row in played.trajectories]
    assert {True, False} == set(is_kept)
    assert_only(played, batch, is_kept, is_seen=[True] * len(is_kept))


def test_a_penalty_reaches_the_advantages_and_no_metric_of_the_game(tmp_path: Path) -> None:
    plain = prepared(tmp_path, scale_rewards="none", advantage_estimator="grpo")
    penalized = prepared(tmp_path, scale_rewards="none", advantage_estimator="grpo", truncated_rollouts=3.0)
    played, before = recorded(plain, ROWS)
    _, after = recorded(penalized, ROWS)
    assert metric(plain, "reward") == metric(penalized, "reward")
    taken = [3.0 * row.stop_reason.truncated for row in played.trajectories]
    assert {0.0, 3.0} == set(taken)
    means = [sum(taken[start : start + 4]) / 4 for start in (0, 4) for _ in range(4)]
    expected = [number - own + mean for number, own, mean in zip(firsts(before, played), taken, means, strict=True)]
    assert firsts(after, played) == pytest.approx(expected, abs=1e-5)


def firsts(batch: dict[str, Any], played: GenerationBatch) -> list[float]:
    """The advantage of each rollout's first turn."""
    return [batch["advantages"][i, row.turns[0].start].item() for i, row in enumerate(played.trajectories)]


@pytest.mark.parametrize("changes", [{}, {"layout": "turn"}, {"loss_type": "grpo"}, {"beta": 0.0, "drift_interval": 1}])
def test_a_batch_of_which_nothing_is_left_changes_nothing_and_is_warned_of(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = tasks(4, secret=IMPOSSIBLE)
    values = {"zero_variance_groups": "drop", "max_steps": 2, "agent": TextAgent(), **changes}
    if "drift_interval" in changes:
        del values["agent"]
    trainer = prepared(tmp_path, dataset=dataset, **values)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert logged(trainer, "loss") == [0.0, 0.0]
    assert logged(trainer, "grad_norm") == [0.0, 0.0]
    assert logged(trainer, "groups/kept") == [0.0, 0.0]
    assert not has_moved(trainer)
    numbers = [value for log in trainer.state.log_history for value in log.values()]
    assert all(value is not None and math.isfinite(value) for value in numbers)
    assert caplog.text.count("no rollout of the generation batch is left to train on") == 1


def test_an_evaluation_filters_nothing(tmp_path: Path) -> None:
    trainer = prepared(
        tmp_path,
        zero_variance_groups="drop",
        truncated_rollouts="mask",
        eval_dataset=tasks(3, secret=IMPOSSIBLE),
        advantage_estimator="reward",
    )
    metrics = trainer.evaluate()
    assert metrics["eval_num_episodes"] == 12
    assert metrics["eval_entropy"] > 0
    assert "eval_groups/kept" not in metrics
    assert math.isfinite(metrics["eval_loss"])
