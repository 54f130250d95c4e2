"""Storage of tokenizers together with rollouts, so that any reader of a store can decode token ids.

Each tokenizer is saved once, in its native serialization, as ``__tokenizers/NAME.json`` in the store; rollouts refer to
it in their column ``tokenizer``. pyarrow skips names that begin with ``_``, and ``datasets`` skips folders whose names
begin with ``__``. Reading such a file executes no code and downloads nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentsgym.cached_folders import replacing
from agentsgym.errors import StoreError
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[0-9a-f]{16}")


def tokenizer_path(folder: Path, name: str) -> Path:
    """Return the path of a tokenizer in a store."""
    return folder / "__tokenizers" / f"{name}.json"


def keep_tokenizer(folder: Path, tokenizer: Any) -> str | None:
    """Save a tokenizer in a store, atomically, unless the store already has it.

    Args:
        folder: The store.
        tokenizer: A ``transformers`` or ``tokenizers`` tokenizer, or None.

    Returns:
        The tokenizer's name for rollouts, which is the first 16 digits of the SHA-256 of its file. None if no tokenizer
        was saved: slow tokenizers cannot be serialized this way, and a write error, such as a full disk, is logged.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        return None
    # The serialization includes the padding and truncation of the last batch, which do not belong to the tokenizer.
    plain = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
    data = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
    name = hashlib.sha256(data).hexdigest()[:16]
    path = tokenizer_path(folder, name)
    try:
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as file:  # concurrent writers write the same bytes
                file.write(data)
    except OSError as error:
        logger.warning("%s: the tokenizer cannot be saved (%s); tokens will be shown as ids", folder, error)
        return None
    return name


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from a file of a store or a ``tokenizer.json``; no code is executed."""
    from tokenizers import Tokenizer  # noqa: PLC0415  # not needed for writing rollouts

    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exceptions
        raise StoreError(f"cannot load a tokenizer from {path}: {sentence_of(error, 200)}") from error


def read_stored_tokenizer(folder: Path, name: str) -> Tokenizer | None:
    """Read a tokenizer that rollouts of a store refer to, by name; None if the store does not have it."""
    if not _NAME.fullmatch(name):
        raise StoreError(f"a stored tokenizer's name must be 16 hexadecimal digits, got {shown(name)}")
    path = tokenizer_path(folder, name)
    return read_tokenizer(path) if path.exists() else None
