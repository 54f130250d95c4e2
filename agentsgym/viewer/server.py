"""The page of the viewer: a local server for it, and writing it to a single file that can be shared.

The server reads one store and accepts only GET requests; a URL never names a file. It listens on 127.0.0.1 and rejects
requests for any other host name, which prevents other sites from reaching it through DNS rebinding. It does not send
data to other sites' pages.
"""

from __future__ import annotations

import base64
import errno
import functools
import hashlib
import socketserver
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import parse_qsl, urlsplit

from agentsgym.cached_folders import replacing
from agentsgym.errors import ConfigError, StoreError
from agentsgym.reports.colors import CSS
from agentsgym.texts import sentence_of
from agentsgym.viewer.answers import Answers, Mode
from agentsgym.viewer.plain import dumped

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
    """Write a page with rollouts, their tokens and groups; an existing file is replaced atomically.

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
        groups = {str(key): answers.group(key) for key in keys}
        yield data_element(f"chunk-{number}", _packed({"rollouts": rollouts, "groups": groups}))
    yield data_element("chunk-turns", _packed(answers.turns()))
    yield end(assets)


def _packed(value: Any) -> str:
    """Return a value as JSON, compressed for ``DecompressionStream("deflate")`` and encoded in base64."""
    return base64.b64encode(zlib.compress(dumped(value).encode("ascii"), 6)).decode("ascii")


HOST: Final = "127.0.0.1"
SERVED_LIMIT: Final = 50_000
_NAMES: Final = (HOST, "localhost")
_MAX_URL_CHARS: Final = 16_384
_IDLE_S: Final = 60.0  # after which a connection without requests is closed

Parameters = Mapping[str, str]


def serve(
    store: RolloutStore,
    *,
    port: int = 0,
    limit: int = SERVED_LIMIT,
    tokenizer: str | Path | None = None,
    on_ready: Callable[[str], None] = print,
) -> None:
    """Serve a page that shows rollouts, to this machine only, until Ctrl-C.

    Args:
        store: The rollouts: a store, or a slice or filter of one, such as ``store.filter(…)``.
        port: The port on 127.0.0.1; 0 picks a free one.
        limit: The maximum number of rollouts listed; the newest are chosen.
        tokenizer: A ``tokenizer.json``, or its folder, for rollouts stored without a tokenizer.
        on_ready: A function that is called with the page's URL once it can be opened; by default, prints the URL.

    Raises:
        ConfigError: The port is in use or not allowed, or ``limit`` is not positive.
        StoreError: A file of the store is missing or damaged, or ``tokenizer`` is not a tokenizer.
    """
    answers = Answers(store, limit=limit, mode="served", tokenizer=None if tokenizer is None else Path(tokenizer))
    with ViewerServer(answers, port) as server:
        on_ready(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


class ViewerServer(ThreadingHTTPServer):
    """Serves the page, with a thread per connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answers: Answers, port: int = 0) -> None:
        """Listen on a port; 0 picks a free one."""
        self.answers, self.assets = answers, Assets.read()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            why = f"cannot be used: {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                why = "is in use: choose another --port, or omit --port to use a free one"
            raise ConfigError(f"port {port} {why}") from error
        except OverflowError as error:
            raise ConfigError(f"a port must be a number from 0 to 65535, got {port}") from error
        self.url = f"http://{HOST}:{self.server_port}/"
        self.hosts = {f"{name}:{self.server_port}" for name in _NAMES}
        if self.server_port == 80:
            self.hosts |= {*_NAMES}

    def server_bind(self) -> None:
        """Bind without looking up this machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a closed connection; print any other error as usual."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ViewerServer  # pyright: ignore[reportIncompatibleVariableOverride]  # always a ViewerServer
    protocol_version = "HTTP/1.1"
    server_version = "agentsgym"
    sys_version = ""
    timeout = _IDLE_S

    def do_GET(self) -> None:
        """Respond with the page or with part of its data."""
        try:
            self._answer()
        except ConfigError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, sentence_of(error))
        except StoreError as error:
            self._refuse(HTTPStatus.GONE, sentence_of(error))

    def _answer(self) -> None:
        server = self.server
        if self.headers.get_all("Host", []) not in [[host] for host in server.hosts]:
            why = f"this server is {server.url}; requests for any other host are rejected"
            self._refuse(HTTPStatus.FORBIDDEN, why)
            return
        if len(self.path) > _MAX_URL_CHARS:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG, "the URL is too long")
            return
        try:
            address = urlsplit(self.path)
        except ValueError as error:
            raise ConfigError(f"the URL cannot be parsed: {sentence_of(error, 200)}") from error
        answer = _ANSWERS.get(address.path)
        if address.path == "/":
            document = begin(server.assets, server.answers.title, "served") + end(server.assets)
            policy = f"{server.assets.policy('served')}; frame-ancestors 'none'"
            self._send(HTTPStatus.OK, document.encode(), "text/html; charset=utf-8", policy)
        elif answer is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no page at {address.path[:200]}")
        elif self.headers.get("Sec-Fetch-Site", "same-origin") not in {"same-origin", "none"}:
            self._refuse(HTTPStatus.FORBIDDEN, "only the viewer's own page may request data")
        else:
            self._json(HTTPStatus.OK, answer(server.answers, _parameters(address.query)))

    def __getattr__(self, name: str) -> Any:
        """Reject every other method, whose handler http.server looks up by name."""
        if name.startswith("do_"):
            return functools.partial(self.send_error, HTTPStatus.METHOD_NOT_ALLOWED, "only GET requests are supported")
        raise AttributeError(name)

    def log_message(self, format: str, *args: Any) -> None:  # the name in http.server
        """Log nothing."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Reject a request with another method or invalid HTTP, in the same form as other rejected requests."""
        self.close_connection = True  # the rest of the request is not read
        self._refuse(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self._json(status, {"error": sentence})

    def _json(self, status: HTTPStatus, value: Any) -> None:
        self._send(
            status, dumped(value).encode("ascii"), "application/json", "default-src 'none'; frame-ancestors 'none'"
        )

    def _send(self, status: HTTPStatus, body: bytes, kind: str, policy: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _parameters(query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=20))
    except ValueError as error:
        raise ConfigError(f"the URL cannot be parsed: {sentence_of(error, 200)}") from error


def _number(parameters: Parameters, name: str) -> int:
    text = parameters.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ConfigError(f"{name} must be an integer from 0 to 10**18 - 1, got {text[:100]!r}")
    return int(text)


_ANSWERS: Final[Mapping[str, Callable[[Answers, Parameters], Any]]] = {
    "/data/list": lambda answers, _: answers.list(),
    "/data/rollout": lambda answers, query: answers.rollout(_number(query, "row")),
    "/data/group": lambda answers, query: answers.group(_number(query, "key")),
    "/data/turns": lambda answers, _: answers.turns(),
    "/data/search": lambda answers, query: answers.search(query.get("text", "")),
}
