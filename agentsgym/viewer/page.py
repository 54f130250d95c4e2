"""Put the page together: style, data and script in one document that loads nothing from anywhere.

Everything that environments and models wrote is data in it. A content security policy lets exactly our own style and
our own script run, by their hashes, and forbids the script to make HTML of texts.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final, Self

from agentsgym.reports.colors import CSS
from agentsgym.viewer.answers import Mode

STATIC: Final = Path(__file__).parent / "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """What of the page is the same for every store.

    Attributes:
        style: Its style sheet.
        script: Its script.
    """

    style: str
    script: str

    @classmethod
    def read(cls, folder: Path = STATIC) -> Self:
        """Read the style sheets and the scripts, each put together in the order of their names."""
        style, scripts = (
            "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob(pattern)))
            for pattern in ("*.css", "*.js")
        )
        return cls(style=f"{_theme()}\n{style}", script=f'(() => {{\n"use strict";\n{scripts}\n}})();\n')

    def policy(self, mode: Mode) -> str:
        """The content security policy."""
        asked = "'self'" if mode == "served" else "'none'"
        return "; ".join([
            "default-src 'none'",
            f"script-src {_hash(self.script)}",
            f"style-src {_hash(self.style)}",
            f"connect-src {asked}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
        ])  # fmt: skip


def begin(assets: Assets, title: str, mode: Mode) -> str:
    """The document up to where its data stands."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(assets.policy(mode))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title.encode(errors='replace').decode())} · agentsgym</title>\n"
        f"<style>{assets.style}</style>\n</head>\n"
        f'<body data-mode="{mode}">\n<main id="app"></main>\n'
        "<noscript>This page draws itself by its own script, which your browser does not run.</noscript>\n"
    )


def data_element(name: str, text: str, kind: str = "text/plain") -> str:
    """One piece of data: text without ``<``, so that nothing in it ends the element."""
    return f'<script type="{kind}" id="{name}">{text}</script>\n'


def end(assets: Assets) -> str:
    """The document from where its data ends."""
    return f"<script>{assets.script}</script>\n</body>\n</html>\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _theme() -> str:
    """The colors: as the reader's system asks, unless the page's own switch says otherwise."""
    light, dark = (_variables(CSS[name]) for name in ("light", "dark"))
    return (
        f":root{{{light}}}@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}"
    )


def _variables(theme: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in theme.items())
