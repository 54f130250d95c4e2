"""ReasoningEvalsEnv in play: attempts, feedback, rewards, what cannot be read, and graders of one's own."""

from __future__ import annotations

from typing import Any

import pytest

from agentsgym import evaluate
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.envs.ReasoningEvals import ReasoningEvalsEnv
from agentsgym.envs.ReasoningEvals import env as env_module
from agentsgym.errors import ConfigError, MissingDependencyError, TaskError
from agentsgym.rollouts.process_pool import EnvProcessPool
from agentsgym.rollouts.thread_pool import EnvThreadPool
from agentsgym.types import Action, StopReason, Trajectory

TASK = {"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}
CHOICE = {"question": "Which is a town?", "answer": "B", "choices": ["Tarn", "Belmora"]}


def played(*actions: str | Action, task: Any = TASK, **config: Any) -> Trajectory:
    [trajectory] = ReasoningEvalsEnv(None, config).rollout([task], ScriptedAgent([*actions], repeat_last=True))
    return trajectory


def test_one_attempt_is_one_turn() -> None:
    right, wrong = played("so <answer>7</answer>"), played("8")
    assert (right.final_reward, right.info["answer"], right.success) == (1.0, "7", True)
    assert (wrong.final_reward, wrong.info["answer"], wrong.success) == (0.0, "8", False)
    assert right.num_turns == wrong.num_turns == 1
    assert right.stop_reason is wrong.stop_reason is StopReason.DONE


def test_a_wrong_answer_is_reported_and_may_be_corrected() -> None:
    trajectory = played("8", r"\boxed{7}", max_attempts=3, wrong_penalty=0.25)
    assert trajectory.messages[3]["content"] == "That is not right. You have 2 attempts left."
    assert trajectory.turn_rewards == [-0.25, 1.0]
    assert played("8", max_attempts=3).num_turns == 3


def test_an_answer_that_nobody_can_find_is_invalid_and_names_what_would_be_found() -> None:
    trajectory = played("I do not know.", "7", max_attempts=2, invalid_penalty=0.5)
    assert [turn.invalid for turn in trajectory.turns] == [True, False]
    assert trajectory.turn_rewards == [-0.5, 1.0]
    assert trajectory.messages[3]["content"] == (
        "No answer was found. Write the final answer, and nothing else, between <answer> and </answer>. "
        "You have 1 attempt left."
    )
    assert played("I do not know.").info == {"success": False, "invalid": True, "num_attempts": 1, "score": 0.0}


def test_thoughts_are_not_the_answer_and_neither_is_what_was_cut() -> None:
    assert played("<think><answer>7</answer>").turns[0].invalid
    assert played("<think><answer>8</answer></think>7").success
    assert played(Action(text="first 3, then 7", finish_reason="length")).turns[0].invalid
    assert played(Action(text=r"\boxed{7}, since", finish_reason="length")).success


def test_choices_are_shown_with_letters() -> None:
    trajectory = played("The answer is (B)", task=CHOICE)
    assert trajectory.messages[1]["content"] == "Which is a town?\nA. Tarn\nB. Belmora"
    assert trajectory.success


@pytest.mark.parametrize("extractor", ["tag", "boxed", "hashes", "choice", "number", "line"])
def test_the_prompt_names_the_form_that_is_looked_for(extractor: str) -> None:
    form = {
        "tag": "<answer>7</answer>",
        "boxed": r"\boxed{7}",
        "hashes": "#### 7",
        "choice": "The answer is (B)",
        "number": "7",
        "line": "7",
    }[extractor]
    trajectory = played(form, task=CHOICE if extractor == "choice" else TASK, extractor=extractor)
    assert trajectory.success
    sign = {"tag": "<answer>", "boxed": r"\boxed{}", "hashes": "####", "choice": "(X)", "number": "number"}
    assert sign.get(extractor, "alone") in trajectory.messages[0]["content"]


def test_functions_extract_and_grade() -> None:
    config = {"extractor": lambda output: output.partition(": ")[2], "grader": lambda answer, gold: 0.5}
    trajectory = played("it is: seven", partial_credit=True, **config)
    assert trajectory.final_reward == 0.5
    assert trajectory.info["answer"] == "seven"
    assert trajectory.success is False
    assert played("seven", **config).turns[0].invalid


def test_partial_credit_gives_what_is_better_than_before() -> None:
    scores = iter([0.25, 0.125, 0.5])
    trajectory = played("7", max_attempts=3, partial_credit=True, grader=lambda answer, gold: next(scores))
    assert trajectory.turn_rewards == [0.25, 0.0, 0.25]


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"grader": lambda answer, gold: None}, "must return True, False or a number in"),
        ({"grader": lambda answer, gold: 2}, "must return True, False or a number in"),
        ({"grader": lambda answer, gold: 1 / 0}, "ZeroDivisionError"),
        ({"extractor": lambda output: 7}, "must return a str or None, got 7"),
    ],
)
def test_a_function_that_gives_nonsense_fails_its_episode(config: Any, error: str) -> None:
    trajectory = played("7", **config)
    assert trajectory.failed
    assert error in str(trajectory.error)


def test_an_answer_that_hangs_is_wrong_and_gives_the_reason() -> None:
    task = {"question": "?", "answer": "x^2"}
    trajectory = played("<answer>9^{9^9}</answer>", task=task, grading_timeout_s=0.5)
    assert not trajectory.failed
    assert trajectory.info["grading"] == "timeout"
    assert trajectory.success is False


@pytest.mark.parametrize("pool", [EnvThreadPool, EnvProcessPool])
def test_it_grades_in_threads_and_in_processes(pool: Any) -> None:
    env = ReasoningEvalsEnv()
    tasks = [{"question": f"x+{n}?", "answer": f"x+{n}"} for n in range(4)]
    with pool(2) as workers:
        result = evaluate(env, ScriptedAgent(["<answer>2+x</answer>"]), tasks, pool=workers)
    assert [one.success for one in result.trajectories] == [False, False, True, False]


def test_accuracy_pass_and_majority_are_distinguished() -> None:
    env = ReasoningEvalsEnv()
    answers = iter(["7", "8", "8", "7.0", "7", "9"])

    class Guesser:
        def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
            return next(answers), None

    result = evaluate(env, Guesser(), [TASK, TASK], num_rollouts=3)
    assert result.win_rate is not None
    assert result.win_rate.mean == 0.5
    assert result.pass_at_k(3) == 1.0
    assert result.maj_at_k(3) == 0.5
    assert result.maj_at_k(1) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("task", "error"),
    [
        ({}, "'question'"),
        ({"question": "?"}, "'answer'"),
        ({"question": "?", "answer": 7}, "'answer'"),
        ({**CHOICE, "answer": "C"}, "one of AB, got 'C'"),
        ({**CHOICE, "choices": ["x"]}, "2 to 26 strings"),
        ({"task": "leg_count"}, "did you mean 'leg_counting'"),
        ({"task": "leg_counting", "question": "?"}, "must not have both"),
        ({"task": "leg_counting", "item": -1}, "'item'"),
        ({"task": "leg_counting", "difficulty": 10**9}, "must be a level from 0 to"),
        ({"task": "leg_counting", "difficulty": {"legs": 3}}, "cannot be created with the difficulty"),
        ({"task": "codeio"}, "is not supported: its problems depend on Python's global random generator"),
        ({"task": "acre", "difficulty": 1}, "has no levels of difficulty"),
    ],
)
def test_tasks_are_checked(task: Any, error: str) -> None:
    with pytest.raises(TaskError, match=error):
        ReasoningEvalsEnv().check_task(task)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"extractor": "box"}, "one of 'auto', 'tag', 'boxed'"),
        ({"grader": "sympy"}, "one of 'auto', 'text'"),
        ({"max_attempts": 30}, "must be at most env_config"),
        ({"grading_timeout_s": 0}, "must be a number > 0"),
    ],
)
def test_bad_configurations_are_refused(config: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        ReasoningEvalsEnv(None, config)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'agentsgym\[reasoning\]'"):
        ReasoningEvalsEnv()
    assert env_module.ReasoningEvalsEnv(None, {"grader": "text"})
