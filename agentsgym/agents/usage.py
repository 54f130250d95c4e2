"""Count what an agent requests of its server, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from agentsgym.fields import is_number, or_none, require

_TOO_MANY = 1 << 50  # tokens: a larger count from a server is nonsense


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of what an agent has requested of its server so far.

    Attributes:
        requests: Turns that were requested.
        retries: HTTP requests that were sent again after a failure.
        failures: Turns that got no answer in the end.
        refusals: Turns in which the model or its filter refused to answer.
        prompt_tokens: Tokens read, as far as the server reports them.
        completion_tokens: Tokens written, reasoning included.
        cached_tokens: Number of ``prompt_tokens`` that the server had in its cache.
        cost: Price of the tokens, cached ones at full price; None if the agent has no prices.
    """

    requests: int = 0
    retries: int = 0
    failures: int = 0
    refusals: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float | None = None


class Meter:
    """Adds up usage; written on the agents' event loop alone."""

    def __init__(self, price_per_million: tuple[float, float] | None) -> None:
        require("price_per_million", price_per_million, or_none(_are_prices), "two numbers of at least 0")
        self.prices = price_per_million
        self.usage = Usage(cost=None if price_per_million is None else 0.0)

    def add(self, **counts: int) -> None:
        """Add to the fields of that name."""
        usage = replace(self.usage, **{name: getattr(self.usage, name) + count for name, count in counts.items()})
        if self.prices is not None:
            price_in, price_out = self.prices
            cost = (usage.prompt_tokens * price_in + usage.completion_tokens * price_out) / 1e6
            usage = replace(usage, cost=cost)
        self.usage = usage

    def add_body(self, body: Mapping[str, Any]) -> None:
        """Add the ``usage`` of an answer."""
        usage = as_mapping(body.get("usage"))
        cached = as_mapping(usage.get("prompt_tokens_details")).get("cached_tokens")
        self.add(
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            cached_tokens=_count(cached),
        )


def _are_prices(prices: Any) -> bool:
    values = cast("Sequence[Any]", prices) if isinstance(prices, Sequence) else ()
    return len(values) == 2 and all(map(is_number(0), values))


def _count(value: Any) -> int:
    """A number of tokens as a server reports it; 0 for anything else."""
    return value if type(value) is int and 0 <= value < _TOO_MANY else 0


def as_mapping(value: Any) -> Mapping[str, Any]:
    """A foreign value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}  # pyright: ignore[reportUnknownVariableType]  # foreign data
