"""Select how to run a model token by token: the fastest strategy that gives correct logits.

Models in transformers differ in what they support in a batch of uneven conversations: padding, several new tokens after
a cached state, positions. They do not declare it, so the first use of a model tests the strategies: each runs short
made-up conversations, and its logits are compared with those of one forward pass over the full row, as in training.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from agentsgym.agents.policy.attention import has_plain_attention
from agentsgym.agents.policy.decoding import BatchedDecoder, CachedPrefix, Decoder, Forward, SequentialDecoder
from agentsgym.agents.policy.sampling import LOGITS_NOT_FINITE
from agentsgym.errors import ConfigError

logger = logging.getLogger(__name__)

# For the cached prefixes and prompts of conversations, yields decoders, which are sampled from one after another.
DecodingStrategy = Callable[[Sequence[CachedPrefix], Sequence[Sequence[int]]], Iterator[Decoder]]


def _batched(
    prefixes: Sequence[CachedPrefix], prompts: Sequence[Sequence[int]], *, forward: Forward, one_by_one: bool = False
) -> Iterator[Decoder]:
    yield BatchedDecoder(prefixes, prompts, forward=forward, one_by_one=one_by_one)


def _sequential(
    _prefixes: Sequence[CachedPrefix], prompts: Sequence[Sequence[int]], *, forward: Forward, with_cache: bool
) -> Iterator[Decoder]:
    for index, prompt in enumerate(prompts):
        yield SequentialDecoder(index, prompt, forward=forward, with_cache=with_cache)


_STRATEGIES: dict[str, Callable[..., Iterator[Decoder]]] = {  # slow ones are named by what they cost
    "kept": _batched,
    "kept, with a forward pass for each new token": functools.partial(_batched, one_by_one=True),
    "prefilled again, entirely, for each turn of each conversation": functools.partial(_sequential, with_cache=True),
    "run again, entirely, for each token of each conversation": functools.partial(_sequential, with_cache=False),
}
# The strategy of each model, and whether its attention is plain.
_chosen: WeakKeyDictionary[PreTrainedModel, tuple[str, bool]] = WeakKeyDictionary()


def select_strategy(model: PreTrainedModel, call: Callable[..., Any] | None = None) -> DecodingStrategy:
    """Return the fastest strategy whose logits match a forward pass over the full row; tested once per model.

    Args:
        model: The model.
        call: What to call instead of the model, such as a wrapper; by default the model.

    Raises:
        ConfigError: No strategy returns these logits.
    """
    forward = Forward(model, call)
    if model not in _chosen:
        _chosen[model] = _choose(forward)
    name, is_plain = _chosen[model]
    forward.is_plain = is_plain and has_plain_attention(model)  # it may have been exchanged since
    return functools.partial(_STRATEGIES[name], forward=forward)


def _choose(forward: Forward) -> tuple[str, bool]:
    reasons: list[str] = []
    for name in _STRATEGIES:
        reason = _reason_against(name, forward)
        if reason is None:
            if reasons:
                reason = "; ".join(dict.fromkeys(reasons))
                logger.warning("the cache of %s is %s, since: %s", forward.name, name, reason)
            # Only the first strategy runs several tokens after a cache, with a mask.
            plain = Forward(forward.model, forward.call, is_plain=not reasons and has_plain_attention(forward.model))
            return name, plain.is_plain and _reason_against(name, plain) is None
        reasons.append(reason)
    raise ConfigError(
        f"{forward.name} cannot be sampled: no way of decoding token by token reproduces the logits of one forward "
        f"pass over the full row: {'; '.join(dict.fromkeys(reasons))}"
    )


def _reason_against(name: str, forward: Forward) -> str | None:
    """Return why this strategy is wrong for the model; None if it is correct."""
    try:
        error = _measured_error(forward, functools.partial(_STRATEGIES[name], forward=forward))
    except (torch.OutOfMemoryError, ConfigError):
        raise
    except Exception as raised:  # noqa: BLE001  # the model's code may raise anything for what it does not support
        return f"{type(raised).__name__}: {raised}"
    if error <= 2 * _rounding(forward) ** 0.5:
        return None
    return f"logits are off by {error:.2g} of their spread if the cache is {name}"


# Numbers of new tokens in the prompt and the answer of the first and of the second turn of made-up conversations.
_PROBES = ((5, 3, 3, 3), (2, 1, 8, 2), (9, 2, 1, 3), (3, 3, 2, 3))


def _measured_error(forward: Forward, strategy: DecodingStrategy) -> float:
    """Measure how far the logits are from those of a forward pass over the full row, in made-up conversations."""
    vocabulary_size = forward.model.config.get_text_config().vocab_size  # pyright: ignore[reportUnknownMemberType]
    rows = [
        [(7919 * n * n + 31 * row + 13) % vocabulary_size for n in range(sum(probe))]
        for row, probe in enumerate(_PROBES)
    ]
    expected = [forward([ids], use_cache=False).logits[0].float() for ids in rows]  # (T, V) each
    if not all((row < torch.inf).all() for row in expected):  # False for NaN as well
        raise ConfigError(f"{forward.name} cannot be sampled: {LOGITS_NOT_FINITE}")
    prefixes = [CachedPrefix() for _ in rows]
    errors: list[torch.Tensor] = []
    for turn in (0, 2):
        places = [sum(probe[: turn + 1]) for probe in _PROBES]  # the number of tokens of each row that have been run
        stops = [sum(probe[: turn + 2]) for probe in _PROBES]
        for decoder in strategy(prefixes, [ids[:place] for ids, place in zip(rows, places, strict=True)]):
            logits = decoder.prefill()
            while True:
                errors += [
                    _distance(given, expected[index][places[index] - 1])
                    for index, given in zip(decoder.indices, logits.float(), strict=True)
                    if places[index] < stops[index]
                ]
                fed = {
                    index: rows[index][places[index]] for index in decoder.indices if places[index] < stops[index] - 1
                }
                if not fed:
                    break
                for index in decoder.indices:
                    places[index] += 1
                logits = decoder.extend(fed)
    # In low precision, rounding alone may route a few tokens to other experts; a wrong strategy is off more often.
    return float(torch.stack(errors).quantile(0.75 if _rounding(forward) > 1e-4 else 1.0))


def _distance(given: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest difference between two rows of logits, (V,), in units of their spread."""
    return ((given - expected).abs().max() / (expected - expected.mean()).abs().max()).nan_to_num(torch.inf)


def _rounding(forward: Forward) -> float:
    """Return the relative rounding error of one operation of the model, in float32 at least, as in some layers."""
    kinds = {torch.float32, *(one.dtype for one in forward.model.parameters() if one.is_floating_point())}
    if torch.is_autocast_enabled(forward.device.type):
        kinds.add(torch.get_autocast_dtype(forward.device.type))
    if torch.get_float32_matmul_precision() != "highest":
        kinds.add(torch.bfloat16)
    return max(torch.finfo(kind).eps for kind in kinds)
