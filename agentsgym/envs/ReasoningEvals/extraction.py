r"""Extract the final answer from an agent's text: in a tag or ``\boxed{}``, after ``####``, a letter, or a number.

Only the extracted answer is graded, never the complete text, so that listing many candidates does not pay off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from agentsgym.envs.shared.numbers import SCALE_WORD

Kind = Literal["number", "choice", "text"]
Extractor = Callable[[str], str | None]

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# "Answer A" and "Answer: a" only at the end of a line, since elsewhere "a" may be an ordinary word.
_CHOICE = re.compile(
    r"\b(?i:answer)\s*(?:(?i:is|(?:would|should|must)\s+be)\b|[:=])[\s:*]*(?:(?i:\w+ly|option)\s+)?"
    r"\**\(?([A-Z])\b(?!\s+or\b)"
    r"|\b(?:(?i:answer(?:\s+is)?)[\s:=*]*\(?([A-Za-z])"
    r"|(?i:thus|hence|therefore|so)\b[\s:,*]*\(?([A-HJ-Z]))\)?[*.!]*[ \t]*$",
    re.MULTILINE,
)
_LONE_CHOICE = re.compile(r"\**\(?([A-Za-z])[).:]?\**\.?")
_LEADING_CHOICE = re.compile(r"\**(?:\(([A-Z])\)(?!.*\([A-Z]\))|([A-Z])[).:])\**(?:\s[^\n]*)?", re.DOTALL)
_NAMED_CHOICE = re.compile(
    r"\(([A-Z])\)|\b(?i:option|choice|pick|choose|select|go with)\s*:?\s*\**([A-HJ-Z]\b|I(?![\w'\u2019]|\s+\w))"
)
_SIGN = r"(?:(?:\A|(?<==))\s*[-\u2212+]\s+|(?<![\w.])[-\u2212+]?)"
_NUMBER = re.compile(
    rf"(?:{_SIGN}\$?(?:[1-9]\d{{0,2}}(?:[ \u2009\u202f\xa0]\d{{3}})+(?![\d,])|\d[\d,]*)(?:\.\d+)?"
    r"(?:[eE][-+]?\d+\b|\s?/\s?\d+)?%?|" + _SIGN + rf"\.\d+(?:[eE][-+]?\d+\b)?%?)(?:(?<!,)[^\S\n]+{SCALE_WORD}\b)*"
)
_DETACHED_SIGN = re.compile(r"\A([-\u2212+])\s+")
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), (r"\text{", "}"))
_MAX_LINE = 200


def in_tag(text: str) -> str | None:
    """Return the content of the last ``<answer>…</answer>``."""
    found = _TAG.findall(text)
    return found[-1].strip() or None if found else None


def in_box(text: str) -> str | None:
    r"""Return the content of the last closed ``\boxed{…}``, with any nested braces.

    >>> in_box(r"so \boxed{3}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    opened: list[int | None] = []  # for each open brace, the start of a box's content; None for other braces
    last: str | None = None
    for brace in _BRACES.finditer(text):
        if brace[0] == "{":
            opened.append(None)
        elif brace[0] == "}":
            start = opened.pop() if opened else None
            last = last if start is None else text[start : brace.start()]
        elif brace[0].endswith("{") and len(brace[0]) > 2:
            opened.append(brace.end())
    return None if last is None else last.strip() or None


def after_hashes(text: str) -> str | None:
    """Return the text after the last ``####``, as in GSM8K, to the end of its line."""
    _, found, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() or None if found else None


def letter(text: str) -> str | None:
    """Return the letter of a choice: "The answer is (B)", "Thus, B.", "B. Paris"; else the last "(B)" or "I pick B".

    >>> letter("A difficult one. The answer is (C).")
    'C'
    """
    text = text.strip()
    if named := _CHOICE.findall(text):
        return "".join(named[-1]).upper()
    if lone := _LONE_CHOICE.fullmatch(text):
        return lone[1].upper()
    if begun := _LEADING_CHOICE.fullmatch(text):
        return begun[1] or begun[2]
    anywhere = [one or other for one, other in _NAMED_CHOICE.findall(text)]
    return anywhere[-1] if anywhere else None


def last_number(text: str) -> str | None:
    """Return the last number, with its sign; a detached sign counts only at the start and after "=".

    >>> last_number("3 bags of 1,200 are 3,600."), last_number("x = - 5"), last_number("10 - 5")
    ('3,600', '-5', '5')
    >>> last_number("That is 2 million people.")
    '2 million'
    """
    found = _NUMBER.findall(text)
    return _DETACHED_SIGN.sub(r"\1", found[-1].strip()).rstrip(",") if found else None


def whole_line(text: str) -> str | None:
    """Return the text if it is a single short line."""
    text = text.strip()
    return text if text and "\n" not in text and len(text) <= _MAX_LINE else None


def strip_wrappers(answer: str) -> str | None:
    r"""Strip an answer's wrapping: dollars, ``\text{}``, a box, bold markers, a final period; None if nothing is left.

    >>> strip_wrappers(r" $\text{north}$. ")
    'north'
    """
    return _without_wrappers(answer, keep_period=False) or None


def possible_readings(written: str) -> list[str]:
    """Return the possible readings of an answer whose final period may be part of it: as written, and stripped.

    >>> possible_readings("**It is so.**")
    ['**It is so.**', 'It is so.', 'It is so']
    """
    bare = (_without_wrappers(written, keep_period=True), strip_wrappers(written) or "")
    return [*dict.fromkeys(one for one in (written.strip(), *bare) if one)]


def _without_wrappers(answer: str, *, keep_period: bool) -> str:
    answer = answer.strip()
    while True:
        before = answer
        answer = answer if keep_period or answer.endswith("..") else answer.rstrip(".").strip()
        for begin, end in (*_WRAPPERS, (r"\boxed{", "}")):
            if answer.startswith(begin) and answer.endswith(end) and len(answer) >= len(begin) + len(end):
                inner = answer[len(begin) : len(answer) - len(end)]
                if begin not in inner and brace_depth(inner) is not None:
                    answer = inner.strip()
        if answer == before:
            return answer


def brace_depth(text: str) -> int | None:
    r"""Return the maximum nesting depth of unescaped braces; None if they do not match.

    >>> brace_depth(r"\frac{1}{x_{2}}"), brace_depth(r"\{1"), brace_depth("}{")
    (2, 0, None)
    """
    depth = deepest = 0
    for one in re.findall(r"\\[{}]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(one, 0)
        deepest = max(deepest, depth)
        if depth < 0:
            return None
    return None if depth else deepest


#: Extractors by the name of the answer's form; each returns the answer as written.
RAW_EXTRACTORS: Mapping[str, Extractor] = {
    "tag": in_tag,
    "boxed": in_box,
    "hashes": after_hashes,
    "choice": letter,
    "number": last_number,
    "line": whole_line,
}


def _cleaned_by(find: Extractor, text: str) -> str | None:
    found = find(text)
    return None if found is None else strip_wrappers(found)


#: The same extractors, with the answer's wrapping stripped.
EXTRACTORS: Mapping[str, Extractor] = {name: partial(_cleaned_by, find) for name, find in RAW_EXTRACTORS.items()}
_EXPLICIT = ("tag", "boxed", "hashes")
_FALLBACKS: Mapping[Kind, tuple[str, ...]] = {"number": ("number",), "choice": ("choice",), "text": ("line",)}


def extract_answer(
    text: str, kind: Kind, *, is_cut: bool, extractors: Mapping[str, Extractor] = EXTRACTORS
) -> str | None:
    """Extract an answer of any form (``"auto"``).

    Args:
        text: The agent's text, without its reasoning.
        kind: The kind of the right answer.
        is_cut: Whether a budget truncated the text: then only explicit forms count, not the last number so far.
        extractors: :data:`EXTRACTORS`, or :data:`RAW_EXTRACTORS` for the answer as written.
    """
    names = _EXPLICIT if is_cut else (*_EXPLICIT, *_FALLBACKS[kind])
    for name in names:
        answer = extractors[name](text)
        if answer is not None:
            return (letter(answer) or answer) if kind == "choice" else answer
    return None


def gold_answer(solution: str) -> str:
    """Extract the final answer from a dataset's solution if it has ``####`` or a box; otherwise return all of it."""
    return EXTRACTORS["hashes"](solution) or EXTRACTORS["boxed"](solution) or solution.strip()
