"""Calls in the forms of families that no library ships a template of, and templates whose calls cannot be read."""

from typing import Any

import pytest
from chat_families import tokenizer_for
from faulty_envs import HasATool
from public_families import WRITTEN
from test_tool_calls import CALLS, TOOLS, read, written_turn
from tool_game import add

from agentsgym import Action, ConfigError, ScriptedAgent, ToolCall, check_env
from agentsgym.envs import ToolEnv
from agentsgym.testing import chat_tokenizer
from agentsgym.tokens.calls.reader import AnswerReader
from agentsgym.tokens.transcript import ChatFormat, Transcript

_TURNS = (
    "{{% for m in messages %}}{{% if m.role == 'tool' %}}<|im_start|>tool\n{result}<|im_end|>\n{{% else %}}"
    "<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}<|im_end|>\n"
    "{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
RESULTS = {"kimi": "## Return of {{ m.tool_call_id }}\n{{ m.content }}"}
UNREADABLE = (
    "{% for c in m.tool_calls %}RUN {{ c.function.name }} WITH {{ c.function.arguments | tojson }} STOP{% endfor %}"
)


def family_of(name: str) -> Any:
    calls = {**WRITTEN, "unreadable": UNREADABLE}[name]
    return tokenizer_for(_TURNS.format(calls=calls, result=RESULTS.get(name, "{{ m.content }}")))


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_of_other_families_are_read_as_they_are_written(name: str, kind: str) -> None:
    tokenizer = family_of(name)
    turn = written_turn(tokenizer, "Hm.", CALLS[kind], as_text=False)
    if name == "kimi":  # whose template prints ids, in which its models name the tools
        for number, (tool, _) in enumerate(CALLS[kind]):
            turn = turn.replace(f"call{number:05}", f"functions.{tool}:{number}")
    action = read(tokenizer, turn)
    assert [(c.name, c.arguments, c.error) for c in action.tool_calls] == [(*one, None) for one in CALLS[kind]]
    assert action.text == "Hm."


def test_a_repaired_call_keeps_line_breaks_that_its_template_does_not_add() -> None:
    call = written_turn(family_of("seed"), "", CALLS["line breaks"][:1], as_text=False).partition("<seed:tool_call>")[2]
    (repaired,) = read(family_of("seed"), call.partition("<|im_end|>")[0].strip()).tool_calls
    assert (repaired.repair, repaired.arguments) == ("opening_tag", CALLS["line breaks"][0][1])


@pytest.mark.parametrize(
    ("name", "begins", "ends"),
    [
        ("command", "<|START_THINKING|>", "<|END_THINKING|>"),
        ("seed", "<seed:think>", "</seed:think>"),
        ("kimi", "<think>", "</think>"),
    ],
)
def test_thoughts_of_other_families_are_thoughts(name: str, begins: str, ends: str) -> None:
    tokenizer = family_of(name)
    turn = written_turn(tokenizer, "", CALLS["one"], as_text=False).partition("<|im_end|>")[0]
    action = read(tokenizer, f"{begins}I {turn}{ends}No.")
    assert (action.tool_calls, action.text) == ((), "No.")
    assert (action.reasoning or "").startswith("I ")


@pytest.mark.parametrize(
    ("name", "text", "num_good", "error"),
    [
        (
            "kimi",
            "<|tool_call_begin|>functions.look:0<|tool_call_end|>{}",
            1,
            "must be written as functions.name:number",
        ),
        (
            "kimi",
            "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{<|tool_call_end|>{}",
            1,
            "not valid JSON",
        ),
        ("minimax", '<minimax:tool_call><invoke name="look"><parameter name="days">3</parameter>{}', 2, "not closed"),
        ("minimax", "<minimax:tool_call>look(){}", 2, "must be written in <invoke"),
        ("minimax", "<minimax:tool_call></minimax:tool_call>{}", 2, "is empty"),
        ("command", '<|START_ACTION|>[{"tool_name": "look", "parameters": },{}', 2, "not valid JSON"),
        ("command", "<|START_ACTION|>[3,{}", 2, 'must be a JSON object with "name"'),
    ],
)
def test_a_malformed_call_of_another_family_costs_no_other(name: str, text: str, num_good: int, error: str) -> None:
    tokenizer = family_of(name)
    good = written_turn(tokenizer, "", [("look", {"days": 1}), ("look", {"days": 2})][:num_good], as_text=False)
    good = good.replace("call00000", "functions.look:1").partition("<|im_end|>")[0].strip()
    block = WRITTEN[name].partition("{%")[0].strip()
    if not text.endswith("</minimax:tool_call>{}") and name != "kimi":
        good = good.removeprefix(block)
    calls = read(tokenizer, text.replace("{}", good)).tool_calls
    assert [call.arguments["days"] for call in calls if call.error is None] == [1, 2][:num_good]
    (failed,) = [call.error for call in calls if call.error is not None]
    assert error in failed


def test_a_call_whose_id_names_the_tool_has_such_an_id_on_record() -> None:
    tokenizer = family_of("kimi")
    transcript = Transcript(ChatFormat.of(tokenizer, tools=TOOLS))
    transcript.observe([{"role": "user", "content": "go"}])
    for _ in range(2):
        transcript.act(
            Action(text="", tool_calls=[ToolCall(name="look", arguments={"days": 1}), ToolCall(name="list_all")])
        )
        transcript.observe([{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}])
    text = tokenizer.decode(transcript.token_ids)
    for named in ("look:0", "list_all:1", "look:2", "list_all:3"):
        assert text.count(f"<|tool_call_begin|>functions.{named}<|tool_call_argument_begin|>") == 1
        assert text.count(f"## Return of functions.{named}\n") == 1
    assert transcript.token_ids == transcript.chat_format.render(transcript.messages)


TASK = {"question": "1 + 2?", "answer": "3"}


def test_an_environment_refuses_a_template_whose_calls_cannot_be_read() -> None:
    tokenizer = family_of("unreadable")
    unreadable = r"prints calls that cannot be read back: .*RUN look_up WITH .*response_template"
    with pytest.raises(ConfigError, match=unreadable):
        ToolEnv(tokenizer, tools=[add])
    env = HasATool(tokenizer)  # which gives its tools as it is played
    with pytest.raises(ConfigError, match=unreadable):
        env.rollout([{}], ScriptedAgent(["3"]))
    report = check_env(env, [{}], raise_on=None)
    assert [(finding.check, "cannot be read back" in finding.text) for finding in report.errors] == [("tools", True)]


def test_a_response_template_makes_its_calls_readable() -> None:
    tokenizer = family_of("unreadable")
    with pytest.raises(ConfigError, match="cannot be read back"):
        _ = ToolEnv(tokenizer, tools=[add]).chat_format
    calls = {"open_pattern": r"RUN (?P<name>\w+) WITH ", "close": " STOP", "repeats": True, "content": "json"}
    function = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {**calls, "transform": function},
            "content": {"close": "<|im_end|>", "content": "text"},
        },
    }
    (trajectory,) = ToolEnv(tokenizer, tools=[add]).rollout([TASK], ScriptedAgent(["3"]))
    assert trajectory.success


def test_a_template_without_calls_is_taken() -> None:
    (trajectory,) = ToolEnv(chat_tokenizer(), tools=[add]).rollout([TASK], ScriptedAgent(["3"]))
    assert trajectory.success
    assert AnswerReader(chat_tokenizer(), {}).form is None
