"""Write each token of a rollout as the text that it adds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentsgym.errors import StoreError
from agentsgym.store.stored_tokenizers import read_tokenizer, tokenizer_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BROKEN: Final = "\ufffd"
_MOST_PIECES: Final = 8  # of one character: what needs more is none
_MOST_KEPT: Final = 200_000


class TokenTexts:
    """Knows the tokenizers of a store; any thread may ask."""

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        """Read nothing yet, unless a tokenizer is given.

        Args:
            folder: The store.
            path: A ``tokenizer.json``, or the folder of one, to use for all rollouts; None for what each one names.

        Raises:
            StoreError: There is no tokenizer at ``path``.
        """
        self._folder = folder
        self._lock = threading.Lock()
        self._found: dict[str | None, TokenWriter | None] = {}
        self._given: TokenWriter | None = None
        if path is not None:
            self._given = TokenWriter(read_tokenizer(path / "tokenizer.json" if path.is_dir() else path))

    def texts(self, name: str | None, ids: Sequence[int]) -> list[str] | None:
        """Write the tokens of a rollout; None where nobody knows its tokenizer.

        Args:
            name: What the rollout calls its tokenizer.
            ids: Its tokens, (T,).

        Returns:
            (T,), one text a token: see :meth:`TokenWriter.texts`.
        """
        with self._lock:
            writer = self._given or self._writer(name)
            return None if writer is None else writer.texts(ids)

    def _writer(self, name: str | None) -> TokenWriter | None:
        if name not in self._found:
            try:
                tokenizer = None if name is None else tokenizer_of(self._folder, name)
            except StoreError:  # damaged: the ids are shown
                tokenizer = None
            self._found[name] = None if tokenizer is None else TokenWriter(tokenizer)
        return self._found[name]


class TokenWriter:
    """Writes tokens by one tokenizer, and remembers what it wrote."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Any = tokenizer
        self._known: dict[tuple[int, ...], str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Write each token as what it adds to the text of those before it, (T,).

        A character that several tokens spell stands at the last of them; at the others the text is empty. What never
        becomes a character is the replacement character.
        """
        found: list[str] = []
        begin = 0  # of the pieces that wait for their character
        for end in range(1, len(ids) + 1):
            text = self._added(ids[max(0, begin - 1) : begin], ids[begin:end])
            if text.endswith(_BROKEN) and end - begin < _MOST_PIECES and end < len(ids):
                found.append("")
            else:
                found.append(text)
                begin = end
        return found

    def _added(self, before: Sequence[int], new: Sequence[int]) -> str:
        """The text of some tokens behind another one."""
        both = self._decoded((*before, *new))
        prefix = self._decoded((*before,))
        return both[len(prefix) :] if both.startswith(prefix) else self._decoded((*new,))

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
