"""Reduce the output of a TextWorld game to its narrative."""

from __future__ import annotations

import re

_BANNER = re.compile(r"^[ \\_$|/<>]*[\\_$|][ \\_$|/<>]*$\n?", re.M)
_PROMPT = re.compile(r"\n?>[ ]*(?:-=[^\n]*)?\s*\Z")  # the input prompt, followed by the status line
_ENDED = re.compile(r"\s*Would you like to RESTART, RESTORE a saved game, QUIT or UNDO the last command\?\s*\Z")
_GAPS = re.compile(r"\n\s*\n(?:\s*\n)*")


def said_text(feedback: str) -> str:
    r"""Strip the prompt, the status line and superfluous empty lines.

    >>> said_text("\nYou can't go that way.\n\n\n>      -= Bedroom =-1/6")
    "You can't go that way."
    """
    text = _ENDED.sub("", _PROMPT.sub("", feedback))
    return _GAPS.sub("\n\n", text).strip()


def opening_text(feedback: str) -> str:
    """Strip the banner as well."""
    return said_text(_BANNER.sub("", feedback))
