"""Rows of questions of one's own, and of problems without end."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from reasoning_gym.factory import DATASETS

from agentsgym import Agent, ConfigError, ScriptedAgent, evaluate, make
from agentsgym.envs import ReasoningEvalsEnv
from agentsgym.envs.ReasoningEvals import UNSOUND, WITHOUT_SOLUTION, task_names
from agentsgym.envs.ReasoningEvals.generated import _make_item, make_item, score
from agentsgym.envs.ReasoningEvals.grading import Verdict, by_generator

SLOW = (
    "arc_agi",
    "knight_swap",
    "figlet_font",
    "group_anagrams",
    "intermediate_integration",
    "zebra_puzzles",
    "futoshiki",
    "puzzle24",
)


def test_questions_are_read_by_their_columns_and_split_by_question() -> None:
    data = [{"problem": f"{n} + 1?", "solution": rf"It is \boxed{{{n + 1}}}."} for n in range(20)]
    options: Any = {"data": data, "columns": {"question": "problem", "answer": "solution"}}
    train, held_out = (
        {row["task_data"]["question"]: row["task_data"]["answer"] for row in rows}
        for rows in (ReasoningEvalsEnv.get_train_dataset(**options), ReasoningEvalsEnv.get_eval_dataset(**options))
    )
    assert not train.keys() & held_out.keys()
    assert train | held_out == {f"{n} + 1?": str(n + 1) for n in range(20)}
    assert len(held_out) == 4


def test_choices_may_name_the_right_one_in_three_ways() -> None:
    choices = ["red", "green", "blue"]
    data = [{"question": f"q{n}", "answer": one, "choices": choices} for n, one in enumerate(["B", 1, "green"])]
    rows = ReasoningEvalsEnv.get_train_dataset(data=data, split="all")
    assert [row["task_data"]["answer"] for row in rows] == ["B"] * 3
    with pytest.raises(
        ConfigError, match=r"data\[0\]: the answer must be a choice's letter \(one of ABC\), index or text, got 5"
    ):
        ReasoningEvalsEnv.get_train_dataset(data=[{**data[0], "answer": 5}], split="all")


def test_problems_go_on_for_ever_and_never_meet_those_of_evaluation() -> None:
    options: Any = {"task": ["leg_counting", "gcd"], "difficulty": 1, "size": 50}
    items = [
        {(row["task_data"]["task"], row["task_data"]["item"]) for row in rows}
        for rows in (
            ReasoningEvalsEnv.get_train_dataset(**options),
            ReasoningEvalsEnv.get_train_dataset(**options, seed=1),
            ReasoningEvalsEnv.get_eval_dataset(**options),
        )
    ]
    assert [len(one) for one in items] == [50, 50, 50]
    assert len(set.union(*items)) == 150
    assert {name for name, _ in items[0]} == {"leg_counting", "gcd"}


def questions(rows: Any) -> set[str]:
    return {make_item(*(row["task_data"][key] for key in ("task", "difficulty", "item"))).question for row in rows}


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "prime_factorization", "basic_arithmetic"])
def test_no_question_of_evaluation_is_trained_on(task: str) -> None:
    options: Any = {"task": task, "difficulty": 0}
    trained = questions(ReasoningEvalsEnv.get_train_dataset(**options, size=300))
    for seed in (0, 1):
        held_out = questions(ReasoningEvalsEnv.get_eval_dataset(**options, size=30, seed=seed))
        assert held_out
        assert not trained & held_out


def test_a_generator_of_one_question_cannot_be_shared_out() -> None:
    always: Any = {"task": "count_primes", "size": 3, "difficulty": {"min_n": 2, "max_n": 2}}
    makers = (ReasoningEvalsEnv.get_train_dataset, ReasoningEvalsEnv.get_eval_dataset)
    assert [len(make_rows(**always, split="all")) for make_rows in makers] == [3, 3]
    refused = []
    for make_rows in makers:
        try:
            make_rows(**always)
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) == 1
    assert "too few different questions: use split='all'" in refused[0]


class Solver(Agent):
    """Knows the answers by the question."""

    def __init__(self, rows: Any) -> None:
        tasks = [row["task_data"] for row in rows]
        made = [make_item(task["task"], task["difficulty"], task["item"]) for task in tasks]
        self.solutions = {item.question: item.solution for item in made}

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        return f"<answer>{self.solutions[messages[-1]['content']]}</answer>", None


def test_generated_problems_are_played_from_rows_and_won_by_who_knows_them() -> None:
    rows = ReasoningEvalsEnv.get_train_dataset(task=["leg_counting", "spell_backward", "gcd"], difficulty=0, size=12)
    result = evaluate(make(rows[0]), Solver(rows), rows)
    assert result.win_rate is not None
    assert result.win_rate.mean == 1.0


def test_a_task_without_an_item_is_the_one_of_its_seed() -> None:
    env = ReasoningEvalsEnv()
    first, again, other = (
        env.rollout([{"task": "leg_counting", "seed": seed}], Anything())[0].messages[1]["content"]
        for seed in (1, 1, 2)
    )
    assert first == again != other


class Anything(Agent):
    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        return "<answer>zzz</answer>", None


@pytest.mark.parametrize("task", ["prime_factorization", "leg_counting", "countdown"])
def test_a_generator_that_raises_at_an_answer_calls_it_wrong(task: str) -> None:
    [trajectory] = ReasoningEvalsEnv().rollout([{"task": task, "seed": 1}], Anything())
    assert not trajectory.failed
    assert trajectory.success is False


def test_data_and_generators_are_not_mixed() -> None:
    with pytest.raises(ConfigError, match="data cannot be combined with task"):
        ReasoningEvalsEnv.get_train_dataset(data=[{"question": "?", "answer": "x"}], task="gcd")
    with pytest.raises(ConfigError, match="did you mean 'gcd'"):
        ReasoningEvalsEnv.get_train_dataset(task="gdc")
    with pytest.raises(ConfigError, match="no option 'taks'; did you mean 'task'"):
        ReasoningEvalsEnv.get_train_dataset(**{"taks": "gcd"})  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"env_config\['grader'\] is a callable, which dataset rows cannot store"):
        ReasoningEvalsEnv.get_train_dataset({"grader": max})


def test_what_is_claimed_of_generators_is_of_known_ones() -> None:
    assert {*task_names(), *UNSOUND} == {*DATASETS}
    assert {*task_names()} >= WITHOUT_SOLUTION


@pytest.mark.parametrize("task", [name for name in task_names() if name not in SLOW])
@pytest.mark.filterwarnings("ignore")  # what generators warn of is theirs
def test_a_generator_is_repeatable_private_and_sound(task: str) -> None:
    states = random.getstate(), np.random.get_state()[1].tobytes()
    item, again = _make_item(task, None, 3), _make_item(task, None, 3)
    assert (item.question, item.solution) == (again.question, again.solution)
    assert item.question != _make_item(task, None, 4).question
    if task in WITHOUT_SOLUTION:
        assert item.solution is None
    else:
        assert item.solution is not None
        assert score(item, item.solution) == 1.0
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == states


_ASK = """
import json, sys, warnings
warnings.simplefilter("ignore")
from agentsgym.envs.ReasoningEvals.generated import _make_item
names = json.loads(sys.argv[1])
asked = {name: [_make_item(name, None, item).question for item in range(10, 12)] for name in names}
print()  # some generators print
print(json.dumps(asked))
"""


def test_an_item_has_the_same_question_in_every_process() -> None:
    names = [name for name in task_names() if name not in SLOW]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _ASK, json.dumps(names)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    one, other = (json.loads(process.communicate()[0].splitlines()[-1]) for process in processes)
    assert [name for name in names if one[name] != other[name]] == []


@pytest.mark.filterwarnings("ignore")  # what generators warn of is theirs
def test_the_own_solution_of_every_generator_is_rewarded_in_play() -> None:
    env = ReasoningEvalsEnv()
    wrong: list[tuple[str, str, float]] = []
    for name in task_names():
        if name in WITHOUT_SOLUTION or name in SLOW:
            continue
        for item in (0, 3):
            solution = str(make_item(name, None, item).solution)
            mark = "" if "**" in solution else "**"  # which would end the bold type
            for output in (f"<answer>{solution}</answer>", f"So <answer>\n{mark}{solution}{mark}\n</answer>."):
                [played] = env.rollout([{"task": name, "item": item}], ScriptedAgent([output]))
                if played.final_reward != 1.0:
                    wrong.append((name, output, played.final_reward))
    assert wrong == []


def test_the_grader_grades_the_very_problem_that_was_posed() -> None:
    task = "polynomial_multiplication"  # refused, since it is another problem in the grader's process
    for number in range(12):
        problem = {"task": task, "difficulty": None, "item": number}
        solution = make_item(**problem).solution
        assert by_generator(problem, [f"0 + {solution}"], 20.0) == Verdict(1.0)
        assert by_generator(problem, [f"1 + {solution}"], 20.0) == Verdict(0.0)
