from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_chat import opening, record, tokenizer_of, user

from agentsgym.testing import chat_tokenizer
from agentsgym.tokens.transcript import ChatFormat, Transcript
from agentsgym.types import Action

BOUNDED = ["chatml", "llama3", "default_system", "trimming"]  # control tokens bound the turns
TEMPLATED = [*BOUNDED, "inst"]

plain_text = (
    st.text(max_size=20).filter(lambda text: "<" not in text)  # hypothesis draws control tokens from our own source
    | st.sampled_from(["", "\n", " a ", "\n\nb", "c\n", "  ", "naïve 🙂", "%s {x}"])
)
fragments = st.sampled_from(["<|im_end|>", "<|im_start|>", "<|eot_id|>", "</s>", "[/INST]", " x", "\n", "<|pad|>", "ü"])
any_text = plain_text | st.lists(fragments, max_size=5).map("".join)


def conversations(text: str, answers: Any) -> Any:
    """A system message or None, the first question, and (answer, observation) pairs."""
    return st.tuples(st.none() | text, text, st.lists(st.tuples(answers, text), max_size=3))


def render(tokenizer: Any, messages: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def text_of(tokenizer: Any, ids: Any) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", BOUNDED)
@given(conversation=conversations(plain_text, plain_text.filter(lambda text: not text[:1].isspace())))
def test_a_canonical_conversation_is_the_full_render_token_for_token(kind: Any, conversation: Any) -> None:
    tokenizer = tokenizer_of(kind)
    transcript = record(tokenizer, conversation)
    whole = tokenizer.apply_chat_template(
        transcript.messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert transcript.token_ids == whole


@pytest.mark.parametrize("kind", TEMPLATED)
@given(conversation=conversations(any_text, any_text))
def test_any_conversation_is_the_full_render_as_text(kind: Any, conversation: Any) -> None:
    tokenizer = tokenizer_of(kind)
    transcript = record(tokenizer, conversation)
    assert text_of(tokenizer, transcript.token_ids) == render(tokenizer, transcript.messages)


def test_the_message_of_a_cut_text_is_what_was_kept() -> None:
    transcript = Transcript(ChatFormat.of(tokenizer_of("chatml")))
    transcript.observe([user("go")])
    transcript.act(Action(text="a 🙂"), 4)
    assert transcript.messages[-1]["content"] == "a \ufffd"


@pytest.mark.parametrize("kind", [*TEMPLATED, "none"])
@given(conversation=conversations(any_text, any_text))
def test_control_looking_text_never_becomes_a_control_token(kind: Any, conversation: Any) -> None:
    tokenizer = tokenizer_of(kind)
    system, _, turns = conversation
    harmless = (None if system is None else "s", "q", [("a", "o")] * len(turns))
    controls = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}

    def skeleton(transcript: Transcript) -> list[int]:
        return [token_id for token_id in transcript.token_ids if token_id in controls]

    assert skeleton(record(tokenizer, conversation)) == skeleton(record(tokenizer, harmless))


@pytest.mark.parametrize("kind", [*TEMPLATED, "none"])
@given(data=st.data())
def test_sampled_ids_are_kept_and_every_context_extends_the_last(kind: Any, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    transcript = Transcript(ChatFormat.of(tokenizer))
    context = []
    for turn in range(data.draw(st.integers(1, 4))):
        transcript.observe([user(f"observation {turn}")])
        assert transcript.token_ids[: len(context)] == context
        context = list(transcript.token_ids)
        sampled = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=6).map(tuple))
        start, stop = transcript.act(Action(text="whatever it says", token_ids=sampled))
        assert transcript.token_ids[:start] == context
        assert tuple(transcript.token_ids[start:stop]) == sampled
        assert stop == len(transcript.token_ids)
        context = list(transcript.token_ids)


@pytest.mark.parametrize("kind", BOUNDED)
def test_the_end_of_turn_is_in_the_span_if_sampled_and_in_the_next_observation_if_cut(kind: Any) -> None:
    tokenizer = tokenizer_of(kind)
    chat_format = ChatFormat.of(tokenizer)
    end = chat_format.end_of_turn_id
    assert end == tokenizer.eos_token_id
    assert chat_format.end_of_turn_ids == (end,)
    output = chat_format.encode("left")

    def play(token_ids: Any) -> Transcript:
        transcript = Transcript(chat_format)
        transcript.observe([user("go")])
        span = transcript.act(Action(text="left", token_ids=token_ids, finish_reason="length"))
        transcript.observe([user("next")])
        return span, transcript.token_ids

    (start, stop), whole = play([*output, end])
    (cut_start, cut_stop), cut = play(output)
    assert whole == cut
    assert (start, stop - 1) == (cut_start, cut_stop)
    assert cut[cut_stop] == end


def test_other_stop_tokens_replace_the_end_of_turn() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.eos_token = "<|begin_of_text|>"
    chat_format = ChatFormat.of(tokenizer)
    assert chat_format.stop_token_ids == {chat_format.end_of_turn_id, tokenizer.eos_token_id}
    transcript = Transcript(chat_format)
    transcript.observe([user("go")])
    transcript.act(Action(text="left", token_ids=[tokenizer.eos_token_id]))
    transcript.observe([user("next")])
    assert text_of(tokenizer, transcript.token_ids) == (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n<|begin_of_text|>\n"
        "<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("kind", BOUNDED)
def test_an_end_that_only_the_model_declares_is_closed_once_and_a_cut_turn_still_is(kind: Any) -> None:
    tokenizer = tokenizer_of(kind)
    chat_format = ChatFormat.of(tokenizer)
    declared = tokenizer.pad_token_id  # a control token that neither template nor tokenizer ends a turn by
    assert declared not in chat_format.stop_token_ids

    def behind(finish_reason: Any, last: int) -> list[int]:
        transcript = Transcript(chat_format)
        transcript.observe([user("go")])
        token_ids = [*chat_format.encode("left"), last]
        _, stop = transcript.act(Action(text="left", token_ids=token_ids, finish_reason=finish_reason))
        transcript.observe([user("next")])
        return transcript.token_ids[stop:]

    [plain] = chat_format.encode("x")
    closed = behind("stop", tokenizer.eos_token_id)
    assert behind("stop", declared) == closed
    assert behind("length", tokenizer.eos_token_id) == closed
    assert behind("length", declared) == behind("stop", plain) == [tokenizer.eos_token_id, *closed]


def test_an_action_without_tokens_is_closed_by_the_next_observation() -> None:
    tokenizer = tokenizer_of("chatml")
    transcript = Transcript(ChatFormat.of(tokenizer))
    transcript.observe([user("go")])
    start, stop = transcript.act(Action(text="", token_ids=[]))
    transcript.observe([user("next")])
    assert start == stop
    assert text_of(tokenizer, transcript.token_ids) == render(tokenizer, transcript.messages)


def test_a_turn_that_ends_by_plain_text_is_closed_once() -> None:
    tokenizer = tokenizer_of("inst")
    chat_format = ChatFormat.of(tokenizer)
    assert chat_format.end_of_turn_id is None
    assert text_of(tokenizer, chat_format.end_of_turn_ids) == " [/END]\n"
    assert len(chat_format.end_of_turn_ids) > 1
    expected = "[INST] go [/INST] left [/END]\n[INST] next [/INST] "
    for sampled in ("left", "left [/END]\n"):
        for token_ids in (
            tokenizer(sampled)["input_ids"],
            list(map(tokenizer.convert_tokens_to_ids, by_byte(sampled))),
        ):
            transcript = Transcript(chat_format)
            transcript.observe([user("go")])
            transcript.act(Action(text="left", token_ids=token_ids))
            transcript.observe([user("next")])
            assert text_of(tokenizer, transcript.token_ids) == expected


def by_byte(text: str) -> list[str]:
    """The tokens of a text that was sampled byte for byte: nothing an encoder would give."""
    return [token for char in text for token in tokenizer_of("inst").tokenize(char)]


@pytest.mark.parametrize(("limit", "message"), [(None, 9), (100, 9), (9, 9), (8, 8), (3, 3), (0, 0)])
def test_text_over_the_limit_is_cut_and_counts_as_cut(limit: int | None, message: int) -> None:
    tokenizer = tokenizer_of("chatml")
    chat_format = ChatFormat.of(tokenizer)
    transcript = Transcript(chat_format)
    transcript.observe([user("go")])
    words = "qqqqqqqq"
    assert len(chat_format.encode(words)) == 8
    start, stop = transcript.act(Action(text=words), limit)
    assert stop - start == message
    closed = message == 9
    assert (transcript.token_ids[-1] == chat_format.end_of_turn_id) is closed
    transcript.observe([user("next")])
    kept = words if closed else words[:message]
    assert text_of(tokenizer, transcript.token_ids[start:]).startswith(f"{kept}<|im_end|>\n<|im_start|>user\nnext")


@pytest.mark.parametrize("kind", [*TEMPLATED, "none"])
def test_retract_undoes_exactly_the_last_observation(kind: Any) -> None:
    chat_format = ChatFormat.of(tokenizer_of(kind))
    transcript, plain = Transcript(chat_format), Transcript(chat_format)
    transcript.observe([user("too early")])
    transcript.retract()
    assert (transcript.messages, transcript.token_ids) == ([], [])
    for one in (transcript, plain):
        one.observe([user("go")])
        one.act(Action(text="left"))
    transcript.observe([user("no room"), user("at all")])
    transcript.retract()
    assert (transcript.messages, transcript.token_ids) == (plain.messages, plain.token_ids)
    for one in (transcript, plain):
        one.observe([user("next")])
    assert transcript.token_ids == plain.token_ids


@pytest.mark.parametrize("kind", BOUNDED)
@given(last=st.lists(plain_text, min_size=1, max_size=2), answer=plain_text.filter(lambda text: not text[:1].isspace()))
def test_what_closes_a_conversation_is_the_full_render_without_a_generation_prompt(
    kind: Any, last: list[str], answer: str
) -> None:
    tokenizer = tokenizer_of(kind)
    transcript = Transcript(ChatFormat.of(tokenizer))
    transcript.observe([user("go")])
    transcript.act(Action(text=answer))
    transcript.close([user(text) for text in last])
    assert len(transcript.messages) == 2 + len(last)
    assert transcript.token_ids == tokenizer.apply_chat_template(transcript.messages, return_dict=False)


def test_without_a_template_the_text_closes_a_conversation() -> None:
    tokenizer = tokenizer_of("none")
    transcript = Transcript(ChatFormat.of(tokenizer))
    transcript.observe([user("The room")])
    transcript.act(Action(text=" is dark."))
    transcript.close([user(" Over.")])
    assert text_of(tokenizer, transcript.token_ids) == "The room is dark. Over."


def test_observations_and_actions_take_turns() -> None:
    transcript = Transcript(None)
    with pytest.raises(RuntimeError, match=r"act\(\) was called without an observation"):
        transcript.act(Action(text="hello"))
    with pytest.raises(RuntimeError, match=r"retract\(\) needs an observation"):
        transcript.retract()
    transcript.observe([user("go")])
    with pytest.raises(RuntimeError, match=r"observe\(\) was called before"):
        transcript.observe([user("go on")])
    with pytest.raises(RuntimeError, match=r"close\(\) needs a conversation whose last observation is answered"):
        transcript.close([user("over")])
    transcript.act(Action(text="left"))
    with pytest.raises(RuntimeError, match=r"retract\(\) needs an observation"):
        transcript.retract()


def test_without_a_tokenizer_there_are_messages_only() -> None:
    transcript = Transcript(None)
    transcript.observe(opening("play", "go"))
    assert transcript.act(Action(text="left", token_ids=[1, 2])) == (0, 0)
    transcript.observe([user("next")])
    assert transcript.token_ids == []
    assert transcript.messages == [*opening("play", "go"), {"role": "assistant", "content": "left"}, user("next")]


def test_without_a_template_texts_are_concatenated() -> None:
    tokenizer = tokenizer_of("none")
    chat_format = ChatFormat.of(tokenizer)
    assert chat_format.end_of_turn_ids == ()
    assert chat_format.stop_token_ids == {tokenizer.eos_token_id}
    transcript = Transcript(chat_format)
    transcript.observe(opening("You play.", "The room"))
    start, stop = transcript.act(Action(text=" is dark."))
    transcript.observe([user(" lamp")])
    assert transcript.act(Action(text="")) == (len(transcript.token_ids),) * 2
    pieces = [
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in ("You play.", "The room", " is dark.", " lamp")
    ]
    assert transcript.token_ids == [token_id for piece in pieces for token_id in piece]
    assert transcript.token_ids[start:stop] == pieces[2]


@pytest.mark.parametrize("kind", BOUNDED)
def test_several_messages_and_tool_results_in_one_observation(kind: Any) -> None:
    tokenizer = tokenizer_of(kind)
    transcript = Transcript(ChatFormat.of(tokenizer))
    transcript.observe([user("go")])
    transcript.act(Action(text="look"))
    transcript.observe([{"role": "tool", "content": " a lamp "}, user("what now?")])
    whole = tokenizer.apply_chat_template(
        transcript.messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert transcript.token_ids == whole
