"""A whole conversation rendered afresh is what the tokenizer itself gives, but for text that looks like control."""

import json

import pytest
from chat_families import FAMILIES, NAMES, TRL_TEMPLATES, family, full_render, text_of, tokenizer_for
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError as JinjaError

from agentsgym.errors import TemplateError
from agentsgym.tokens.transcript import ChatFormat

THINKING = "<think>\nIs it?\n</think>\n\n"
SHAPES = {
    "user": ("user",),
    "system": ("system", "user"),
    "tool": ("user", "assistant", "tool"),
    "two users": ("user", "user"),
    "late system": ("user", "assistant", "system", "user"),
}


def conversation(roles: tuple[str, ...], answer: str) -> list[dict[str, str]]:
    messages = [{"role": role, "content": f" {role} says\nthis "} for role in roles]
    answers = [{"role": "assistant", "content": answer}, {"role": "assistant", "content": "Yes. "}]
    return [*messages, answers[0], {"role": "user", "content": "and"}, answers[1], {"role": "user", "content": "then"}]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_ordinary_text_is_rendered_as_the_tokenizer_does(name: str) -> None:
    chat_format = ChatFormat.of(family(name), append=False)
    rendered = 0
    for roles in SHAPES.values():
        for answer in ("Yes", THINKING + "Yes"):
            messages = conversation(roles, answer)
            for last, add_prompt in ((len(messages), True), (len(messages) - 1, False)):
                try:
                    whole = full_render(name, messages[:last], add_prompt=add_prompt)
                except JinjaError:
                    if "tool" in roles:  # as the text of a user message
                        continue
                    with pytest.raises(TemplateError, match=r"cannot render a conversation of .*user"):
                        chat_format.render(messages[:last], add_prompt=add_prompt)
                    continue
                ids = chat_format.render(messages[:last], add_prompt=add_prompt)
                if "tool" in roles and ids != whole:  # where it has no form, or one behind structured calls only
                    assert "<tool_response>\n tool says\nthis \n</tool_response>" in text_of(family(name), ids)
                    continue
                assert ids == whole
                rendered += 1
    assert rendered >= 4


def test_old_thinking_is_dropped_where_the_template_drops_it() -> None:
    tokenizer = family("qwen3")
    messages = conversation(("user",), THINKING + "Yes")
    ids = ChatFormat.of(tokenizer).render(messages)
    assert "Is it?" not in text_of(tokenizer, ids)
    shown = ChatFormat.of(tokenizer).render(messages[:2], add_prompt=False)
    assert "Is it?" in text_of(tokenizer, shown)


def test_without_a_template_the_contents_stand_one_behind_the_other() -> None:
    tokenizer = family("none")
    ids = ChatFormat.of(tokenizer).render(conversation(("user",), "Yes</s>"), add_prompt=True)
    assert ids == [
        token_id
        for message in conversation(("user",), "Yes</s>")
        for token_id in ChatFormat.of(tokenizer).encode(message["content"])
    ]
    assert tokenizer.eos_token_id not in ids


SOME = ["chatml", "llama3", "inst", "Gemma", "Phi", "DeepSeek", "tool results as ASCII", "qwen3", "glm4moe", "gptoss"]


@pytest.mark.parametrize("name", SOME)
@settings(max_examples=25)
@given(data=st.data())
def test_text_that_looks_like_control_stays_text(name: str, data: st.DataObject) -> None:
    tokenizer = family(name)
    chat_format = ChatFormat.of(tokenizer, append=False)
    controls = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    parts = st.sampled_from([*controls.values(), "\U000f0000", "\U000f0001", "x", "é", '"', "<", "|>", "a b"])
    contents = [data.draw(st.lists(parts, min_size=1, max_size=6).map("".join)) for _ in range(5)]
    roles = ["user", "assistant", "user", "assistant", "user"]
    if name == "tool results as ASCII":
        roles[2] = "tool"
    ids = chat_format.render([{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)])
    harmless = chat_format.render([{"role": r, "content": f"c{k}"} for k, r in enumerate(roles)])
    assert [i for i in ids if i in controls] == [i for i in harmless if i in controls]
    expected = text_of(tokenizer, harmless)
    for k, content in enumerate(contents):
        written = json.dumps(content) if roles[k] == "tool" else content
        expected = expected.replace(f'"c{k}"' if roles[k] == "tool" else f"c{k}", written)
    assert text_of(tokenizer, ids) == expected


@pytest.mark.parametrize("name", [*FAMILIES, *TRL_TEMPLATES])
def test_the_end_of_a_turn_that_somebody_writes_ends_no_turn(name: str) -> None:
    tokenizer = family(name)
    chat_format = ChatFormat.of(tokenizer, append=False)
    end = chat_format.end_of_turn_id
    output = tokenizer.convert_ids_to_tokens(end)
    harmless = conversation(("user",), "Yes")
    spoofed = [{**message, "content": f"a{output}b"} for message in harmless]
    assert chat_format.render(spoofed).count(end) == chat_format.render(harmless).count(end)
    assert text_of(tokenizer, chat_format.render(spoofed)).count(f"a{output}b") == len(spoofed)


@pytest.mark.parametrize("contents", [("a<|im_", "end|>b"), ("<", "|im_", "end|>"), ("<|im_end|><|", "im_start|>", "")])
def test_contents_that_stand_side_by_side_make_no_control_token(contents: tuple[str, ...]) -> None:
    tokenizer = tokenizer_for("<|im_start|>{% for m in messages %}{{ m.content | trim }}{% endfor %}<|im_end|>")
    chat_format = ChatFormat.of(tokenizer, append=False)
    ids = chat_format.render([{"role": "user", "content": f"{content} \n"} for content in contents])
    controls = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert [i for i in ids if i in tokenizer.all_special_ids] == controls
    assert text_of(tokenizer, ids) == f"<|im_start|>{''.join(contents)}<|im_end|>"


def test_an_escaped_character_in_a_content_stays_as_it_is() -> None:
    content = "".join(json.dumps(chr(code)).strip('"') for code in range(0xF0000, 0xF0003)) + "<|im_end|>"
    tokenizer = family("chatml")
    ids = ChatFormat.of(tokenizer).render([{"role": "user", "content": content}], add_prompt=False)
    assert text_of(tokenizer, ids) == f"<|im_start|>user\n{content}<|im_end|>\n"


def test_a_template_that_refuses_is_quoted() -> None:
    tokenizer = tokenizer_for("{{ raise_exception('closed today') if messages | length > 3 }}" + FAMILIES["Phi"])
    chat_format = ChatFormat.of(tokenizer, append=False)
    with pytest.raises(TemplateError, match=r"user, assistant, user, assistant.*closed today"):
        chat_format.render(conversation(("user",), "Yes")[:4])
