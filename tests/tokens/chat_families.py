"""Chat templates of every family, with a tokenizer for each: those that ship with TRL and some written here."""

import re
from functools import cache
from importlib.resources import files
from typing import Any

from transformers import PreTrainedTokenizerFast

from agentsgym.testing import chat_tokenizer

TRL_TEMPLATES = {
    path.name.removesuffix(".jinja"): path.read_text(encoding="utf-8")
    for path in sorted(files("trl").joinpath("chat_templates").iterdir(), key=lambda path: path.name)
    if path.name.endswith(".jinja")
}
# Known by name, since reading each template takes seconds: test_tool_calls and test_tool_conversations compare.
WITHOUT_CALLS = {
    *("cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next"),
    *("phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),
}
PRINTS_CALLS = [name for name in TRL_TEMPLATES if name.removesuffix("_training") not in WITHOUT_CALLS]
CONTROL = re.compile(
    r"<\|[^|<>\n' ]+\|>|<\uff5c[^\uff5c]+\uff5c>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|<end_of_utterance>|</?s>"
)
TOOL_CONTROL = re.compile(r"<\|tool_(?:call|response)>|<tool_(?:call|response)\|>|\[/?[A-Z]+_[A-Z]+\]")
_BLOCKS = ("idefics3", "llava_next", "smolvlm")  # their contents are lists of parts
_CHATML_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_CHATML_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CHATML = "{% for m in messages %}" + _CHATML_TURN + "{% endfor %}" + _CHATML_ASK
_ALTERNATE = (
    "{% if (m.role == 'user') == (loop.index0 % 2 == 1) %}{{ raise_exception('roles must take turns') }}{% endif %}"
)
FAMILIES: dict[str, str] = {
    "Gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for m in messages %}" + _ALTERNATE + "<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "Mistral": (
        "{{ bos_token }}{% set first = '' %}{% if messages[0].role == 'system' %}"
        "{% set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}" + _ALTERNATE + "{% if m.role == 'user' %}"
        "[INST] {{ first if loop.first }}{{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    "Mistral that moves the system message": (
        "{{ bos_token }}{% set system = '' %}{% if messages[0].role == 'system' %}"
        "{% set system = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}<|inst|>{{ system if loop.last }}{{ m.content }}<|/inst|>"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    "Phi": (
        "{% for m in messages %}{% if m.content %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}"
    ),
    "DeepSeek": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<\uff5cAssistant\uff5c>{{ m.content.split('</think>')[-1] }}"
        "<\uff5cend\u2581of\u2581sentence\uff5c>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<\uff5cAssistant\uff5c><think>\n{% endif %}"
    ),
    "default system prompt": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + _CHATML
    ),
    "date": (
        "<|im_start|>system\nToday is {{ strftime_now('%Y-%m-%d') }}."
        "{% if messages[0].role == 'system' %} {{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
        "<|im_end|>\n" + _CHATML
    ),
    "time of each message": _CHATML.replace("{{ m.role }}", "{{ m.role }} at {{ strftime_now('%H:%M') }}"),
    "old thinking dropped": (
        "{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}{% set ns.last = loop.index %}"
        "{% endfor %}{% set ns.users = 0 %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endif %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and ns.users < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + _CHATML_ASK
    ),
    "tool results first": (
        "{% for m in messages if m.role == 'tool' %}" + _CHATML_TURN + "{% endfor %}"
        "{% for m in messages if m.role != 'tool' %}" + _CHATML_TURN + "{% endfor %}" + _CHATML_ASK
    ),
    "tool results as JSON": _CHATML.replace(
        "{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}"
    ),
    "tool results as ASCII": _CHATML.replace(
        "{{ m.content }}", "{{ m.content | tojson(ensure_ascii=True) if m.role == 'tool' else m.content }}"
    ),
    "numbered turns": _CHATML.replace("{{ m.role }}", "{{ m.role }} {{ loop.index0 }}"),
    "thinking on demand": (
        "{% set ns = namespace(think=false) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.think = m.content.endswith('/think') %}{% endif %}"
        + _CHATML_TURN
        + "{% endfor %}"
        + _CHATML_ASK
        + "{{ '<think>\n' if add_generation_prompt and ns.think }}"
    ),
    "thinking once and for all": (
        "{% set ns = namespace(think=false) %}{% for m in messages %}{% if m.role != 'assistant' and '/think' in "
        "m.content %}{% set ns.think = true %}{% endif %}"
        + _CHATML_TURN
        + "{% endfor %}"
        + _CHATML_ASK
        + "{{ '<think>\n' if add_generation_prompt and ns.think }}"
    ),
}
KINDS = ("chatml", "llama3", "inst", "default_system", "trimming", "none")
NAMES = [*KINDS, *FAMILIES, *TRL_TEMPLATES]


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    """A small tokenizer that has the template's control tokens."""
    ends = [token for token in ("</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>") if token in template]
    ends = ends or ["</s>"] * ("[TOOL_CALLS]" in template)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=chat_tokenizer("none").backend_tokenizer,
        bos_token="<BOS>",
        eos_token=ends[0] if ends else "<EOS>",
        pad_token="<PAD>",
        extra_special_tokens=sorted({*CONTROL.findall(template), *TOOL_CONTROL.findall(template)} - set(ends)),
    )
    tokenizer.chat_template = template
    return tokenizer


@cache
def family(name: str) -> Any:
    """The tokenizer of a family, of a kind of :func:`chat_tokenizer`, or of a template of TRL."""
    return chat_tokenizer(name) if name in KINDS else tokenizer_for({**FAMILIES, **TRL_TEMPLATES}[name])


def full_render(name: str, messages: Any, *, add_prompt: bool = True, tokenize: bool = True) -> Any:
    """What the tokenizer itself makes of a whole conversation."""
    if name.startswith(_BLOCKS):
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return family(name).apply_chat_template(
        messages, tokenize=tokenize, add_generation_prompt=add_prompt, **({"return_dict": False} if tokenize else {})
    )


def text_of(tokenizer: Any, ids: Any) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
