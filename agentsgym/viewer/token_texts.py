"""Decode each token of a rollout to the text that it adds."""

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

_BROKEN: Final = "\ufffd"
_MOST_PIECES: Final = 8  # of one character: a longer sequence is none
_MOST_KEPT: Final = 200_000


class TokenTexts:
    """The texts of tokens, by the tokenizers of a store; thread-safe."""

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        """Read nothing yet, unless a tokenizer is given.

        Args:
            folder: The store.
            path: A ``tokenizer.json``, or its folder, for all rollouts; None for the tokenizer that each one names.

        Raises:
            StoreError: ``path`` is not a tokenizer.
        """
        self._folder = folder
        self._lock = threading.Lock()
        self._found: dict[str | None, TokenWriter | None] = {}
        self._given: TokenWriter | None = None
        if path is not None:
            self._given = TokenWriter(read_tokenizer(path / "tokenizer.json" if path.is_dir() else path))

    def texts(self, name: str | None, ids: Sequence[int]) -> list[str] | None:
        """Decode the tokens of a rollout, (T,), one text per token as in :meth:`TokenWriter.texts`.

        Args:
            name: The name of the rollout's tokenizer.
            ids: Its tokens, (T,).

        Returns:
            The texts; None if the tokenizer is unknown, or damaged.
        """
        with self._lock:
            writer = self._given
            if writer is None:
                if name not in self._found:
                    tokenizer = None
                    with contextlib.suppress(StoreError):  # damaged: the ids are shown
                        tokenizer = None if name is None else read_stored_tokenizer(self._folder, name)
                    self._found[name] = None if tokenizer is None else TokenWriter(tokenizer)
                writer = self._found[name]
            return None if writer is None else writer.texts(ids)


class TokenWriter:
    """Decodes tokens by one tokenizer, with a cache."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Any = tokenizer
        self._known: dict[tuple[int, ...], str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Decode each token to the text that it adds after those before it, (T,).

        A character encoded by several tokens is the text of the last of them; the texts of the others are empty. Tokens
        that never form a character are the replacement character.
        """
        found: list[str] = []
        begin = 0  # of the tokens that do not form a character yet
        for end in range(1, len(ids) + 1):
            before, new = (*ids[max(0, begin - 1) : begin],), (*ids[begin:end],)
            prefix, both = self._decoded(before), self._decoded((*before, *new))
            text = both[len(prefix) :] if both.startswith(prefix) else self._decoded(new)
            if text.endswith(_BROKEN) and end - begin < _MOST_PIECES and end < len(ids):
                found.append("")
            else:
                found.append(text)
                begin = end
        return found

    def _decoded(self, ids: tuple[int, ...]) -> str:
        text = self._known.get(ids)
        if text is None:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            known = (
                [one for one in ids if self._tokenizer.id_to_token(one) is not None] if min(ids, default=0) >= 0 else []
            )
            text = self._known[ids] = self._tokenizer.decode(known, skip_special_tokens=False)
        return text
