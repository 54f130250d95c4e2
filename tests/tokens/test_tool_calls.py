"""Calls are read out of answers as each chat template writes them."""

import json
from typing import Any

import pytest
from chat_families import PRINTS_CALLS, TRL_TEMPLATES, family, text_of, tokenizer_for

from agentsgym.testing import chat_tokenizer
from agentsgym.tokens.calls.reader import AnswerReader, read_answer
from agentsgym.tokens.transcript import ChatFormat
from agentsgym.types import Action, ToolCall

PROPERTIES = {
    "city": {"type": "string", "description": "Where."},
    "days": {"type": "integer", "description": "When."},
    "share": {"type": "number", "description": "How much."},
    "exact": {"type": "boolean", "description": "Whether."},
    "where": {"type": "object", "description": "Nested."},
    "tags": {"type": "array", "items": {"type": "string"}, "description": "Several."},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "Do.", "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("look", "list_all")
]
USER = {"role": "user", "content": "What is it?"}
CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one": [("look", {"city": "Paris", "days": 3})],
    "no arguments": [("list_all", {})],
    "several": [("look", {"city": "Paris"}), ("list_all", {}), ("look", {"city": "Rome", "days": 1})],
    "text that looks typed": [("look", {"city": "75001", "exact": True, "share": 0.5})],
    "unicode": [("look", {"city": "Åre, 東京 🙂"})],
    "nested": [("look", {"where": {"a": [1, {"b": "x"}], "c": {"d": "e"}}, "tags": ["a", "b"]})],
    "marks": [("look", {"city": "a, b=(c) [d] {e}: f"})],
    "line breaks": [("look", {"city": "\nParis\n\n"}), ("look", {"city": "\n"})],
    "quotes": [("look", {"city": 'it\'s\nC:\\new "q"', "days": 1})],
}
ONE_CALL_A_TURN = ("llama", "gptoss")


def rendered(tokenizer: Any, messages: list[Any], *, add_prompt: bool) -> str:
    return tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=add_prompt)


def written_turn(tokenizer: Any, content: str, calls: list[tuple[str, dict[str, Any]]], *, as_text: bool) -> str:
    """What a template writes for a turn that calls tools."""
    tool_calls = [
        {"type": "function", "id": f"call{n:05}", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate((name, json.dumps(one) if as_text else one) for name, one in calls)
    ]
    whole = rendered(
        tokenizer, [USER, {"role": "assistant", "content": content, "tool_calls": tool_calls}], add_prompt=False
    )
    for add_prompt in (True, False):
        before = rendered(tokenizer, [USER], add_prompt=add_prompt)
        if whole.startswith(before):
            turn = whole[len(before) :]  # deepseek's own has no thought where its generation prompt begins one
            return turn.replace("<\uff5cAssistant\uff5c>", "</think>")
    raise AssertionError("the template does not leave the question as it was")


def sampled(tokenizer: Any, text: str, **fields: Any) -> Action:
    """An action as an agent makes it of sampled ids: its text has lost the special tokens."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, ids) == text
    return Action(text=tokenizer.decode(ids, skip_special_tokens=True), token_ids=ids, **fields)


def read(tokenizer: Any, text: str, **fields: Any) -> Action:
    return read_answer(sampled(tokenizer, text, **fields), ChatFormat.of(tokenizer, append=False), TOOLS)


def test_most_templates_of_trl_print_calls() -> None:
    assert [name for name in TRL_TEMPLATES if AnswerReader(family(name), {}).form is not None] == PRINTS_CALLS
    assert len(PRINTS_CALLS) >= 46


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("name", PRINTS_CALLS)
def test_calls_are_read_as_the_template_writes_them(name: str, kind: str) -> None:
    tokenizer = family(name)
    calls = CALLS[kind][:1] if name.startswith(ONE_CALL_A_TURN) else CALLS[kind]
    text = written_turn(tokenizer, "", calls, as_text=name == "deepseekv3")
    action = read(tokenizer, text)
    assert [(call.name, call.arguments, call.error) for call in action.tool_calls] == [(*one, None) for one in calls]
    assert action.text == ""


@pytest.mark.parametrize("name", PRINTS_CALLS)
def test_what_is_written_beside_a_call_is_the_text(name: str) -> None:
    tokenizer = family(name)
    text = written_turn(tokenizer, "Let me see.", CALLS["one"], as_text=name == "deepseekv3")
    action = read(tokenizer, text)
    assert [call.name for call in action.tool_calls] == ["look"]
    output = "" if "Let me see." not in text else "Let me see."
    assert (action.text, action.reasoning) == ("", output) if name.startswith("gptoss") else action.text == output


@pytest.mark.parametrize("name", PRINTS_CALLS)
def test_an_answer_without_calls_is_its_text(name: str) -> None:
    tokenizer = family(name)
    whole = rendered(tokenizer, [USER, {"role": "assistant", "content": "It is 7, not 8."}], add_prompt=False)
    text = whole[len(rendered(tokenizer, [USER], add_prompt=False)) :].removeprefix(
        AnswerReader(tokenizer, {})._prompt  # pyright: ignore[reportPrivateUsage]
    )
    action = read(tokenizer, text.replace("<\uff5cAssistant\uff5c>", "</think>"))
    assert action.tool_calls == ()
    assert action.text.strip().endswith("It is 7, not 8.")


@pytest.mark.parametrize("name", PRINTS_CALLS)
def test_an_answer_that_the_budget_cut_makes_no_call(name: str) -> None:
    tokenizer = family(name)
    text = written_turn(tokenizer, "", CALLS["several"][:1], as_text=name == "deepseekv3")
    for part in (text[: len(text) * 2 // 3], text):
        action = read(tokenizer, part, finish_reason="length")
        assert action.tool_calls == ()
        assert "</think>" not in action.text


@pytest.mark.parametrize("name", PRINTS_CALLS)
def test_no_call_is_read_out_of_a_part_of_one(name: str) -> None:
    tokenizer = family(name)
    text = written_turn(tokenizer, "", CALLS["one"], as_text=name == "deepseekv3")
    end = max(text.rfind(mark) for mark in ("3", "Paris"))
    for length in range(0, end, 3):
        action = read(tokenizer, text[:length])
        assert [call for call in action.tool_calls if call.error is None] == []


@pytest.mark.parametrize(
    ("name", "text", "reasoning"),
    [
        ("qwen3", "<think>\nI could <tool_call>{call}</tool_call>\n</think>\n\nNo.<|im_end|>", "I could"),
        ("qwen3_5_think", "I could <tool_call>{call}</tool_call>\n</think>\n\nNo.<|im_end|>", "I could"),
        ("nemotron_3_nano", "I could <tool_call>{call}</tool_call></think>No.<|im_end|>", "I could"),
        ("gemma4", "<|channel>thought\nI could <|tool_call>call:look{}<tool_call|><channel|>No.<turn|>", "I could"),
        (
            "gptoss",
            "<|channel|>analysis<|message|>I could to=functions.look<|end|><|start|>assistant<|channel|>final"
            "<|message|>No.<|return|>",
            "I could",
        ),
        ("muse_glimmer", " to=self<|message|>I could<|eom|><|start|>assistant to=user<|message|>No.<|eot|>", "I could"),
        ("glm4moe", "<think>I could <tool_call>look\n</tool_call></think>\nNo.<|user|>", "I could"),
    ],
)
def test_a_call_inside_a_thought_is_none(name: str, text: str, reasoning: str) -> None:
    call = '{"name": "look", "arguments": {}}'
    action = read(family(name), text.replace("{call}", call))
    assert action.tool_calls == ()
    assert action.text == "No."
    assert (action.reasoning or "").startswith(reasoning)


def test_an_empty_thought_is_no_part_of_the_text() -> None:
    action = read(family("qwen3"), "<think>\n\n</think>\n\n5<|im_end|>")
    assert (action.text, action.reasoning, action.tool_calls) == ("5", "", ())


def test_a_thought_that_never_ends_holds_no_call() -> None:
    action = read(family("qwen3_5_think"), "I call <tool_call>\n<function=look>\n</function>\n</tool_call><|im_end|>")
    assert action.tool_calls == ()
    assert action.text == ""


def test_a_call_behind_a_thought_is_one_and_a_string_may_spell_marks() -> None:
    city = "</tool_call> <think> <tool_call>"
    call = json.dumps({"name": "look", "arguments": {"city": city}})
    action = read(family("qwen3"), f"<think>\nLook.\n</think>\n\nHm.\n<tool_call>\n{call}\n</tool_call><|im_end|>")
    assert action.tool_calls == (ToolCall(name="look", arguments={"city": city}),)
    assert (action.text, action.reasoning) == ("Hm.", "Look.")


def test_gpt_oss_calls_in_the_commentary_channel_with_a_constraint() -> None:
    text = (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
        '<|constrain|>json<|message|>{"days": 2}<|call|>'
    )
    action = read(tokenizer_for(TRL_TEMPLATES["gptoss"] + "{# <|constrain|> #}"), text)
    assert action.tool_calls == (ToolCall(name="look", arguments={"days": 2}),)
    assert (action.text, action.reasoning) == ("", "Look.")


def test_mistral_calls_are_read_as_a_list_and_by_name() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
        "{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_for(template)
    listed = '[TOOL_CALLS] [{"name": "look", "arguments": {"days": 3}, "id": "abcdefghi"}, {"name": "list_all"}]</s>'
    named = '[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"days": 3}[TOOL_CALLS]list_all[ARGS]{}</s>'
    expected = (ToolCall(name="look", arguments={"days": 3}, id="abcdefghi"), ToolCall(name="list_all"))
    assert read(tokenizer, listed).tool_calls == expected
    assert read(tokenizer, named).tool_calls == expected


def test_deepseek_calls_are_read_with_and_without_a_fence() -> None:
    call = "<\uff5ctool\u2581call\u2581begin\uff5c>{}<\uff5ctool\u2581call\u2581end\uff5c>"
    text = call.format('look<\uff5ctool\u2581sep\uff5c>{"days": 3}')
    fenced = call.format('function<\uff5ctool\u2581sep\uff5c>look\n```json\n{"days": 4}\n```')
    action = read(family("deepseekv3_training"), f"</think>{text}{fenced}")
    assert [call.arguments for call in action.tool_calls] == [{"days": 3}, {"days": 4}]


@pytest.mark.parametrize(
    ("opens", "closes"), [("<function_call>", "</function_call>"), ("<|tool_call|>[", "]"), ("CALL: ", "\nEND")]
)
def test_a_template_never_seen_is_learned_where_it_writes_json(opens: str, closes: str) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        f"\n{opens}{{{{ {{'name': c.function.name, 'parameters': c.function.arguments}} | tojson }}}}{closes}"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = tokenizer_for(template)
    for calls in CALLS.values():
        action = read(tokenizer, written_turn(tokenizer, "Hm.", calls, as_text=False))
        assert [(call.name, call.arguments, call.error) for call in action.tool_calls] == [(*c, None) for c in calls]
        assert action.text == "Hm."


def test_a_tokenizer_that_brings_its_own_response_template_is_read_with_it() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "RUN {{ c.function.name }} WITH {{ c.function.arguments | tojson }} STOP{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer: Any = tokenizer_for(template)
    function = {"name": "{name}", "arguments": "{content}"}
    calls = {"open_pattern": r"RUN (?P<name>\w+) WITH ", "close": " STOP", "repeats": True, "content": "json"}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {**calls, "transform": {"type": "function", "function": function}},
            "content": {"close": "<|im_end|>", "content": "text"},
        },
    }
    turn = written_turn(tokenizer, "Hm. ", CALLS["several"], as_text=False)
    assert [(c.name, c.arguments) for c in read(tokenizer, turn).tool_calls] == CALLS["several"]
    broken = read(tokenizer, turn.replace('"days": 1', '"days": '))
    assert [call.error is None for call in broken.tool_calls] == [True, True, False]


def test_text_calls_in_one_form_where_there_is_no_template_or_it_writes_no_calls() -> None:
    text = 'Hm.\n<tool_call>{"name": "look", "arguments": {"days": 3}}</tool_call>\n'
    expected = Action(text="Hm.", tool_calls=(ToolCall(name="look", arguments={"days": 3}),), written=text)
    for chat_format in (None, *map(ChatFormat.of, (chat_tokenizer("none"), chat_tokenizer(), family("gptoss")))):
        assert read_answer(Action(text=text), chat_format, TOOLS) == expected


def test_text_calls_in_the_form_of_its_template_too() -> None:
    text = "<tool_call>\n<function=look>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    chat_format = ChatFormat.of(family("qwen3_5_nothink"), append=False)
    expected = (ToolCall(name="look", arguments={"days": 3}),)
    assert read_answer(Action(text=text), chat_format, TOOLS).tool_calls == expected
    hermes = '<tool_call>{"name": "look", "arguments": {"days": 3}}</tool_call>'
    assert read_answer(Action(text=hermes), chat_format, TOOLS).tool_calls == expected


JSON_CALL = '<tool_call>{"name": "look", "arguments": {"city": "%s"}}</tool_call>'
XML_CALL = "<tool_call>\n<function=look>\n<parameter=city>\n%s\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "call"),
    [(None, JSON_CALL), ("qwen3", JSON_CALL), ("qwen3_5_think", XML_CALL), ("qwen3_5_nothink", XML_CALL)],
)
def test_a_call_in_a_thought_that_the_prompt_began_is_none_in_text(name: str | None, call: str) -> None:
    chat_format = None if name is None else ChatFormat.of(family(name), append=False)

    def read_text(text: str) -> Action:
        return read_answer(Action(text=text), chat_format, TOOLS)

    output = read_text(f"maybe {call % 'Rome'} no\n</think>\n\n7")
    assert output.tool_calls == ()
    assert (output.text, output.reasoning) == ("7", f"maybe {call % 'Rome'} no") or name is None
    called = read_text(f"maybe {call % 'Rome'} or <tool_call> no</think>So {call % 'Paris'}")
    assert [one.arguments for one in called.tool_calls] == [{"city": "Paris"}]
    spelled = read_text(f"{call % 'the mark </think>'} and {call % 'Rome'}")
    assert [one.arguments for one in spelled.tool_calls] == [{"city": "the mark </think>"}, {"city": "Rome"}]
    behind = read_text(f"<think>so {call % 'Rome'}</think>{call % 'Paris'}</think>")
    assert [one.arguments for one in behind.tool_calls] == [{"city": "Paris"}]


def test_a_call_in_a_thought_of_the_template_is_none_in_another_form_either() -> None:
    template = "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}{% endfor %}]</s>{% else %}{{ m.content }}{% endif %}{% endfor %}"  # fmt: skip  # noqa: E501
    chat_format = ChatFormat.of(tokenizer_for(template), append=False)
    output = read_answer(Action(text=f"[THINK]{JSON_CALL % 'Rome'}[/THINK]no"), chat_format, TOOLS)
    assert (output.tool_calls, output.text) == ((), "no")


def test_text_of_no_form_is_left_alone_and_malformed_text_is_malformed_with_every_template() -> None:
    for name in PRINTS_CALLS:
        chat_format = ChatFormat.of(family(name), append=False)
        plain = Action(text=" It is 7. ")
        assert read_answer(plain, chat_format, TOOLS) is plain
        (call,) = read_answer(Action(text='<tool_call>{"name": 7</tool_call>'), chat_format, TOOLS).tool_calls
        assert call.error is not None


def test_calls_that_an_agent_brings_are_left_alone() -> None:
    action = Action(text="<tool_call>{}</tool_call>", tool_calls=(ToolCall(name="look"),))
    assert read_answer(action, None, TOOLS) is action


def test_a_thought_that_does_not_end_is_kept_without_the_token_that_ended_the_turn() -> None:
    action = read(family("qwen3_6"), "I wonder<|im_end|>")  # the prompt has begun the thought
    assert (action.text, action.reasoning, action.tool_calls) == ("", "I wonder", ())
