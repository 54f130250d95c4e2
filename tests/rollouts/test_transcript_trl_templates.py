"""The templates that ship with TRL, over one small tokenizer that has each one's control tokens."""

import re
from importlib.resources import files

import pytest
from transformers import PreTrainedTokenizerFast

from agentsgym.errors import TemplateError
from agentsgym.rollouts.transcript import ChatFormat, Transcript
from agentsgym.testing import chat_tokenizer
from agentsgym.types import Action, Message

TEMPLATES = {
    path.name.removesuffix(".jinja"): path.read_text(encoding="utf-8")
    for path in sorted(files("trl").joinpath("chat_templates").iterdir(), key=lambda path: path.name)
    if path.name.endswith(".jinja")
}
CONTROL = re.compile(
    r"<\|[^|<>\n' ]+\|>|<\uff5c[^\uff5c]+\uff5c>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|<end_of_utterance>"
)
OBSERVATIONS = ["The room is dark. ", "", "\n\nYou said <|im_end|>? "]


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=chat_tokenizer("none").backend_tokenizer,
        bos_token="<BOS>",
        eos_token="<EOS>",
        pad_token="<PAD>",
        extra_special_tokens=sorted(set(CONTROL.findall(template))),
    )
    tokenizer.chat_template = template
    return tokenizer


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def play(chat_format: ChatFormat, observations: list[str]) -> Transcript:
    transcript = Transcript(chat_format)
    transcript.observe([user(observations[0])])
    for observation in observations[1:]:
        transcript.act(Action(text="Is it alive?"))
        transcript.observe([user(observation)])
    return transcript


def test_every_template_has_a_format() -> None:
    assert len(TEMPLATES) >= 68
    refused = []
    for name, template in TEMPLATES.items():
        try:
            ChatFormat.of(tokenizer_for(template))
        except TemplateError:
            refused.append(name)
    assert refused == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_record_is_the_full_render_unless_the_template_rewrites_history(name: str) -> None:
    tokenizer = tokenizer_for(TEMPLATES[name])
    chat_format = ChatFormat.of(tokenizer)
    transcript = play(chat_format, OBSERVATIONS)
    try:
        whole = tokenizer.apply_chat_template(transcript.messages, tokenize=False, add_generation_prompt=True)
    except Exception:  # noqa: BLE001  # some templates take lists of content blocks only
        whole = None
    same = tokenizer.decode(transcript.token_ids, clean_up_tokenization_spaces=False) == whole
    assert same or chat_format.rewrites_history


def test_most_records_are_the_full_render() -> None:
    exact = 0
    for template in TEMPLATES.values():
        tokenizer = tokenizer_for(template)
        transcript = play(ChatFormat.of(tokenizer), ["go", "on", "now"])
        try:
            whole = tokenizer.apply_chat_template(transcript.messages, add_generation_prompt=True, return_dict=False)
        except Exception:  # noqa: BLE001  # some templates take lists of content blocks only
            continue
        exact += transcript.token_ids == whole
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
    tokenizer = tokenizer_for(TEMPLATES[name])
    chat_format = ChatFormat.of(tokenizer)
    sampled = [*chat_format.encode("X"), *tokenizer.convert_tokens_to_ids(ended_by)]
    transcript = Transcript(chat_format)
    transcript.observe([user("go")])
    start, stop = transcript.act(Action(text="X", token_ids=sampled))
    transcript.observe([user("on")])
    assert transcript.token_ids[start:stop] == sampled
    assert tokenizer.decode(transcript.token_ids[start:], clean_up_tokenization_spaces=False) == expected


@pytest.mark.parametrize("name", ["gemma4", "phi3", "cohere2"])
def test_a_template_that_does_not_show_tool_messages_is_refused_when_one_comes(name: str) -> None:
    transcript = play(ChatFormat.of(tokenizer_for(TEMPLATES[name])), ["go"])
    transcript.act(Action(text="look"))
    with pytest.raises(TemplateError, match="changed the tool message 0"):
        transcript.observe([{"role": "tool", "content": "a lamp"}])
