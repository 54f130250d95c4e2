"""Where each file of the repository stands in the site, and links rewritten to lead there.

The pages are written for a reader of the repository: ``../examples/tools.py`` is a file beside the manual. In the site
it is a page with that file's text, so that the site is whole without any other server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parents[3]
#: Pages beside the manual that the site has too.
PROJECT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_FENCE = re.compile(r"^(?P<fence> *(?:```+|~~~+)).*?^(?P=fence) *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s]+)(?P<after>(?:\s+\"[^\"]*\")?\))")


def site_path(path: str) -> str:
    """Where a file of the repository stands in the site.

    >>> [site_path(path) for path in ("docs/credit.md", "docs/notebooks/quickstart.ipynb", "examples/tools.py")]
    ['credit.md', 'notebooks/quickstart.md', 'source/examples/tools.py.md']
    """
    if path.startswith("docs/"):
        inner = path.removeprefix("docs/")
        return inner.removesuffix(".ipynb") + ".md" if inner.endswith(".ipynb") else inner
    return f"project/{path.lower()}" if path in PROJECT_PAGES else f"source/{path}.md"


def repository_path(src_uri: str) -> str:
    """The file of the repository that a page of the site shows: what its links are relative to."""
    originals = {site_path(path): path for path in PROJECT_PAGES}
    return originals.get(src_uri, f"docs/{src_uri}")


def resolved(target: str, page: str) -> str | None:
    """The file of the repository that a link leads to from a page of it; None if it leads elsewhere."""
    path = target.partition("#")[0]
    if not path or "://" in target or target.startswith(("mailto:", "/")):
        return None
    return normpath((PurePosixPath(page).parent / path).as_posix())


def outside(markdown: str, page: str) -> Iterator[str]:
    """The files that a page links to and that are no page of the manual."""
    for part, is_code in _parts(markdown):
        for link in () if is_code else _LINK.finditer(part):
            path = resolved(link["target"], page)
            if path and site_path(path).startswith("source/") and (ROOT / path).is_file():
                yield path


def rewritten(markdown: str, src_uri: str) -> str:
    """A page with its links as the site needs them."""
    page = repository_path(src_uri)

    def rewrite(link: re.Match[str]) -> str:
        path = resolved(link["target"], page)
        if path is None or not (ROOT / path).is_file():  # no file, or one that is made here: as it stands
            return link[0]
        anchor = link["target"].partition("#")[2]
        where = site_path(path)
        if where.startswith("source/"):
            anchor = re.sub(r"^L(\d+)$", r"L-\1", anchor)
        target = relpath(where, PurePosixPath(src_uri).parent.as_posix())
        return f"{link['before']}{target}{f'#{anchor}' if anchor else ''}{link['after']}"

    return "".join(part if is_code else _LINK.sub(rewrite, part) for part, is_code in _parts(markdown))


def _parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """The text in pieces, each with whether it is a block of code."""
    end = 0
    for fence in _FENCE.finditer(markdown):
        yield markdown[end : fence.start()], False
        yield fence[0], True
        end = fence.end()
    yield markdown[end:], False


def source_page(path: str) -> str:
    """The page of a file of the repository: its text, line 12 of it at the anchor ``L-12``."""
    text = (ROOT / path).read_text(encoding="utf-8")
    formatter = HtmlFormatter(linespans="L", cssclass="highlight source", wrapcode=True)
    try:
        lexer = get_lexer_for_filename(path, stripnl=False)
    except ClassNotFound:  # a text without an ending, such as the license
        lexer = TextLexer(stripnl=False)
    html = highlight(text, lexer, formatter)
    # What would be Markdown in the code is written as a character reference.
    html = html.replace("`", "&#96;")
    return f"---\ntitle: {path}\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# `{path}`\n\n{html}"
