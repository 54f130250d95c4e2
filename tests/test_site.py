"""The manual as a site: it builds without a warning, is whole without a network, and every link leads somewhere."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from manual_pages import links, settings
from manual_pages.reference import public_paths

import agentsgym
from agentsgym.cli.catalogue import config_rows, entries
from agentsgym.cli.options import find_env
from agentsgym.envs import PACKAGED
from agentsgym.envs.config import COMMON_FIELDS

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium")
EMPTY = frozenset(("area", "base", "br", "circle", "hr", "img", "input", "link", "meta", "path", "source", "wbr"))
NO_TEXT = frozenset(("code", "pre", "script", "style", "svg", "h1", "h2", "h3"))  # a heading may begin with "1."
#: What Markdown leaves of itself in a text that it did not read as its writer meant it.
LEFT_OVER = re.compile(
    r"(?:^|\n)\s*(?:[-*] |\d+\. |#+ |\|.*\|)|```|`|\]\(|\*\*|:\w+:`|>>> |::|(?<![\w.])_[a-z ]+_(?![\w(])"
)


@dataclass
class Html:
    """What a page of the site has.

    Attributes:
        ids: Its anchors.
        hrefs: Where its links lead.
        loaded: What a browser loads to show it.
        texts: Pieces of its text that are no code.
        code: All its code, a piece a line.
    """

    ids: set[str] = field(default_factory=set)
    hrefs: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)


class Reader(HTMLParser):
    """Reads a page of the site."""

    def __init__(self) -> None:
        super().__init__()
        self.page = Html()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.page.ids |= {known[name] for name in ("id", "name") if name in known}
        if tag == "a" and "href" in known:
            self.page.hrefs.append(known["href"])
        elif tag == "link" and known.get("rel") not in ("prev", "next", "canonical"):
            self.page.loaded.append(known["href"])
        self.page.loaded += [known[name] for name in ("src", "srcset", "poster", "data") if name in known]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "code" in self.open:
            self.page.code.append(data.strip())
        elif "article" in self.open and not NO_TEXT & set(self.open) and data.strip():
            self.page.texts.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet, which hides warnings from --strict too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stdout) == (0, ""), built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Html]:
    found: dict[str, Html] = {}
    for file in sorted(site.rglob("*.html")):
        reader = Reader()
        reader.feed(file.read_text(encoding="utf-8"))
        found[file.relative_to(site).as_posix()] = reader.page
    return found


def test_every_link_and_every_anchor_leads_somewhere(site: Path, pages: dict[str, Html]) -> None:
    lost: list[str] = []
    for name, page in pages.items():
        for href in page.hrefs:
            parts = urlsplit(href)
            if parts.scheme or name == "404.html":
                continue
            target = (site / name).parent / unquote(parts.path) if parts.path else site / name
            target = target / "index.html" if target.is_dir() else target
            linked = pages.get(os.path.relpath(target, site))
            has_anchor = not parts.fragment or linked is None or unquote(parts.fragment) in linked.ids
            if not target.is_file() or not has_anchor:
                lost.append(f"{name}: {href}")
    assert lost == []
    assert sum(len(page.hrefs) for page in pages.values()) > 1000


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[str, Html]) -> None:
    foreign = {one for page in pages.values() for one in page.loaded if urlsplit(one).scheme not in ("", "data")}
    assert foreign == set()
    assert not any(one.startswith("//") for page in pages.values() for one in page.loaded)
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\s]+", sheet.read_text(encoding="utf-8")) == []


def test_all_of_the_markdown_was_read(pages: dict[str, Html]) -> None:
    left = [
        f"{name}: {text.strip()[:80]}" for name, page in pages.items() for text in page.texts if LEFT_OVER.search(text)
    ]
    assert left == []


def test_every_environment_of_the_catalogue_is_on_a_page_with_its_settings(pages: dict[str, Html]) -> None:
    missing = [
        entry.name
        for entry in entries()
        if entry.is_variant
        and entry.name not in pages[f"reference/environments/{entry.name.partition(':')[0]}.html"].code
    ]
    assert missing == []
    for group in PACKAGED:
        code = pages[f"reference/environments/{group}.html"].code
        keys = [row["key"] for row in config_rows(find_env(group).env_class) if row["own"]]
        assert [key for key in keys if key not in code] == []
        assert group in " ".join(pages["reference/environments.html"].texts)
    assert [key for key in COMMON_FIELDS if key not in pages["reference/environments.html"].code] == []


def test_every_setting_of_ours_is_on_a_page_once(pages: dict[str, Html]) -> None:
    code = pages["reference/config.html"].code
    names = [field.name for field in settings.own_fields()]
    assert len(names) > 30
    assert [name for name in names if code.count(name) == 0] == []
    text = settings.settings_page()
    assert [name for name in names if text.count(f"\n| `{name}` |") != 1] == []


def test_every_public_name_has_its_place_in_the_reference(pages: dict[str, Html]) -> None:
    ids = set().union(*(page.ids for name, page in pages.items() if name.startswith("reference/api/")))
    assert [path for path in sorted(public_paths()) if path not in ids] == []
    assert {path.rpartition(".")[2] for path in public_paths()} >= set(agentsgym.__all__) - {"__version__"}


def test_the_search_finds_what_the_manual_states_and_no_source(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert '"location":"credit.html' in index
    assert '"location":"source/' not in index


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Say nothing of each request."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(CHROMIUM is None, reason="there is no browser")
def test_a_browser_shows_the_pages_finds_by_search_and_requests_no_other_server(address: str) -> None:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    requested: list[str] = []
    output: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 400, "height": 800}, color_scheme="dark")
        page.on("request", lambda request: requested.append(request.url))
        page.on("console", lambda message: output.append(message.text))
        for name in ("reference/environments/TextArena.html", "reference/api/envs.html", "cli.html", "index.html"):
            page.goto(address + name)
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{name} is too wide"
            assert page.evaluate("document.body.getAttribute('data-md-color-scheme')") == "slate"
        page.set_viewport_size({"width": 1280, "height": 800})
        # The page reads what is typed when a key is released; it may miss a value that is set at once.
        page.locator("input[name=query]").press_sequentially("turn_credit")
        page.locator(".md-search-result__link").first.wait_for(timeout=120_000)  # its index is built first
        browser.close()
    assert [url for url in requested if not url.startswith((address, "data:", "blob:"))] == []
    assert output == []


@pytest.mark.parametrize(
    ("markdown", "page", "expected"),
    [
        ("[a](credit.md#x)", "training.md", "[a](credit.md#x)"),
        ("[a](../README.md#a-quick-look)", "environments.md", "[a](project/readme.md#a-quick-look)"),
        ("[a](docs/credit.md)", "project/readme.md", "[a](../credit.md)"),
        ("[a](../examples/tools.py)", "cli.md", "[a](source/examples/tools.py.md)"),
        ("[a](../agentsgym/types.py#L12)", "architecture.md", "[a](source/agentsgym/types.py.md#L-12)"),
        ("[a](notebooks/quickstart.ipynb)", "README.md", "[a](notebooks/quickstart.md)"),
        ("[a](https://example.org/README.md) [b](#x)", "cli.md", "[a](https://example.org/README.md) [b](#x)"),
        ("```text\n[a](../README.md)\n```", "cli.md", "```text\n[a](../README.md)\n```"),
    ],
)
def test_a_link_of_the_repository_leads_to_the_page_of_the_site(markdown: str, page: str, expected: str) -> None:
    assert links.rewrite_links(markdown, page) == expected
