"""Helpers for your own tests: small chat tokenizers that need no network access."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from agentsgym.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ChatKind = Literal["chatml", "llama3", "inst", "default_system", "trimming", "none"]

_SENTENCES = (
    "Is it alive? Is it bigger than a book? Yes. No. Sometimes. I don't know.",
    "My final guess is: a clock. Is it a clock? You have asked three questions out of twenty.",
    "You are a helpful assistant. Think of the answer, then say it: <answer>left</answer>.",
    "user\nassistant\nsystem\nThe room is dark.\n\nYou see a lamp, a table and two doors.",
)
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_INST = (
    "{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content }} [/END]\n"
    "{% elif message.role == 'system' %}[SYS] {{ message.content }} [/SYS]\n"
    "{% else %}[INST] {{ message.content }} [/INST]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} {% endif %}"
)
_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
)
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_KINDS: dict[str, tuple[str | None, str, tuple[str, ...]]] = {  # template, end-of-sequence token, control tokens
    "chatml": (_CHATML, "<|im_end|>", _CHATML_TOKENS),
    "llama3": (_LLAMA3, "<|eot_id|>", _LLAMA3_TOKENS),
    "inst": (_INST, "</s>", ()),
    "default_system": (_DEFAULT_SYSTEM + _CHATML, "<|im_end|>", _CHATML_TOKENS),
    "trimming": (_CHATML.replace("message.content", "message.content | trim"), "<|im_end|>", _CHATML_TOKENS),
    "none": (None, "</s>", ()),
}


def chat_tokenizer(kind: ChatKind = "chatml") -> PreTrainedTokenizerFast:
    r"""Build a small byte-level BPE tokenizer in memory; each call returns a new one.

    Encoding and decoding any text restores it exactly. The pad token differs from the end-of-sequence token.

    Args:
        kind: How the chat template formats a conversation: ``"chatml"``; ``"llama3"`` (contents trimmed, a
            begin-of-sequence token first); ``"inst"`` (``[INST] … [/INST]`` and ``[/END]``, all of it plain text);
            ``"default_system"`` (ChatML that adds a default system message if there is none);
            ``"trimming"`` (ChatML with contents trimmed); ``"none"`` (no template).

    Raises:
        ConfigError: The kind is unknown.

    >>> tokenizer = chat_tokenizer("chatml")
    >>> tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    '<|im_start|>user\nHi<|im_end|>\n'
    """
    from tokenizers import Tokenizer  # noqa: PLC0415  # slow to import, and needed only here
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    if kind not in _KINDS:
        raise ConfigError(f"chat_tokenizer has no kind {kind!r}{did_you_mean(kind, get_args(ChatKind))}")
    template, eos_token, control_tokens = _KINDS[kind]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level_bpe()),
        bos_token="<|begin_of_text|>",
        eos_token=eos_token,
        pad_token="<|pad|>",
        extra_special_tokens=[token for token in control_tokens if token != eos_token],
    )
    tokenizer.chat_template = template
    return tokenizer


@cache
def _byte_level_bpe() -> str:
    """Train the tokenizer on a few sentences, and return it as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    raw: Any = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator(_SENTENCES, trainer)
    return raw.to_str()
