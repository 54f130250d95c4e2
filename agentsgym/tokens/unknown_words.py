"""Find the words that a tokenizer does not cover, which all become one token and cannot be distinguished."""

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
_MAX_READ = 4  # trajectories that are searched for words


def unknown_id(tokenizer: Any) -> int | None:
    """The id of the unknown token; None if there is none, or if it is also the end-of-text token (GPT-2)."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    return None if unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id) else unknown


def unknown_words(tokenizer: Any, texts: Iterable[str]) -> list[str]:
    """List the distinct words, or other pieces of text, that a tokenizer encodes as its unknown token."""
    unknown = unknown_id(tokenizer)
    found: dict[str, None] = {}
    for text in () if unknown is None else dict.fromkeys(texts):
        if getattr(tokenizer, "is_fast", False):
            encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
            pieces = zip(encoding.ids, encoding.offsets, strict=True)
            unread = [text[start:stop] for token_id, (start, stop) in pieces if token_id == unknown]
            found |= dict.fromkeys(piece.strip() or piece for piece in unread)
            continue
        for word in dict.fromkeys(text.split()):
            forms = (tokenizer.encode(form, add_special_tokens=False) for form in (word, f" {word}"))
            if all(unknown in ids for ids in forms):
                found[word] = None
    return [*found]


def named(words: Sequence[str]) -> str:
    """List the first three words, for a sentence."""
    return ", ".join(map(shown, words[:_MAX_NAMED])) + (", …" if len(words) > _MAX_NAMED else "")


def warn_of_unknown_words(tokenizer: Any, trajectories: Iterable[Trajectory]) -> None:
    """Warn, once per tokenizer, about words in recorded conversations that it encodes as its unknown token.

    Nothing is tokenized unless the unknown token is among the recorded ids.
    """
    if tokenizer is None or tokenizer in _WARNED:
        return
    unknown = unknown_id(tokenizer)
    if unknown is None:
        return
    texts: list[str] = []
    for trajectory in islice((one for one in trajectories if unknown in one.token_ids), _MAX_READ):
        # Encoding the decoded text of sampled tokens may give other tokens.
        sampled = {turn.message_index for turn in trajectory.turns if turn.exact}
        texts += [message["content"] for k, message in enumerate(trajectory.messages) if k not in sampled]
    words = unknown_words(tokenizer, texts)
    if not words:
        return  # the token was sampled, or the template renders it
    _WARNED.add(tokenizer)
    logger.warning(
        "the tokenizer has no token for %s: all such words become %s, and the model cannot distinguish them; build "
        "tiny_policy from texts with every word (vocabulary_texts() of the environment, or episodes that use them)",
        named(words),
        tokenizer.unk_token,
    )


_WARNED: WeakSet[Any] = WeakSet()  # tokenizers
