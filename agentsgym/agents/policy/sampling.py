"""Draw tokens from logits, and end a turn at a stop string."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final

import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from agentsgym.errors import NonFiniteError
from agentsgym.fields import Check, is_strings, or_none, require

LOGITS_NOT_FINITE: Final = (
    "the policy's logits are NaN or infinite, so no token can be drawn: its weights are corrupt, or values overflow in "
    "its precision"
)
_NEVER_DRAWN: Final = -103.0  # the log-probability below which the probability is 0 in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings, as in transformers and TRL.

    Attributes:
        temperature: Divisor of the logits; 0 to choose the likeliest token.
        top_k: Number of likeliest tokens to draw from; 0 for all.
        top_p: Total probability of the likeliest tokens to draw from.
        min_p: Minimum probability of the tokens to draw from, as a fraction of the highest; None for all.
        repetition_penalty: Factor that, above 1, makes tokens in the context less likely; 1 for no penalty.
        stop: Strings that end a turn with the token that completes one of them. The answer's text ends before the
            string; its token ids include it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, (valid, expected) in _CHECKS.items():
            require(name, getattr(self, name), valid, expected)


def _real(valid: Check) -> Check:
    return lambda value: isinstance(value, Real) and valid(value)


_CHECKS: Final[dict[str, tuple[Check, str]]] = {
    "temperature": (_real(lambda value: value >= 0), "a non-negative number"),
    "top_k": (_real(lambda value: value >= 0 and value % 1 == 0), "0 or a positive whole number"),
    "top_p": (_real(lambda value: 0 < value <= 1), "above 0 and at most 1"),
    "min_p": (or_none(_real(lambda value: 0 <= value <= 1)), "None or between 0 and 1"),
    "repetition_penalty": (_real(lambda value: value > 0), "a positive number"),
    "stop": (lambda value: is_strings(value) and all(value), "a sequence of non-empty strings"),
}


class Sampler:
    """A sampler that uses one uniform random number per token."""

    def __init__(self, sampling: SamplingParams, vocabulary_size: int | None = None) -> None:
        """Set up; nothing is drawn.

        Args:
            sampling: The sampling settings.
            vocabulary_size: Exclusive upper bound of the ids to draw; None for no limit.
        """
        self.vocabulary_size = vocabulary_size
        self.temperature, self.penalty = sampling.temperature, sampling.repetition_penalty
        cuts: Any = LogitsProcessorList()  # in TRL's order, after the temperature
        if sampling.top_k:
            cuts.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            cuts.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            cuts.append(MinPLogitsWarper(sampling.min_p))
        self._cuts = cuts

    def draw(
        self, logits: torch.Tensor, uniforms: torch.Tensor, seen: torch.Tensor | None = None
    ) -> tuple[list[int], list[float]]:
        """Draw one token per row.

        Ids from ``vocabulary_size`` on have probability 0, and the log-probabilities are of the distribution without
        them.

        Args:
            logits: (N, V).
            uniforms: One number in [0, 1) per row, float64, (N,).
            seen: Whether each token occurs in the row's context, bool, (N, V), for a repetition penalty.

        Returns:
            The tokens, and their log-probabilities at the temperature before top-k, top-p and min-p, both of length N;
            NaN for a token that could be drawn only because of the repetition penalty.

        Raises:
            NonFiniteError: A row has a NaN or infinite logit, other than -inf for excluded tokens.
        """
        scores = logits[:, : self.vocabulary_size].float()
        if self.temperature > 0 and self.temperature != 1:
            scores = scores / self.temperature
        logprobs = scores.log_softmax(-1)
        if seen is not None:
            scores = penalized(scores, seen[:, : self.vocabulary_size], self.penalty)
        if self.temperature == 0:
            drawn = scores.argmax(-1, keepdim=True)
        else:
            drawn = inverse_transform_sample(self._cuts(None, scores).softmax(-1), uniforms)
        # The index exceeds the last token only if the distribution is invalid, which raises below; on a GPU, gathering
        # with it would be fatal.
        drawn = drawn.clamp(max=scores.shape[1] - 1)
        found = torch.cat([drawn.double(), logprobs.gather(1, drawn)], 1)  # read together: reading waits
        pairs: list[list[float]] = found.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        chosen = [value for _, value in pairs]
        if math.isnan(sum(chosen)):
            raise NonFiniteError(LOGITS_NOT_FINITE)
        if seen is not None:
            chosen = [value if value > _NEVER_DRAWN else math.nan for value in chosen]
        return [int(token) for token, _ in pairs], chosen


def inverse_transform_sample(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw the first token whose cumulative probability exceeds u times the total.

    Probabilities are summed in double precision: in single precision, sums over a large vocabulary lose the unlikely
    tokens. A token of probability 0 is never drawn.

    Args:
        probabilities: (N, V), not necessarily summing to 1.
        uniforms: One number in [0, 1) per row, float64, (N,).

    Returns:
        (N, 1).
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)


def penalized(scores: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Make seen tokens less likely: positive scores are divided, negative ones multiplied (arXiv:1909.05858, §4.1).

    Args:
        scores: (N, V).
        seen: Whether each token occurs in the row's context, bool, (N, V).
        penalty: The penalty; above 1, seen tokens become less likely.
    """
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def seen_tokens(contexts: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
    """Mark the tokens that occur in each of N contexts, bool, (N, V), with V and the device of ``logits``."""
    seen = torch.zeros(len(contexts), logits.shape[-1], dtype=torch.bool, device=logits.device)
    for row, context in zip(seen, contexts, strict=True):
        row[torch.tensor(context, device=logits.device)] = True
    return seen


class StopText:
    """A search for stop strings in the text of a turn as it grows."""

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.stop, self._decode = tuple(stop), decode
        # A decoded tail may begin differently from the full text: with a broken character, or without a space.
        self._length = max(map(len, stop), default=0) + 8

    def completed_by_last(self, ids: Sequence[int]) -> bool:
        """Whether the last of the turn's ids completes a stop string, given that none before did."""
        if not self.stop:
            return False
        count, text = 8, self._decode(ids[-8:])
        while len(text) < self._length and count < len(ids):
            count *= 2
            text = self._decode(ids[-count:])
        return any(stop in text for stop in self.stop)

    def before(self, text: str) -> str:
        """Cut a text off before its first stop string."""
        return text[: min((place for stop in self.stop if (place := text.find(stop)) >= 0), default=len(text))]
