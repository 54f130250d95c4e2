"""Evaluation through a real environment."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from agentsgym.agents.base import AsyncAgent
from agentsgym.agents.scripted import RandomAgent, ScriptedAgent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.datasets.environments import class_path
from agentsgym.errors import ConfigError, TaskError, TooManyFailuresError
from agentsgym.evaluation.run import evaluate
from agentsgym.evaluation.transcripts import render_transcript
from agentsgym.statistics.metrics import Evaluation
from agentsgym.types import Action, Trajectory, TurnRequest


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
    assert evaluation.num_episodes == 6
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
        [
            {"env_class_path": path, "env_config": {"max_steps_per_episode": 3}, "task_data": task}
            for task in tasks("a", "b")
        ]
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


def test_a_broken_episode_is_counted_and_the_others_go_on() -> None:
    evaluation = evaluate(env(), ScriptedAgent(["a", "crash"]), tasks("a", "b"))
    assert (evaluation.num_episodes, evaluation.num_failed) == (1, 1)
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
        (
            [{"env_class_path": "other.Game", "task_data": {}}],
            {},
            ConfigError,
            r"tasks\[0\] is for the environment 'other.Game'",
        ),
        (
            tasks("a"),
            {"cluster_by": "soluton"},
            ConfigError,
            "cluster_by='soluton' must .*task 0 lacks it; did you mean 'solution'",
        ),
        (tasks("a"), {"num_rollouts": 0}, ConfigError, "num_rollouts must be a positive int, got 0"),
    ],
)
def test_bad_input_is_named(rows: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        evaluate(env(), ScriptedAgent(["a"]), rows, **options)


ENV, AGENT = Guess(env_config={}), ScriptedAgent(["a"])


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (
            (AGENT, ENV, tasks("a")),
            ConfigError,
            r"\(env, agent, tasks\), in this order; got \(ScriptedAgent, Guess, list\)",
        ),
        ((ENV, tasks("a"), AGENT), ConfigError, r"in this order; got \(Guess, list, ScriptedAgent\)"),
        ((tasks("a"), ENV, AGENT), ConfigError, r"in this order; got \(list, Guess, ScriptedAgent\)"),
        ((ENV, ENV, tasks("a")), ConfigError, r"in this order; got \(Guess, Guess, list\)"),
        ((Guess, AGENT, tasks("a")), ConfigError, r"got the class Guess: pass Guess\(tokenizer, env_config\)"),
        ((ENV, None, tasks("a")), ConfigError, "an agent must define get_action"),
        ((ENV, AGENT, {"solution": "a"}), TaskError, "tasks must be a list of task_data dicts, got"),
        ((ENV, AGENT, None), TaskError, "tasks must be a list of task_data dicts, got None"),
    ],
)
def test_arguments_in_a_wrong_order_are_reported(arguments: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        evaluate(*arguments)


@pytest.mark.parametrize(
    ("option", "nearest"),
    [("cluster_bye", "cluster_by"), ("max_concurent", "max_concurrent"), ("max_turn_token", "max_turn_tokens")],
)
def test_a_misspelled_keyword_names_the_nearest(option: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"evaluate has no argument '{option}'; did you mean '{nearest}'"):
        evaluate(ENV, AGENT, tasks("a"), **{option: 1})


@pytest.mark.parametrize("option", ["n", "task_data_list"])
def test_an_unknown_keyword_names_those_of_evaluate_alone(option: str) -> None:
    known = (
        "'agent', 'agent_name', 'cluster_by', 'env', 'episode_timeout_s', 'failures', 'max_completion_length', "
        "'max_concurrent', 'max_failed_fraction', 'max_turn_tokens', 'num_rollouts', 'on_finish', 'on_resume', "
        "'pool', 'progress', 'references', 'resume', 'seed', 'store', 'tasks', 'turn_timeout_s'"
    )
    with pytest.raises(TypeError) as raised:
        evaluate(ENV, AGENT, tasks("a"), **{option: 2})
    assert str(raised.value) == f"evaluate has no argument {option!r}; valid names: {known}"


def test_an_evaluation_in_which_too_much_fails_ends_and_keeps_what_is_finished() -> None:
    agent, seen = ScriptedAgent(["a", "crash"], repeat_last=True), list[Trajectory]()
    rows = tasks("a", "b", "c", "a", "d")
    kept = evaluate(env(), agent, rows, max_failed_fraction=0.6)
    assert (kept.num_episodes, kept.num_failed) == (2, 3)
    with pytest.raises(TooManyFailuresError) as caught:
        evaluate(env(), agent, rows, max_failed_fraction=0.2, max_concurrent=1, on_finish=seen.append)
    assert str(caught.value).startswith(
        "2 of 5 rollouts failed, more than max_failed_fraction = 0.2 allows; the first failure:\n"
        "task 1, rollout 0, turn 1 of Guess, at "
    )
    assert str(caught.value).endswith("RuntimeError: the dice fell off the table")
    assert [one.task_index for one in caught.value.trajectories] == [0, 1, 2]
    assert list(caught.value.trajectories) == seen


@pytest.mark.parametrize("fraction", [-0.1, 1.5, "all", True])
def test_a_fraction_is_a_number_from_0_to_1(fraction: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_failed_fraction must be a number in \[0, 1\] or None, got "):
        evaluate(ENV, AGENT, tasks("a"), max_failed_fraction=fraction)


class Refused(AsyncAgent):
    """Its server takes the key for the first two answers only."""

    num_answers = 0

    async def aact(self, request: TurnRequest) -> Action:
        self.num_answers += 1
        if self.num_answers > 2:
            raise ConfigError("the server refuses the key")
        return Action(text="a")


def test_an_agent_whose_key_is_refused_is_not_called_again_and_no_finished_rollout_is_lost() -> None:
    agent = Refused()
    with pytest.raises(ConfigError, match="the server refuses the key") as caught:
        evaluate(env(), agent, tasks(*"aaaaaa"), max_concurrent=1)
    assert agent.num_answers == 3
    assert [one.success for one in caught.value.trajectories] == [True, True]


def test_a_transcript_reads_as_the_game_went() -> None:
    agent = ScriptedAgent(["", "<think>a?</think>b"])
    (trajectory,) = evaluate(env(system_prompt="Play."), agent, [{"solution": "b", "seed": 1}]).trajectories
    coin = trajectory.messages[1]["content"]
    assert render_transcript(trajectory) == (
        "=== task 0, rollout 0: won after 2 turns (done), reward 1 ===\n"
        f"[system] Play.\n[user] {coin}\n[assistant +0, invalid] \n[user] no\n[thought] a?\n[assistant +1] b\n"
    )


def test_a_transcript_shows_calls_and_the_named_rewards_that_are_not_zero() -> None:
    (trajectory,) = evaluate(env(), ScriptedAgent(["b"]), tasks("b")).trajectories
    function = {"name": "open", "arguments": {"door": "left", "times": 2}}
    output = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "assistant", "content": "so", "tool_calls": [{"function": {"name": "end", "arguments": "{}"}}]},
    ]
    turn = dataclasses.replace(trajectory.turns[0], message_index=1, components={"kind": 0.0, "right": 1.0})
    text = render_transcript(dataclasses.replace(trajectory, messages=output, turns=[turn]))
    assert text.endswith("[assistant +1, right +1] open(door='left', times=2)\n[assistant] so\nend({})\n")


def test_a_transcript_has_no_minus_zero() -> None:
    (trajectory,) = evaluate(env(), ScriptedAgent(["b"]), tasks("b")).trajectories
    silent = dataclasses.replace(
        trajectory, final_reward=-0.0, turns=[dataclasses.replace(trajectory.turns[0], reward=-0.0)]
    )
    text = render_transcript(silent)
    assert text.splitlines()[0].endswith("reward 0 ===")
    assert "[assistant +0] b" in text


def test_a_transcript_of_a_failed_game_ends_with_its_error() -> None:
    (trajectory,) = evaluate(env(), ScriptedAgent(["crash"]), tasks("b")).trajectories
    text = render_transcript(trajectory)
    assert text.startswith("=== task 0, rollout 0: failed after 1 turn (failed), reward 0 ===\n")
    assert text.rstrip().endswith("the dice fell off the table")
    assert "[assistant +0] crash\n[error] " in text


def test_a_transcript_shows_escape_sequences_and_obeys_none() -> None:
    output = "\x1b[2J\x1b]0;owned\x07b\r\u202e\ud800\tright\nnext"
    (trajectory,) = evaluate(env(), ScriptedAgent(["b"]), tasks("b")).trajectories
    played = dataclasses.replace(trajectory, messages=[{"role": "user\x1b", "content": output}], turns=[])
    text = render_transcript(played)
    assert "[user\\x1b] \\x1b[2J\\x1b]0;owned\\x07b\\r\\u202e\\ud800\tright\nnext\n" in text
    text.encode()
    assert played.messages[0]["content"] == output  # the record itself stays as it is


def test_a_progress_bar_counts_the_rollouts_and_those_stored_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bar:
        """Stands in for the bar."""

        def __init__(self, **arguments: Any) -> None:
            self.total, self.n, self.is_closed = arguments["total"], arguments["initial"], False
            bars.append(self)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.is_closed = True

        def update(self) -> None:
            self.n += 1

    bars: list[Any] = []
    finished: list[Trajectory] = []
    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    agent, stored = ScriptedAgent(["a"], repeat_last=True), {"store": tmp_path, "agent_name": "one"}
    evaluate(ENV, agent, tasks("a", "b"), **stored)
    assert bars == []
    evaluate(ENV, agent, tasks("a", "b", "c"), **stored, resume=True, progress=True, on_finish=finished.append)
    assert [(bar.total, bar.n, bar.is_closed) for bar in bars] == [(3, 3, True)]
    assert len(finished) == 1
