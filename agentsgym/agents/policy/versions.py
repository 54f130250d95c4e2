"""What differs between the supported versions of transformers; ``make test-lowest`` and ``make test-newest`` run both.

Axolotl 0.19, which plays environments in its own trainer, pins 5.16.
"""

from __future__ import annotations

from typing import Any

from transformers import cache_utils

#: The layer that caches nothing, which versions up to 5.20 lack.
EMPTY_LAYERS: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))


def recompute_by_default(args: Any, *, is_recomputed: bool) -> None:
    """Set whether activations are recomputed in the backward pass, unless a user did.

    From 5.23 on, the setting is ``activation_checkpointing``, and its earlier name is deprecated.
    """
    names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(args, name)]
    if all(getattr(args, name) is None for name in names):
        setattr(args, names[0], is_recomputed)
