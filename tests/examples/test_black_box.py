"""The example of a program as a person runs it, shortened, and its game."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
from example_runs import FOLDER, call_example, summary_of

from agentsgym import ScriptedAgent
from agentsgym.envs import AgentProgramEnv
from agentsgym.envs.TwentyQuestions import DEMO_PROPERTIES, TwentyQuestionsEnv


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    namespace = runpy.run_path(str(FOLDER / "black_box.py"))
    config = {"objects": [*namespace["OBJECTS"]], "properties": [*DEMO_PROPERTIES]}
    facts, guesses = namespace["facts_of"](TwentyQuestionsEnv(env_config=config))
    namespace["FACTS"].update(facts)
    namespace["GUESSES"].update(guesses)
    return namespace


def test_a_game_is_rewarded_by_information_and_by_the_win(example: dict[str, Any]) -> None:
    secret = example["OBJECTS"][1]
    question = "Is it alive?"
    same = sum(answers[question] == example["FACTS"][secret][question] for answers in example["FACTS"].values())
    [guess] = [text for text, name in example["GUESSES"].items() if name == secret]
    env = AgentProgramEnv(program=example["play"])
    [one] = env.rollout([{"secret": secret}], ScriptedAgent([question, "Hm?", guess]))
    gained = 1 - math.log(same, len(example["FACTS"]))
    assert one.turn_rewards == pytest.approx([gained, -0.1, 1.0])
    assert one.success is True
    [lost] = env.rollout([{"secret": secret}], ScriptedAgent([question], repeat_last=True))
    assert (len(lost.turns), lost.success) == (5, False)


def test_the_policy_is_trained_through_the_program(tmp_path: Path) -> None:
    short = ["--num_games", "16", "--num_demonstrations", "64", "--warm_start_steps", "3", "--max_steps", "2"]
    printed = call_example("black_box", tmp_path, *short)
    assert "after" in printed
    assert summary_of(tmp_path)["interrupted"] is False
    assert (tmp_path / "transcripts_after.txt").is_file()
