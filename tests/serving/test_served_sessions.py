"""A session: each message gets its response, and what is wrong with one is a sentence that costs nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served_games import QUESTIONS, TASKS, Game, add, guesses, live, sums

from agentsgym.envs.Tools import ToolEnv
from agentsgym.errors import ConfigError, TaskError
from agentsgym.serving.served_env import ServedEnv
from agentsgym.serving.server import Session

SERVED, SUMS = guesses(), sums()
_NAMES = ("seed", "split", "index", "task", "episode_id")
KINDS = st.sampled_from(["reset", "step", "other"])
NAMES = st.sampled_from(
    ["seed", "split", "index", "task", "episode_id", "message", "type", "tool_name", "arguments", "metadata", "first"]
)


def reported(session: Session, kind: str, data: Any = None) -> dict[str, Any]:
    """What a message is answered."""
    message = {"type": kind} if data is None else {"type": kind, "data": data}
    return json.loads(str(session.respond(json.dumps(message))))


def seen(session: Session, kind: str, data: Any = None) -> dict[str, Any]:
    """The data of the answer, which is no error."""
    answer = reported(session, kind, data)
    assert answer["type"] in {"observation", "state"}, answer
    return answer["data"]


def refused(session: Session, kind: str, data: Any = None) -> tuple[str, str]:
    """The code and the sentence of the error."""
    answer = reported(session, kind, data)
    assert answer["type"] == "error", answer
    assert "Traceback" not in answer["data"]["message"]
    return answer["data"]["code"], answer["data"]["message"]


def guess(text: str) -> dict[str, Any]:
    return {"message": text}


def test_an_episode_from_its_reset_to_its_end() -> None:
    session = Session(SERVED)
    assert seen(session, "state") == {"episode_id": None, "step_count": 0}
    first = seen(session, "reset", {"task": {"solution": 3, "seed": 7}, "episode_id": "mine"})
    assert first["observation"] == {"text": "Play.\n\nGuess a number from 1 to 9."}
    assert (first["reward"], first["done"]) == (None, False)
    assert first["metadata"]["messages"] == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Guess a number from 1 to 9."},
    ]
    higher = seen(session, "step", guess("2"))
    assert higher["observation"]["text"].startswith("Higher. ")
    assert (higher["reward"], higher["done"], higher["metadata"]) == (-0.25, False, {"success": False})
    wrong = seen(session, "step", {"message": "hm", "metadata": {}})
    assert (wrong["reward"], wrong["metadata"]) == (-1.0, {"success": False, "invalid": True})
    assert seen(session, "state") == {"episode_id": "mine", "step_count": 2}
    last = seen(session, "step", guess("3"))
    assert (last["observation"], last["reward"], last["done"]) == ({"text": "It is over."}, 1.0, True)
    assert last["metadata"] == {"success": True, "stop_reason": "done", "truncated": False, "final_reward": -0.25}
    assert refused(session, "step", guess("3"))[0] == "EXECUTION_ERROR"
    assert seen(session, "reset", {"seed": 1})["done"] is False
    session.close()
    assert live(SERVED) == {}


@pytest.mark.parametrize("message", ["3", 3])
def test_a_message_that_the_client_parsed_as_json_is_a_text_again(message: Any) -> None:
    session = Session(SERVED)
    seen(session, "reset", {"task": {"solution": 3}})
    assert seen(session, "step", {"message": message})["done"] is True


def test_the_last_turn_reports_that_it_was_cut_off() -> None:
    session = Session(SERVED)
    seen(session, "reset", {"task": {"solution": 3}})
    last = [seen(session, "step", guess("1")) for _ in range(4)][-1]
    assert (last["done"], last["metadata"]["truncated"], last["metadata"]["stop_reason"]) == (True, True, "max_turns")


def played(arguments: dict[str, Any]) -> list[str]:
    session = Session(SERVED)
    texts = [seen(session, "reset", arguments)["observation"]["text"]]
    texts += [seen(session, "step", guess("hm"))["observation"]["text"] for _ in range(3)]
    session.close()
    return texts


@given(st.integers(0, 2**70), st.sampled_from(["train", "eval", None]))
def test_equal_arguments_are_the_same_episode(seed: int, split: str | None) -> None:
    arguments = {"seed": seed, "split": split}
    assert played(arguments) == played(arguments)


def test_seeds_spread_over_the_tasks_and_an_index_names_one() -> None:
    assert len({tuple(played({"seed": seed})) for seed in range(60)}) > 15
    by_index = [played({"index": index}) for index in range(20)]
    assert by_index == [played({"task": task}) for task in TASKS["train"]]
    assert by_index[3] == played({"index": 3, "seed": 9})  # the task has its own
    assert played({"split": "eval", "index": 0, "seed": 9}) == played({"task": {"solution": 5, "seed": 9}})
    assert played({"split": "eval", "seed": 1}) != played({"split": "eval", "seed": 2})  # this task has none


def test_a_drawn_seed_is_reported_and_plays_the_episode_again() -> None:
    session = Session(SERVED)
    metadata = seen(session, "reset", {"split": "eval"})["metadata"]
    drawn = [seen(session, "step", guess("hm"))["observation"]["text"] for _ in range(3)]
    assert played({"split": "eval", "seed": metadata["seed"]})[1:] == drawn


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"sed": 1}, "reset has no argument 'sed'; did you mean 'seed'?"),
        ({"seed": -1}, "seed must be an int of at least 0, got -1"),
        ({"seed": True}, "seed must be an int of at least 0, got True"),
        ({"seed": "1"}, "seed must be an int of at least 0, got '1'"),
        ({"split": "test"}, "split must be one of train, eval, got 'test'"),
        ({"split": ["train"]}, "split must be one of train, eval, got ['train']"),
        ({"index": 20}, "index must be an int from 0 to 19, since 'train' has 20 tasks, got 20"),
        ({"index": 0.0}, "index must be an int from 0 to 19, since 'train' has 20 tasks, got 0.0"),
        ({"index": 1, "task": {}}, "task is a complete task, so it cannot be combined with split or index"),
        ({"task": {"solutio": 3}}, "task['solutio'] is unknown; did you mean 'solution'?"),
        ({"task": {"solution": "3"}}, "['solution'] must be an int, got '3'"),
        ({"task": {"seed": "3"}}, "task['seed'] must be an int or None, got '3'"),
        ({"episode_id": 3}, "episode_id must be a str, got 3"),
        ({"task": 3}, "task must be a JSON object, got 3"),
        ({"task": {"env_class_path": "os.system"}}, "must be a task, got a dict with 'env_class_path'"),
    ],
)
def test_a_wrong_reset_is_a_sentence_and_the_episode_goes_on(arguments: dict[str, Any], sentence: str) -> None:
    session = Session(SERVED)
    seen(session, "reset", {"seed": 1})
    code, text = refused(session, "reset", arguments)
    assert code == "VALIDATION_ERROR"
    assert sentence in text
    assert seen(session, "step", guess("hm"))["reward"] == -1.0
    session.close()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"text": "1"},
        {"message": None},
        {"message": "\ud800"},
        {"message": "1", "other": 2},
        {"type": "call_tool", "tool_name": "add"},
        {"type": "list_tools"},
        [],
        "1",
        None,
    ],
)
def test_a_wrong_step_is_a_sentence_and_costs_no_turn(data: Any) -> None:
    session = Session(SERVED)
    seen(session, "reset", {"task": {"solution": 3}})
    code, text = refused(session, "step", data)
    assert code == "VALIDATION_ERROR"
    assert '{"message": TEXT}' in text or "the 'data' of a step must be a JSON object" in text
    assert seen(session, "state")["step_count"] == 0
    assert seen(session, "step", guess("3"))["done"] is True


@pytest.mark.parametrize("raw", ["{", "", b"\xff", "[" * 100_000, '{"type": 1' + "0" * 5000 + "}"])
def test_what_is_not_json_is_a_sentence(raw: str | bytes) -> None:
    session = Session(SERVED)
    answer = json.loads(str(session.respond(raw)))
    assert answer["data"]["code"] == "INVALID_JSON"
    assert answer["data"]["message"].startswith("the message is not valid JSON: ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.sampled_from(["3", "add"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=4),
)


@given(st.sampled_from(["guess", "sums"]), st.lists(JSON | st.builds(dict, type=KINDS, data=JSON), max_size=4))
def test_any_json_is_answered(game: str, messages: list[Any]) -> None:
    session = Session(SERVED if game == "guess" else SUMS)
    seen(session, "reset", {"seed": 1})
    for message in messages:
        answer = json.loads(str(session.respond(json.dumps(message))))
        assert answer["type"] in {"observation", "error"}, answer
    session.close()


def test_deep_json_is_answered() -> None:
    deep = '{"a": ' * 900 + "1" + "}" * 900
    session = Session(SUMS)
    for start, end in (
        ('{"type": "reset", "data": {"task": ', "}}"),
        ('{"type": "reset", "data": {"episode_id": ', "}}"),
        ('{"type": "reset", "data": {"seed": 1}}', None),
        ('{"type": "step", "data": {"message": ', "}}"),
        ('{"type": "step", "data": {"type": "call_tool", "tool_name": "add", "arguments": ', "}}"),
    ):
        answer = json.loads(str(session.respond(start if end is None else start + deep + end)))
        assert answer["type"] in {"observation", "error"}
    session.close()


def test_before_a_reset_there_is_no_episode() -> None:
    code, text = refused(Session(SERVED), "step", guess("1"))
    assert (code, "send a reset first" in text) == ("EXECUTION_ERROR", True)


def test_a_game_that_raises_is_a_sentence_and_the_next_reset_plays() -> None:
    session = Session(SERVED)
    seen(session, "reset", {"seed": 1})
    code, text = refused(session, "step", guess("raise"))
    assert code == "EXECUTION_ERROR"
    assert "the game broke" in text
    assert refused(session, "step", guess("1"))[0] == "EXECUTION_ERROR"
    assert seen(session, "reset", {"seed": 1})["done"] is False
    session.close()
    assert live(SERVED) == {}


def test_numbers_of_the_environment_arrive_at_the_end() -> None:
    session = Session(SERVED)
    seen(session, "reset", {"task": {"solution": 3}})
    last = [seen(session, "step", guess("odd")) for _ in range(4)][-1]
    assert last["metadata"].pop("num_odd") == 1.0
    assert last["metadata"].keys() == {"stop_reason", "truncated", "final_reward"}


def test_each_episode_is_closed_once() -> None:
    served = guesses()
    session = Session(served)
    for seed in range(5):
        seen(session, "reset", {"seed": seed})
    session.close()
    session.close()
    assert isinstance(served.env, Game)
    assert served.env.num_closed == 5


def test_tools_are_called_one_a_step_and_plain_text_is_the_answer() -> None:
    session = Session(SUMS)
    tools = seen(session, "step", {"type": "list_tools"})["observation"]["tools"]
    assert [tool["name"] for tool in tools] == ["add", "answer"]
    assert tools[0]["input_schema"]["required"] == ["first", "second"]
    call = {"type": "call_tool", "tool_name": "add", "arguments": {"first": 3, "second": 4}}
    for answer in (guess("7"), {"type": "call_tool", "tool_name": "answer", "arguments": {"action": "7"}}):
        assert "What is 3 + 4?" in seen(session, "reset", {"seed": 1})["observation"]["text"]
        result = seen(session, "step", call)
        assert result["observation"] == {"tool_name": "add", "result": "7", "error": None}
        last = seen(session, "step", answer)
        assert (last["reward"], last["done"], last["metadata"]["success"]) == (1.0, True, True)
        assert last["metadata"]["num_calls"] == 1.0


@pytest.mark.parametrize(
    "data",
    [
        {"type": "call_tool"},
        {"type": "call_tool", "tool_name": 1},
        {"type": "call_tool", "tool_name": "add", "arguments": [1]},
        {"type": "call_tool", "tool_name": "answer", "arguments": {"action": 7}},
        {"type": "call", "tool_name": "add", "arguments": {}},
        {"tool_name": "add", "arguments": {}, "message": "x"},
    ],
)
def test_a_wrong_call_is_a_sentence(data: dict[str, Any]) -> None:
    session = Session(SUMS)
    seen(session, "reset", {"seed": 1})
    assert refused(session, "step", data)[0] == "VALIDATION_ERROR"
    session.close()


def test_an_unknown_tool_is_for_the_environment_to_answer() -> None:
    session = Session(SUMS)
    seen(session, "reset", {"seed": 1})
    result = seen(session, "step", {"type": "call_tool", "tool_name": "subtract", "arguments": {}})
    assert result["observation"]["result"].startswith("Error: ")
    session.close()


def test_an_environment_with_its_own_tool_for_the_answer_gets_no_other() -> None:
    env = ToolEnv(None, {"submit_tool": "submit"}, tools=[add])
    assert "answer" not in {tool["name"] for tool in ServedEnv(env, QUESTIONS).tools}


def test_what_cannot_be_served_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"episodes_per_trial'\] must be 1 to be served, got 3"):
        ServedEnv(Game(None, {"episodes_per_trial": 3}), TASKS)
    with pytest.raises(ConfigError, match="split must be one of train, eval, got 'test'"):
        ServedEnv(Game(), TASKS, split="test")
    with pytest.raises(TaskError, match=r"tasks\['train'\] must contain at least one task"):
        ServedEnv(Game(), {"train": []})
