"""Conversion of docstrings and declarations to Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

_ROLE = re.compile(r":\w+:`(?P<text>[^`]+)`")
_TITLED = re.compile(r"(?P<title>.+?)\s*<(?P<target>[^>]+)>")
_DOCTEST = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*|\n(?P=indent) .*)*", re.MULTILINE)
_SECTION = re.compile(r"^(?:Args|Attributes|Raises|Returns|Yields|Example|Examples):$", re.MULTILINE)
_ITEM = re.compile(r"^- (?P<names>``\w+``(?:, ``\w+``)*): (?P<text>.*(?:\n(?:  .*|(?=\n  )))*)", re.MULTILINE)


def as_markdown(docstring: str) -> str:
    """Convert a docstring to Markdown: references become links if the site has their target, and doctests code blocks.

    >>> as_markdown("See :class:`~agentsgym.fields.Field` and ``x``.")
    'See <autoref optional identifier="agentsgym.fields.Field"><code>Field</code></autoref> and ``x``.'
    """
    text = _DOCTEST.sub(_fenced, _ROLE.sub(_reference, docstring))
    return re.sub(r"(?<=\S)::$", ":", re.sub(r"^ *::$", "", text, flags=re.MULTILINE), flags=re.MULTILINE)


def _reference(role: re.Match[str]) -> str:
    text = role["text"]
    titled = _TITLED.fullmatch(text)
    target = (titled["target"] if titled else text).lstrip("~.")
    title = titled["title"] if titled else target.rpartition(".")[2] if text.startswith("~") else target
    if not target.startswith("agentsgym."):  # a name in the same class or module
        return f"`{title}`"
    return f'<autoref optional identifier="{target}"><code>{title}</code></autoref>'


def _fenced(example: re.Match[str]) -> str:
    indent = example["indent"]
    return f"{indent}```pycon\n{example[0]}\n{indent}```"


def prose_of(documented: Any) -> str:
    """Return the prose of an object's docstring, without its keys, arguments and errors."""
    text = _SECTION.split(inspect.getdoc(documented) or "", maxsplit=1)[0]
    text = _ITEM.sub("", re.sub(r"Keys of ``env_config``(?:(?!\n\n).|\n)*?:\n(?=\n- )", "", text))
    return as_markdown(re.sub(r"\n{3,}", "\n\n", text)).strip()


def meanings_of(documented: type) -> dict[str, str]:
    """Return the meaning of each key, ``- ``key``: meaning``, in the docstrings of a class and its bases."""
    meanings: dict[str, str] = {}
    for one in documented.__mro__:
        for item in _ITEM.finditer(inspect.cleandoc(one.__dict__.get("__doc__") or "")):
            for name in re.findall(r"\w+", item["names"]):
                meanings.setdefault(name, one_line(item["text"]))
    return meanings


def attributes_of(documented: type) -> dict[str, str]:
    """Return the meaning of each attribute in the ``Attributes`` sections of a class and its bases."""
    meanings: dict[str, str] = {}
    for one in documented.__mro__:
        text = inspect.cleandoc(one.__dict__.get("__doc__") or "")
        section = re.search(r"^Attributes:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
        for item in re.finditer(r"^    (\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.MULTILINE):
            meanings.setdefault(item[1], one_line(item[2]))
    return meanings


def one_line(text: str) -> str:
    """Convert a docstring's text to a line of Markdown."""
    return as_markdown(" ".join(text.split()))


def cell(text: str) -> str:
    r"""Escape a text for a cell of a Markdown table; in code, vertical bars are left unchanged.

    >>> cell("`a|b` or c|d")
    '`a|b` or c\\|d'
    """
    return "".join(
        part if part.startswith("`") else re.sub(r"(?<!\\)\|", r"\\|", part)
        for part in re.split(r"(`+[^`]+`+)", " ".join(text.split()))
    )


def code(value: Any) -> str:
    """Return a value's ``repr`` as code."""
    text = repr(value)
    return f"``{text}``" if "`" in text else f"`{text}`"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; empty if there are no rows.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    lines = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(header)} |", "|" + " --- |" * len(header), *lines])


def page(*parts: str) -> str:
    """Join the parts of a page, skipping empty ones."""
    return "\n\n".join(part for part in parts if part) + "\n"
