"""Assembly of the page: style, data and script in a single document that loads nothing from elsewhere.

Texts from environments and models are included as data. A content security policy allows only the viewer's style and
script, by their hashes, and forbids the script to parse texts as HTML.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final, Self

from agentsgym.reports.colors import CSS
from agentsgym.viewer.answers import Mode

STATIC: Final = Path(__file__).parent / "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """The style sheet and the script of the page, which are the same for every store."""

    style: str
    script: str

    @classmethod
    def read(cls, folder: Path = STATIC) -> Self:
        """Read and concatenate the style sheets and the scripts, in the order of their names."""
        style, scripts = (
            "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob(pattern)))
            for pattern in ("*.css", "*.js")
        )
        light, dark = ("".join(f"--{name}:{value};" for name, value in CSS[one].items()) for one in ("light", "dark"))
        theme = (  # the system's theme, unless the page's switch overrides it
            f":root{{{light}}}@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
            f":root[data-theme=dark]{{{dark}}}"
        )
        return cls(style=f"{theme}\n{style}", script=f'(() => {{\n"use strict";\n{scripts}\n}})();\n')

    def policy(self, mode: Mode) -> str:
        """Return the content security policy."""
        connected = "'self'" if mode == "served" else "'none'"
        return "; ".join([
            "default-src 'none'",
            f"script-src {_hash(self.script)}",
            f"style-src {_hash(self.style)}",
            f"connect-src {connected}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
        ])  # fmt: skip


def begin(assets: Assets, title: str, mode: Mode) -> str:
    """Return the document before its data."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(assets.policy(mode))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title.encode(errors='replace').decode())} · agentsgym</title>\n"
        f"<style>{assets.style}</style>\n</head>\n"
        f'<body data-mode="{mode}">\n<main id="app"></main>\n'
        "<noscript>This page requires JavaScript: enable it to see the rollouts.</noscript>\n"
    )


def data_element(name: str, text: str, kind: str = "text/plain") -> str:
    """Return an element that contains data, which must have no ``<``, so that nothing in it ends the element."""
    return f'<script type="{kind}" id="{name}">{text}</script>\n'


def end(assets: Assets) -> str:
    """Return the document after its data."""
    return f"<script>{assets.script}</script>\n</body>\n</html>\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
