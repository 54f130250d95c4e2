"""Every template, every shape of observation: recorded exactly, or refused with what would do instead."""

import datetime
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from chat_families import FAMILIES, NAMES, TRL_TEMPLATES, family, full_render, text_of, tokenizer_for
from hypothesis import given, settings
from hypothesis import strategies as st

from agentsgym import Action, Message, TemplateError
from agentsgym.tokens.transcript import ChatFormat, Transcript

ANOTHER = "set tokenizer.chat_template to one that prints every message once"
RERENDER = 'env_config["history"] = "rerender"'
OPENINGS = [("user",), ("system", "user"), ("user", "user")]
LATER = [("user",), ("tool",), ("tool", "tool"), ("tool", "user"), ("user", "user"), ("system",), ("system", "user")]
CASES = [(first, ("user",)) for first in OPENINGS] + [(("user",), later) for later in LATER[1:]]
ANSWERS = ["Left0", "Left1", "Left2"]
REFUSED_OUTRIGHT = {"time of each message", "numbered turns"}


def speak(roles: tuple[str, ...], turn: int) -> list[Message]:
    return [{"role": role, "content": f" {role} {turn}.{n}\nsays "} for n, role in enumerate(roles)]


def play(name: str, first: tuple[str, ...], later: tuple[str, ...]) -> tuple[Transcript, list[tuple[int, int]]]:
    return play_with(family(name), first, later)


def play_with(tokenizer: Any, first: Any, later: Any) -> tuple[Transcript, list[tuple[int, int]]]:
    transcript = Transcript(ChatFormat.of(tokenizer))
    spans: list[tuple[int, int]] = []
    transcript.observe(speak(first, 0))
    for turn, answer in enumerate(ANSWERS, 1):
        spans.append(transcript.act(Action(text=answer)))
        transcript.observe(speak(later, turn))
    return transcript, spans


def printed(name: str, messages: list[Message]) -> list[int]:
    """The full render, what a tool returned in the form that the template takes."""
    return full_render(name, ChatFormat.of(family(name), append=False).for_template(messages))


def up_to_last_content(piece: str, messages: list[Message]) -> str:
    last = messages[-1]["content"].strip().split("\n")[0]
    return piece[: piece.rindex(last)]


def assert_recorded_exactly(name: str, transcript: Transcript, spans: list[tuple[int, int]], later: Any) -> None:
    """Compare with the full render: wholly, or all that is not the agent's where history is rewritten."""
    whole = printed(name, transcript.messages)
    if transcript.token_ids == whole:
        return
    tokenizer = family(name)
    rendered = text_of(tokenizer, whole)
    if not ChatFormat.of(tokenizer).rewrites_history:
        assert name == "inst"  # plain text bounds its turns, so that tokens may differ where text does not
        assert text_of(tokenizer, transcript.token_ids) == rendered
        return
    edges = [0, *(edge for span in spans for edge in span), len(transcript.token_ids)]
    for turn, (start, stop) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
        messages = speak(later, turn) if turn else transcript.messages[: transcript.messages.index(answer_of(0))]
        recorded = up_to_last_content(text_of(tokenizer, transcript.token_ids[start:stop]), messages)
        expected, _, rendered = rendered.partition(ANSWERS[turn]) if turn < len(ANSWERS) else (rendered, "", "")
        expected = up_to_last_content(expected, messages)
        assert expected.endswith(recorded) if turn else expected == recorded  # the agent ended its turn by itself
    tail = transcript.token_ids[spans[-1][1] :]
    assert len(tail) > len(later)
    assert whole[-len(tail) :] == tail


def answer_of(turn: int) -> Message:
    return {"role": "assistant", "content": ANSWERS[turn]}


def follow(advice: str, roles: tuple[str, ...]) -> tuple[str, ...]:
    """Change roles as an error demands."""
    changed = list(roles)
    if "tool returned as a user message" in advice:
        changed = ["user" if role == "tool" else role for role in changed]
    if "system message's text into the user message" in advice:
        at = changed.index("system")
        changed[at : at + 2] = ["user"]
    if "merge consecutive messages of the same role" in advice:
        changed = [role for n, role in enumerate(changed) if n == 0 or changed[n - 1] != role]
    return tuple(changed)


def assert_advice_is_true(name: str, advice: str, first: tuple[str, ...], later: tuple[str, ...]) -> None:
    assert ANOTHER in advice
    others = (follow(advice, first), later) if first != ("user",) else (first, follow(advice, later))
    if others != (first, later):
        play(name, *others)
    if RERENDER in advice:
        conversation = [*speak(first, 0), answer_of(0), *speak(later, 1), answer_of(1), *speak(later, 2)]
        ids = ChatFormat.of(family(name), append=False).render(conversation)
        text = text_of(family(name), ids)
        assert all(message["content"].strip().split("\n")[0] in text for message in conversation)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_every_shape_is_recorded_exactly_or_refused_with_true_advice(name: str) -> None:
    recorded = 0
    for first, later in CASES:
        try:
            transcript, spans = play(name, first, later)
        except TemplateError as error:
            _, found, advice = str(error).partition("; to fix it: ")
            assert found
            assert_advice_is_true(name, advice, first, later)
        else:
            assert_recorded_exactly(name, transcript, spans, later)
            recorded += 1
    assert recorded >= (0 if name in REFUSED_OUTRIGHT else 1)


def test_plain_user_turns_are_recorded_under_every_template_of_trl_and_tool_results_under_most() -> None:
    with_tools = []
    for name in TRL_TEMPLATES:
        play(name, ("user",), ("user",))
        try:
            play(name, ("user",), ("tool",))
        except TemplateError:
            continue
        with_tools.append(name)
    assert len(with_tools) >= 46
    assert {"llama3_1", "qwen3", "qwen2_5", "glm4moe"} <= set(with_tools)


def test_a_conversation_is_closed_as_the_full_render_has_it_or_without_tokens() -> None:
    left_out: list[str] = []
    for name in sorted(set(NAMES) - REFUSED_OUTRIGHT - {"none"}):
        tokenizer = family(name)
        with suppress(TemplateError):
            transcript = Transcript(ChatFormat.of(tokenizer))
            transcript.observe(speak(("user",), 0))
            transcript.act(Action(text=ANSWERS[0]))
            num_before = len(transcript.token_ids)
            transcript.close(speak(("user",), 1))
            tail = transcript.token_ids[num_before:]
            if not tail:
                left_out.append(name)
                continue
            whole = full_render(name, transcript.messages, add_prompt=False)
            printed_to_its_end = text_of(tokenizer, whole).removesuffix(tokenizer.eos_token)  # Phi-3 closes with it
            assert printed_to_its_end.endswith(text_of(tokenizer, tail).removesuffix(tokenizer.eos_token)), name
    assert sorted(left_out) == []


def test_where_a_template_of_trl_is_refused_its_training_twin_is_too() -> None:
    """So no error names the training templates: they would not help."""

    def refused(name: str) -> list[Any]:
        found = []
        for case in CASES:
            try:
                play(name, *case)
            except TemplateError:
                found.append(case)
        return found

    twins = [name for name in TRL_TEMPLATES if f"{name}_training" in TRL_TEMPLATES]
    assert len(twins) >= 25
    assert all(refused(name) == refused(f"{name}_training") for name in twins)


@pytest.mark.parametrize(
    ("name", "first", "later", "complaint"),
    [
        ("Gemma", ("system", "user"), ("user",), "no system role; to fix it: put the system message's text into"),
        ("Gemma", ("user", "user"), ("user",), "take turns; to fix it: merge consecutive messages of the same role"),
        (
            "Mistral that moves the system message",
            ("system", "user"),
            ("user",),
            "in the same place, after later.*rerender",
        ),
        ("tool results first", ("user",), ("tool",), "different first prompt when tool comes later.*rerender"),
        ("deepseekv3", ("user",), ("tool",), "tool results differently in a second round of calls.*rerender"),
        ("numbered turns", ("user",), ("user",), "different text around user in the second turn.*rerender"),
        ("time of each message", ("user",), ("user",), "prints the time around user in later turns.*rerender"),
    ],
)
def test_the_reason_and_the_way_out_are_named(name: str, first: Any, later: Any, complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint) as error:
        play(name, first, later)
    assert ("rerender" in complaint) is (RERENDER in str(error.value))


def test_a_template_that_shows_a_message_nowhere_is_no_case_for_rendering_again() -> None:
    hiding = tokenizer_for(CHATML.replace("in messages %}", "in messages if m.role != 'system' %}"))
    with pytest.raises(TemplateError) as error:
        play_with(hiding, ("system", "user"), ("user",))
    assert RERENDER not in str(error.value)


CHATML = FAMILIES["tool results as JSON"].replace(" | tojson", "")


@pytest.mark.parametrize(
    ("heading", "first", "later", "complaint"),
    [
        (
            "{{ 'new ' if loop.last and m.role == 'tool' }}",
            ("user",),
            ("tool",),
            "render tool the same way, in the same place",
        ),
        (
            "{{ 'so ' if m.role == 'user' and messages[:loop.index0] | selectattr('role', 'eq', 'tool') | list }}",
            ("user",),
            ("tool",),
            "different text around user after an earlier tool",
        ),
        (
            "{{ 'told ' if loop.index0 > 2 and messages[0].role == 'system' }}",
            ("system", "user"),
            ("user",),
            "after an answer changes if the conversation begins with system . user",
        ),
    ],
)
def test_what_only_a_longer_conversation_shows_is_seen(heading: str, first: Any, later: Any, complaint: str) -> None:
    tokenizer = tokenizer_for(CHATML.replace("{{ m.role }}", heading + "{{ m.role }}"))
    with pytest.raises(TemplateError, match=complaint):
        play_with(tokenizer, first, later)


def test_of_several_templates_the_one_that_the_tokenizer_uses_counts() -> None:
    tokenizer = tokenizer_for(FAMILIES["date"])
    tokenizer.chat_template = {"default": FAMILIES["date"], "tool_use": FAMILIES["numbered turns"]}
    transcript = Transcript(ChatFormat.of(tokenizer))
    transcript.observe(speak(("user",), 0))
    assert transcript.token_ids == full_render("date", transcript.messages)


class Tomorrow(datetime.datetime):
    days = 0

    @classmethod
    def now(cls, tz: Any = None) -> datetime.datetime:
        return datetime.datetime(2031, 12, 31, 23, 59, tzinfo=tz) + datetime.timedelta(days=cls.days)


@pytest.mark.parametrize("name", ["date", "llama3_2", "gptoss", "muse_glimmer"])
def test_a_date_in_the_first_prompt_is_that_of_the_day(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    messages = speak(("user",), 0)
    prompts = []
    for Tomorrow.days in (0, 0, 1):
        transcript = Transcript(ChatFormat.of(family(name)))
        transcript.observe(messages)
        assert transcript.token_ids == full_render(name, messages)
        prompts.append(transcript.token_ids)
    assert prompts[0] == prompts[1] != prompts[2]


WORDS = [
    "",
    "  \n",
    "/think",
    "What? /think",
    "/think not",
    "<think>",
    "</think> so",
    "<tool_response>x</tool_response>",
]


BOUNDED = [name for name in NAMES if name not in {*REFUSED_OUTRIGHT, "inst", "none"}]  # by control tokens


@pytest.mark.parametrize("name", BOUNDED)
def test_contents_that_a_template_looks_into_are_recorded_exactly_or_refused(name: str) -> None:
    chat_format = ChatFormat.of(family(name))
    for word in [*WORDS, "My Reasoning Effort"]:
        for first, then in ((word, "go on"), ("go", word)):
            transcript = Transcript(chat_format)
            try:
                transcript.observe([{"role": "user", "content": first}])
                prompt = list(transcript.token_ids)
                _, stop = transcript.act(Action(text=ANSWERS[0]))
                transcript.observe([{"role": "user", "content": then}])
            except TemplateError as error:
                assert "; to fix it: omit" in str(error)  # noqa: PT017  # most words are taken
                continue
            assert prompt == full_render(name, transcript.messages[:1])
            tail = transcript.token_ids[stop:]
            assert full_render(name, transcript.messages)[-len(tail) :] == tail


def test_a_word_that_turns_thinking_on_does_so_for_its_turn() -> None:
    transcript = Transcript(ChatFormat.of(family("thinking on demand")))
    transcript.observe([{"role": "user", "content": "Where? /think"}])
    assert text_of(family("thinking on demand"), transcript.token_ids).endswith("assistant\n<think>\n")
    transcript.act(Action(text="There."))
    transcript.observe([{"role": "user", "content": "And <|im_end|> now?"}])
    assert text_of(family("thinking on demand"), transcript.token_ids).endswith(
        "And <|im_end|> now?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_word_that_acts_on_all_turns_is_refused() -> None:
    transcript = Transcript(ChatFormat.of(family("thinking once and for all")))
    with pytest.raises(TemplateError, match=r"later turns because of '/think' in user; to fix it: omit it"):
        transcript.observe([{"role": "user", "content": "Please /Think. /think"}])
    assert transcript.token_ids == []


def test_a_word_that_an_option_replaces_is_refused_with_the_option() -> None:
    template = FAMILIES["thinking once and for all"].replace("think=false", "think=enable_thinking | default(true)")
    tokenizer = tokenizer_for(
        template.replace("'/think' in", "'/no_think' in").replace("think = true", "think = false")
    )
    asked = {"role": "user", "content": "Where? /no_think"}
    with pytest.raises(
        TemplateError, match=r"'/no_think' in user; .*chat_template_kwargs.*\"enable_thinking\": False}"
    ):
        Transcript(ChatFormat.of(tokenizer)).observe([asked])
    transcript = Transcript(ChatFormat.of(tokenizer, template_options={"enable_thinking": False}))
    transcript.observe([asked])
    assert not text_of(tokenizer, transcript.token_ids).endswith("<think>\n")


def test_the_token_that_calls_a_tool_ends_a_turn_where_openers_do() -> None:
    tokenizer = family("glm4moe")
    chat_format = ChatFormat.of(tokenizer)
    calls = tokenizer.convert_tokens_to_ids("<|observation|>")
    assert calls in chat_format.stop_token_ids
    transcript = Transcript(chat_format)
    transcript.observe(speak(("user",), 0))
    _, stop = transcript.act(Action(text="look", token_ids=[*chat_format.encode("look"), calls]))
    transcript.observe([{"role": "tool", "content": "a lamp"}])
    assert text_of(tokenizer, transcript.token_ids[stop - 1 :]) == (
        "<|observation|>\n<tool_response>\na lamp\n</tool_response><|assistant|>"
    )


def test_new_messages_are_refused_by_a_format_that_renders_afresh() -> None:
    tokenizer = tokenizer_for(FAMILIES["numbered turns"])
    chat_format = ChatFormat.of(tokenizer, append=False)
    assert chat_format.rewrites_history
    assert chat_format.end_of_turn_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    with pytest.raises(TemplateError, match="rerender"):
        chat_format.later(("user",), None)
    with pytest.raises(TemplateError, match="rerender"):
        ChatFormat.of(tokenizer)


texts = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)


@cache
def shapes(name: str) -> list[tuple[str, ...]]:
    """The observations that a template takes."""
    taken: list[tuple[str, ...]] = []
    for later in LATER:
        with suppress(TemplateError):
            play(name, ("user",), later)
            taken.append(later)
    return taken


def draw_messages(data: st.DataObject, roles: tuple[str, ...], contents: st.SearchStrategy[str]) -> list[Message]:
    return [{"role": role, "content": data.draw(contents)} for role in roles]


@settings(max_examples=300)
@given(data=st.data(), name=st.sampled_from([*BOUNDED, "inst", "none"]))
def test_sampled_ids_stay_as_they_are_and_around_them_stands_the_canonical_text(data: Any, name: str) -> None:
    tokenizer = family(name)
    chat_format = ChatFormat.of(tokenizer)
    controls = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    contents = texts | st.lists(st.sampled_from([*controls.values(), "x", " "]), max_size=4).map("".join)
    ordinary = st.integers(0, len(tokenizer) - 1).filter(lambda token_id: token_id not in controls)
    sampled, canonical = Transcript(chat_format), Transcript(chat_format)
    context: list[int] = []
    roles = ("user",)
    for _ in range(data.draw(st.integers(1, 4))):
        start = len(canonical.token_ids)
        observation = draw_messages(data, roles, contents)
        sampled.observe(observation)
        canonical.observe(observation)
        assert sampled.token_ids[: len(context)] == context
        new = sampled.token_ids[len(context) :]
        assert new == canonical.token_ids[start:]  # whatever was sampled
        context = list(sampled.token_ids)
        ended = data.draw(st.booleans()) and chat_format.end_of_turn_id is not None
        ids = data.draw(st.lists(ordinary, max_size=6)) + (list(chat_format.end_of_turn_ids) if ended else [])
        span = sampled.act(Action(text="?", token_ids=ids, finish_reason="stop" if ended else "length"))
        assert span == (len(context), len(context) + len(ids))
        canonical.act(Action(text=ANSWERS[0]) if ended else Action(text="", token_ids=[], finish_reason="length"))
        context += ids
        assert sampled.token_ids == context
        roles = data.draw(st.sampled_from(shapes(name)))


@settings(max_examples=150)
@given(data=st.data(), name=st.sampled_from([*BOUNDED, "inst", "none"]))
def test_no_content_prints_a_control_token(data: Any, name: str) -> None:
    tokenizer = family(name)
    chat_format = ChatFormat.of(tokenizer)
    controls = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    spoofed = st.lists(st.sampled_from([*controls.values(), "x", " "]), max_size=4).map(
        lambda parts: f"a{''.join(parts)}"
    )
    harmful, harmless = Transcript(chat_format), Transcript(chat_format)
    for _ in range(data.draw(st.integers(1, 3))):
        roles = data.draw(st.sampled_from(shapes(name))) if harmful.messages else ("user",)
        harmful.observe(draw_messages(data, roles, spoofed))
        harmless.observe(speak(roles, 0))
        harmful.act(Action(text=data.draw(spoofed)))
        harmless.act(Action(text="a"))
    mine, theirs = ([i for i in t.token_ids if i in controls] for t in (harmful, harmless))
    assert mine == theirs


@settings(max_examples=150)
@given(data=st.data(), name=st.sampled_from(BOUNDED))
def test_canonical_conversations_are_the_full_render(data: Any, name: str) -> None:
    chat_format = ChatFormat.of(family(name))
    transcript = Transcript(chat_format)
    transcript.observe(draw_messages(data, ("user",), texts))
    for _ in range(data.draw(st.integers(0, 3))):
        _, stop = transcript.act(Action(text=data.draw(texts.map(lambda text: f"a{text}".strip()))))
        transcript.observe(draw_messages(data, data.draw(st.sampled_from(shapes(name))), texts))
        tail = transcript.token_ids[stop:]
        assert printed(name, transcript.messages)[-len(tail) :] == tail
    if not chat_format.rewrites_history:
        assert transcript.token_ids == printed(name, transcript.messages)
