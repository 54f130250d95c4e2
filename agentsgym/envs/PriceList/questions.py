"""Format and parse questions about a price, a sum or a product."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["price", "sum", "product"]
KINDS: tuple[Kind, ...] = ("price", "sum", "product")
MAX_TIMES = 4

_QUESTION = re.compile(
    r"What is (?:(?P<times>\d+) times )?the price of an? (?P<one>[\w-]+)(?: plus the price of an? (?P<other>[\w-]+))?\?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about prices.

    Attributes:
        goods: One good, or two whose prices are added.
        times: The factor that the price is multiplied by; None for no multiplication.
    """

    goods: tuple[str, ...]
    times: int | None = None

    def text(self) -> str:
        """Format the question.

        >>> Question(goods=("pear",), times=3).text()
        'What is 3 times the price of a pear?'
        """
        prices = " plus ".join(f"the price of a{'n' * (name[0] in 'aeiou')} {name}" for name in self.goods)
        return f"What is {prices}?" if self.times is None else f"What is {self.times} times {prices}?"

    def answer(self, prices: Mapping[str, int]) -> int:
        """Compute the answer."""
        return sum(prices[name] for name in self.goods) * (1 if self.times is None else self.times)

    @classmethod
    def parse(cls, text: str) -> Question | None:
        """Parse a question; None if the text is not one.

        >>> Question.parse("What is the price of a pear plus the price of an egg?")
        Question(goods=('pear', 'egg'), times=None)
        """
        found = _QUESTION.fullmatch(text.strip())
        if found is None:
            return None
        goods = tuple(name for name in (found["one"], found["other"]) if name)
        return cls(goods=goods, times=int(found["times"]) if found["times"] else None)
