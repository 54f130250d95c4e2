"""Find the calls that a text answer merely quotes: without token ids, nothing distinguishes a marker from text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

_CALL: Final = re.compile(r"[\w./-]|\s*[\[<]|\s*\{\s*[\"']")  # the beginning of a call in some form
_QUOTES: Final = ("`", '"', "'", "\u201c", "\u2018", "\u00ab", "(")
_NEAR: Final = 40  # characters behind a call that show whether its line continues
_FENCE_END: Final = re.compile(r"\s*```")


def without_quotes(text: str, opens: str, closes: str, spelled: Callable[[str], str]) -> str:
    """Rewrite the opening markers of quoted calls, in time that is linear in the text.

    A call is quoted in a line that has text before it, unless nothing but the call follows and no quotation mark stands
    directly before it; and in a code fence that contains anything else.

    Args:
        text: The answer.
        opens: A pattern of opening markers.
        closes: A pattern of closing markers.
        spelled: Rewrites a marker so that it is none.
    """
    position, pieces = 0, list[str]()
    for start, end in _quoted(text, opens, closes):
        pieces += text[position:start], spelled(text[start:end])
        position = end
    return "".join([*pieces, text[position:]])


def _quoted(text: str, opens: str, closes: str) -> Iterator[tuple[int, int]]:
    block = re.compile(rf"(?P<opens>{opens})(?P<body>(?:(?!{opens}|{closes}).)*+)(?:{closes})?", re.DOTALL)
    position, num_fences = 0, 0
    for found in block.finditer(text):
        num_fences += text.count("```", position, found.start())
        line = text[position : found.start()].rpartition("\n")[2].rpartition(">")[2].strip()
        behind = text[found.end() : found.end() + _NEAR].partition("\n")[0].strip()
        is_named = not _CALL.match(found["body"]) or line.endswith(_QUOTES) or (behind and not behind.startswith("<"))
        if (line and is_named) or (num_fences % 2 and not _is_alone(text, found)):
            yield found.span("opens")
        num_fences += text.count("```", found.start(), found.end())
        position = found.end()


def _is_alone(text: str, found: re.Match[str]) -> bool:
    """Whether a code fence contains nothing but a call."""
    before = text[text.rfind("```", 0, found.start()) : found.start()].partition("\n")[2]
    return not before.strip() and _FENCE_END.match(text, found.end()) is not None
