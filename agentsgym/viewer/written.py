"""The page of the viewer, and writing it to a single file that can be shared."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from agentsgym.cached_folders import replacing
from agentsgym.credit.rewards import TURN_CREDITS
from agentsgym.credit.settings import CreditSettings
from agentsgym.errors import ConfigError
from agentsgym.reports.colors import CSS
from agentsgym.viewer.answers import Answers, Mode
from agentsgym.viewer.plain import dumped
from agentsgym.viewer.what_if import Request, available, options_of

if TYPE_CHECKING:
    from agentsgym.store.reader import RolloutStore

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


WRITTEN_LIMIT: Final = 1000
_PER_CHUNK: Final = 32  # rollouts; task groups are never split


def write_page(
    store: RolloutStore, path: str | Path, *, limit: int = WRITTEN_LIMIT, tokenizer: str | Path | None = None
) -> Path:
    """Write a page with rollouts, their tokens, groups and what-ifs; an existing file is replaced atomically.

    Args:
        store: The rollouts: a store, or a slice or filter of one, such as ``store.filter(…)``.
        path: The path of the file.
        limit: The maximum number of rollouts; the newest are chosen.
        tokenizer: A ``tokenizer.json``, or its folder, for rollouts stored without a tokenizer.

    Returns:
        The path of the file.

    Raises:
        ConfigError: ``limit`` is not positive.
        StoreError: A file of the store is missing or damaged, or ``tokenizer`` is not a tokenizer.
        OSError: The file cannot be written; an existing one is unchanged.
    """
    answers = Answers(store, limit=limit, mode="written", tokenizer=None if tokenizer is None else Path(tokenizer))
    path = Path(path)
    with replacing(path) as file:
        file.writelines(part.encode() for part in _document(answers))
    return path


def _document(answers: Answers) -> Iterator[str]:
    """Yield the parts of the page, with its data in chunks of complete task groups."""
    index = answers.index
    chunks: list[list[int]] = []
    chunk_of: dict[int, int] = {}
    size = _PER_CHUNK
    for key, rows in index.groups.items():
        if size + len(rows) > _PER_CHUNK:
            chunks.append([])
            size = 0
        chunks[-1].append(key)
        size += len(rows)
        chunk_of |= dict.fromkeys(rows, len(chunks) - 1)
    assets = Assets.read()
    yield begin(assets, answers.title, "written")
    listed = answers.list()
    listed["columns"] = listed["columns"] | {"chunk": [chunk_of[row] for row in index.rows]}
    yield data_element("list", dumped(listed), "application/json")
    for number, keys in enumerate(chunks):
        rollouts = {str(row): answers.rollout(row) for row in sorted(row for key in keys for row in index.groups[key])}
        groups = {str(key): answers.group(key) | {"what_ifs": _what_ifs(answers, key)} for key in keys}
        yield data_element(f"chunk-{number}", _packed({"rollouts": rollouts, "groups": groups}))
    yield data_element("chunk-turns", _packed(answers.turns()))
    yield end(assets)


def _what_ifs(answers: Answers, key: int) -> list[dict[str, Any]]:
    """Return the what-ifs among :func:`included_requests` that can be computed for a task group."""
    results: list[dict[str, Any]] = []
    for request in included_requests(answers.batch(key).settings):
        with contextlib.suppress(ConfigError):  # the estimator cannot be applied to these rollouts
            result = answers.what_if_of(key, request)
            results.append({name: result[name] for name in ("settings", "advantages", "rows", "compared", "note")})
    return results


def included_requests(run: CreditSettings | None) -> list[Request]:
    """Return the what-if requests whose results a written page contains.

    The first are the run's settings, if known, with every turn credit. They are followed by every estimator with its
    defaults, with the scales "group" and "none", and with each choice of its options.
    """
    base = CreditSettings() if run is None else replace(run, value_head=None)
    names = available()
    is_known = run is not None and run.advantage_estimator in names
    found: list[Request] = []
    if is_known:
        found += _allowed(base)
        found += [replace(one, turn_credit=credit) for one in found[:1] for credit in TURN_CREDITS]
    for name in names:
        plain = replace(base, advantage_estimator=name, options={}, potential_weight=0.0)
        for scale in ("group", "none"):
            found += _allowed(replace(plain, scale_rewards=scale))
        for option, one in options_of(name).items():
            for value in one["choices"] or ():
                if value != one["default"]:
                    found += _allowed(replace(plain, options={option: value}))
    if not is_known:
        found += [Request(settings=CreditSettings(), turn_credit=credit) for credit in TURN_CREDITS]
    return [one for index, one in enumerate(found) if one not in found[:index]]


def _allowed(settings: CreditSettings) -> list[Request]:
    """Return a list with a request for the settings; empty if they are not allowed, as with some options of runs."""
    try:
        return [Request(settings=settings)]
    except ConfigError:
        return []


def _packed(value: Any) -> str:
    """Return a value as JSON, compressed for ``DecompressionStream("deflate")`` and encoded in base64."""
    return base64.b64encode(zlib.compress(dumped(value).encode("ascii"), 6)).decode("ascii")
