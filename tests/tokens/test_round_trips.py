"""What a model writes in its family's form is what the environment gets, and the next prompt is what the family writes.

Of every template of TRL and of the forms of further public families: random thoughts, texts and calls are written as
the record writes an answer in text, and read again from these ids.
"""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_families import TRL_TEMPLATES, family, tokenizer_for
from public_families import PUBLIC, public_family

from agentsgym.errors import AgentsGymError
from agentsgym.tokens.calls.reader import read_answer, reader_of
from agentsgym.tokens.transcript import ChatFormat, Transcript
from agentsgym.types import Action, Message, ToolCall

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name}.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "rest": {}},
                "required": ["text"],
            },
        },
    }
    for name in ("look", "search_all")
]
GO: Message = {"role": "user", "content": "go"}
WORDS = (
    *("So", "it", "is 7.", "é", "日本", "😀", "{", "}", "[1, 2]", '{"a": 1}', "<b>", "</b>", "`x`", "<", ">", "it's"),
    *('"so"', "\\n", "a\nb", "c\n\nd", "= 3,", "call:", "name", "None", "true", "```", "- x"),
    *("|", "(y)", "@", "#", "%}"),
)
# Letters that spell a token of the vocabulary are text, and so are the markers of other families.
MARKS = ("<think>", "</think>", "[THINK]", "<|START_ACTION|>", "<tool_call>", "</tool_call>", "<|tool_call_end|>")
OTHERS = ("[THINK]", "<|START_ACTION|>", "<|tool_call_end|>")
# These write no text beside calls.
WITHOUT_TEXT = (
    *("llama3", "llama4", "meta-llama-Llama-3", "gptoss", "muse", "gemma4", "diffusion_gemma", "deepseekv3"),
)
ONE_CALL = ("llama3", "llama4", "gptoss")
NAMES = [*PUBLIC, *TRL_TEMPLATES]
# Templates of a folder outside the repository: make test-templates FOLDER=…
OUTSIDE = {path.stem: path for path in sorted(Path(os.environ.get("AGENTSGYM_TEMPLATES", os.devnull)).glob("*.jinja"))}
LOOK = [ToolCall(name="look", arguments={"text": "x"})]
# The ids of these cannot tell an empty thought from none; the ids of the others below only beside a call.
NO_EMPTY_THOUGHT = ("diffusion_gemma", "gemma4_v5", "lfm2_2_5_v2", "lfm2_2_5_vl", "muse_glimmer", "qwen3_5_nothink")
NONE_BESIDE_A_CALL = ("gemma4", "glm4moe", "gptoss", "nemotron_3_nano", "qwen3", "qwen3_5_think", "qwen3_6", "qwen3_8")


@cache
def tokenizer_of(name: str) -> Any:
    if name in OUTSIDE:
        return tokenizer_for(OUTSIDE[name].read_text(encoding="utf-8"))
    return public_family(name) if name in PUBLIC else family(name)


def words(rng: random.Random, most: int, marks: tuple[str, ...] = ()) -> str:
    chosen = [rng.choice((*WORDS, *marks)) for _ in range(rng.randrange(most + 1))]
    return rng.choice((" ", "\n", "")).join(chosen).strip()


def draw(rng: random.Random, name: str, *, with_marks: bool = True) -> Action:
    """A random answer that a model of this family could write."""
    reader = reader_of(chat_format_of(name))
    marks = marks_of(name) if with_marks else ()
    thought = words(rng, 5, marks) if reader.has_thoughts and (reader.is_begun or rng.random() < 0.6) else None
    if thought is not None and (reader.is_begun or thought.startswith(("{", "```"))):
        thought = (
            f"I {thought}".strip()
        )  # what begins as data may quote the end of a thought; not all print an empty one
    calls: list[ToolCall] = []
    if chat_format_of(name).separates_calls and rng.random() < 0.6:
        for _ in range(1 if name.startswith(ONE_CALL) else rng.randrange(1, 4)):
            arguments: dict[str, Any] = {"text": words(rng, 4)}
            arguments |= {"count": rng.randrange(-9, 99)} if rng.random() < 0.5 else {}
            calls.append(ToolCall(name=rng.choice(("look", "search_all")), arguments=arguments))
    text = "" if calls and name.startswith(WITHOUT_TEXT) else words(rng, 5, marks)
    return Action(text=text, reasoning=thought, tool_calls=calls)


@cache
def marks_of(name: str) -> tuple[str, ...]:
    """Markers that this tokenizer does not have are letters of no meaning, unless its model may write them as text."""
    tokens = tokenizer_of(name).get_added_vocab()
    others = OTHERS[1:] if "stral" in name else OTHERS  # some of these think in [THINK]
    return tuple(one for one in MARKS if one in tokens or one in others)


@cache
def chat_format_of(name: str) -> ChatFormat:
    return ChatFormat.of(tokenizer_of(name), append=False, tools=TOOLS)


def written(name: str, action: Action) -> tuple[list[int], Transcript]:
    """The ids of an answer as the record writes it, and its record."""
    transcript = Transcript(chat_format_of(name), "rerender")
    transcript.observe([GO])
    start, stop = transcript.act(action)
    return transcript.record()[start:stop], transcript


def parts(action: Action) -> tuple[Any, ...]:
    calls = [(call.name, call.arguments, call.error, call.repair) for call in action.tool_calls]
    return action.reasoning, action.text, calls


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_the_environment_gets(name: str) -> None:
    rng = random.Random(f"round trips {name}")
    for _ in range(60):
        given = draw(rng, name)
        ids, _ = written(name, given)
        text = chat_format_of(name).truncated_text(ids)
        sampled = Action(text=text, token_ids=ids, finish_reason="stop")
        read = read_answer(sampled, chat_format_of(name), TOOLS)
        found, expected = parts(read), parts(given)
        if name.startswith(NO_EMPTY_THOUGHT) or (given.tool_calls and name.startswith(NONE_BESIDE_A_CALL)):
            found, expected = ((one[0] or None, *one[1:]) for one in (found, expected))
        assert found == expected, tokenizer_of(name).decode(ids)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        *((name, Action(text="So", reasoning=""), Action(text="So")) for name in NO_EMPTY_THOUGHT),
        *(
            (name, Action(text="", reasoning="", tool_calls=LOOK), Action(text="", tool_calls=LOOK))
            for name in NONE_BESIDE_A_CALL
        ),
        # Without a token for the end of a thought, an answer that begins as data is data.
        ("qwen3_5_nothink", Action(text="So", reasoning="{"), Action(text="{\n</think>\n\nSo")),
        # Space around text is no part of it.
        ("qwen3", Action(text="So", reasoning="I\n"), Action(text="So", reasoning="I")),
    ],
)
def test_what_a_form_cannot_tell_apart(name: str, one: Action, other: Action) -> None:
    assert written(name, one)[0] == written(name, other)[0]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_next_prompt_is_what_the_family_writes(name: str) -> None:
    rng, tokenizer = random.Random(f"prompts {name}"), tokenizer_of(name)
    chat_format = ChatFormat.of(tokenizer, tools=TOOLS)
    for _ in range(8):
        canonical, sampled = Transcript(chat_format), Transcript(chat_format)
        results: list[Message] = [GO]
        for _ in range(3):
            canonical.observe(results)
            sampled.observe(results)
            given = draw(rng, name, with_marks=False)
            start, stop = canonical.act(given)
            ids = canonical.token_ids[start:stop]
            sampled.act(read_answer(Action(text=chat_format.truncated_text(ids), token_ids=ids), chat_format, TOOLS))
            results = [{"role": "tool", "content": words(rng, 2)} for _ in given.tool_calls] or [GO]
        canonical.observe(results)
        sampled.observe(results)
        shown: Any = chat_format.for_template(sampled.messages)
        whole = tokenizer.apply_chat_template(shown, tools=TOOLS, add_generation_prompt=True, return_dict=False)
        assert sampled.token_ids == canonical.token_ids == whole, tokenizer.decode(whole)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_template_of_the_folder_is_read_as_it_writes_or_refused(name: str) -> None:
    rng, num_read = random.Random(f"outside {name}"), 0
    try:
        chat_format = ChatFormat.of(tokenizer_of(name), tools=TOOLS)
        chat_format.check_results()
        chat_format.check_calls()
    except AgentsGymError as refusal:
        pytest.skip(f"{name}: {refusal}")
    for _ in range(60):
        given = draw(rng, name)
        try:
            ids, _ = written(name, given)
        except AgentsGymError:
            continue  # an answer that the template rejects: several calls, or text beside them
        text = chat_format_of(name).truncated_text(ids)
        read = read_answer(Action(text=text, token_ids=ids), chat_format_of(name), TOOLS)
        assert parts(read)[2] == parts(given)[2], tokenizer_of(name).decode(ids)
        is_same = parts(read) == parts(given)
        assert is_same or written(name, read)[0] == ids, (tokenizer_of(name).decode(ids), parts(given), parts(read))
        num_read += 1
    assert num_read > 9
