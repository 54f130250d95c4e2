"""Calls of tools and their results go on record as the chat template prints them, under every template."""

from typing import Any

import pytest
from chat_families import PRINTS_CALLS, TRL_TEMPLATES, text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_chat import (
    GO,
    OWN_TEMPLATES,
    TOOLS,
    calls_of,
    new_transcript,
    one_round,
    results_of,
    tool_family,
    tool_render,
)

from agentsgym import Action, TemplateError, ToolCall
from agentsgym.tokens.calls.reader import reader_of
from agentsgym.tokens.transcript import ChatFormat, Transcript

PRINTING = [*OWN_TEMPLATES, *PRINTS_CALLS]
REFUSED = ["deepseekv3", "deepseekv3_training", "diffusion_gemma", "diffusion_gemma_training"]
# A canonical answer of these thinks, or has no text beside its calls, or one call; of the others it may be any.
THINKING = [name for name in PRINTING if name.startswith("nemotron")]
NOT_THINKING = [name for name in PRINTING if "nothink" in name]
WITHOUT_TEXT = [
    *("ids of nine letters", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "llama3_1", "llama3_2"),
    *("muse_glimmer", "muse_glimmer_training", "gptoss", "gptoss_training"),
]
# Reasoning is text, which the first three do not print beside a call; the last prints none there, but it is on record.
TEXT_ONLY = ["ids of nine letters", "llama3_1", "llama3_2", "gemma4_v2"]
ONE_CALL = ["llama3_1", "llama3_2", "gptoss", "gptoss_training"]
EXACT = [name for name in PRINTING if name not in REFUSED]

texts = st.text(st.characters(codec="utf-8", exclude_characters="<[", exclude_categories=["Cs", "Cc"]), max_size=10)
spaced = st.tuples(st.sampled_from(["", " ", "\n\n", "\t "]), texts, st.sampled_from(["", " ", "\n"])).map("".join)
arguments = texts | st.integers(-5, 5) | st.lists(texts, max_size=2) | st.booleans() | st.none()


def draw_answer(data: st.DataObject, name: str) -> dict[str, Any]:
    """Text and reasoning of a canonical answer."""
    output: dict[str, Any] = {}
    if name in THINKING or (name not in [*NOT_THINKING, *TEXT_ONLY] and data.draw(st.booleans())):
        output["reasoning"] = data.draw(texts.map(lambda text: f"I {text}".strip()))
    if name not in WITHOUT_TEXT and data.draw(st.booleans()):
        output["text"] = data.draw(texts.map(lambda text: f"So {text}".strip()))
    return output


def draw_round(data: st.DataObject, name: str, contents: Any) -> tuple[list[Any], list[str]]:
    """Arguments and results of one round."""
    num_calls = 1 if name in ONE_CALL else data.draw(st.integers(1, 3))
    return [data.draw(arguments) for _ in range(num_calls)], [data.draw(contents) for _ in range(num_calls)]


def test_most_templates_of_trl_print_calls() -> None:
    names = [*OWN_TEMPLATES, *TRL_TEMPLATES]
    assert [name for name in names if ChatFormat.of(tool_family(name), append=False).prints_calls] == PRINTING


@settings(max_examples=8, deadline=None)
@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
def test_a_canonical_conversation_is_the_full_render(name: str, data: st.DataObject) -> None:
    transcript = new_transcript(name)
    for _ in range(data.draw(st.integers(1, 3))):
        output = draw_answer(data, name)
        one_round(transcript, *draw_round(data, name, spaced), **output)
    messages, chat_format = transcript.messages, transcript.chat_format
    assert transcript.token_ids == chat_format.render(messages)
    # What a template without reasoning would leave out is in the text.
    shown = messages if reader_of(chat_format).has_thoughts else chat_format.for_template(messages)
    assert transcript.token_ids == tool_render(name, shown)
    thoughts = [message["reasoning_content"] for message in messages if "reasoning_content" in message]
    written = [message["content"] for message in shown if "<think>" in message["content"]]
    assert [text.split("\n")[1] for text in written] == (thoughts if shown is not messages else [])


def test_reasoning_has_the_name_that_the_template_reads() -> None:
    thought = {"role": "assistant", "content": "So", "reasoning_content": "I"}
    named = {name: ChatFormat.of(tool_family(name)).for_template([GO, thought])[1] for name in ("gptoss", "qwen3")}
    assert named == {"gptoss": {**thought, "thinking": "I"}, "qwen3": thought}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(EXACT))
def test_what_looks_like_control_is_the_same_text_and_no_token(data: st.DataObject, name: str) -> None:
    tokenizer = tool_family(name)
    controls = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    spoofed = st.lists(st.sampled_from([*controls.values(), "x", " "]), max_size=4).map(
        lambda parts: f"a{''.join(parts)}b"
    )
    harmful, harmless = new_transcript(name), new_transcript(name)
    output = {"reasoning": "I"} if name in THINKING else {}
    for _ in range(data.draw(st.integers(1, 2))):
        words, results = draw_round(data, name, spoofed)
        words = [data.draw(spoofed) for _ in words]
        one_round(harmful, words, results, **output)
        one_round(harmless, ["a"] * len(words), ["a"] * len(words), **output)
    assert text_of(tokenizer, harmful.token_ids) == tool_render(name, harmful.messages, tokenize=False)
    assert harmful.token_ids == harmful.chat_format.render(harmful.messages)
    mine, theirs = ([i for i in t.token_ids if i in controls] for t in (harmful, harmless))
    assert mine == theirs


@pytest.mark.parametrize("name", EXACT)
def test_sampled_ids_are_kept_and_what_follows_does_not_depend_on_them(name: str) -> None:
    tokenizer = tool_family(name)
    output = {"reasoning": "I"} if name in THINKING else {}
    canonical, sampled = new_transcript(name), new_transcript(name)
    for number, result in enumerate(["one", " two\n", ""]):
        start, stop = one_round(canonical, [number], [result], **output)
        own = canonical.token_ids[start:stop]
        babble = [*tokenizer.encode("x?x", add_special_tokens=False), *own[-1:]]
        begin = len(sampled.token_ids)
        span = one_round(sampled, [number], [result], text="x?x", token_ids=babble)
        assert own[-1] in canonical.chat_format.stop_token_ids
        assert span == (begin, begin + len(babble))
        assert sampled.token_ids[slice(*span)] == babble
        assert sampled.token_ids[span[1] :] == canonical.token_ids[stop:]


@pytest.mark.parametrize("name", EXACT)
def test_a_call_that_the_budget_cut_is_closed_in_front_of_its_result(name: str) -> None:
    output = {"reasoning": "I"} if name in THINKING else {}
    whole, cut = new_transcript(name), new_transcript(name)
    start, stop = one_round(whole, ["a"], ["b"], **output)
    ids = whole.token_ids[start : stop - 1]
    one_round(cut, ["a"], ["b"], token_ids=ids, finish_reason="length")
    assert cut.token_ids == whole.token_ids


@pytest.mark.parametrize("name", REFUSED)
def test_results_that_no_full_render_keeps_are_refused_with_a_way_out(name: str) -> None:
    transcript = new_transcript(name)
    with pytest.raises(TemplateError, match=r'; to fix it: set env_config\["history"\] = "rerender"'):
        one_round(transcript, ["a"], ["b"])
    anew = Transcript(ChatFormat.of(tool_family(name), append=False, tools=TOOLS), "rerender")
    anew.observe([GO])
    one_round(anew, ["here"], ["a lamp"])
    assert "a lamp" in text_of(tool_family(name), anew.token_ids)
    assert anew.token_ids == tool_render(name, anew.chat_format.for_template(anew.messages))


def test_an_answer_without_calls_goes_on_as_ever() -> None:
    for name in EXACT:
        chat_format = ChatFormat.of(tool_family(name), tools=TOOLS)
        if chat_format.rewrites_history:
            continue
        transcript = new_transcript(name)
        one_round(transcript, ["a"], ["b"])
        transcript.act(Action(text="Found."))
        transcript.observe([{"role": "user", "content": "And then?"}])
        one_round(transcript, ["c"], ["d"])
        assert transcript.token_ids == tool_render(name, transcript.messages), name


def test_the_history_may_be_rendered_anew() -> None:
    for name in ("qwen3", "gemma4", "gptoss", "ids of nine letters"):
        anew = Transcript(ChatFormat.of(tool_family(name), append=False, tools=TOOLS), "rerender")
        shortened = Transcript(
            ChatFormat.of(tool_family(name), tools=TOOLS), lambda messages: [messages[0], *messages[-2:]]
        )
        for transcript in (anew, shortened):
            transcript.observe([GO])
            one_round(transcript, ["a"], ["b"])
            one_round(transcript, ["c"], ["d"])
            assert transcript.token_ids == tool_render(name, transcript.prompt_messages)
        assert len(anew.prompt_messages) == 5
        assert len(shortened.prompt_messages) == 3


@pytest.mark.parametrize(
    ("ended_by", "role", "expected"),
    [
        ("<|tool_response>", "tool", 'response:look{value:<|"|>on<|"|>}<tool_response|>'),
        ("<turn|>", "tool", '<|tool_response>response:look{value:<|"|>on<|"|>}<tool_response|>'),
        ("<|tool_response>", "user", "<turn|>\n<|turn>user\non<turn|>\n<|turn>model\n"),
        ("<turn|>", "user", "\n<|turn>user\non<turn|>\n<|turn>model\n"),
    ],
)
def test_a_token_that_opens_results_stands_in_front_of_them_and_closes_nothing_else(
    ended_by: str, role: str, expected: str
) -> None:
    tokenizer = tool_family("gemma4")
    transcript = new_transcript("gemma4")
    ids = [*transcript.chat_format.encode("look"), tokenizer.convert_tokens_to_ids(ended_by)]
    _, stop = transcript.act(Action(text="", token_ids=ids, tool_calls=calls_of("a")))
    transcript.observe([{"role": role, "content": "on"}])
    assert text_of(tokenizer, transcript.token_ids[stop:]) == expected


def test_what_an_environment_returns_of_a_call_is_kept_and_never_breaks_the_record() -> None:
    transcript = new_transcript("gptoss")
    transcript.act(Action(text="", tool_calls=[ToolCall(name="", error="?"), *calls_of("a")]))
    results: Any = [{"role": "tool", "content": "one", "name": "lo\ud800ok"}, {"role": "user", "content": "and?"}]
    transcript.observe(results)
    assert transcript.messages[2] == {"role": "tool", "content": "one", "name": "lo?ok", "tool_call_id": "call00001"}
    assert "functions.lo?ok to=assistant" in text_of(tool_family("gptoss"), transcript.token_ids)
    transcript.act(Action(text="so"))
    unknown: Any = [{"role": "tool", "content": "two", "name": 3, "tool_call_id": 4}]
    transcript.observe(unknown)
    assert transcript.messages[-1] == {"role": "tool", "content": "two", "name": "3", "tool_call_id": "4"}


@pytest.mark.parametrize(("name", "num_calls"), [("qwen3", 1), ("qwen3", 2), ("gptoss", 1)])
def test_results_find_their_calls_when_one_could_not_be_read(name: str, num_calls: int) -> None:
    calls = [ToolCall(name="", error="no JSON"), *calls_of(*"ab"[:num_calls])]
    transcript = new_transcript(name)
    transcript.act(Action(text="{oops", tool_calls=calls))
    transcript.observe(results_of("no JSON", *["one", "two"][:num_calls]))
    answer, *results = transcript.messages[1:]
    names = ["look", "walk"][:num_calls]
    assert [call["function"]["name"] for call in answer["tool_calls"]] == names
    assert [message.get("name") for message in results] == [None, *names]
    assert [message.get("tool_call_id") for message in results][1:] == [call["id"] for call in answer["tool_calls"]]
    assert transcript.token_ids == tool_render(name, transcript.chat_format.for_template(transcript.messages))
    if name == "gptoss":
        assert text_of(tool_family("gptoss"), transcript.token_ids).endswith(
            "<|start|>user<|message|><tool_response>\nno JSON\n</tool_response><|end|><|start|>assistant"
        )


@pytest.mark.parametrize("name", EXACT)
def test_what_follows_a_call_that_could_not_be_read_is_exact(name: str) -> None:
    transcript = new_transcript(name)
    ids = transcript.chat_format.encode("CALL{")
    _, stop = transcript.act(
        Action(
            text="",
            token_ids=[*ids, *transcript.chat_format.end_of_turn_ids],
            tool_calls=[ToolCall(name="", error="?")],
        )
    )
    transcript.observe(results_of("no call"))
    assert transcript.messages[1] == {"role": "assistant", "content": "CALL{"}
    whole = tool_render(name, transcript.chat_format.for_template(transcript.messages))
    tail = transcript.token_ids[stop:]
    assert tail
    assert whole[-len(tail) :] == tail
