"""The style of TextArena, whose words and opening come from its package."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from agentsgym import ScriptedAgent
from agentsgym.envs.TextArena import SPEC as TEXT_ARENA
from agentsgym.envs.TwentyQuestions import GreedyPlayer, RandomPlayer, TwentyQuestionsEnv
from agentsgym.envs.TwentyQuestions.knowledge import load_knowledge
from agentsgym.errors import ConfigError

pytest.importorskip("textarena")
GAME = {"style": "textarena", "max_steps_per_episode": 21, "reward_scheme": "win"}
ENV = TwentyQuestionsEnv(None, GAME)


def reported(env: TwentyQuestionsEnv, solution: str, *output: str) -> tuple[list[str], float]:
    """Play a game; return what the environment returns after its opening, and the reward."""
    [one] = env.rollout([{"solution": solution}], ScriptedAgent([*output]))
    assert one.error is None
    return [message["content"] for message in one.messages if message["role"] == "user"][1:], one.final_reward


def test_the_opening_and_the_words_are_those_of_the_package() -> None:
    [one] = ENV.rollout([{"solution": "teacher"}], ScriptedAgent(["[pilot]"]))
    assert [message["role"] for message in one.messages] == ["user", "assistant"]
    assert "related to people" in one.messages[0]["content"]
    assert "[diving bell]" in one.messages[0]["content"]
    assert len(ENV.candidates.objects) > 100
    assert set(ENV.candidates.objects) <= {*load_knowledge().objects}


def test_the_hard_mode_is_absent() -> None:
    with pytest.raises(ConfigError, match=r"must be False with style 'textarena'.* Use style 'agentsgym'"):
        TwentyQuestionsEnv(None, {**GAME, "hardcore": True})
    [one] = ENV.rollout([{"solution": "sextant"}], ScriptedAgent(["Is it a sextant?", "[sextant]"]))
    assert (one.messages[2]["content"], one.success) == ("Yes", True)


@pytest.mark.parametrize("secret", ["school", "marble", "yo-yo", "school nurse"])
def test_a_question_with_a_name_is_answered_and_ends_nothing(secret: str) -> None:
    script = [f"Is it a {secret}?", "Is it a castle?", "I think it's a rat", "is it a gizmo?", f"[{secret}]"]
    assert reported(ENV, secret, *script) == (["Yes", "No", "No", "I don't know"], 1.0)


def test_a_question_with_a_name_earns_information() -> None:
    env = TwentyQuestionsEnv(None, {**GAME, "reward_scheme": "win_plus_information"})
    [one] = env.rollout([{"solution": "school"}], ScriptedAgent(["Is it a castle?", "Is it a school?", "[school]"]))
    assert one.turn_rewards[0] > 0
    assert sum(one.turn_rewards[:2]) == pytest.approx(1.0)


def test_the_gamemaster_of_the_package_has_these_replies() -> None:
    source = inspect.getsource(TEXT_ARENA.load("textarena.envs.TwentyQuestions.env").TwentyQuestionsEnv.__init__)
    options = re.search(r"gamemaster_options = (\[.*\])", source)
    assert options
    assert ast.literal_eval(options[1]) == [*ENV.style.replies.values()]


def test_all_but_a_bracket_is_a_question_and_there_is_no_sometimes() -> None:
    question = load_knowledge().properties["metal"].question
    assert load_knowledge().value("chair", "metal") == "sometimes"
    heard, reward = reported(ENV, "chair", "Is it alive?", question, "I like turtles", "Is it [table]?", "[Chairs]")
    assert heard == ["No", "I don't know", "I don't know", "No"]
    assert reward == 1.0


def test_a_gamemaster_of_ones_own_has_no_sometimes_either() -> None:
    env = TwentyQuestionsEnv(None, {**GAME, "gamemaster": lambda solution, question: "Sometimes."})
    assert reported(env, "chair", "Is it alive?", "[chair]") == (["I don't know"], 1.0)


def test_a_wrong_guess_loses() -> None:
    [one] = ENV.rollout([{"solution": "chair"}], ScriptedAgent(["Is it alive?", "[table]", "[chair]"]))
    assert (len(one.turns), one.final_reward, one.success) == (2, 0.0, False)


@pytest.mark.parametrize("player", [RandomPlayer, GreedyPlayer])
def test_players_know_the_style(player: type[RandomPlayer]) -> None:
    tasks = [{"solution": name} for name in ENV.candidates.objects]
    played = ENV.rollout(tasks, player(ENV))
    assert all("[" in one.messages[-1]["content"] for one in played)
    assert sum(bool(one.success) for one in played) > len(tasks) * 0.3
