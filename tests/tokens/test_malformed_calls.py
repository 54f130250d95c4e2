"""A call that cannot be read gives the reason, costs no call beside it, and raises nothing."""

import json
import time
from typing import Any

import pytest
from chat_families import TRL_TEMPLATES, family, text_of, tokenizer_for
from hypothesis import given, settings
from hypothesis import strategies as st

from agentsgym.tokens.calls.forms import ReadString, bare_string, escaped_string, python_calls
from agentsgym.tokens.calls.reader import AnswerReader, read_answer
from agentsgym.tokens.calls.values import MAX_CALLS, MAX_DEPTH, typed_arguments, whole_json
from agentsgym.tokens.transcript import ChatFormat
from agentsgym.types import Action, ToolCall

GOOD = '<tool_call>{"name": "look", "arguments": {"days": 3}}</tool_call>'
LOOK = ToolCall(name="look", arguments={"days": 3})
NAMES = [name for name in TRL_TEMPLATES if AnswerReader(family(name), {}).form is not None]


def read(tokenizer: Any, text: str) -> Action:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, ids) == text
    action = Action(text=tokenizer.decode(ids, skip_special_tokens=True), token_ids=ids)
    return read_answer(action, ChatFormat.of(tokenizer, append=False), [])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ('{"name": "look", "arguments": {"days": }}', "the call is not valid JSON: Expecting value at character 39"),
        ('{"name": "look", "arguments": {"days": 3}', "the call is not valid JSON: Expecting ',' delimiter"),
        ('{"name": "look", "arguments": {}} and more', "the call is not valid JSON: 'and more' follows it"),
        ("", "the call is not valid JSON: Expecting value"),
        ("look()", "the call is not valid JSON: Expecting value"),
        ("[]", "the call is an empty list"),
        ('"look"', 'the call must be a JSON object with "name" and "arguments"'),
        ("3", 'the call must be a JSON object with "name" and "arguments"'),
        ('{"arguments": {"days": 3}}', "the call has no name"),
        ('{"name": "", "arguments": {}}', "the call has no name"),
        ('{"name": ["look"], "arguments": {}}', "the call has no name"),
        ('{"name": "look", "arguments": "{}"}', "the call of 'look' has arguments that are a string"),
        ('{"name": "look", "arguments": [3]}', "the call of 'look' has arguments that are a list"),
        ('{"name": "look", "arguments": null}', "the call of 'look' has arguments that are null"),
        ('{"name": "look", "days": 3}', "the call of 'look' has the key 'days' beside"),
        ('{"name": "look", "arguments": {"days": 3, "days": 4}}', "the call gives 'days' twice"),
        ('{"name": "look", "name": "go", "arguments": {}}', "the call gives 'name' twice"),
        ('{"name": "look", "arguments": {"days": NaN}}', "the call is not valid JSON: NaN is not a JSON number"),
        ('{"name": "look", "arguments": {"days": -Infinity}}', "-Infinity is not a JSON number"),
        ('{"name": "look", "arguments": {"days": 1e999}}', "1e999 is not a JSON number"),
        ('{"name": "look", "arguments": {"days": ' + "9" * 5000 + "}}", "contains a number with too many digits"),
        ('{"name": "look", "arguments": {"city": "\\ud800"}}', "half of a surrogate pair"),
        ('{"name": "look", "arguments": {"x": ' + "[" * 3000 + "]" * 3000 + "}}", f"nested more than {MAX_DEPTH} deep"),
        ('{"name": "look", "arguments": {"x": ' + "[" * 100 + "]" * 100 + "}}", f"nested more than {MAX_DEPTH} deep"),
        ("[" * 100_000, "the call is"),
    ],
)
def test_a_malformed_call_names_what_was_wrong_and_costs_no_other(call: str, error: str) -> None:
    text = f"Hm. {GOOD}<tool_call>{call}</tool_call>{GOOD}"
    for action in (read_answer(Action(text=text), None, []), read(family("qwen3"), text)):
        first, malformed, last = action.tool_calls
        assert (first, last) == (LOOK, LOOK)
        assert error in (malformed.error or "")
        assert action.text == f"Hm. <tool_call>{call}</tool_call>".strip()


@pytest.mark.parametrize(
    ("text", "num_good"),
    [
        (f'<tool_call>{{"name": "look", "arguments": {{"days": 3{GOOD}', 1),
        (f"{GOOD}<tool_call>", 1),
        (f'{GOOD}<tool_call>{{"name": "look", "arguments": {{}}}}', 1),
        ('<tool_call>{"name": "look", "arguments": {}}', 0),
        ("<tool_call>", 0),
    ],
)
def test_a_call_that_is_not_closed_is_malformed(text: str, num_good: int) -> None:
    action = read_answer(Action(text=text), None, [])
    assert [call for call in action.tool_calls if call.error is None] == [LOOK] * num_good
    [error] = [call.error for call in action.tool_calls if call.error]
    assert error.startswith("the call is not closed: the end of a call is missing; a call looks like this: <tool_call>")


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("qwen3_5_nothink", "<tool_call>\n{}\n</tool_call>", "must be written as <function=name>"),
        ("qwen3_5_nothink", "<tool_call><function=f><parameter=a>3</tool_call>", "outside its arguments"),
        (
            "qwen3_5_nothink",
            "<tool_call><function=f><parameter=a>3</parameter><parameter=a>4</parameter></function></tool_call>",
            "the call of 'f' gives 'a' twice",
        ),
        ("qwen3_5_nothink", "<tool_call><function=></function></tool_call>", "the call has no name"),
        ("glm4moe", "<tool_call>\n</tool_call>", "must name the tool first"),
        ("glm4moe", "<tool_call>f\n<arg_key>a</arg_key></tool_call>", "outside its arguments"),
        ("gemma4", "<|tool_call>f{}<tool_call|>", "must be written as call:name{key:value}"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x}<tool_call|>', "a string that is not closed"),
        ("gemma4", "<|tool_call>call:f[1]<tool_call|>", "arguments that are a list"),
        ("lfm2_v2", "<|tool_call_start|>[f(3)]<|tool_call_end|>", "gives an argument without its name"),
        ("lfm2_v2", "<|tool_call_start|>[f(a='x)]<|tool_call_end|>", "a string that is not closed"),
        ("lfm2_v2", "<|tool_call_start|>[f(a=3 b=4)]<|tool_call_end|>", "is not valid JSON"),
        ("lfm2_v2", "<|tool_call_start|>[f(a=1, a=2)]<|tool_call_end|>", "gives 'a' twice"),
        ("lfm2_v2", "<|tool_call_start|>f<|tool_call_end|>", "must be written as name(argument=value)"),
        ("lfm2_v2", "<|tool_call_start|>[]<|tool_call_end|>", "is empty"),
        ("gptoss", " to=functions.f<|channel|>commentary json<|message|>{a}<|call|>", "is not valid JSON"),
        ("muse_glimmer", " to=f<|message|>{}<|eot|>", "must be written as <atem:invoke"),
        ("llama3_1", '{"name": "f"<|eot_id|>', "is not valid JSON"),
        ("llama3_1", '{"name": "f", "parameters": [3]}<|eot_id|>', "arguments that are a list"),
        (
            "deepseekv3_training",
            "</think><\uff5ctool\u2581call\u2581begin\uff5c>f<\uff5ctool\u2581call\u2581end\uff5c>",
            "no",
        ),
    ],
)
def test_a_malformed_call_of_another_form_names_what_was_wrong(name: str, text: str, error: str) -> None:
    (call,) = read(family(name), text).tool_calls
    assert error in (call.error or "")


def test_good_calls_beside_a_malformed_one_in_a_list_are_calls() -> None:
    text = "<|tool_call_start|>[look(days=1), f(a=), look(days=2), 7, look(days=3)]<|tool_call_end|><|im_end|>"
    calls = read(family("lfm2_v2"), text).tool_calls
    assert [call.arguments.get("days") for call in calls if call.error is None] == [1, 2, 3]
    listed = '[TOOL_CALLS][{"name": "look", "arguments": {"days": 1}}, {"name": "f", "arguments": }, 3, '
    listed += '{"name": "look", "arguments": {"days": 2}}]</s>'
    template = "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}{% endfor %}]</s>{% else %}{{ m.content }}{% endif %}{% endfor %}"  # fmt: skip  # noqa: E501
    calls = read(tokenizer_for(template), listed).tool_calls
    assert [call.arguments.get("days") for call in calls if call.error is None] == [1, 2]
    assert any(call.error for call in calls)


@pytest.mark.parametrize(
    ("written", "errors"),
    [
        ("rm(path='tmp/x), ls(path='/')", [True, False]),
        ("say(text='hi', add(a=1, b=2), say(text='bye')", [True, False, False]),
        ('say(text="hi), add(a=1, text="b"), say(text="bye")', [True, False, False]),
        ("say(text='a, f(b) c, d=e', n=1), say(text='bye')", [False, False]),
        ("say(text='a', n=), add(a=1)", [True, False]),
    ],
)
def test_a_string_that_is_not_closed_swallows_no_other_call(written: str, errors: list[bool]) -> None:
    calls = read(family("lfm2_v2"), f"<|tool_call_start|>[{written}]<|tool_call_end|><|im_end|>").tool_calls
    assert [call.error is not None for call in calls] == errors


@given(
    place=st.integers(0, 39),
    edit=st.sampled_from(["insert", "replace", "delete"]),
    character=st.sampled_from("()[]{}'\",=ab 1"),
)
@pytest.mark.parametrize("read_string", [bare_string, escaped_string])
def test_no_edit_of_a_call_costs_those_behind_it(
    read_string: ReadString, place: int, edit: str, character: str
) -> None:
    first = "say(text='hi you', n=3, tags=['a', 'b'])"
    kept = {"insert": character + first[place], "replace": character, "delete": ""}[edit]
    edited = first[:place] + kept + first[place + 1 :]
    calls = python_calls(f"[{edited}, add(a=1, b=2), say(text='bye')]", read_string)
    assert calls[-2:] == [
        ToolCall(name="add", arguments={"a": 1, "b": 2}),
        ToolCall(name="say", arguments={"text": "bye"}),
    ]


def test_of_very_many_calls_the_first_are_read() -> None:
    for text in (
        GOOD * 1000,
        "<tool_call>" * 1000,
        f"<tool_call>[{GOOD[11:-12]}{(',' + GOOD[11:-12]) * 999}]</tool_call>",
    ):
        calls = read_answer(Action(text=text), None, []).tool_calls
        assert len(calls) == MAX_CALLS + 1
        assert "more than 128 in one answer" in (calls[-1].error or "")


def test_text_behind_a_llama_call_is_text() -> None:
    action = read(family("llama3_1"), '{"name": "look", "parameters": {"days": 3}} as you asked<|eot_id|>')
    assert (action.tool_calls, action.text) == ((LOOK,), "as you asked")


def test_json_that_is_no_call_is_text() -> None:
    text = 'Their record: {"name": "Ada", "age": 3}.<|eot_id|>'
    assert read(family("llama3_1"), text).tool_calls == ()


MARKS = sorted(
    {
        "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<think>",
        "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "</s>",
        "<|tool_call>", "<tool_call|>", '<|"|>', "call:f", "<|tool_call_start|>", "<|tool_call_end|>", "f(a=", ")",
        "to=functions.f", "<|message|>", "<|channel|>", "analysis", "<|call|>", "<|eot_id|>", "<|start|>", "<|end|>",
        '<atem:invoke name="f">', "</atem:invoke>", "<|python_tag|>", '{"name": "f", "parameters": ', '"name"', "{",
        "}", "[", "]", "'", '"', ":", ",", "f", "3", "é", "\n", " ",
    }
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(NAMES), parts=st.lists(st.sampled_from(MARKS), max_size=12))
def test_nothing_that_an_agent_answers_raises(name: str, parts: list[str]) -> None:
    action = read(family(name), "".join(parts))
    json.dumps([[call.name, call.arguments, call.error] for call in action.tool_calls], allow_nan=False)
    text = read_answer(Action(text="".join(parts)), ChatFormat.of(family(name), append=False), [])
    assert all(call.name or call.error for call in text.tool_calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=JSON)
def test_json_is_read_as_it_was_written(value: Any) -> None:
    assert whole_json(json.dumps(value)) == value


@given(text=st.text(), character=st.sampled_from("'\""))
def test_an_escaped_string_is_read_as_python_reads_it(text: str, character: str) -> None:
    escaped = text.replace("\\", "\\\\").replace(character, f"\\{character}").replace("\n", "\\n")
    assert python_calls(f"[f(a={character}{escaped}{character}, b=1)]", escaped_string) == [
        ToolCall(name="f", arguments={"a": text, "b": 1})
    ]
    assert escaped_string(repr(text), 0)[0] == text or "\\U" in repr(text)


def test_half_of_a_surrogate_pair_is_no_string() -> None:
    [call] = python_calls(r"[f(a='\ud800')]", escaped_string)
    assert call.error == "the call has a string that contains half of a surrogate pair"


@given(text=st.text(alphabet="ab,()='\"[] \n"))
def test_a_string_between_quotes_is_read_as_it_stands(text: str) -> None:
    calls = python_calls(f"[f(a='{text}')]", bare_string)
    assert all(call.error or call.name for call in calls)
    if not {*text} & {*"'\"=()"}:
        assert calls == [ToolCall(name="f", arguments={"a": text})]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, " a\n", " a\n"),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "3.5", 3.5),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "3", 3),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "3", "3"),
        ({"type": ["integer", "string"]}, "3", 3),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "1", "1"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "object"}, "{a}", "{a}"),
        ({"type": "number"}, "NaN", "NaN"),
        ({}, "3", 3),
        ({}, "word", "word"),
    ],
)
def test_bare_text_gets_the_type_of_its_schema(schema: dict[str, Any], text: str, value: Any) -> None:
    arguments = typed_arguments("f", [("a", text)], {"f": {"a": schema}})
    assert arguments == {"a": value}
    assert type(arguments["a"]) is type(value)


WRITTEN_IN_TAGS = {
    "qwen3_5_nothink": (
        "<tool_call>\n<function=f>\n<parameter=s>\none\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    "glm4moe": (
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>one</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>1</arg_value>\n</tool_call>"
    ),
    "muse_glimmer": (
        ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="s">one</atem:parameter>\n'
        '<atem:parameter name="n">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>'
    ),
}


@pytest.mark.parametrize("name", WRITTEN_IN_TAGS)
def test_a_misspelled_tag_makes_no_argument_a_part_of_another(name: str) -> None:
    properties = {"s": {"type": "string"}, "n": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    text, reader = WRITTEN_IN_TAGS[name], AnswerReader(family(name), {})
    first, second = text.index("one") + 3, text.index("1")
    for place in range(first, second):
        for kept in ("", '"', "x" + text[place]):
            answer = reader.read(text[:place] + kept + text[place + 1 :], tools)
            for call in answer.calls if answer else ():
                assert call.error or "1" not in str(call.arguments.get("s")), (place, kept)
    for value in ("<b>n</b>", "</parameter>", "n=1", "<parameter>", "</arg_value>"):
        answer = reader.read(text.replace("one", value), tools)
        assert answer is not None
        assert [call.arguments for call in answer.calls] == [{"s": value, "n": 1}]


def test_white_space_without_end_takes_no_long_time() -> None:
    reader, start = AnswerReader(family("llama3_2"), {}), time.monotonic()
    for character in " \n":
        reader.read('{"name": "f", "parameters": {"s": "' + character * 100_000, [])
    assert time.monotonic() - start < 5  # it took half a minute
