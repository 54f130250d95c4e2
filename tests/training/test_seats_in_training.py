"""A game of two seats through the trainer: advantages, filters, weights and metrics go by role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from games import NUMBERS, logged, policy, recording, settings, tasks

from agentsgym import ConfigError, GRPOEnvTrainer, MultistepEnv, ScoredRollout, StopReason, Trajectory, Turn
from agentsgym.batch.layouts import trajectory_rows
from agentsgym.credit.assignment import AdvantageAssigner, TokenAdvantages, uninformative_task_groups
from agentsgym.credit.components import attribute_rewards
from agentsgym.training.metrics.rollouts import RolloutSummary, rollout_metrics

PLAIN: dict[str, Any] = {
    "advantage_estimator": "return_to_go",
    "estimator_kwargs": {"baseline": "none"},
    "scale_rewards": "none",
}


class Duel(MultistepEnv):
    """X states a number, then O, then X again: the higher last number wins, and a word that is none loses."""

    default_config: ClassVar = {"max_steps_per_episode": 3, "error_allowance": 99}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "output": [], "reported": task_data.get("reported", True)}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return "A number, please."

    def _role(self, state: dict[str, Any]) -> str:
        return "XOX"[len(state["output"])]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        output = [
            *state["output"],
            max((NUMBERS.index(word) for word in action.split() if word in NUMBERS), default=-1),
        ]
        done = len(output) == 3
        margin = float(output[2] - output[1]) if done else 0.0
        info = {"rewards": {"X": margin, "O": -margin}} if state["reported"] else {}
        return {**state, "output": output}, abs(margin), done, info


def trainer_of(folder: Path, *, reported: bool = True, **changes: Any) -> GRPOEnvTrainer:
    model, tokenizer = policy()
    rows = tasks(8, reported=reported)
    return GRPOEnvTrainer(model, Duel(tokenizer), settings(folder, **changes), train_dataset=rows, eval_dataset=rows)


def test_each_seats_tokens_get_what_the_seat_earned(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **PLAIN)
    dataset: Any = trainer.train_dataset
    played = recording(trainer)
    batch = trainer._generate_and_score_completions([dataset[i // 4] for i in range(8)])
    trajectories: Sequence[Trajectory] = played[0].trajectories
    assert any(one.final_reward for one in trajectories)
    for i, one in enumerate(trajectories):
        assert one.final_rewards["O"] == -one.final_rewards["X"]
        for turn in one.turns:
            expected = [one.final_rewards[turn.role]] * (turn.stop - turn.start)
            assert batch["advantages"][i, turn.start : turn.stop].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("changes", [{}, {"advantage_estimator": "turn_gae", "value_head": "shared"}], ids=str)
def test_metrics_go_by_role(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, eval_strategy="steps", eval_steps=2, **changes)
    trainer.train()
    x, o = (logged(trainer, f"reward/by_role/{role}") for role in "XO")
    assert len(x) == 2
    assert x == [-reward for reward in o] == logged(trainer, "reward")
    for name in ("win_rate/by_role/X", "advantage/by_role/O", "advantage_std/by_role/X", "eval_reward/by_role/O"):
        assert logged(trainer, name), name
    evaluation = trainer.last_evaluation
    assert evaluation is not None
    assert list(evaluation.by_role) == ["X", "O"]
    of_x, of_o = (evaluation.by_role[role].reward for role in "XO")
    assert of_x is not None
    assert of_o is not None
    assert of_x.mean == pytest.approx(-of_o.mean)
    assert evaluation.by_environment == {}


def test_a_game_that_does_not_name_whom_it_rewards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Duel has turns of the roles 'X' and 'O'.*return info\['rewards'\] = "):
        trainer_of(tmp_path, reported=False).train()
    trainer = trainer_of(tmp_path, reported=False, advantage_estimator="reward", max_steps=1)
    trainer.train()
    assert not logged(trainer, "reward/by_role/X")  # nobody knows


# --- filters and weights --------------------------------------------------------------------------------------------


def game(x: float, o: float, *, invalid: str = "", stop_reason: StopReason = StopReason.DONE) -> Trajectory:
    """X, O, X, each move two tokens behind one of the environment; the seats in ``invalid`` answer invalidly."""
    turns = [
        Turn(
            start=3 * k + 1,
            stop=3 * k + 3,
            reward=0.0,
            role=role,
            invalid=role in invalid,
            role_rewards={"X": x, "O": o} if k == 2 else {},
        )
        for k, role in enumerate("XOX")
    ]
    settled, final_rewards = attribute_rewards(turns)
    return Trajectory(
        token_ids=range(9),
        turns=settled,
        messages=[],
        final_reward=x,
        final_rewards=final_rewards,
        stop_reason=stop_reason,
    )


def assigned(folder: Path, games: Sequence[Trajectory], groups: Sequence[int], **changes: Any) -> TokenAdvantages:
    assigner = AdvantageAssigner(settings(folder, **changes))
    scored = [ScoredRollout.from_trajectory(one, group=group) for one, group in zip(games, groups, strict=True)]
    return assigner.assign(scored, range(len(games)), games, [6] * len(games), is_training=True)


def of_turns(found: TokenAdvantages, i: int) -> list[float]:
    """The advantage of each turn of a rollout."""
    tokens = found.advantages[i]
    assert tokens[::3] == [0.0] * 3
    assert tokens[1::3] == tokens[2::3]
    return list(tokens[1::3])


def test_a_role_without_variance_is_left_out_by_itself(tmp_path: Path) -> None:
    games = [game(1.0, 0.0), game(1.0, 2.0), game(3.0, 3.0), game(3.0, 3.0)]
    found = assigned(tmp_path, games, [0, 0, 1, 1], zero_variance_groups="drop", **PLAIN)
    assert [of_turns(found, i) for i in range(4)] == [[0.0, 0.0, 0.0], [0.0, 2.0, 0.0], *[[0.0] * 3] * 2]
    assert list(found.included) == [True, True, False, False]
    assert found.num_tokens == 12
    assert found.metrics["groups/kept"] == 1 / 4
    assert found.metrics["frac_reward_zero_std"] == 3 / 4


def test_a_task_is_played_again_where_no_role_learns_from_it(tmp_path: Path) -> None:
    games = [game(1.0, 0.0), game(1.0, 2.0), game(3.0, 3.0), game(3.0, 3.0)]
    scored = [ScoredRollout.from_trajectory(one, group=i // 2) for i, one in enumerate(games)]
    resample = settings(tmp_path, zero_variance_groups="resample")
    assert uninformative_task_groups(scored, resample) == {1}
    assert uninformative_task_groups(scored, settings(tmp_path, min_group_size=3)) == {0, 1}
    alone = ScoredRollout.from_trajectory(replace(games[2], turns=games[2].turns[:1]), group=1)  # O did not move in it
    assert uninformative_task_groups([alone, scored[3]], settings(tmp_path, min_group_size=2)) == set()


def test_truncation_is_held_against_every_seat(tmp_path: Path) -> None:
    games = [game(0.0, 0.0, stop_reason=StopReason.MAX_TURNS), game(1.0, -1.0)]
    penalized = assigned(tmp_path, games, [0, 0], truncated_rollouts=0.5, **PLAIN)
    assert [of_turns(penalized, i) for i in range(2)] == [[-0.5, -0.5, -0.5], [1.0, -1.0, 1.0]]


def test_weights_count_each_seat_as_a_rollout(tmp_path: Path) -> None:
    games = [game(1.0, -1.0, invalid="X"), game(2.0, -2.0)]
    plain = assigned(tmp_path, games, [0, 0], invalid_turns="mask_rollout", **PLAIN)
    assert [of_turns(plain, i) for i in range(2)] == [[0.0, -1.0, 0.0], [2.0, -2.0, 2.0]]
    weighed = assigned(tmp_path, games, [0, 0], loss_aggregation="trajectory", loss_type="dapo", **PLAIN)
    assert of_turns(weighed, 1) == pytest.approx([2 * 12 / (4 * 4), -2 * 12 / (4 * 2), 2 * 12 / (4 * 4)])


def test_advantages_are_summed_up_by_role_and_by_the_turns_of_the_whole_game(tmp_path: Path) -> None:
    found = assigned(tmp_path, [game(1.0, -1.0), game(3.0, -3.0)], [0, 0], **PLAIN)
    metrics = found.metrics
    assert [metrics[f"advantage/turn_{k:02d}"] for k in range(3)] == [2.0, -2.0, 2.0]
    assert [metrics[f"advantage/by_role/{role}"] for role in "XO"] == [2.0, -2.0]
    assert metrics["advantage_std/by_role/O"] == pytest.approx(2**0.5)


def summary(one: Trajectory, environment: str = "") -> RolloutSummary:
    made = RolloutSummary.of(one, trajectory_rows(0, one), ScoredRollout.from_trajectory(one, group=0))
    return replace(made, environment=environment)


def test_who_is_rewarded_more_has_won_and_nobody_after_a_draw() -> None:
    metrics = rollout_metrics([summary(game(1.0, -1.0)), summary(game(-1.0, 1.0)), summary(game(1.0, -1.0))])
    assert (metrics["win_rate/by_role/X"], metrics["win_rate/by_role/O"]) == (2 / 3, 1 / 3)
    assert (metrics["reward/by_role/X"], metrics["reward/by_role/O"]) == pytest.approx((1 / 3, -1 / 3))
    drawn = rollout_metrics([summary(replace(game(0.0, 0.0), info={"success": False}))])
    assert (drawn["win_rate/by_role/X"], drawn["win_rate/by_role/O"]) == (0.0, 0.0)
    together = rollout_metrics([summary(replace(game(2.0, 2.0), info={"success": True}))])
    assert (together["win_rate/by_role/X"], together["win_rate/by_role/O"]) == (1.0, 1.0)


def test_metrics_go_by_environment_where_there_are_several() -> None:
    failed = replace(game(0.0, 0.0), stop_reason=StopReason.FAILED)
    rollouts = [summary(game(1.0, -1.0), "duel"), summary(game(3.0, 0.0), "duel"), summary(failed, "maze")]
    rollouts.append(summary(replace(game(5.0, 5.0), info={"success": True}), "maze"))
    metrics = rollout_metrics(rollouts)
    by_environment = {name: number for name, number in metrics.items() if "by_environment" in name}
    assert by_environment == {
        "reward/by_environment/duel": 2.0,
        "turns/by_environment/duel": 3.0,
        "failed/by_environment/duel": 0.0,
        "reward/by_environment/maze": 5.0,
        "turns/by_environment/maze": 3.0,
        "failed/by_environment/maze": 0.5,
        "win_rate/by_environment/maze": 1.0,
    }
    assert not any("by_environment" in name for name in rollout_metrics(rollouts[:2]))
