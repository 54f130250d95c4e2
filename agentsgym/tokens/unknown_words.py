"""Find the words that a tokenizer cannot read, which all become one token that no model can distinguish."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any
from weakref import WeakSet

from agentsgym.texts import shown
from agentsgym.types import Trajectory

logger = logging.getLogger(__name__)

_MAX_NAMED = 3
_MAX_READ = 4  # trajectories whose texts are looked through for words that can be named


def unknown_id(tokenizer: Any) -> int | None:
    """The id of the unknown token; None without one, or if it also ends texts (GPT-2)."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    return None if unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id) else unknown


def unknown_words(tokenizer: Any, texts: Iterable[str]) -> list[str]:
    """List the words, or other pieces, of texts that a tokenizer cannot read, each once.

    Args:
        tokenizer: A tokenizer; one in plain Python is queried word by word.
        texts: Any texts.
    """
    unknown = unknown_id(tokenizer)
    if unknown is None:
        return []
    return [*dict.fromkeys(piece for text in dict.fromkeys(texts) for piece in _unread(tokenizer, text, unknown))]


def named(words: Sequence[str]) -> str:
    """Name the first three words in a sentence."""
    return ", ".join(map(shown, words[:_MAX_NAMED])) + (", …" if len(words) > _MAX_NAMED else "")


def warn_of_unknown_words(tokenizer: Any, trajectories: Iterable[Trajectory]) -> None:
    """Warn once a tokenizer if recorded conversations hold words that it cannot read.

    Nothing is tokenized unless the unknown token is among the recorded ids.

    Args:
        tokenizer: The one that they were recorded with; None for none.
        trajectories: Any rollouts.
    """
    if tokenizer is None or tokenizer in _WARNED:
        return
    unknown = unknown_id(tokenizer)
    if unknown is None:
        return
    found = islice((one for one in trajectories if unknown in one.token_ids), _MAX_READ)
    words = unknown_words(tokenizer, (text for one in found for text in _given_texts(one)))
    if not words:
        return  # it was sampled, or stands in what a template prints
    _WARNED.add(tokenizer)
    logger.warning(
        "the tokenizer cannot read %s: all such words are one token, %s, and the model cannot distinguish them; give "
        "tiny_policy texts that hold every word (vocabulary_texts() of the environment, or episodes that use them)",
        named(words),
        tokenizer.unk_token,
    )


def _given_texts(trajectory: Trajectory) -> Iterable[str]:
    """What was recorded from text: sampled tokens, decoded and encoded again, are others."""
    sampled = {turn.message_index for turn in trajectory.turns if turn.exact}
    return (message["content"] for index, message in enumerate(trajectory.messages) if index not in sampled)


def _unread(tokenizer: Any, text: str, unknown: int) -> Iterable[str]:
    if not getattr(tokenizer, "is_fast", False):
        forms = {word: (word, f" {word}") for word in text.split()}
        encode = tokenizer.encode
        return [
            word
            for word, both in forms.items()
            if all(unknown in encode(form, add_special_tokens=False) for form in both)
        ]
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    pieces = zip(encoding.ids, encoding.offsets, strict=True)
    unread = [text[start:stop] for token_id, (start, stop) in pieces if token_id == unknown]
    return [piece.strip() or piece for piece in unread]


_WARNED: WeakSet[Any] = WeakSet()  # tokenizers
