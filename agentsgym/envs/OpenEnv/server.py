"""Say how an OpenEnv server is reached; nothing is opened here."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import is_int, is_positive_number, is_strings, require
from agentsgym.texts import shown

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_HEADER_TEXT = re.compile(r"[\t -~]*")
_TIMES = ("connect_timeout_s", "start_timeout_s", "reset_timeout_s", "step_timeout_s")


@dataclass(frozen=True, kw_only=True)
class OpenEnvServer:
    """An OpenEnv server whose games an environment plays: at a URL, or a program that is started and stopped here.

    Nothing is opened before it is needed. Needs ``agentsgym[openenv]``.

    Attributes:
        url: Where it runs: ``"http://localhost:8000"``, ``"https://…"``, ``"ws://…"`` or ``"wss://…"``.
        command: Program and arguments of a server that is started on this machine at first use, on a free port that
            stands in place of ``{port}`` and in the environment variable ``PORT``; it ends with the environment.
        env: Further environment variables for ``command``.
        cwd: Where ``command`` runs; None for here.
        headers: Sent with every request. ``${NAME}`` is replaced by that environment variable whenever a connection is
            opened, so that no secret is written down: ``{"Authorization": "Bearer ${HF_TOKEN}"}``. ``$$`` is a ``$``.
        connect_timeout_s: How long opening a connection may take, and its first answer.
        start_timeout_s: How long ``command`` may take until it answers.
        reset_timeout_s: How long a reset may take.
        step_timeout_s: How long a step may take.
        max_message_bytes: The longest message that is read.
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
                f"OpenEnvServer requires exactly one of url and command, got {'both' if self.url else 'none'}"
            )
        if self.url is not None:
            _check_url(self.url)
        elif not is_strings(self.command) or not self.command:
            given = shown(self.command)
            raise ConfigError(f"OpenEnvServer.command must be a list of program and arguments, got {given}")
        for name in ("env", "headers"):
            require(f"OpenEnvServer.{name}", getattr(self, name), _are_texts, "a dict of texts")
        require(
            "OpenEnvServer.headers", self.headers, _are_headers, "a dict with header names (without spaces) as keys"
        )
        for name in _TIMES:
            require(f"OpenEnvServer.{name}", getattr(self, name), is_positive_number, "a positive number")
        require("OpenEnvServer.max_message_bytes", self.max_message_bytes, is_int(1), "a positive int")

    @property
    def label(self) -> str:
        """What errors call it."""
        if self.url is not None:
            return f"the OpenEnv server at {self.url}"
        return f"the OpenEnv server {shown([*(self.command or ())], 100)}"

    def request_headers(self) -> dict[str, str]:
        """Give the headers, environment variables filled in.

        Raises:
            ConfigError: A variable is not set, or a ``$`` begins none; or what a header becomes cannot be sent.
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
            if not _HEADER_TEXT.fullmatch(filled[name]):  # found here, since other errors would show the secret
                raise ConfigError(
                    f"OpenEnvServer.headers[{name!r}] is not one line of printable ASCII once its variables are "
                    "filled in: does one of them end with a line break?"
                )
        return filled


def _check_url(url: Any) -> None:
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        is_valid = parts is not None and parts.scheme in {"http", "https", "ws", "wss"} and bool(parts.hostname)
        is_valid = is_valid and (parts is None or parts.port != 0)
    except ValueError:  # a port that is no number
        parts, is_valid = None, False
    if not is_valid or parts is None:
        raise ConfigError(
            f"OpenEnvServer.url must be a URL such as 'http://localhost:8000' (http, https, ws or wss), "
            f"got {shown(url)}"
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError("OpenEnvServer.url must not contain a user or a password: pass them in headers, as ${NAME}")
    if parts.query or parts.fragment:
        raise ConfigError(f"OpenEnvServer.url must not have a query or a fragment, got {shown(url)}")


def _are_texts(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return is_strings([*cast("Mapping[Any, Any]", value).keys(), *cast("Mapping[Any, Any]", value).values()])


def _are_headers(value: Mapping[str, str]) -> bool:
    return all(map(_HEADER_NAME.fullmatch, value))


def address_of(url: str, scheme: str, path: str) -> str:
    """Give the address of one of a server's paths.

    Args:
        url: The server's.
        scheme: ``"http"`` or ``"ws"``; with TLS where the server's has it.
        path: As in ``"ws"``.

    >>> address_of("https://example.org/games/", "ws", "ws")
    'wss://example.org/games/ws'
    """
    given, _, rest = url.partition("://")
    secure = "s" if given in {"https", "wss"} else ""
    return f"{scheme}{secure}://{rest.rstrip('/').removesuffix('/ws')}/{path}"


def is_local(url: str) -> bool:
    """Whether a server runs on this machine, so that no proxy leads to it."""
    return urlsplit(url).hostname in _LOCAL_HOSTS


_registered: dict[str, OpenEnvServer] = {}


def register_server(name: str, server: OpenEnvServer | str) -> None:
    """Let ``env_config["server"]`` name a server, so that dataset rows can: a row reaches no address of its own.

    Args:
        name: What rows call it.
        server: The server, or its URL.

    Raises:
        ConfigError: This is no server, or another server has that name.
    """
    made = as_server(server, f"register_server({name!r})")
    if _registered.get(name, made) != made:
        raise ConfigError(f"another server is already registered as {shown(name)}: choose another name")
    _registered[name] = made


def registered_server(name: str) -> OpenEnvServer:
    """Find a server by its name.

    Raises:
        ConfigError: It is not registered in this process.
    """
    if name not in _registered:
        hint = did_you_mean(name, _registered) if _registered else ""
        raise ConfigError(
            f"env_config['server'] names {shown(name)}, which is not registered by register_server{hint} (pass a URL "
            "to the constructor: OpenEnvEnv(server=…))"
        )
    return _registered[name]


def as_server(given: Any, name: str) -> OpenEnvServer:
    """Check what was given as a server.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(given, str):
        return OpenEnvServer(url=given)
    if not isinstance(given, OpenEnvServer):
        raise ConfigError(f"{name} must be an OpenEnvServer or a URL, got {shown(given)}")
    return given
