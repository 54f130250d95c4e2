"""Paths of the repository's files in the site, and the rewriting of links to them.

The manual is written for readers of the repository, where ``../examples/tools.py`` links to a file outside the manual.
In the site, this becomes a link to a page with that file's text, so the site is complete without any other server.
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
#: Pages outside the manual that are also part of the site.
PROJECT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_FENCE = re.compile(r"^(?P<fence> *(?:```+|~~~+)).*?^(?P=fence) *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s]+)(?P<after>(?:\s+\"[^\"]*\")?\))")


def site_path(path: str) -> str:
    """Return the path of a repository file in the site.

    >>> [site_path(path) for path in ("docs/credit.md", "docs/notebooks/quickstart.ipynb", "examples/tools.py")]
    ['credit.md', 'notebooks/quickstart.md', 'source/examples/tools.py.md']
    """
    if path.startswith("docs/"):
        inner = path.removeprefix("docs/")
        return inner.removesuffix(".ipynb") + ".md" if inner.endswith(".ipynb") else inner
    return f"project/{path.lower()}" if path in PROJECT_PAGES else f"source/{path}.md"


def repository_path(src_uri: str) -> str:
    """Return the repository file that a page of the site shows, to which the page's links are relative."""
    originals = {site_path(path): path for path in PROJECT_PAGES}
    return originals.get(src_uri, f"docs/{src_uri}")


def resolve_link(target: str, page: str) -> str | None:
    """Return the repository file to which a link on a page of the repository refers; None for other links."""
    path = target.partition("#")[0]
    if not path or "://" in target or target.startswith(("mailto:", "/")):
        return None
    return normpath((PurePosixPath(page).parent / path).as_posix())


def linked_source_files(markdown: str, page: str) -> Iterator[str]:
    """Yield the files to which a page links and that are not pages of the manual."""
    for part, is_code in _parts(markdown):
        for link in () if is_code else _LINK.finditer(part):
            path = resolve_link(link["target"], page)
            if path and site_path(path).startswith("source/") and (ROOT / path).is_file():
                yield path


def rewrite_links(markdown: str, src_uri: str) -> str:
    """Return a page with its links rewritten for the site."""
    page = repository_path(src_uri)

    def rewrite(link: re.Match[str]) -> str:
        path = resolve_link(link["target"], page)
        if path is None or not (ROOT / path).is_file():  # not a file, or a generated page: unchanged
            return link[0]
        anchor = link["target"].partition("#")[2]
        where = site_path(path)
        if where.startswith("source/"):
            anchor = re.sub(r"^L(\d+)$", r"L-\1", anchor)
        target = relpath(where, PurePosixPath(src_uri).parent.as_posix())
        return f"{link['before']}{target}{f'#{anchor}' if anchor else ''}{link['after']}"

    return "".join(part if is_code else _LINK.sub(rewrite, part) for part, is_code in _parts(markdown))


def _parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a text, and whether each is a code block."""
    end = 0
    for fence in _FENCE.finditer(markdown):
        yield markdown[end : fence.start()], False
        yield fence[0], True
        end = fence.end()
    yield markdown[end:], False


def source_page(path: str) -> str:
    """Return a page with the text of a repository file, whose line 12 has the anchor ``L-12``."""
    text = (ROOT / path).read_text(encoding="utf-8")
    formatter = HtmlFormatter(linespans="L", cssclass="highlight source", wrapcode=True)
    try:
        lexer = get_lexer_for_filename(path, stripnl=False)
    except ClassNotFound:  # a file without a known extension, such as the license
        lexer = TextLexer(stripnl=False)
    html = highlight(text, lexer, formatter)
    # Backticks in the code are escaped so that they are not parsed as Markdown.
    html = html.replace("`", "&#96;")
    return f"---\ntitle: {path}\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# `{path}`\n\n{html}"
