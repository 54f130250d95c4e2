"""What differs between the supported versions of transformers; ``make test-lowest`` and ``make test-newest`` run both.

Axolotl 0.19, which plays environments in its own trainer, pins 5.16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast, get_type_hints

# The names of the cache in models, both as an argument and in their output; from 5.24 on, only the last.
CACHE_NAMES: Final = ("past_key_values", "cache_params", "cache")


def empty_layers() -> tuple[type, ...]:
    """Return the types of cache layers that hold nothing, which are new in 5.23."""
    from transformers import cache_utils  # noqa: PLC0415  # imports torch

    layer = getattr(cache_utils, "DummyLayer", None)
    return () if layer is None else (layer,)


def recompute_by_default(args: Any, *, is_recomputed: bool) -> None:
    """Set whether activations are recomputed in the backward pass, unless a user did.

    From 5.23 on, the setting is ``activation_checkpointing``, and its earlier name is deprecated.
    """
    names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(args, name)]
    if all(getattr(args, name) is None for name in names):
        setattr(args, names[0], is_recomputed)


def json_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a typed function with a docstring.

    Before 5.23, transformers describes enums and classes that it does not know as objects; here, they are refused.

    Raises:
        TypeError: The class of an argument has no JSON form.
        Exception: Whatever else transformers raises.
    """
    from transformers import utils  # noqa: PLC0415

    schema = cast("Any", utils).get_json_schema(function)
    properties = schema["function"]["parameters"]["properties"]
    for name, hint in get_type_hints(function).items():
        if isinstance(hint, type) and hint is not dict and properties.get(name, {}).get("type") == "object":
            raise TypeError(f"{hint!r} has no JSON form")
    return schema
