"""Hooks that mkdocs calls while it builds the site, as configured in ``mkdocs.yml``.

They generate the pages that need no manual maintenance: every environment, setting and public name, the notebooks, and
files outside the manual to which it links. Links are rewritten to their targets in the site.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from manual_pages import environments, links, notebooks, reference, settings
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

DOCS = links.ROOT / "docs"


@functools.cache
def generated_pages() -> dict[str, str]:
    """Return the generated pages of the navigation, by their paths in the site."""
    pages = {settings.PATH: settings.settings_page(), **environments.environment_pages(), **reference.api_pages()}
    for notebook in sorted((DOCS / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{notebook.stem}.md"] = notebooks.notebook_page(notebook)
    for name in links.PROJECT_PAGES:
        pages[links.site_path(name)] = (links.ROOT / name).read_text(encoding="utf-8")
    return pages


def source_pages() -> dict[str, str]:
    """Return the pages of source files to which the manual links, by their paths in the site."""
    texts = {f"docs/{file.name}": file.read_text(encoding="utf-8") for file in DOCS.glob("*.md")}
    texts |= {links.repository_path(where): text for where, text in generated_pages().items()}
    linked = {path for page, text in texts.items() for path in links.linked_source_files(text, page)}
    return {links.site_path(path): links.source_page(path) for path in sorted(linked)}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace patterns in the navigation, such as ``reference/api/*.md``, with the generated pages that match."""
    config.nav = list(_expanded(config.nav))
    return config


def _expanded(entries: Any) -> Iterator[Any]:
    for entry in entries:
        if isinstance(entry, str) and "*" in entry:
            yield from sorted(where for where in generated_pages() if fnmatch(where, entry))
        elif isinstance(entry, dict):
            yield {
                title: list(_expanded(inner)) if isinstance(inner, list) else inner for title, inner in entry.items()
            }
        else:
            yield entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for where, text in generated_pages().items():
        files.append(File.generated(config, where, content=text))
    for where, text in source_pages().items():
        files.append(File.generated(config, where, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite a page's links, which are written for readers of the repository."""
    where = page.file.src_uri
    return markdown if where.startswith("source/") else links.rewrite_links(markdown, where)


def on_serve(server: Any, **_: Any) -> Any:
    """Rebuild the site if a source of the generated pages changes."""
    for path in (*(links.ROOT / name for name in links.PROJECT_PAGES), Path(__file__).parent):
        server.watch(str(path))
    return server
