"""OpenEnv's training traces are read token for token; the package itself is asked in tests/with_worlds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import ConfigError, RolloutStore, Trajectory, audit
from agentsgym.batch.layouts import turn_rows
from agentsgym.testing import chat_tokenizer


def turn(node: str, prompt: list[int], completion: list[int], **fields: Any) -> dict[str, Any]:
    """A turn of a trace, with what a harness says beside it unless ``fields`` say otherwise."""
    plain = {
        "node_id": node,
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "per_token_logps": [-0.5 - index for index in range(len(completion))],
        "loss_mask": [0] * len(prompt) + [1] * len(completion),
    }
    return {**plain, **fields}


def said(*texts: str) -> dict[str, Any]:
    """What a call was shown and what it answered, in turns."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    answer = {**messages[-1], "tool_calls": None}
    return {
        "request": {"messages": messages[:-1], "tools": None},
        "response": {"choices": [{"message": answer, "finish_reason": "stop"}]},
        "metadata": {"index": 0},
    }


def trace(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"schema_version": 1, "turns": [*turns], **fields}


FIRST = turn("a", [1, 2], [3, 4], **said("q", "one"))
SECOND = turn("b", [1, 2, 3, 4, 5], [6], **said("q", "one", "on", "two"))


def test_a_prompt_that_goes_on_continues_the_record() -> None:
    made = Trajectory.from_training_trace(trace(FIRST, SECOND), [0.5, 1.0], task_index=2)
    assert made.token_ids == [1, 2, 3, 4, 5, 6]
    assert [(one.start, one.stop, one.prompt_start, one.message_index) for one in made.turns] == [
        (2, 4, 0, 1),
        (5, 6, 0, 3),
    ]
    assert made.logprobs == [0.0, 0.0, -0.5, -1.5, 0.0, -0.5]
    assert made.per_token_rewards == [0.0, 0.0, 0.25, 0.25, 0.0, 1.0]
    assert [message["content"] for message in made.messages] == ["q", "one", "on", "two"]
    assert (made.exact, made.final_reward, made.task_index) == (True, 1.5, 2)
    assert audit([made]).ok


def test_a_prompt_that_was_rendered_anew_begins_a_segment() -> None:
    anew = turn("b", [1, 2, 9, 5], [6], **said("q", "one", "on", "two"))  # its first answer without what was thought
    short = turn("c", [7], [8], **said("what is left", "three"))
    made = Trajectory.from_training_trace(trace(FIRST, anew, short), 1.0)
    assert made.token_ids == [1, 2, 3, 4, 1, 2, 9, 5, 6, 7, 8]
    assert made.segments == [range(0, 4), range(4, 9), range(9, 11)]
    assert [one.prompt_messages for one in made.turns] == [None, None, [{"role": "user", "content": "what is left"}]]
    assert [message["content"] for message in made.messages] == ["q", "one", "on", "two", "what is left", "three"]
    assert made.turn_rewards == [0.0, 0.0, 1.0]
    assert audit([made]).ok
    assert [row.cut(made.token_ids) for row in turn_rows(0, made)] == [[1, 2, 3, 4], [1, 2, 9, 5, 6], [7, 8]]


def test_what_the_mask_leaves_out_is_context() -> None:
    unseen = turn("b", [1, 2, 3, 4, 5], [6], **{**said("q", "one", "on", "two"), "loss_mask": [0] * 6})
    third = turn("c", [1, 2, 3, 4, 5, 6, 7], [8, 9, 10], **said("q", "one", "on", "two", "so", "three"))
    third["loss_mask"] = [0] * 7 + [0, 1, 0]
    made = Trajectory.from_training_trace(trace(FIRST, unseen, third), [0.0, 0.0, 1.0])
    assert made.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]  # up to the last token that is trained on
    assert made.agent_token_mask == [0, 0, 1, 1, 0, 0, 0, 0, 1]
    assert made.logprobs == [0.0, 0.0, -0.5, -1.5, 0.0, 0.0, 0.0, 0.0, -1.5]
    assert [one.message_index for one in made.turns] == [1, 5]
    assert audit([made]).ok
    with pytest.raises(
        ConfigError, match=r"rewards must be 0 for turns that are not trained on, got 1.0 for turns\[1\]"
    ):
        Trajectory.from_training_trace(trace(FIRST, unseen, third), [0.0, 1.0, 0.0])
    ended = Trajectory.from_training_trace(trace(FIRST, unseen), 1.0)
    assert (ended.token_ids, ended.turn_rewards) == ([1, 2, 3, 4], [1.0])


calls = st.lists(
    st.tuples(
        st.booleans(), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=4)
    ),
    min_size=1,
    max_size=6,
)


@given(calls=calls)
def test_every_call_is_found_in_the_record_behind_its_own_prompt(calls: Any) -> None:
    turns: list[dict[str, Any]] = []
    for goes_on, new, completion in calls:
        before = turns[-1] if turns and goes_on else {"prompt_token_ids": [], "completion_token_ids": []}
        prompt = [*before["prompt_token_ids"], *before["completion_token_ids"], *new]
        turns.append(turn(str(len(turns)), prompt, completion, **said("q", "a")))
    trained = [one for one in turns if one["completion_token_ids"]]
    if not trained:
        with pytest.raises(ConfigError, match="must have a loss mask of 1 for at least one token"):
            Trajectory.from_training_trace(trace(*turns), 0.0)
        return
    made = Trajectory.from_training_trace(trace(*turns), 1.0)
    for one, given_turn in zip(made.turns, trained, strict=True):
        assert made.token_ids[one.prompt_start : one.start] == given_turn["prompt_token_ids"]
        assert made.token_ids[one.start : one.stop] == given_turn["completion_token_ids"]
        assert (made.logprobs or [])[one.start : one.stop] == given_turn["per_token_logps"]
    assert audit([made]).ok


def test_a_file_is_read_and_the_store_gives_it_back(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(trace(FIRST, SECOND)))
    made = Trajectory.from_training_trace(file, 1.0, info={"success": True})
    assert made == Trajectory.from_training_trace(str(file), 1.0, info={"success": True})
    with RolloutStore.writer(tmp_path / "store") as writer:
        writer.add(made)
    assert [*RolloutStore(tmp_path / "store")] == [made]


def test_without_messages_a_tokenizer_writes_them() -> None:
    tokenizer = chat_tokenizer()
    prompt: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Guess."}], add_generation_prompt=True, return_dict=False
    )
    answer = tokenizer.encode("Seven?<|im_end|>", add_special_tokens=False)
    bare = trace(turn("a", prompt, answer))
    made = Trajectory.from_training_trace(bare, 1.0, tokenizer=tokenizer)
    assert "Guess." in made.messages[0]["content"]
    assert made.messages[1] == {"role": "assistant", "content": "Seven?"}
    with pytest.raises(ConfigError, match=r"turns\[0\] has no messages in request or response: pass tokenizer="):
        Trajectory.from_training_trace(bare, 1.0)
    with pytest.raises(
        ConfigError,
        match=r"turns\[0\]\['prompt_token_ids'\] must contain only ints in \[0, \d+\), got 99999 at index 0",
    ):
        Trajectory.from_training_trace(trace(turn("a", [99999], [1])), 1.0, tokenizer=tokenizer)


def test_calls_of_tools_are_shown_as_messages_hold_them() -> None:
    called = said("q", "")
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    called["response"]["choices"][0]["message"] = {"content": None, "tool_calls": [call]}
    made = Trajectory.from_training_trace(trace(turn("a", [1], [2], **called)), 1.0)
    (own,) = made.messages[-1].get("tool_calls", ())
    assert own == {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    call["function"]["arguments"] = "{"  # the tokens are what counts
    made = Trajectory.from_training_trace(trace(turn("a", [1], [2], **called)), 1.0)
    assert made.messages[-1].get("tool_calls") == [call]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (3, "a training trace must be a dict with 'schema_version' and 'turns', got 3"),
        (trace(FIRST, schema_version=2), "a training trace must have schema_version 1, got 2"),
        (trace(FIRST, schema_version=True), "a training trace must have schema_version 1, got True"),
        (trace(FIRST, rewards=[1]), "a training trace has the field 'rewards', which schema 1 does not have"),
        ({"schema_version": 1}, "a training trace must have the field 'turns', got only 'schema_version'"),
        (trace(), r"the turns of a training trace must be a non-empty list, got \[\]"),
        (trace(3), r"turns\[0\] must be a dict, got 3"),
        (trace({**FIRST, "logps": []}), r"turns\[0\] has the field 'logps', which schema 1 does not have"),
        (trace({**FIRST, 3: 4}), r"turns\[0\] has the field 3, which schema 1 does not have"),
        (trace({"node_id": "a"}), r"turns\[0\] must have the field 'prompt_token_ids', got only 'node_id'"),
        (trace({**FIRST, "node_id": ""}), r"turns\[0\]\['node_id'\] must be a non-empty string, got ''"),
        (
            trace({**FIRST, "response": {"choices": [{"message": "x"}]}}),
            r"turns\[0\]\['response'\]\['choices'\]\[0\]\['message'\] must be a dict, got 'x'",
        ),
        (
            trace({**FIRST, "response": {"choices": [{"message": {"content": "", "tool_calls": ["x"]}}]}}),
            r"\['message'\] has no name: it must name the tool, got 'x'",
        ),
        (
            trace({**FIRST, "per_token_logps": [-1.0, -(10**400)]}),
            "must contain only finite log-probabilities, at most 0, got -10+… at index 1",
        ),
        (trace({**FIRST, "request": []}), r"turns\[0\]\['request'\] must be a dict, got \[\]"),
        (trace({**FIRST, "loss_mask": "0011"}), r"turns\[0\]\['loss_mask'\] must be a list, got '0011'"),
        (trace({**FIRST, "loss_mask": [0, 0, 1]}), r"turns\[0\]\['loss_mask'\] must cover .* \(2 \+ 2 tokens\), got 3"),
        (
            trace({**FIRST, "loss_mask": [0, 1, 1, 1]}),
            r"turns\[0\]\['loss_mask'\] must be 0 on the prompt, got 1 at index 1",
        ),
        (
            trace({**FIRST, "loss_mask": [0, 0, 1, 2]}),
            r"turns\[0\]\['loss_mask'\] must contain only 0 or 1, got 2 at index 3",
        ),
        (
            trace({**FIRST, "loss_mask": [0, 0, 0, 0]}),
            "a training trace must have a loss mask of 1 for at least one token",
        ),
        (trace({**FIRST, "per_token_logps": [-1.0]}), r"must have one value per completion token \(2\), got 1"),
        (
            trace({**FIRST, "per_token_logps": [-1.0, 0.1]}),
            "must contain only finite log-probabilities, .* got 0.1 at index 1",
        ),
        (
            trace({**FIRST, "per_token_logps": [-1.0, float("nan")]}),
            "must contain only finite log-probabilities, .* got nan at index 1",
        ),
        (trace(turn("a", [], [1])), r"turns\[0\]\['prompt_token_ids'\] must not be empty"),
        (
            trace(turn("a", [-1], [1])),
            r"turns\[0\]\['prompt_token_ids'\] must contain only ints in \[0, inf\), got -1 at index 0",
        ),
        (
            trace(turn("a", [1], [True])),
            r"turns\[0\]\['completion_token_ids'\] must contain only ints .* got True at index 0",
        ),
        (
            trace(FIRST, {**SECOND, "node_id": "a"}),
            r"turns\[1\] must have a unique node_id, but turns\[0\] has the same one",
        ),
        (
            trace(turn("a", [1], [2, 3, 4], loss_mask=[0, 1, 0, 1])),
            r"turns\[0\]\['loss_mask'\] must be 1 on one contiguous span of tokens, got gaps: \[1, 0, 1\]",
        ),
    ],
)
def test_what_is_no_trace_is_named(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Trajectory.from_training_trace(given, 1.0)


def test_one_number_pays_the_last_turn_that_is_trained_on_whatever_kind_of_number_it_is() -> None:
    aside = turn("x", [9], [9], **{**said("a title", "Title"), "loss_mask": [0, 0]})
    for reward in (1, np.float32(1.0), np.array(1.0)):
        assert Trajectory.from_training_trace(trace(FIRST, aside), reward).turn_rewards == [1.0]
    assert Trajectory.from_training_trace(trace(FIRST, aside), np.array([0.5, 0.0])).turn_rewards == [0.5]


@pytest.mark.parametrize("before", [[], [FIRST]])
def test_what_was_put_into_the_mouth_of_an_answer_is_part_of_its_message(before: list[Any]) -> None:
    facts = said("what is left", "Sure,", "", " three")
    facts["request"]["messages"].pop()
    made = Trajectory.from_training_trace(trace(*before, turn("b", [7], [8], **facts)), 1.0)
    assert [message["content"] for message in made.messages][-2:] == ["what is left", "Sure, three"]
    assert audit([made]).ok
    assert made.messages[made.turns[-1].message_index]["content"] == "Sure, three"


def test_an_answer_is_the_assistants_whatever_its_message_says() -> None:
    facts = said("q", "one")
    facts["response"]["choices"][0]["message"]["role"] = None
    made = Trajectory.from_training_trace(trace(turn("a", [1], [2], **facts)), 1.0)
    assert made.messages[-1] == {"role": "assistant", "content": "one"}


def test_rewards_and_files_are_checked(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rewards must be a single number or one number per turn of the trace \(2\), got 1"
    ):
        Trajectory.from_training_trace(trace(FIRST, SECOND), [1.0])
    with pytest.raises(ConfigError, match="rewards must be finite numbers, got nan for turn of the trace 1"):
        Trajectory.from_training_trace(trace(FIRST, SECOND), float("nan"))
    with pytest.raises(ConfigError, match=r"none.json' cannot be read as JSON: No such file"):
        Trajectory.from_training_trace(tmp_path / "none.json", 1.0)
    with pytest.raises(ConfigError, match=r"cannot be read as JSON: File name too long$") as refused:
        Trajectory.from_training_trace(json.dumps(trace(*[FIRST] * 30)), 1.0)  # the text, not a file of it
    assert len(str(refused.value)) < 400
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"deep.json' cannot be read as JSON: maximum recursion"):
        Trajectory.from_training_trace(deep, 1.0)
    with pytest.raises(ConfigError, match="tokenizer must be a transformers tokenizer or None, got 'Qwen/Qwen3'"):
        Trajectory.from_training_trace(trace(FIRST), 1.0, tokenizer="Qwen/Qwen3")
