"""Decoding of each token of a rollout to the text that it adds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentsgym.errors import StoreError
from agentsgym.store.stored_tokenizers import read_stored_tokenizer, read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT: Final = "\ufffd"
_MAX_PIECES: Final = 8  # no character is encoded by more tokens
_MAX_CACHED: Final = 200_000


class TokenTexts:
    """Decodes tokens with the tokenizers of a store; thread-safe."""

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        """Set up the decoder; a tokenizer in the store is read only when it is first used.

        Args:
            folder: The store.
            path: A ``tokenizer.json``, or its folder, for all rollouts; None for the tokenizer that each rollout names.

        Raises:
            StoreError: ``path`` is not a tokenizer.
        """
        self._folder = folder
        self._lock = threading.Lock()
        self._decoders: dict[str | None, TokenDecoder | None] = {}
        self._shared: TokenDecoder | None = None
        if path is not None:
            self._shared = TokenDecoder(read_tokenizer(path / "tokenizer.json" if path.is_dir() else path))

    def texts(self, name: str | None, ids: Sequence[int]) -> list[str] | None:
        """Decode the tokens of a rollout, (T,), as :meth:`TokenDecoder.texts` does, with the tokenizer of its name.

        Returns None if the tokenizer is unknown or damaged.
        """
        with self._lock:
            decoder = self._shared
            if decoder is None:
                if name not in self._decoders:
                    tokenizer = None
                    with contextlib.suppress(StoreError):  # if it is damaged, ids are shown
                        tokenizer = None if name is None else read_stored_tokenizer(self._folder, name)
                    self._decoders[name] = None if tokenizer is None else TokenDecoder(tokenizer)
                decoder = self._decoders[name]
            return None if decoder is None else decoder.texts(ids)


class TokenDecoder:
    """Decodes tokens with one tokenizer, and caches the results."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Any = tokenizer
        self._cache: dict[tuple[int, ...], str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Decode each token to the text that it adds to the preceding text, (T,).

        If several tokens encode a character, it is the text of the last of them, and the texts of the others are empty.
        Tokens that never form a character are decoded to the replacement character.
        """
        texts: list[str] = []
        begin = 0  # the first of the tokens that do not form a character yet
        for end in range(1, len(ids) + 1):
            before, new = (*ids[max(0, begin - 1) : begin],), (*ids[begin:end],)
            prefix, both = self._decoded(before), self._decoded((*before, *new))
            text = both[len(prefix) :] if both.startswith(prefix) else self._decoded(new)
            if text.endswith(_REPLACEMENT) and end - begin < _MAX_PIECES and end < len(ids):
                texts.append("")
            else:
                texts.append(text)
                begin = end
        return texts

    def _decoded(self, ids: tuple[int, ...]) -> str:
        text = self._cache.get(ids)
        if text is None:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            known = (
                [one for one in ids if self._tokenizer.id_to_token(one) is not None] if min(ids, default=0) >= 0 else []
            )
            text = self._cache[ids] = self._tokenizer.decode(known, skip_special_tokens=False)
        return text
