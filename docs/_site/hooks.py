"""What mkdocs calls while it builds the site (``mkdocs.yml`` names this file).

Pages that nobody has to keep up are made here: every environment, every setting, every public name, the notebooks, and
the files beside the manual that it links to. Links are rewritten to where things stand in the site.
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
def made_pages() -> dict[str, str]:
    """The pages of the navigation that are made, by where they stand in the site."""
    pages = {settings.WHERE: settings.settings_page(), **environments.environment_pages(), **reference.api_pages()}
    for notebook in sorted((DOCS / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{notebook.stem}.md"] = notebooks.notebook_page(notebook)
    for name in links.PROJECT_PAGES:
        pages[links.site_path(name)] = (links.ROOT / name).read_text(encoding="utf-8")
    return pages


def source_pages() -> dict[str, str]:
    """The pages of the files that the manual links to."""
    texts = {f"docs/{file.name}": file.read_text(encoding="utf-8") for file in DOCS.glob("*.md")}
    texts |= {links.repository_path(where): text for where, text in made_pages().items()}
    linked = {path for page, text in texts.items() for path in links.outside(text, page)}
    return {links.site_path(path): links.source_page(path) for path in sorted(linked)}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that are made into the navigation, where it has a pattern such as ``reference/api/*.md``."""
    config.nav = list(_expanded(config.nav))
    return config


def _expanded(entries: Any) -> Iterator[Any]:
    for entry in entries:
        if isinstance(entry, str) and "*" in entry:
            yield from sorted(where for where in made_pages() if fnmatch(where, entry))
        elif isinstance(entry, dict):
            yield {
                title: list(_expanded(inner)) if isinstance(inner, list) else inner for title, inner in entry.items()
            }
        else:
            yield entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for where, text in made_pages().items():
        files.append(File.generated(config, where, content=text))
    for where, text in source_pages().items():
        files.append(File.generated(config, where, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite the links of a page that was written for readers of the repository."""
    where = page.file.src_uri
    return markdown if where.startswith("source/") else links.rewritten(markdown, where)


def on_serve(server: Any, **_: Any) -> Any:
    """Build again when what the pages are made from changes."""
    for path in (*(links.ROOT / name for name in links.PROJECT_PAGES), Path(__file__).parent):
        server.watch(str(path))
    return server
