"""Compress the summaries that ranks exchange: long state keys become digests, and equal values are sent once."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from agentsgym.training.metrics.rollouts import RolloutSummary

_DIGEST_BYTES: Final = 12  # a collision among a million keys has probability 10^-17
_SHORT: Final = 24  # keys with at most this many characters are sent unchanged

PackedValues = tuple["array[int]", "array[float]"]
"""The token count of each turn, and the values of all tokens or of each turn's first token, in single precision."""


def short_summaries(summaries: Sequence[RolloutSummary]) -> list[RolloutSummary]:
    """Compress the summaries of this rank's rollouts, without affecting anything that is computed from them.

    State keys are only compared with each other, for which digests suffice. If ``turn_credit`` leaves turn rewards
    unchanged, they become one list, which is sent once. Only the first error of each rank is kept.
    """
    first = next((place for place, one in enumerate(summaries) if one.error is not None), None)
    shortened: list[RolloutSummary] = []
    for place, one in enumerate(summaries):
        is_same = list(one.scored.turn_rewards) == list(one.turn_rewards)
        rewards = one.turn_rewards if is_same else one.scored.turn_rewards
        scored = replace(one.scored, turn_rewards=rewards, state_keys=[*map(short_key, one.scored.state_keys)])
        shortened.append(replace(one, scored=scored, error=one.error if place == first else None))
    return shortened


def short_key(key: Hashable) -> Hashable:
    """Return a short key unchanged, and a digest of a long one; results are equal exactly if the keys are.

    Numbers, text, bytes, and tuples and frozensets of them are digested; other keys stay unchanged.

    >>> short_key("a cellar"), short_key("a cellar " * 9) == short_key("a cellar " * 9)
    ('a cellar', True)
    """
    if key is None or (isinstance(key, str | bytes) and len(key) <= _SHORT):
        return key
    text = _text_of(key)
    if text is None or len(text) <= _SHORT:
        return key
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def _text_of(key: Hashable) -> str | None:
    """Encode a key as text, with equal texts exactly for equal keys (``1 == 1.0 == True``); None for other types."""
    value: Any = int(key) if isinstance(key, float) and key.is_integer() else key
    match value:
        case str():
            text = f"s{len(value)}:{value}"
        case bytes():
            text = f"b{value.hex()}"
        case Integral():
            text = f"n{int(value)}"
        case None | float():
            text = f"n{value!r}"
        case tuple() | frozenset():
            texts = [_text_of(one) for one in cast("Iterable[Hashable]", value)]
            known = [one for one in texts if one is not None]
            joined = f"({','.join(known)})" if isinstance(value, tuple) else f"{{{','.join(sorted(known))}}}"
            text = joined if len(known) == len(texts) else None
        case _:
            text = None
    return text


def packed_values(values: Sequence[Sequence[float]], *, first_only: bool = False) -> PackedValues:
    """Pack a value head's predictions for the tokens of a rollout's turns, (K, n_k), in single precision.

    Args:
        values: One prediction per agent token.
        first_only: Whether to keep only the prediction for the first token of each turn.

    Returns:
        The packed values, of four bytes per turn and four bytes per value.
    """
    sent = [turn[:1] for turn in values] if first_only else values
    return array("I", map(len, values)), array("f", chain.from_iterable(sent))


def unpacked_values(packed: PackedValues) -> list[list[float]]:
    """Unpack the result of :func:`packed_values`; missing values are NaN."""
    counts, values = packed
    is_complete = len(values) == sum(counts)
    places = pairwise(accumulate(counts if is_complete else (min(count, 1) for count in counts), initial=0))
    sent = [values[start:stop].tolist() for start, stop in places]
    return [turn + [math.nan] * (count - len(turn)) for turn, count in zip(sent, counts, strict=True)]
