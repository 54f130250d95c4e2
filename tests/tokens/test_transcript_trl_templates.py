"""How a turn that the agent ended is gone on with, under templates that ship with TRL."""

import pytest
from chat_families import TRL_TEMPLATES, family, full_render, text_of
from recorded_chat import record, user

from agentsgym.tokens.transcript import ChatFormat, Transcript
from agentsgym.types import Action

OBSERVATIONS = ["The room is dark. ", "", "\n\nYou said <|im_end|>? "]


@pytest.mark.parametrize("name", TRL_TEMPLATES)
def test_the_record_is_the_full_render_as_text_unless_the_template_rewrites_history(name: str) -> None:
    tokenizer = family(name)
    transcript = record(tokenizer, (None, OBSERVATIONS[0], [("Is it?", text) for text in OBSERVATIONS[1:]]))
    whole = full_render(name, transcript.messages, tokenize=False)
    assert text_of(tokenizer, transcript.token_ids) == whole or ChatFormat.of(tokenizer).rewrites_history


def test_most_records_are_the_full_render() -> None:
    exact = 0
    for name in TRL_TEMPLATES:
        transcript = record(family(name), (None, "go", [("left", "on"), ("right", "now")]))
        exact += transcript.token_ids == full_render(name, transcript.messages)
    assert len(TRL_TEMPLATES) >= 68
    assert exact >= 40


@pytest.mark.parametrize(
    ("name", "ended_by", "expected"),
    [
        ("gptoss", ["<|return|>"], "X<|return|><|start|>user<|message|>on<|end|><|start|>assistant"),
        ("glm4moe", ["<|user|>"], "X<|user|>\non<|assistant|>"),
        ("glm4moe", ["<EOS>"], "X<EOS><|user|>\non<|assistant|>"),
        ("glm4moe", [], "X<|user|>\non<|assistant|>"),
        ("qwen3", ["<|im_end|>"], "X<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", ["<EOS>"], "X<EOS>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"),
        (
            "cohere2",
            ["<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"],
            "X<|END_RESPONSE|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>on<|END_OF_TURN_TOKEN|>"
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>",
        ),
    ],
)
def test_a_sampled_end_of_turn_is_not_repeated(name: str, ended_by: list[str], expected: str) -> None:
    tokenizer = family(name)
    chat_format = ChatFormat.of(tokenizer)
    sampled = [*chat_format.encode("X"), *tokenizer.convert_tokens_to_ids(ended_by)]
    transcript = Transcript(chat_format)
    transcript.observe([user("go")])
    start, stop = transcript.act(Action(text="X", token_ids=sampled))
    transcript.observe([user("on")])
    assert transcript.token_ids[start:stop] == sampled
    assert text_of(tokenizer, transcript.token_ids[start:]) == expected
