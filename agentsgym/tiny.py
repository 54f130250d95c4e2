"""A language model small enough to learn on a laptop CPU, built from an environment's own words.

::

    env.vocabulary_texts() ─▶ tiny_tokenizer ─▶ tiny_model ─▶ everything a large model goes through

The tokenizer is word-level and lossless: each token is a word with its article, the punctuation behind it and the
space before it, so that decoding joins tokens and nothing else. It has a chat template, and what
:meth:`save_pretrained` writes is loaded again by ``AutoTokenizer`` and ``AutoModelForCausalLM``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, cast, runtime_checkable

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from agentsgym.errors import ConfigError
from agentsgym.seeding import derive_seed

PAD, UNKNOWN, END, ASSISTANT = "<|pad|>", "<|unknown|>", "<|end|>", "<|assistant|>"

# A word with the marks inside and behind it, or marks alone, each with the space before it; or other white space. An
# article belongs to its word: a policy that chose it first would say "a airplane" as soon as both are rewarded alike.
_PIECE = r" ?(?:an? )?\w+(?:['\u2019\-]\w+)*[^\w\s]*| ?[^\w\s]+|\s"

# Every token of a turn is one more that attention must look past: what the environment says stands bare between the two
# control tokens of the agent.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message['role'] == 'assistant' %}}{ASSISTANT}{{{{ message['content'] }}}}{END}"
    f"{{% else %}}{{% if loop.previtem is defined and loop.previtem['role'] != 'assistant' %}}{END}{{% endif %}}"
    "{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)


@runtime_checkable
class HasVocabulary(Protocol):
    """An environment that knows its own words."""

    def vocabulary_texts(self) -> Iterable[str]:
        """Give texts that hold every word of the environment: prompts, observations and what an agent may say."""
        ...


def tiny_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Build a word-level chat tokenizer whose vocabulary is what stands in the texts.

    Every given text decodes to itself; case is kept; a word that no text holds becomes the unknown token. A token is
    bound to what touches it: ``a clock?``, ``clock?`` and ``[clock]`` are three tokens. A turn costs two control
    tokens: the agent's end-of-turn token (the EOS) and its opening one.

    Args:
        texts: Prompts, observations and answers as the environment writes and reads them; their order does not matter.

    Raises:
        ConfigError: There is no word in the texts, or they are one bare string.

    >>> tokenizer = tiny_tokenizer(["Is it a clock?", "Yes."])
    >>> tokenizer.tokenize("Is it a clock?")
    ['Is', ' it', ' a clock?']
    >>> tokenizer.decode(tokenizer("Is it a clock?").input_ids)
    'Is it a clock?'
    """
    splitter = pre_tokenizers.Split(Regex(_PIECE), behavior="isolated")
    pieces = sorted({piece for text in _as_texts(texts) for piece, _ in splitter.pre_tokenize_str(text)})
    if not pieces:
        raise ConfigError("a tiny tokenizer needs at least one word in its texts, got none")
    control = [PAD, UNKNOWN, END, ASSISTANT]
    vocabulary = {piece: index for index, piece in enumerate(control + pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(  # pyright: ignore[reportUnknownMemberType]
        [AddedToken(token, normalized=False, special=True) for token in control]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        extra_special_tokens=[ASSISTANT],
        chat_template=_CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


_COMMON_CONFIG: dict[str, Any] = {"initializer_range": 0.1, "bos_token_id": None, "dtype": torch.float32}


def tiny_model(
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    max_positions: int = 1024,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Make a small Llama with random weights, 0.09 million parameters as it stands, equal for equal seeds.

    Args:
        tokenizer: Gives the vocabulary and the ids of EOS and padding.
        hidden_size: Width; a multiple of ``2 * num_heads``, since rotary positions turn pairs.
        num_layers: Number of decoder layers.
        num_heads: Attention heads a layer.
        max_positions: Longest sequence in tokens; costs nothing.
        seed: Seed of the weights.

    Raises:
        ConfigError: A size is below 1, the heads do not divide the width into pairs, or the tokenizer lacks EOS or pad.
    """
    if min(hidden_size, num_layers, num_heads, max_positions) < 1 or hidden_size % (2 * num_heads):
        raise ConfigError(
            "a tiny model needs sizes of at least 1 and a hidden_size that is a multiple of 2 * num_heads, got "
            f"{hidden_size=}, {num_layers=}, {num_heads=}, {max_positions=}"
        )
    if tokenizer.eos_token_id is None or tokenizer.pad_token_id is None:
        raise ConfigError(f"a tiny model needs a tokenizer with an EOS and a pad token, got {tokenizer!r}")
    end, pad = cast("int", tokenizer.eos_token_id), cast("int", tokenizer.pad_token_id)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        max_position_embeddings=max_positions,
        **_COMMON_CONFIG,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # pyright: ignore[reportUnknownMemberType]
        torch.default_generator.manual_seed(derive_seed("tiny model", seed))
        model = LlamaForCausalLM(config)
        # Small weights make a long plateau: the layers must first learn to tell words apart before they bind an answer
        # to its question. Wide embeddings keep Adam's steps small beside the words.
        torch.nn.init.normal_(model.model.embed_tokens.weight)
    # Left out, top_k would be 50: sampling is to follow the policy itself.
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=end, pad_token_id=pad)
    return model


def tiny_policy(
    source: HasVocabulary | Iterable[str], **sizes: int
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Make a tiny model and its tokenizer from an environment, or from texts.

    Args:
        source: An environment that has ``vocabulary_texts()``, or the texts themselves.
        **sizes: As :func:`tiny_model` takes them, the seed included.

    Returns:
        The model and its tokenizer.

    Raises:
        ConfigError: The source is neither, or holds no word.
    """
    texts = source.vocabulary_texts() if isinstance(source, HasVocabulary) else source
    tokenizer = tiny_tokenizer(texts)
    return tiny_model(tokenizer, **sizes), tokenizer


def _as_texts(source: object) -> list[str]:
    if isinstance(source, str) or not isinstance(source, Iterable):
        raise ConfigError(
            "a tiny tokenizer is built from several texts, or from an environment that defines vocabulary_texts(); "
            f"got {source!r}"
        )
    texts: list[str] = []
    for text in cast("Iterable[object]", source):
        if not isinstance(text, str):
            raise ConfigError(f"every text of a tiny tokenizer must be a str, got {text!r}")
        texts.append(text)
    return texts
