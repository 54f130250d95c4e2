"""Conversations that share a beginning are recorded as if each had been recorded alone."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_chat import tokenizer_of, user

from agentsgym import Action, TemplateError, ToolCall
from agentsgym.tokens.branches import BranchingTranscript
from agentsgym.tokens.chat_format import ChatFormat
from agentsgym.tokens.transcript import Transcript

KINDS = ["chatml", "llama3", "inst"]
LOOK: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}


def branching(kind: str = "chatml") -> BranchingTranscript:
    tokenizer = tokenizer_of(kind)
    return BranchingTranscript(lambda tools: ChatFormat.of(tokenizer, tools=tools), tokenizer)


def assistant(content: str, **fields: Any) -> Any:
    return {"role": "assistant", "content": content, **fields}


#: Which earlier call a call continues (modulo their number; None for a new conversation), its message, and its answer.
steps = st.lists(
    st.tuples(
        st.none() | st.integers(0, 20),
        st.sampled_from(["a", "b", "look", "x y"]),
        st.lists(st.integers(0, 255), min_size=1, max_size=4),
        st.sampled_from(["", " ", "\n"]),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("kind", KINDS)
@given(steps=steps)
def test_every_conversation_is_recorded_as_if_it_were_the_only_one(kind: str, steps: Any) -> None:
    tokenizer, transcript = tokenizer_of(kind), branching(kind)
    sent: list[list[Any]] = []  # the conversation of each call as the program knows it
    pasts: list[list[tuple[str, Action]]] = []  # its turns
    for number, (place, text, ids, space) in enumerate(steps):
        parent = None if place is None or not sent else place % len(sent)
        messages = [*([] if parent is None else sent[parent]), user(f"{number} {text}")]
        transcript.observe(messages)
        assert transcript.parent == parent
        alone = Transcript(ChatFormat.of(tokenizer))
        past = [] if parent is None else pasts[parent]
        for before, action in past:
            alone.observe([user(before)])
            alone.act(action)
        alone.observe([user(f"{number} {text}")])
        assert transcript.token_ids == alone.token_ids
        answer = Action(text=f"answer {number} {tokenizer.decode(ids)}", token_ids=ids)
        start, stop = transcript.act(answer)
        assert transcript.record()[start:stop] == ids
        sent.append([*messages, assistant(space + transcript.returned["content"].strip() + space)])
        pasts.append([*past, (f"{number} {text}", answer)])


def test_a_call_with_other_tools_or_a_changed_answer_begins_a_segment() -> None:
    transcript = branching()
    transcript.observe([user("go")])
    transcript.act(Action(text="I went", token_ids=[65, 66]))
    for messages, tools in (
        ([user("go"), assistant("I went"), user("on")], [LOOK]),
        ([user("go"), assistant("I walked"), user("on")], []),
        ([user("Go"), assistant("I went"), user("on")], []),
        ([user("go"), assistant("I went")], []),
    ):
        transcript.observe(messages, tools)
        assert transcript.parent is None
        assert transcript.segment_start > 0
        transcript.retract()
    transcript.observe([user("go"), assistant("I went"), user("on")])
    assert (transcript.parent, transcript.segment_start) == (0, 0)


def test_a_call_of_a_tool_is_recognized_in_whatever_way_it_was_serialized() -> None:
    transcript = branching()
    transcript.observe([user("go")], [LOOK])
    call = ToolCall(name="look", arguments={"at": "the door", "for_s": 2})
    start, stop = transcript.act(Action(text="Let me see.", token_ids=[65, 66, 67], tool_calls=(call,)))
    [returned] = transcript.returned["tool_calls"]  # type: ignore[typeddict-item]
    function = {"name": "look", "arguments": json.dumps({"for_s": 2, "at": "the door"}, indent=1)}
    answer = assistant(" Let me see.\n", tool_calls=[{"type": "function", "id": returned["id"], "function": function}])
    result = {"role": "tool", "content": "It is open.", "tool_call_id": returned["id"]}
    transcript.observe([user("go"), answer, result], [LOOK])
    assert transcript.parent == 0
    assert transcript.record()[start:stop] == [65, 66, 67]
    assert "It is open." in tokenizer_of("chatml").decode(transcript.token_ids)


def test_a_retracted_prompt_leaves_nothing() -> None:
    transcript = branching()
    transcript.observe([user("go")])
    transcript.act(Action(text="I went", token_ids=[65, 66]))
    before = [*transcript.record()], [*transcript.messages]
    for messages in ([user("go"), assistant("I went"), user("on")], [user("another")]):
        transcript.observe(messages)
        transcript.retract()
        assert (transcript.record(), transcript.messages) == before


def test_text_prompts_continue_by_text_and_by_tokens() -> None:
    transcript, tokenizer = branching(), tokenizer_of("chatml")
    transcript.observe_text("Once upon")
    first = [*transcript.token_ids]
    transcript.act(Action(text=" a time", token_ids=tokenizer(" a time")["input_ids"], finish_reason="length"))
    known = [*transcript.token_ids]
    transcript.observe_text("Once upon a time there was")
    assert transcript.parent == 0
    assert transcript.token_ids == [*known, *tokenizer(" there was", add_special_tokens=False)["input_ids"]]
    transcript.act(Action(text=" x", token_ids=[65], finish_reason="length"))
    transcript.observe_text([*known, 7, 8])
    assert transcript.parent == 0
    assert transcript.token_ids == [*known, 7, 8]
    transcript.act(Action(text="y", token_ids=[66]))
    transcript.observe_text(first)
    assert transcript.parent is None
    transcript.retract()
    with pytest.raises(TemplateError, match="empty"):
        transcript.observe_text("")


def test_text_alone_needs_no_tokenizer() -> None:
    transcript = BranchingTranscript(lambda _: None)
    transcript.observe([user("go")])
    transcript.act(Action(text="I went"))
    transcript.observe([user("go"), assistant("I went"), user("on")])
    assert (transcript.parent, transcript.token_ids) == (0, [])
    transcript.act(Action(text="again"))
    with pytest.raises(TemplateError, match="requires a tokenizer"):
        transcript.observe_text([1, 2])
