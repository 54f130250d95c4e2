"""Describe and register OpenEnv servers; no connection is opened here."""

from __future__ import annotations

import contextlib
import os
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import has_str_keys, is_int, is_seconds, is_strings, or_none, require
from agentsgym.texts import shown

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_HEADER_TEXT = re.compile(r"[\t -~]*")
_TIMES = ("connect_timeout_s", "start_timeout_s", "reset_timeout_s", "step_timeout_s")


def _are_strings(value: Any) -> bool:
    return has_str_keys(value) and is_strings([*value.values()])


def _are_headers(value: Mapping[str, str]) -> bool:
    return all(map(_HEADER_NAME.fullmatch, value))


@dataclass(frozen=True, kw_only=True)
class OpenEnvServer:
    """An OpenEnv server: at a URL, or a program that the environment starts and stops.

    It is opened at first use. Requires ``agentsgym[openenv]``.

    Attributes:
        url: URL of the server: ``"http://localhost:8000"``, ``"https://…"``, ``"ws://…"`` or ``"wss://…"``.
        command: Program and arguments of a server that is started on this machine at first use, on a free port
            (inserted for ``{port}``, and set as the environment variable ``PORT``); it is stopped with the environment.
        env: Additional environment variables for ``command``.
        cwd: Working directory of ``command``; None for the current one.
        headers: Headers of every request. ``${NAME}`` is replaced by that environment variable whenever a connection is
            opened, so that no secret is stored: ``{"Authorization": "Bearer ${HF_TOKEN}"}``. ``$$`` is a literal ``$``.
        connect_timeout_s: Time limit for opening a connection and for its first response, in seconds.
        start_timeout_s: Time limit for ``command`` until it responds, in seconds.
        reset_timeout_s: Time limit for a reset, in seconds.
        step_timeout_s: Time limit for a step, in seconds.
        max_message_bytes: Maximum size of a message.
    """

    url: str | None = None
    command: Sequence[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    cwd: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    connect_timeout_s: float = 10.0
    start_timeout_s: float = 60.0
    reset_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    max_message_bytes: int = 100 * 2**20

    def __post_init__(self) -> None:
        if (self.url is None) == (self.command is None):
            raise ConfigError(
                f"OpenEnvServer requires exactly one of url and command, got {'both' if self.url else 'neither'}"
            )
        if self.url is not None:
            _check_url(self.url)
        for name, valid, expected in (
            ("command", or_none(lambda value: is_strings(value) and len(value) > 0), "a list of program and arguments"),
            ("env", _are_strings, "a dict of strings"),
            ("headers", _are_strings, "a dict of strings"),
            ("headers", _are_headers, "a dict with header names (without spaces) as keys"),
            *((name, is_seconds, "a positive number") for name in _TIMES),
            ("max_message_bytes", is_int(1), "a positive int"),
        ):
            require(f"OpenEnvServer.{name}", getattr(self, name), valid, expected)

    @property
    def label(self) -> str:
        """The server's name in error messages."""
        if self.url is not None:
            return f"the OpenEnv server at {self.url}"
        return f"the OpenEnv server {shown([*(self.command or ())], 100)}"

    def request_headers(self) -> dict[str, str]:
        """Return the headers with environment variables filled in.

        Raises:
            ConfigError: A variable is not set, a ``$`` does not start one, or a header is invalid after substitution.
        """
        filled: dict[str, str] = {}
        for name, text in self.headers.items():
            try:
                filled[name] = string.Template(text).substitute(os.environ)
            except KeyError as error:
                raise ConfigError(
                    f"OpenEnvServer.headers[{name!r}] needs the environment variable {error.args[0]}, which is not set"
                ) from None
            except ValueError:
                raise ConfigError(
                    f"OpenEnvServer.headers[{name!r}] has a '$' that does not start ${{NAME}}: write '$$' for a '$'"
                ) from None
            if not _HEADER_TEXT.fullmatch(filled[name]):  # checked here, since later errors would reveal the secret
                raise ConfigError(
                    f"OpenEnvServer.headers[{name!r}] must be one line of printable ASCII once its variables are "
                    "filled in: does one of them end with a line break?"
                )
        return filled


def _check_url(url: Any) -> None:
    parts, is_valid = urlsplit(""), False
    with contextlib.suppress(ValueError):  # an invalid port
        parts = urlsplit(url if isinstance(url, str) else "")
        is_valid = parts.scheme in {"http", "https", "ws", "wss"} and bool(parts.hostname) and parts.port != 0
    if not is_valid:
        raise ConfigError(
            f"OpenEnvServer.url must be a URL such as 'http://localhost:8000' (http, https, ws or wss), "
            f"got {shown(url)}"
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError("OpenEnvServer.url must not contain a user or a password: pass them in headers, as ${NAME}")
    if parts.query or parts.fragment:
        raise ConfigError(f"OpenEnvServer.url must not have a query or a fragment, got {shown(url)}")


def address_of(url: str, scheme: str, path: str) -> str:
    """Return the address of a path on a server; the scheme, ``"http"`` or ``"ws"``, is with TLS if the URL's is.

    >>> address_of("https://example.org/games/", "ws", "ws")
    'wss://example.org/games/ws'
    """
    given, _, rest = url.partition("://")
    secure = "s" if given in {"https", "wss"} else ""
    return f"{scheme}{secure}://{rest.rstrip('/').removesuffix('/ws')}/{path}"


def is_local(url: str) -> bool:
    """Whether a server runs on this machine, in which case no proxy is used."""
    return urlsplit(url).hostname in _LOCAL_HOSTS


_registered: dict[str, OpenEnvServer] = {}


def register_server(name: str, server: OpenEnvServer | str) -> None:
    """Register a server under a name for ``env_config["server"]``; dataset rows can use only registered servers.

    Args:
        name: Name for ``env_config["server"]``.
        server: The server, or its URL.

    Raises:
        ConfigError: The server is invalid, or another server has that name.
    """
    made = as_server(server, f"register_server({name!r})")
    if _registered.get(name, made) != made:
        raise ConfigError(f"another server is already registered as {shown(name)}: choose another name")
    _registered[name] = made


def registered_server(name: str) -> OpenEnvServer:
    """Find a server by its name."""
    if name not in _registered:
        hint = did_you_mean(name, _registered) if _registered else ""
        raise ConfigError(
            f"env_config['server'] names {shown(name)}, which is not registered with register_server{hint} (to pass "
            "a URL, use OpenEnvEnv(server=…))"
        )
    return _registered[name]


def as_server(given: Any, name: str) -> OpenEnvServer:
    """Convert a server or a URL to a server."""
    if isinstance(given, str):
        return OpenEnvServer(url=given)
    if not isinstance(given, OpenEnvServer):
        raise ConfigError(f"{name} must be an OpenEnvServer or a URL, got {shown(given)}")
    return given
