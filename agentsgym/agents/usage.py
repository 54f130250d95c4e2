"""Count an agent's requests and tokens, and their cost."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from agentsgym.fields import is_list, is_number, or_none, require

_TOO_MANY = 1 << 50  # tokens: a larger count from a server is invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of an agent's requests to its server so far.

    Attributes:
        requests: Number of turns that were requested.
        retries: Number of HTTP requests that were repeated after a failure.
        failures: Number of turns without an answer after all retries.
        refusals: Number of turns in which the model or its filter refused to answer.
        prompt_tokens: Number of input tokens, if the server reports them.
        completion_tokens: Number of output tokens, including reasoning.
        cached_tokens: Number of ``prompt_tokens`` that the server had in its cache.
        cost: Cost of the tokens, with cached ones at full price; None if the agent has no prices.
    """

    requests: int = 0
    retries: int = 0
    failures: int = 0
    refusals: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float | None = None


@dataclass(slots=True, kw_only=True)
class TokenCount:
    """The tokens of some calls; ``total`` is None until an agent reports any."""

    total: int | None = None


_count_of_calls: ContextVar[TokenCount | None] = ContextVar("agentsgym tokens", default=None)


@contextlib.contextmanager
def counted_tokens() -> Generator[TokenCount]:
    """Count the tokens that agents report for the calls inside the block, also of coroutines that it starts."""
    count = TokenCount()
    outer = _count_of_calls.set(count)
    try:
        yield count
    finally:
        _count_of_calls.reset(outer)


class Meter:
    """A counter of usage; used only on the agents' event loop."""

    def __init__(self, price_per_million: tuple[float, float] | None) -> None:
        are_prices = or_none(lambda given: is_list(given) and len(given) == 2 and all(map(is_number(0), given)))
        require("price_per_million", price_per_million, are_prices, "two numbers of at least 0")
        self.prices = price_per_million
        self.usage = Usage(cost=None if price_per_million is None else 0.0)

    def add(self, **counts: int) -> None:
        """Add counts to the fields with their names."""
        usage = replace(self.usage, **{name: getattr(self.usage, name) + count for name, count in counts.items()})
        if self.prices is not None:
            price_in, price_out = self.prices
            cost = (usage.prompt_tokens * price_in + usage.completion_tokens * price_out) / 1e6
            usage = replace(usage, cost=cost)
        self.usage = usage
        count, number = _count_of_calls.get(), counts.get("prompt_tokens", 0) + counts.get("completion_tokens", 0)
        if count is not None and number:
            count.total = (count.total or 0) + number

    def add_body(self, body: Mapping[str, Any]) -> None:
        """Add the ``usage`` reported in a response body."""
        usage = as_mapping(body.get("usage"))
        cached = as_mapping(usage.get("prompt_tokens_details")).get("cached_tokens")
        self.add(
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            cached_tokens=_count(cached),
        )


def _count(value: Any) -> int:
    """Return a token count reported by a server; 0 if it is invalid."""
    return value if type(value) is int and 0 <= value < _TOO_MANY else 0


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return an unchecked value if it is a mapping, otherwise an empty mapping."""
    return value if isinstance(value, Mapping) else {}  # pyright: ignore[reportUnknownVariableType]  # foreign data
