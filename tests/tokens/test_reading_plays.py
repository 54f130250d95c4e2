"""What becomes of an answer behind its reading: in the record, later prompts, forks, exports and metrics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from public_families import PUBLIC
from test_repairs import JSON, TOOLS, XML
from test_round_trips import tokenizer_of

from agentsgym import Action, Agent, DirectOutputAgent, ScoredRollout, ScriptedAgent, TurnRequest
from agentsgym.batch.layouts import trajectory_rows
from agentsgym.envs import ToolEnv
from agentsgym.export import sft_examples
from agentsgym.store.records import StoredRollout
from agentsgym.tokens.calls.reader import read_answer, reader_of
from agentsgym.tokens.transcript import ChatFormat, Transcript
from agentsgym.training.metrics.rollouts import RolloutSummary, rollout_metrics
from agentsgym.types import Trajectory

TASK = {"question": "q", "answer": "z", "seed": 1}
HERMES = f"<tool_call>\n{JSON}\n</tool_call>"
THOUGHT = "<think>\nhm\n</think>\n\n"


def ids_of(name: str, text: str) -> list[int]:
    return tokenizer_of(name)(text, add_special_tokens=False)["input_ids"]


def read(name: str, text: str, tools: Any = TOOLS) -> Action:
    """Read an answer that ended its turn, from ids."""
    chat_format = ChatFormat.of(tokenizer_of(name), append=False, tools=TOOLS)
    ids = [*ids_of(name, text), *chat_format.end_of_turn_ids]
    return read_answer(Action(text=chat_format.truncated_text(ids), token_ids=ids), chat_format, tools)


def made(action: Action) -> list[tuple[str, Any]]:
    return [(call.name, call.repair) for call in action.tool_calls if call.error is None]


def add(a: int, b: int) -> str:
    """Add.

    Args:
        a: One number.
        b: Another.
    """
    return str(sum(range(a, a + 1)) + b)


class Sampling(Agent):
    """Samples given texts as ids."""

    def __init__(self, name: str, texts: Sequence[str]) -> None:
        self._name, self._texts = name, list(texts)

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        text = self._texts.pop(0) if len(self._texts) > 1 else self._texts[0]
        ids = ids_of(self._name, text)
        decoded = tokenizer_of(self._name).decode(ids, skip_special_tokens=True)
        return [Action(text=decoded, token_ids=ids, logprobs=[-1.0] * len(ids)) for _ in requests]


def play(name: str, *texts: str, **config: Any) -> tuple[ToolEnv, Trajectory]:
    env = ToolEnv(tokenizer_of(name), {"max_steps_per_episode": 4, **config}, tools=[add])
    [played] = env.rollout([TASK], Sampling(name, texts))
    return env, played


def last_prompt(name: str, played: Trajectory) -> str:
    turn = played.turns[-1]
    return tokenizer_of(name).decode(played.token_ids[turn.prompt_start : turn.start])


UNREADABLE = {
    "gptoss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add"
    "<|message|>bad<|call|>",
    "qwen3": f"{THOUGHT}<tool_call>\nbad\n</tool_call><|im_end|>",
    "Falcon H1": f"{THOUGHT}<tool_call>\nbad\n</tool_call><|im_end|>",
    "llama3": f"{THOUGHT}{HERMES}<|eot_id|>",  # well-formed, but its template prints none
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_thought_beside_an_unreadable_call_is_no_text_and_stands_once_in_later_prompts(name: str) -> None:
    _, played = play(name, UNREADABLE[name], "z", history="rerender")
    assert played.messages[1].get("reasoning_content") == "hm"
    assert "hm" not in played.messages[1]["content"]
    assert last_prompt(name, played).count("hm") <= 1


@pytest.mark.parametrize(("first", "last"), [(f"{JSON}<|im_end|>", "z<|im_end|>"), (HERMES, "z")])
def test_a_fork_makes_the_calls_of_the_turns_before_it(first: str, last: str) -> None:
    env, played = play("qwen3", first, last)
    [fork] = env.fork(played, 1, Sampling("qwen3", [last]), num_forks=1)
    assert (fork.token_ids, fork.info["calls_read"]) == (played.token_ids, played.info["calls_read"])
    assert sum(played.info["calls_read"].values()) == 1


QUOTING_CALLS = {
    "gptoss": f'<|channel|>commentary to=functions.say<|message|>{{"text":\n{JSON}<|call|>',
    "Qwen3 Coder": f"<tool_call>\n<function=say>\n<parameter=text>\n{JSON}",
    "Qwen3 Coder 2": f"<tool_call>\n<parameter=text>\n{XML}\n</tool_call>",
    "Qwen3 Coder 3": f"<tool_call>\n<function=say>\n<parameter=text>\nWrite\n<tool_call>\n{XML}\n</tool_call>\n"
    "</parameter>\n</function>\n</tool_call>",
    "gemma4_v5": f'<|tool_call>call:say{{text:<|"|>x\n{JSON}\n',
    "qwen3": f'<tool_call>\n{{"name": "say", "arguments": {{"text": "x\n{JSON}\n</tool_call>',
    "qwen3 2": f'<tool_call>\n{{"name": "say", "arguments": {{"text": "x\n{XML}\n</tool_call>',
    "Magistral": f'[TOOL_CALLS]say[ARGS]{{"text":\n{JSON}',
    "Command A Reasoning": f'<|START_ACTION|>[{{"tool_name": "say", "parameters": {{"text":\n{JSON}<|END_ACTION|>',
}


@pytest.mark.parametrize("case", QUOTING_CALLS)
def test_no_call_is_made_out_of_the_arguments_of_another(case: str) -> None:
    name = case.removesuffix(" 2").removesuffix(" 3")
    action = read(name, QUOTING_CALLS[case])
    assert made(action) == []
    assert action.tool_calls


NESTED = {
    "LFM2": '<|tool_call_start|>[say(text="<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>")]<|tool_call_end|>',
    "gemma4_v5": '<|tool_call>call:say{text:<|"|><|tool_call>call:add{a:1,b:2}<tool_call|><|"|>}<tool_call|>',
}


@pytest.mark.parametrize("name", NESTED)
def test_a_call_may_quote_another_in_an_argument(name: str) -> None:
    assert made(read(name, NESTED[name])) == [("say", None)]


def test_a_call_at_the_end_of_an_open_thought_may_stand_in_a_section() -> None:
    section = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|>'
    )
    action = read("Kimi K2 Thinking", f"<think>hm\n{section}")
    assert (action.reasoning, made(action)) == ("hm", [("add", "open_thought")])


@pytest.mark.parametrize("tools", [TOOLS, None])
@pytest.mark.parametrize("name", ["Command A", "Mistral Nemo", "llama3"])
def test_tags_at_the_start_are_a_thought_under_templates_without_one_with_tools_too(name: str, tools: Any) -> None:
    action = read(name, "<think>hm</think>7", tools)
    assert (action.reasoning, action.text) == ("hm", "7")


MARKED = {
    "gemma4_v5": "call:add{a:1,b:2}<tool_call|>",
    "gptoss": '<|channel|>commentary<|message|>{"a": 1, "b": 2}<|call|>',
    "gptoss 2": "<|channel|>commentary to=functions.add",
    "Kimi K2": "<|tool_calls_section_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "Command A": '[{"tool_name": "add", "parameters": {"a": 1, "b": 2}}]<|END_ACTION|>',
}


@pytest.mark.parametrize("case", MARKED)
def test_an_answer_with_a_token_of_calls_is_never_the_final_answer(case: str) -> None:
    _, played = play(case.removesuffix(" 2"), MARKED[case], max_steps_per_episode=1)
    assert played.info["calls_read"] == {"unreadable": 1}


@pytest.mark.parametrize("text", ["Write `</tool_call>` behind it.", '{"answer": "</tool_call>"}'])
def test_an_answer_that_quotes_a_token_of_calls_is_one(text: str) -> None:
    assert read("qwen3", text).tool_calls == ()


def test_a_tag_inside_a_text_is_no_beginning_of_a_thought() -> None:
    text = "The answer is 4, as <think>2 + 2</think> shows."
    assert read_answer(Action(text=text), None) == Action(text=text)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_call_is_read_as_a_call(name: str) -> None:
    chat_format = ChatFormat.of(tokenizer_of(name), append=False, tools=TOOLS)
    if chat_format.separates_calls:
        reader = reader_of(chat_format)
        action = read(name, f"{reader.end_mark * reader.is_begun}{reader.example}")
        assert [(call.name, call.error) for call in action.tool_calls] == [("look_up", None)]


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("LFM2", "<think>hm</think><|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>"),
        ("LFM2", f"{THOUGHT}<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>"),
        ("qwen2_5", f"{THOUGHT}{HERMES}"),
    ],
)
def test_a_thought_beside_a_call_without_a_form_is_shown_as_it_was_written(name: str, written: str) -> None:
    _, played = play(name, f"{written}<|im_end|>", "z<|im_end|>", history="rerender")
    assert f"assistant\n{written}<|im_end|>" in last_prompt(name, played)
    [example] = sft_examples([StoredRollout(trajectory=played)], min_reward=0.5)
    assert written in tokenizer_of(name).apply_chat_template(
        ChatFormat.of(tokenizer_of(name), tools=TOOLS).for_template(example["messages"]), tools=TOOLS, tokenize=False
    )


@pytest.mark.parametrize("before", ["<example>", "<!--", '"""', '{"calls": [1,'])
def test_a_call_inside_something_that_is_open_is_quoted(before: str) -> None:
    assert read("qwen3", f"So:\n{before}\n{JSON}").tool_calls == ()
    assert read("qwen3", f"{before}\n{JSON}").tool_calls == ()


def test_an_open_json_answer_quotes_the_call_in_it() -> None:
    whole = json.dumps({"answer": ["So", json.loads(JSON)]}, indent=2)
    assert read("qwen3", whole[: whole.rindex("]")].rstrip()).tool_calls == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Qwen3 Coder", f"<tool_call>\n{XML}"),
        ("LFM2", "<|tool_call_start|>[add(a=1, b=2)]"),
        ("gemma4_v5", "<|tool_call>call:add{a:1,b:2}"),
    ],
)
def test_a_call_that_was_not_closed_is_not_completed(name: str, text: str) -> None:
    action = read(name, text)
    assert (made(action), len(action.tool_calls)) == ([], 1)


@pytest.mark.parametrize(
    ("text", "num_made"),
    [
        (f"Write `<tool_call>{JSON}</tool_call>` to add.", 0),
        (f"Write <tool_call>{JSON}</tool_call> to add.", 0),
        (f"As in:\n```\nadd them:\n{HERMES}\n```\nthe tool adds.", 0),
        (f"I add them. {HERMES}", 1),
        (f"I add them.\n{HERMES}\n{HERMES}", 2),
        (f"```\n{HERMES}\n```", 1),
    ],
)
def test_text_without_ids_may_quote_a_call(text: str, num_made: int) -> None:
    for chat_format in (None, ChatFormat.of(tokenizer_of("qwen3"), append=False, tools=TOOLS)):
        assert len(made(read_answer(Action(text=text), chat_format, TOOLS))) == num_made


def test_metrics_of_calls_are_logged_for_every_batch_with_tools() -> None:
    bad = '<tool_call>{"name": "add", "arguments": {"a": "x", "b": 2}}</tool_call>'
    for texts, expected in (
        (["z"], {"call_frequency": 0.0, "failure_frequency": 0.0, "unreadable": 0.0, "repaired": 0.0}),
        ([HERMES, bad, "z"], {"call_frequency": 2.0, "failure_frequency": 0.5, "unreadable": 0.0, "repaired": 0.0}),
    ):
        [played] = ToolEnv(None, {"max_steps_per_episode": 4}, tools=[add]).rollout([TASK], ScriptedAgent(texts))
        scored = ScoredRollout.from_trajectory(played, group=0)
        metrics = rollout_metrics([RolloutSummary.of(played, trajectory_rows(0, played), scored)])
        found = {key.removeprefix("tools/"): value for key, value in metrics.items() if key.startswith("tools/")}
        assert found == expected


def test_a_float_without_a_fraction_is_given_to_a_tool_as_the_integer_that_it_is() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1.0, "b": 2}}</tool_call>'
    env = ToolEnv(None, {"max_steps_per_episode": 3}, tools=[add])
    [played] = env.rollout([TASK], DirectOutputAgent(lambda messages: call if len(messages) < 3 else "z"))
    assert [message["content"] for message in played.messages if message["role"] == "tool"] == ["3"]


@pytest.mark.parametrize("history", ["append", "rerender"])
def test_a_truncated_thought_without_a_form_is_closed_in_later_prompts(history: Any) -> None:
    tokenizer = tokenizer_of("llama3")
    transcript = Transcript(ChatFormat.of(tokenizer), history)
    transcript.observe([{"role": "user", "content": "go"}])
    cut = Action(text="<think>Let", token_ids=ids_of("llama3", "<think>Let"), finish_reason="length")
    transcript.act(read_answer(cut, transcript.chat_format))
    transcript.observe([{"role": "user", "content": "on"}])
    assert tokenizer.decode(transcript.token_ids).count("</think>") == 1
