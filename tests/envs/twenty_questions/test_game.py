from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_game import OBJECTS, PROPERTIES

from agentsgym import ScoredRollout, ScriptedAgent, StopReason
from agentsgym.credit.bound import shaped
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.envs.TwentyQuestions.styles import FIRST_PROMPT, LAST_TURN

GAME = {"objects": OBJECTS, "properties": PROPERTIES, "max_steps_per_episode": 7}
ENV = TwentyQuestionsEnv(None, GAME)


def play(
    env: TwentyQuestionsEnv, solution: str, actions: list[str]
) -> tuple[list[tuple[str, float, bool, dict[str, Any]]], dict[str, Any]]:
    """Play by hand; one (observation before it, reward, done, info) a turn, and the last state."""
    state = env._initialize_episode("s", {"solution": solution, "seed": 0})
    turns = []
    for step, action in enumerate(actions):
        observation = env._format_prompt(state, step)
        state, reward, done, info = env._step_episode("s", state, action)
        turns.append((observation, reward, done, info))
    return turns, state


def rewards(env: TwentyQuestionsEnv, solution: str, actions: list[str]) -> list[float]:
    return [reward for _, reward, _, _ in play(env, solution, actions)[0]]


def test_a_game_from_prompt_to_win() -> None:
    script = ["Is it an animal?", "Can it fly?", "Is it a frog?", "hello", "Is it a bee?"]
    [trajectory] = ENV.rollout([{"solution": "bee"}], ScriptedAgent(script))
    assert [message["content"] for message in trajectory.messages[1:]] == [
        FIRST_PROMPT,
        "Is it an animal?",
        "Yes.",
        "Can it fly?",
        "Yes.",
        "Is it a frog?",
        "No.",
        "hello",
        "That was no question: ask one yes-or-no question, or guess the object.",
        "Is it a bee?",
    ]
    assert trajectory.messages[0]["role"] == "system"
    assert "You have 7 turns." in trajectory.messages[0]["content"]
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.success is True
    assert [turn.invalid for turn in trajectory.turns] == [False, False, False, True, False]


def test_information_is_rewarded_as_the_formula_states() -> None:
    # 20 objects, 5 animals (bee dog elephant frog horse), of which one flies
    share = [math.log2(20 / 5) / math.log2(20), math.log2(5 / 1) / math.log2(20)]
    assert rewards(ENV, "bee", ["Is it an animal?", "Can it fly?", "[bee]"]) == pytest.approx([*share, 1.0])
    assert sum(share) == pytest.approx(1.0)


def test_a_wrong_guess_brings_the_information_of_one_object() -> None:
    expected = [math.log2(20 / 19) / math.log2(20), -0.05, 0.0]  # the last is no candidate of this game
    assert rewards(ENV, "bee", ["Is it a dog?", "[dog]", "Is it a zeppelin?"]) == pytest.approx(expected)


@pytest.mark.parametrize("last", ["Is it an animal?", "Is it a dog?", "What is it?", "hello"])
def test_only_the_right_guess_is_rewarded_in_the_last_turn(last: str) -> None:
    env = TwentyQuestionsEnv(None, {**GAME, "max_steps_per_episode": 3, "invalid_penalty": 0})
    before = ["hello", "Can it fly?"]  # an invalid action takes a turn too
    assert rewards(env, "bee", [*before, last])[1] > 0
    assert rewards(env, "bee", [*before, last])[2] == 0.0
    assert rewards(env, "bee", [*before, "Is it a bee?"])[2] == 1.0
    assert rewards(ENV, "bee", [*before, "Is it an animal?"])[2] > 0


def test_penalties_of_the_default_scheme() -> None:
    actions = ["", "Is it alive? Is it big?", "Is it an animal?", "Is it some kind of animal?", "What is it?"]
    earned = rewards(ENV, "bee", actions)
    assert earned[:2] == [-0.1, -0.1]
    assert earned[3:] == pytest.approx([-0.05, 0.0])
    env = TwentyQuestionsEnv(None, {**GAME, "invalid_penalty": 2, "repeat_penalty": 0, "unknown_penalty": 0.5})
    assert rewards(env, "bee", ["", "Is it an animal?", "Is it an animal?", "What is it?"])[2:] == [0.0, -0.5]
    assert rewards(env, "bee", [""]) == [-2.0]


@pytest.mark.parametrize(("scheme", "earned"), [("win", [0, 0, 0, 0, 1]), ("lmrl", [-1, -1, -1, -1, 0])])
def test_other_schemes_are_as_they_are_defined(scheme: str, earned: list[float]) -> None:
    env = TwentyQuestionsEnv(None, {**GAME, "reward_scheme": scheme})
    assert rewards(env, "bee", ["", "Is it an animal?", "Is it an animal?", "[dog]", "[bee]"]) == earned


def test_a_penalty_that_is_set_holds_in_any_scheme() -> None:
    env = TwentyQuestionsEnv(None, {**GAME, "reward_scheme": "win", "invalid_penalty": 0.3})
    assert rewards(env, "bee", ["", "[bee]"]) == [-0.3, 1.0]


def test_the_final_reward_is_the_sum_of_the_turn_rewards() -> None:
    script = ["Is it an animal?", "Is it an animal?", "", "Is it a bee?"]
    [trajectory] = ENV.rollout([{"solution": "bee"}], ScriptedAgent(script))
    assert trajectory.final_reward == pytest.approx(sum(trajectory.turn_rewards))
    assert trajectory.final_reward == pytest.approx(math.log(4) / math.log(20) - 0.05 - 0.1 + 1.0)


def test_a_final_guess_ends_the_game() -> None:
    env = TwentyQuestionsEnv(None, {**GAME, "final_guess": True})
    [trajectory] = env.rollout([{"solution": "bee"}], ScriptedAgent(["Is it an animal?", "Is it a dog?"]))
    assert (trajectory.stop_reason, trajectory.success) == (StopReason.DONE, False)
    assert trajectory.turn_rewards[1] == 0.0
    assert "single guess" in trajectory.messages[0]["content"]


def test_the_last_turn_demands_the_guess() -> None:
    env = TwentyQuestionsEnv(None, {**GAME, "max_steps_per_episode": 2})
    [trajectory] = env.rollout([{"solution": "bee"}], ScriptedAgent(["Can it fly?", "Is it round?"]))
    assert trajectory.messages[3]["content"] == f"Yes. {LAST_TURN}"
    assert (trajectory.stop_reason, trajectory.success) == (StopReason.MAX_TURNS, False)
    one = TwentyQuestionsEnv(None, {**GAME, "max_steps_per_episode": 1})
    assert one._format_prompt(one._initialize_episode("s", {"solution": "bee"}), 0) == f"{FIRST_PROMPT} {LAST_TURN}"
    assert "1 turn." in one._system_prompt()


def test_too_many_invalid_actions_end_the_game() -> None:
    [trajectory] = ENV.rollout([{"solution": "bee"}], ScriptedAgent(["", "hello"]))
    assert (trajectory.stop_reason, trajectory.success) == (StopReason.INVALID, False)


@pytest.mark.parametrize(
    ("guess", "won"),
    [
        ("Is it a testword?", True),
        ("[Testword]", True),
        ("Is it a clock?", False),
        ("Is it testwords?", True),
        ("Is it a testword radio?", False),
    ],
)
def test_a_solution_that_nobody_knows_can_be_played(guess: str, won: bool) -> None:
    turns, state = play(ENV, "testword", ["Is it an animal?", guess])
    assert turns[0][1] == 0.0
    assert turns[1][2] is turns[1][3]["success"] is won
    assert state["observation"] == ("Yes." if won else "No." if "clock" in guess else "I don't know.")
    assert play(ENV, "testword", ["Is it an animal?"])[1]["observation"] == "I don't know."


def test_a_known_solution_outside_the_game_is_answered_from_the_facts() -> None:
    turns, _ = play(ENV, "Fridge", ["Is it an animal?", "Is it found in a kitchen?", "Is it a refrigerator?"])
    assert turns[2][3]["success"] is True
    assert turns[0][1] == pytest.approx(math.log2(21 / 16) / math.log2(21))


OPEN = TwentyQuestionsEnv(None, {"objects": OBJECTS})
NONSENSE, ODD = "Does it glorp the frumious?", "I don't know what you mean."


def test_what_is_not_understood_is_told_apart_from_what_is_not_known() -> None:
    for solution, action, reply, not_understood in (
        ("bee", NONSENSE, ODD, True),
        ("testword", "Is it an animal?", "I don't know.", False),
        ("bee", "Is it an animal?", "Yes.", False),
    ):
        [(_, _, _, info)], state = play(OPEN, solution, [action])
        assert (state["observation"], info["not_understood"]) == (reply, not_understood)
    assert ODD in OPEN._system_prompt()
    assert ODD in OPEN.vocabulary_texts()


@pytest.mark.parametrize(
    "config", [GAME, {"gamemaster": lambda solution, question: "I don't know."}], ids=["few properties", "own"]
)
def test_a_closed_vocabulary_and_a_gamemaster_keep_one_reply(config: dict[str, Any]) -> None:
    env = TwentyQuestionsEnv(None, config)
    turns, state = play(env, "bee", [NONSENSE])
    assert (state["observation"], turns[0][3]["not_understood"]) == ("I don't know.", True)
    _, state = play(env, "testword", ["Is it an animal?"])
    assert state["observation"] == "I don't know."
    assert ODD not in " ".join(env.vocabulary_texts())


def test_a_gamemaster_of_ones_own_that_answers_has_understood() -> None:
    env = TwentyQuestionsEnv(None, {**GAME, "gamemaster": lambda solution, question: "No."})
    assert play(env, "bee", [NONSENSE])[0][0][3]["not_understood"] is False


def test_the_penalty_for_an_unknown_reply_holds_for_both() -> None:
    env = TwentyQuestionsEnv(None, {"objects": OBJECTS, "unknown_penalty": 0.5})
    assert rewards(env, "testword", ["Is it an animal?", NONSENSE]) == [-0.5, -0.5]


def test_fractions_of_turns_and_the_information_are_metrics() -> None:
    actions = ["Is it an animal?", NONSENSE, "Is it a dog?", "hello", "Can it fly?", NONSENSE, "Is it a bee?"]
    [known] = OPEN.rollout([{"solution": "bee"}], ScriptedAgent(actions))
    assert known.metrics == pytest.approx({
        "information": 1.0,
        "not_understood_turns": 2 / 7,
        "not_known_turns": 0.0,
        "invalid_turns": 1 / 7,
        "guess_turns": 2 / 7,
    })  # fmt: skip
    [lost] = OPEN.rollout([{"solution": "testword"}], ScriptedAgent(["Is it an animal?", NONSENSE, "", ""]))
    assert (lost.metrics["not_known_turns"], lost.metrics["information"]) == (0.25, 0.0)
    turns, _ = play(OPEN, "bee", ["Is it an animal?", NONSENSE])
    assert [info["information"] for *_, info in turns] == pytest.approx([math.log(20 / 5) / math.log(20)] * 2)


LETTERS = (
    "Does it start with b?",
    "Does it contain the letter e?",
    "Does it have more than 2 letters?",
    "Is it one word?",
    "Is the first letter a vowel?",
)


@pytest.mark.parametrize("question", LETTERS)
def test_questions_about_the_name_can_be_turned_off(question: str) -> None:
    heard = []
    own = {"gamemaster": lambda solution, text: heard.append(text) or "Yes."}
    for config, reply in ({}, ODD), ({"style": "textarena"}, "I don't know"), (own, "I don't know."):
        if config.get("style"):
            pytest.importorskip("textarena")
        [(_, reward, _, info)], state = play(
            TwentyQuestionsEnv(None, {**config, "objects": OBJECTS, "spelling": False}), "bee", [question]
        )
        assert (state["observation"], reward, info["not_understood"]) == (reply, 0.0, True)
    assert heard == []
    assert play(OPEN, "bee", [question])[0][0][3]["not_understood"] is False
    assert "letters" in TwentyQuestionsEnv(None, {"spelling": False})._system_prompt()
    assert "letters" not in OPEN._system_prompt()


def test_properties_outside_the_game_are_not_answered() -> None:
    _, state = play(ENV, "bee", ["Does it have fur?"])
    assert state["observation"] == "I don't know."
    assert state["candidates"] == ENV.candidates.all


def test_a_gamemaster_of_ones_own() -> None:
    heard = []

    def gamemaster(solution: str, question: str) -> str:
        heard.append((solution, question))
        return "No."

    env = TwentyQuestionsEnv(None, {**GAME, "gamemaster": gamemaster})
    turns, _ = play(env, "Bee", ["Is it an animal?", "Does it buzz?", "Is it found in a kitchen?", "Is it a dog?"])
    assert heard == [("Bee", "Is it an animal?"), ("Bee", "Does it buzz?"), ("Bee", "Is it found in a kitchen?")]
    assert turns[0][1] == turns[1][1] == 0.0  # what the facts do not confirm rules nothing out
    assert turns[2][1] > 0
    assert play(env, "bee", ["[bee]"])[0][0][3]["success"] is True


@pytest.mark.parametrize("answer", [None, "", " \n", "."])
def test_a_gamemaster_that_answers_nonsense_fails_its_episode_alone(answer: Any) -> None:
    env = TwentyQuestionsEnv(None, {**GAME, "gamemaster": lambda solution, question: answer})
    [trajectory] = env.rollout([{"solution": "bee"}], ScriptedAgent(["Is it an animal?"]))
    assert trajectory.failed
    assert f"must answer with a str that is not empty, got {answer!r}" in (trajectory.error or "")


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        ("yes", "Yes."),
        (" YES!\r\n", "Yes."),
        ("**Yes**", "Yes."),
        ("I don\u2019t know", "I don't know."),
        ("Perhaps, who knows", "Perhaps, who knows"),
    ],
)
def test_the_form_of_a_gamemasters_reply_makes_no_difference(answer: str, reply: str) -> None:
    env = TwentyQuestionsEnv(None, {**GAME, "gamemaster": lambda solution, question: answer})
    turns, state = play(env, "bee", ["Is it an animal?"])
    assert state["observation"] == reply
    assert (turns[0][1] > 0) is (reply == "Yes.")


def test_state_keys_are_equal_where_the_same_objects_are_left() -> None:
    one = play(ENV, "bee", ["Can it fly?", "Is it an animal?"])[1]
    other = play(ENV, "bee", ["Is it an animal?", "What is it?", "Can it fly?"])[1]
    assert ENV._state_key(one) == ENV._state_key(other) != ENV._state_key(play(ENV, "bee", ["Can it fly?"])[1])
    hash(ENV._state_key(one))


def shaped_rewards(solution: str, actions: list[str], **config: Any) -> list[float]:
    """The turn rewards of the scheme that gives wins alone, shaped with the game's potential."""
    env = TwentyQuestionsEnv(None, {**GAME, "reward_scheme": "win", **config})
    [trajectory] = env.rollout([{"solution": solution}], ScriptedAgent(actions))
    scored = ScoredRollout.from_trajectory(trajectory, group=0)
    return [*shaped([scored], discount=1.0, weight=1.0)[0].turn_rewards]


def test_shaping_rewards_each_turn_with_the_information_that_it_brings() -> None:
    script = ["Is it an animal?", "What is it?", "Is it a dog?", "Can it fly?", "[bee]"]
    env = TwentyQuestionsEnv(None, {**GAME, "repeat_penalty": 0.0})
    assert shaped_rewards("bee", script) == pytest.approx(rewards(env, "bee", script))
    lost = shaped_rewards("bee", ["Is it an animal?", "[dog]"], final_guess=True)
    assert sum(lost) == pytest.approx(1.0)  # whatever is played, a game's shaping comes to the same
    assert sum(shaped_rewards("zeppelin", ["Can it fly?", "[zeppelin]"])) == pytest.approx(2.0)


def test_an_only_object_leaves_nothing_to_find_out() -> None:
    env = TwentyQuestionsEnv(None, {**GAME, "objects": ["bee"]})
    assert env._potential(env._initialize_episode("s", {"solution": "bee"})) == 0.0


def test_a_step_leaves_the_state_before_it_alone() -> None:
    state = ENV._initialize_episode("s", {"solution": "bee"})
    before = dict(state)
    for action in ("Can it fly?", "", "[dog]", "[bee]"):
        ENV._step_episode("s", state, action)
    assert state == before


SAID = st.sampled_from(
    [ENV.knowledge.properties[key].question for key in PROPERTIES]
    + [ENV.knowledge.objects[name].guess for name in OBJECTS]
    + ["", "hm", "What is it?"]
)


@given(st.lists(SAID, max_size=7), st.sampled_from([*OBJECTS, "testword"]))
def test_the_secret_always_fits_and_information_never_exceeds_one(actions: list[str], secret: str) -> None:
    state = ENV._initialize_episode("s", {"solution": secret})
    information = 0.0
    for action in actions:
        state, reward, done, info = ENV._step_episode("s", state, action)
        assert state["candidates"] & state["secret_bit"]
        assert done is info["success"]
        if done:
            assert reward == 1.0
            return
        information += max(reward, 0.0)
    assert information <= 1.0 + 1e-9


@given(st.data())
def test_sessions_do_not_touch_each_other(data: st.DataObject) -> None:
    scripts = {name: data.draw(st.lists(SAID, min_size=3, max_size=3)) for name in ("bee", "dog", "testword")}
    alone = {name: [turn[:3] for turn in play(ENV, name, actions)[0]] for name, actions in scripts.items()}
    order = data.draw(st.permutations(list(itertools.chain.from_iterable([name] * 3 for name in scripts))))
    states = {name: ENV._initialize_episode(name, {"solution": name, "seed": 0}) for name in scripts}
    together = {name: [] for name in scripts}
    for name in order:
        step = len(together[name])
        observation = ENV._format_prompt(states[name], step)
        states[name], reward, done, _ = ENV._step_episode(name, states[name], scripts[name][step])
        together[name].append((observation, reward, done))
    assert together == alone


def test_the_vocabulary_holds_every_word_of_a_game() -> None:
    env = TwentyQuestionsEnv(None, {**GAME, "system_prompt": "", "final_guess": True})
    texts = env.vocabulary_texts()
    assert all(texts)
    assert {env.knowledge.objects[name].guess for name in OBJECTS} <= set(texts)
    assert {env.knowledge.properties[key].question for key in PROPERTIES} <= set(texts)
    assert not any("Twenty Questions" in text for text in texts)
    for action, step in itertools.product(("", "hello", "Can it fly? Is it big?", "Can it fly?", "Is it new?"), (1, 6)):
        _, state = play(env, "bee", [action])
        assert env._format_prompt(state, step) in texts
    assert ENV._system_prompt() in ENV.vocabulary_texts()


def test_a_kind_that_is_also_a_name_is_answered_as_a_property_and_rules_out_the_object_of_that_name() -> None:
    env = TwentyQuestionsEnv(None, {"final_guess": True})
    for action, solution, reply in (("Is it a fish?", "shark", "Yes."), ("Is it a tree?", "dog", "No.")):
        turns, state = play(env, solution, [action])
        assert state["observation"] == reply
        assert not turns[0][2]
        left = env.candidates.names(state["candidates"])
        assert solution in left
        assert action[8:-1] not in left
    won, _ = play(env, "tree", ["Is it a tree?"])
    assert won[0][2]


def test_a_kind_that_the_game_does_not_answer_is_a_guess() -> None:
    [turn], state = play(ENV, "bee", ["Is it a fish?"])
    assert turn[3]["guess"] == "fish"
    assert state["observation"] == "No."
