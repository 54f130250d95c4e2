"""Evaluation through a real environment."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from agentsgym.agents.scripted import RandomAgent, ScriptedAgent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.registry import class_path
from agentsgym.errors import ConfigError, TaskError
from agentsgym.evaluation.metrics import Evaluation
from agentsgym.evaluation.run import evaluate
from agentsgym.evaluation.transcripts import render_transcript
from agentsgym.types import Trajectory


class Guess(MultistepEnv):
    """Guess the solution; a coin, drawn from the session's generator, is shown with the prompt."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        coin = self.rng(session_id).randrange(1000)
        return {"solution": task_data["solution"], "coin": coin, "done": False}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"coin {state['coin']}: guess!" if step == 0 else "no"

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        if action == "crash":
            raise RuntimeError("the dice fell off the table")
        won = action == state["solution"]
        return state, float(won), won, {"success": won, "invalid": action == ""}

    def _check_task(self, task_data: Any) -> None:
        if "solution" not in task_data:
            raise TaskError("no solution")


def env(**config: Any) -> Guess:
    return Guess(env_config={"max_steps_per_episode": 3, **config})


def tasks(*solutions: str) -> list[dict[str, Any]]:
    return [{"solution": solution} for solution in solutions]


def conversations(trajectories: Any) -> list[Any]:
    return [trajectory.messages for trajectory in trajectories]


def test_wins_turns_and_rewards_are_those_that_were_played() -> None:
    evaluation = evaluate(env(), ScriptedAgent(["a", "b", "c"]), tasks("a", "b", "z"), num_rollouts=2)
    assert evaluation.num_games == 6
    assert evaluation.win_rate is not None
    assert evaluation.win_rate.mean == pytest.approx(2 / 3)
    assert evaluation.turns is not None
    assert evaluation.turns.mean == pytest.approx((1 + 2 + 3) / 3)
    assert evaluation.reward is not None
    assert evaluation.reward.mean == pytest.approx(2 / 3)
    assert evaluation.stop_reasons == {"done": 4, "max_turns": 2}
    assert [trajectory.task_index for trajectory in evaluation.trajectories] == [0, 0, 1, 1, 2, 2]


def test_equal_arguments_give_equal_games_and_numbers() -> None:
    def run(seed: int, max_concurrent: int | None) -> Evaluation:
        agent = RandomAgent(["a", "b"], seed=1)
        return evaluate(env(), agent, tasks("a", "b") * 8, 2, seed=seed, max_concurrent=max_concurrent)

    runs = [run(3, None), run(3, 1), run(4, None)]
    assert conversations(runs[0].trajectories) == conversations(runs[1].trajectories)
    assert runs[0].as_dict() == runs[1].as_dict()
    assert conversations(runs[0].trajectories) != conversations(runs[2].trajectories)


def test_a_tasks_own_seed_is_kept_and_tasks_without_one_differ() -> None:
    same = [{"solution": "a", "seed": 5}] * 2
    firsts = [
        [trajectory.messages[0] for trajectory in evaluate(env(), ScriptedAgent(["a"]), rows, seed=seed).trajectories]
        for rows, seed in [(same, 0), (same, 1), (tasks("a", "a"), 0)]
    ]
    assert firsts[0] == firsts[1] == [firsts[0][0]] * 2
    assert firsts[2][0] != firsts[2][1]


def test_rows_of_a_dataset_are_tasks() -> None:
    path = class_path(Guess)
    rows = Dataset.from_list(
        [{"env_class_path": path, "env_config": {"a": 1}, "task_data": task} for task in tasks("a", "b")]
    )
    by_rows = evaluate(env(), ScriptedAgent(["a", "b"]), rows, seed=2)
    by_tasks = evaluate(env(), ScriptedAgent(["a", "b"]), tasks("a", "b"), seed=2)
    assert conversations(by_rows.trajectories) == conversations(by_tasks.trajectories)


def test_cluster_by_joins_rows_of_one_secret() -> None:
    rows = tasks("a", "z") * 30
    agent = ScriptedAgent(["a"], repeat_last=True)
    apart, joined = evaluate(env(), agent, rows), evaluate(env(), agent, rows, cluster_by="solution")
    assert apart.win_rate is not None
    assert joined.win_rate is not None
    assert apart.win_rate.mean == joined.win_rate.mean == 0.5
    assert (joined.win_rate.low, joined.win_rate.high) == (0.0, 1.0)
    assert apart.win_rate.high - apart.win_rate.low < 0.3


def test_a_broken_game_is_counted_and_the_others_go_on() -> None:
    evaluation = evaluate(env(), ScriptedAgent(["a", "crash"]), tasks("a", "b"))
    assert (evaluation.num_games, evaluation.num_failed) == (1, 1)
    assert evaluation.win_rate is not None
    assert evaluation.win_rate.mean == 1.0


def test_options_reach_the_rollout() -> None:
    finished: list[Trajectory] = []
    evaluate(env(), ScriptedAgent(["a"]), tasks("a", "a"), on_finish=finished.append)
    assert len(finished) == 2


@pytest.mark.parametrize(
    ("rows", "options", "error", "message"),
    [
        ([], {}, TaskError, "at least one task"),
        ([{"word": "a"}], {}, TaskError, "no solution"),
        (["a"], {}, TaskError, r"tasks\[0\] must be a task_data dict or a dataset row, got 'a'"),
        ([{"env_class_path": "other.Game", "task_data": {}}], {}, ConfigError, r"tasks\[0\] is a row of 'other.Game'"),
        (tasks("a"), {"cluster_by": "soluton"}, ConfigError, "task 0 has no 'soluton'.*did you mean 'solution'"),
        (tasks("a"), {"num_rollouts": 0}, ConfigError, "num_rollouts must be a positive int, got 0"),
    ],
)
def test_bad_input_is_named(rows: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        evaluate(env(), ScriptedAgent(["a"]), rows, **options)


def test_a_transcript_reads_as_the_game_went() -> None:
    agent = ScriptedAgent(["", "b"])
    (trajectory,) = evaluate(env(system_prompt="Play."), agent, [{"solution": "b", "seed": 1}]).trajectories
    coin = trajectory.messages[1]["content"]
    assert render_transcript(trajectory) == (
        "=== task 0, rollout 0: won after 2 turns (done), reward 1 ===\n"
        f"[system] Play.\n[user] {coin}\n[assistant +0, invalid] \n[user] no\n[assistant +1] b\n"
    )


def test_a_transcript_of_a_failed_game_ends_with_its_error() -> None:
    (trajectory,) = evaluate(env(), ScriptedAgent(["crash"]), tasks("b")).trajectories
    text = render_transcript(trajectory)
    assert text.startswith("=== task 0, rollout 0: failed after 1 turn (failed), reward 0 ===\n")
    assert text.rstrip().endswith("the dice fell off the table")
    assert "[assistant +0] crash\n[error] " in text
