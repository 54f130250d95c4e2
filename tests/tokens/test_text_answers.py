"""Answers that are given as text are recorded as the template's full render has them, headers and ends included."""

from typing import Any

import pytest
from chat_families import CONTROL, family, text_of, tokenizer_for
from hypothesis import example, given
from hypothesis import strategies as st
from recorded_chat import record, user
from tokenizers import AddedToken

from agentsgym import Action, TemplateError
from agentsgym.testing import chat_tokenizer
from agentsgym.tokens.transcript import ChatFormat, Transcript

_HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
_ASSISTANT = "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
_SPEAKERS = "{{ {'user': 'USER', 'assistant': 'ASSISTANT', 'system': 'SYSTEM'}[m.role] }}"
_ASK = "{% if add_generation_prompt %}"
TEMPLATES = {  # the shapes of known ones: what stands in front of an answer, and behind it
    "Zephyr": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% if loop.last and add_generation_prompt %}"
        "<|assistant|>{% endif %}{% endfor %}"
    ),
    "OpenChat": (
        "{{ bos_token }}{% for m in messages %}GPT4 Correct {{ m.role | title }}: {{ m.content }}<|end_of_turn|>"
        "{% endfor %}" + _ASK + "GPT4 Correct Assistant:{% endif %}"
    ),
    "Llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
        "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
    ),
    "Vicuna": (
        "Be kind. {% for m in messages %}" + _SPEAKERS + ": {{ m.content }}{{ '</s>' if m.role == 'assistant' else ' ' "
        "}}{% endfor %}" + _ASK + "ASSISTANT:{% endif %}"
    ),
    "Falcon": (
        "{% for m in messages %}{{ '\n\n' if not loop.first }}{{ m.role | title }}: {{ m.content }}{% endfor %}"
        + _ASK
        + "{{ '\n\nAssistant:' }}{% endif %}"
    ),
    "ends by two newlines": (
        "{% for m in messages %}{{ m.role | title }}: {{ m.content }}\n\n{% endfor %}" + _ASK + "Assistant:{% endif %}"
    ),
    "Llama 3 that always asks": (
        "{{ bos_token }}{% for m in messages %}" + _HEADER + "{{ m.content | trim }}<|eot_id|>{% endfor %}" + _ASSISTANT
    ),
    "Vicuna that always asks": (
        "{% for m in messages %}" + _SPEAKERS + ": {{ m.content }}{{ '</s>' if m.role == 'assistant' else ' ' "
        "}}{% endfor %}ASSISTANT:"
    ),
    "no control token but the end, and always asks": (
        "{% for m in messages %}### {{ m.role }}\n{{ m.content }}</s>{% endfor %}### assistant\n"
    ),
    "a channel in front of an answer": (
        "{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>"
        "{{ m.content }}<|end|>{% endfor %}" + _ASK + "<|start|>assistant{% endif %}"
    ),
}
TOKEN_FOR_TOKEN = ("Zephyr", "Llama 3 that always asks", "a channel in front of an answer")
texts = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)
conversations = st.tuples(st.none(), texts, st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
TOKENIZERS = {name: tokenizer_for(template) for name, template in TEMPLATES.items()}


def full_render(tokenizer: Any, messages: Any, **options: Any) -> Any:
    form = {"return_dict": False} if options.get("tokenize", True) else {}
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **form, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@example(conversation=(None, "Is it?", [("Yes.", "And?"), ("", ""), ("No. ", " Hm")]))
@given(conversation=conversations)
def test_the_record_of_text_answers_is_the_full_render(name: str, conversation: Any) -> None:
    tokenizer = TOKENIZERS[name]
    transcript = record(tokenizer, conversation)
    assert text_of(tokenizer, transcript.token_ids) == full_render(tokenizer, transcript.messages, tokenize=False)
    if name in TOKEN_FOR_TOKEN:
        assert transcript.token_ids == full_render(tokenizer, transcript.messages)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Zephyr", "\nYes.</s>"),
        ("OpenChat", " Yes.<|end_of_turn|>"),
        ("Llama 2", " Yes. </s>"),
        ("Vicuna", " Yes.</s>"),
        ("Falcon", " Yes."),
        ("ends by two newlines", " Yes.\n\n"),
        ("Llama 3 that always asks", "Yes.<|eot_id|>"),
        ("Vicuna that always asks", " Yes.</s>"),
        ("no control token but the end, and always asks", "\nYes.</s>"),
        ("a channel in front of an answer", "<|channel|>final<|message|>Yes.<|end|>"),
    ],
)
def test_the_agents_own_tokens_are_what_a_model_would_sample(name: str, expected: str) -> None:
    tokenizer = TOKENIZERS[name]
    transcript = Transcript(ChatFormat.of(tokenizer))
    transcript.observe([user("Is it?")])
    start, stop = transcript.act(Action(text="Yes."))
    assert text_of(tokenizer, transcript.token_ids[start:stop]) == expected


@pytest.mark.parametrize("name", ["Llama 3 that always asks", "no control token but the end, and always asks"])
def test_a_prompt_that_is_always_printed_is_no_part_of_the_end_of_a_turn(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    chat_format = ChatFormat.of(tokenizer)
    assert len(chat_format.end_of_turn_ids) == 1
    end = chat_format.end_of_turn_id
    transcript = Transcript(chat_format)
    transcript.observe([user("Is it?")])
    _, stop = transcript.act(Action(text="Yes.", token_ids=[*chat_format.encode("Yes."), end]))
    transcript.observe([user("And?")])
    whole = full_render(tokenizer, transcript.messages, tokenize=False)
    assert text_of(tokenizer, transcript.token_ids[stop:]) == whole.rpartition("Yes.")[2].removeprefix(
        tokenizer.decode([end])
    )
    assert text_of(tokenizer, chat_format.render(transcript.messages, add_prompt=False)) == whole[
        : whole.rindex("And?")
    ] + ("And?" + tokenizer.decode([end]))


def test_an_end_that_cannot_be_distinguished_from_the_prompt_behind_it_is_refused() -> None:
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    tokenizer = tokenizer_for(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        "{% for m in messages %}" + turn + "{% endfor %}{{ '<|im_start|>assistant\n' }}"
    )
    with pytest.raises(TemplateError, match=r"a generation prompt is requested.*if add_generation_prompt"):
        ChatFormat.of(tokenizer)


def test_an_end_of_plain_text_merges_with_the_answer_as_in_the_full_render() -> None:
    tokenizer = chat_tokenizer("inst")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}t\n{% endfor %}" + _ASK + ("assistant:{% endif %}")
    )
    transcript = record(tokenizer, (None, "go", [("lef", "on")]))
    left = tokenizer.encode("left\n")
    assert len(left) < len(tokenizer.encode("lef")) + len(tokenizer.encode("t\n"))
    assert str(left)[1:-1] in str(transcript.token_ids)


@pytest.mark.parametrize(("limit", "kept"), [(0, ""), (1, ""), (3, "qq"), (8, "qqqqqqq")])
def test_a_text_that_the_limit_cuts_is_without_what_the_template_puts_in_front(limit: int, kept: str) -> None:
    transcript = Transcript(ChatFormat.of(TOKENIZERS["Zephyr"]))
    transcript.observe([user("go")])
    start, stop = transcript.act(Action(text="qqqqqqqq"), limit)
    assert (stop - start, transcript.messages[-1]["content"]) == (limit, kept)


def test_a_control_token_that_swallows_the_space_in_front_of_an_answer_does_so_here_too() -> None:
    template = TEMPLATES["Zephyr"]
    tokenizer = tokenizer_for(template)
    names = CONTROL.findall(template.replace("{{ m.role }}", "user") + "<|assistant|>")
    added = [AddedToken(name, special=True, rstrip=True) for name in {*names} - {"</s>"}]
    tokenizer.add_tokens(added, special_tokens=True)
    transcript = record(tokenizer, (None, "go", [(" left", "on"), ("\n", " now")]))
    assert transcript.token_ids == full_render(tokenizer, transcript.messages)


def test_gpt_oss_writes_its_text_in_the_channel_of_answers() -> None:
    transcript = Transcript(ChatFormat.of(family("gptoss")))
    transcript.observe([user("go")])
    start, _ = transcript.act(Action(text="left"))
    assert text_of(family("gptoss"), transcript.token_ids[start:]) == "<|channel|>final<|message|>left<|return|>"
