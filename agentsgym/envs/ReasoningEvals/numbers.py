"""Read plain numbers and compare answers without a computer algebra system: what is cheap is done first."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

_MAX_LENGTH = 100
_MAX_EXPONENT = 400  # beyond what a float holds, and no more digits than are read in no time
_TOLERANCE = Fraction(1, 10**6)
_RELATIVE_TOLERANCE = Fraction(1, 10**4)  # else 0 would be equal to all that is small
_GAP = r",|[ \u2009\u202f\xa0]|\\,|\{,\}"  # between thousands
_PLAIN = re.compile(
    rf"[-+]?(?:\d+|\d{{1,3}}(?P<gap>{_GAP})\d{{3}}(?:(?P=gap)\d{{3}})*)(?P<decimals>\.\d*)?"
    r"|[-+]?(?P<only_decimals>\.\d+)"
)
_SCIENTIFIC = re.compile(r"(?P<digits>[-+]?(?:\d+\.?\d*|\.\d+))[eE](?P<exponent>[-+]?\d{1,4})")
_RATIO = re.compile(r"(?P<over>[-+]?\d+)\s*/\s*(?P<under>\d+)|(?P<sign>[-+]?)\\[dt]?frac\{(?P<a>-?\d+)\}\{(?P<b>\d+)\}")
_GAPS = re.compile(_GAP)
_SPACING = re.compile(r"\\[,;:! ]|~|\s+")


@dataclass(frozen=True, slots=True)
class Number:
    """A plain number.

    Attributes:
        value: Exactly what is written.
        is_rounded: Whether it is written with decimals, and so may be rounded.
    """

    value: Fraction
    is_rounded: bool

    def equals(self, other: Number) -> bool:
        """Compare exactly, or, where one of them may be rounded, to six decimals and at least four digits."""
        if not (self.is_rounded or other.is_rounded):
            return self.value == other.value
        size = max(abs(self.value), abs(other.value))
        return abs(self.value - other.value) <= min(_TOLERANCE, size * _RELATIVE_TOLERANCE)


def as_number(text: str) -> Number | None:
    r"""Read a whole number, a decimal (``2.5``, ``1e-3``) or a ratio (``3/4``, ``\frac{3}{4}``); None for else.

    >>> as_number("$1,250.50")
    Number(value=Fraction(2501, 2), is_rounded=True)
    """
    text = text.strip().replace("\u2212", "-").removeprefix("\\$").removeprefix("$")
    if len(text) > _MAX_LENGTH:
        return None
    if plain := _PLAIN.fullmatch(text):
        is_rounded = bool(plain["decimals"] or plain["only_decimals"])
        return Number(Fraction(_GAPS.sub("", text).rstrip(".")), is_rounded)
    if (scientific := _SCIENTIFIC.fullmatch(text)) and abs(int(scientific["exponent"])) <= _MAX_EXPONENT:
        return Number(Fraction(text), is_rounded="." in scientific["digits"])
    if ratio := _RATIO.fullmatch(text):
        over, under = (
            int(ratio["over"] or ratio["sign"] + ratio["a"].replace("--", "")),
            int(ratio["under"] or ratio["b"]),
        )
        return Number(Fraction(over, under), is_rounded=False) if under else None
    return None


def canonical(answer: str) -> str:
    """Write an answer so that equal ones mostly are equal texts: for votes, and to compare texts.

    >>> canonical(" 1,000.0 "), canonical("North  West")
    ('1000', 'north west')
    """
    number = as_number(answer)
    if number is not None:
        return str(number.value)
    text = unicodedata.normalize("NFKC", answer).replace(r"\left", "").replace(r"\right", "")
    return _SPACING.sub(" ", text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")).strip().casefold()
