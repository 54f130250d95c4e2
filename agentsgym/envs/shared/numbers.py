"""Parse numbers in answers exactly, with or without units."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

_MAX_LENGTH = 400
_MAX_EXPONENT = 400  # beyond the range of a float, yet fast to parse
_TOLERANCE = Fraction(1, 10**6)
_RELATIVE_TOLERANCE = Fraction(1, 10**4)  # relative, since otherwise 0 would equal every small number
_SEPARATOR = r",|[ \u2009\u202f\xa0]|\\,|\{,\}"  # between groups of three digits
_PLAIN = re.compile(
    rf"[-+]?(?:\d+|\d{{1,3}}(?P<separator>{_SEPARATOR})\d{{3}}(?:(?P=separator)\d{{3}})*)(?P<decimals>\.\d*)?"
    r"|[-+]?(?P<only_decimals>\.\d+)"
)
_SCIENTIFIC = re.compile(r"(?P<digits>[-+]?(?:\d+\.?\d*|\.\d+))[eE](?P<exponent>[-+]?\d{1,4})")
_RATIO = re.compile(r"(?P<over>[-+]?\d+)\s*/\s*(?P<under>\d+)|(?P<sign>[-+]?)\\[dt]?frac\{(?P<a>-?\d+)\}\{(?P<b>\d+)\}")
_SEPARATORS = re.compile(_SEPARATOR)
_SIGN = re.compile(r"\A(?:\\?\$)?\s*([-+]?)\s*(?:\\?\$)?\s*")
#: The words that scale a number: "2 million" is 2,000,000. "dozen" is excluded, since an answer to "how many dozen?" is
#: "3 dozen".
SCALE_WORD = r"(?i:(?:hundred|thousand|million|billion|trillion)s?)"
_SCALED = re.compile(rf"(?P<digits>.*?[\d.}}])(?P<scales>(?:(?:\s|\\[,;:! ]|~)*{SCALE_WORD})+)")
_DECIMAL_COMMA = re.compile(r"(\d),(?=\d{1,2}\Z)")  # by itself "1,5" may be two numbers, but "1,5 million" is one
_FIRST_WORD = re.compile(rf"\s+(?=\(?[^\W\d_])(?!{SCALE_WORD}(?:\s|\Z))|\Z")
_PERCENT = re.compile(r"\s*\\?%\Z")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|textrm)\s*\{([^{}\\]*)\}")
_UNIT = re.compile(r"\(?(?:[^\W\d_]{2,}|[mgshlLNJWVKCF])(?:['\u2019/.-][^\W\d_]+)*[,.;)]*")
_NO_UNIT = re.compile(
    r"and|or|to|not|but|plus|minus|times|over|by|divided|squared|cubed|factorial|choose|mod|modulo|half|halves"
    r"|(?:third|quarter|fourth|fifth|tenth|hundredth|thousandth)s?|sqrt|pi|sin|cos|tan|log|ln|exp|inf|infinity"
)
_MULTIPLES = {
    "dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
_SPACING = re.compile(r"\\[,;:! ]|~|\s+")


@dataclass(frozen=True, slots=True)
class Number:
    """A plain number.

    Attributes:
        value: The exact value of the number as written.
        is_rounded: Whether the number has decimals, and so may be rounded.
    """

    value: Fraction
    is_rounded: bool

    def equals(self, other: Number) -> bool:
        """Compare exactly; if one number may be rounded, to six decimals and at least four significant digits."""
        if not (self.is_rounded or other.is_rounded):
            return self.value == other.value
        size = max(abs(self.value), abs(other.value))
        return abs(self.value - other.value) <= min(_TOLERANCE, size * _RELATIVE_TOLERANCE)


def as_number(text: str) -> Number | None:
    r"""Parse an integer, a decimal (``2.5``, ``1e-3``) or a ratio (``3/4``, ``\frac{3}{4}``); None for anything else.

    A sign may precede or follow a dollar sign, and may be separated from the digits. "thousand", "million" and the like
    may follow the number; a comma before its last one or two digits is then a decimal comma.

    >>> as_number("$1,250.50"), as_number("2 million")
    (Number(value=Fraction(2501, 2), is_rounded=True), Number(value=Fraction(2000000, 1), is_rounded=False))
    """
    if len(text) > _MAX_LENGTH:
        return None
    scaled = _SCALED.fullmatch(_LATEX_TEXT.sub(r" \1", text).strip())
    if scaled is None:
        return _unscaled(text)
    number = _unscaled(_DECIMAL_COMMA.sub(r"\1.", scaled["digits"]))
    scales = [_MULTIPLES[word] for word in re.findall("|".join(_MULTIPLES), scaled["scales"].lower())]
    return number and Number(number.value * math.prod(scales), number.is_rounded)


def _unscaled(text: str) -> Number | None:
    text = _SIGN.sub(r"\1", text.strip().replace("\u2212", "-"))
    if plain := _PLAIN.fullmatch(text):
        is_rounded = bool(plain["decimals"] or plain["only_decimals"])
        return Number(Fraction(_SEPARATORS.sub("", text).rstrip(".")), is_rounded)
    if (scientific := _SCIENTIFIC.fullmatch(text)) and abs(int(scientific["exponent"])) <= _MAX_EXPONENT:
        return Number(Fraction(text), is_rounded="." in scientific["digits"])
    if ratio := _RATIO.fullmatch(text):
        over, under = (
            int(ratio["over"] or ratio["sign"] + ratio["a"].replace("--", "")),
            int(ratio["under"] or ratio["b"]),
        )
        return Number(Fraction(over, under), is_rounded=False) if under else None
    return None


def quantities(text: str) -> tuple[Number, ...]:
    """Return the values that a number with a unit may stand for; empty if the text is not a number with unit words.

    Words that express arithmetic are not units, so the result is empty for "5 or 6", "5 and a half" and "5 x". Words
    such as "thousand" multiply the number, and a percentage may stand for its number or for a hundredth of it.

    >>> [str(number.value) for number in quantities("5 percent of it")], quantities("5 or 6")
    (['5', '1/20'], ())
    """
    if len(text) > _MAX_LENGTH:
        return ()
    text = _LATEX_TEXT.sub(r" \1", text).strip()
    found = _FIRST_WORD.search(text)
    digits, words = (text[: found.start()], text[found.end() :].split()) if found else (text, [])
    number, multiple = as_number(_PERCENT.sub("", digits)), 1
    for word in words:
        bare = word.strip("(,.;)").casefold()
        if _NO_UNIT.fullmatch(bare) or not _UNIT.fullmatch(word):
            return ()
        multiple *= _MULTIPLES.get(bare, 1)
    if number is None:
        return ()
    is_percentage = _PERCENT.search(digits) or words[:1] == ["percent"]
    shares = (1, Fraction(1, 100)) if is_percentage else (1,)
    return tuple(Number(number.value * multiple * share, number.is_rounded) for share in shares)


def canonical(answer: str) -> str:
    """Normalize an answer so that equivalent answers usually become equal strings, for majority votes and comparisons.

    >>> canonical(" 1,000.0 "), canonical("North  West")
    ('1000', 'north west')
    """
    number = as_number(answer)
    if number is not None:
        return str(number.value)
    text = unicodedata.normalize("NFKC", answer).replace(r"\left", "").replace(r"\right", "")
    return _SPACING.sub(" ", text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")).strip().casefold()
