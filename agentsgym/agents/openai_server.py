"""Describe an OpenAI-compatible server: its address, its key, and the limits of requests."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from agentsgym.agents.key_mask import KeyMask, url_secrets, without_credentials
from agentsgym.errors import ConfigError
from agentsgym.fields import is_int, is_number, is_seconds, require
from agentsgym.texts import shown

NO_KEY = "none"  # sent to a server that needs no key


class _LeftOut(Enum):
    """A marker for the missing key of a copy; an enum, since copying a member returns the member itself."""

    KEY = "left out"


_LEFT_OUT = _LeftOut.KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The address of a server, and the limits of each request to it: arguments of ``OpenAIAgent``.

    The ``api_key`` of a copy is a function or None, never a key.
    """

    base_url: str | None = field(repr=False)
    api_key: str | Callable[[], str] | _LeftOut | None = field(repr=False)
    max_concurrency: int
    timeout_s: float
    max_retries: int
    backoff_s: float
    max_answer_bytes: int

    def __post_init__(self) -> None:
        if self.base_url is not None and not _is_url(self.base_url):
            given = shown(without_credentials(self.base_url) if isinstance(self.base_url, str) else self.base_url)  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"base_url must begin with http:// or https:// and name a host, got {given}")
        require("max_concurrency", self.max_concurrency, is_int(1), "an int of at least 1")
        require("max_retries", self.max_retries, is_int(0), "an int of at least 0")
        require("timeout_s", self.timeout_s, is_seconds, "a positive number")
        require("backoff_s", self.backoff_s, is_number(0), "a number of at least 0")
        require("max_answer_bytes", self.max_answer_bytes, is_int(1), "an int of at least 1")
        if self.api_key is not _LEFT_OUT:
            _ = self.key

    @property
    def key(self) -> str:
        """The key to send."""
        key = self.api_key
        if key is _LEFT_OUT and self.base_url is not None:
            raise ConfigError(
                f"this agent for {self.url} was copied or sent to another process, which drops its api_key: "
                "pass a function that returns the key; functions are copied"
            )
        if key is None or isinstance(key, _LeftOut):
            key = os.environ.get("OPENAI_API_KEY") if self.base_url is None else NO_KEY
        elif not isinstance(key, str):
            if not callable(key):
                raise ConfigError(
                    f"api_key must be a str, a function that returns one, or None, got {type(key).__name__}"
                )
            key = key()
        if not isinstance(key, str):
            raise ConfigError("OpenAI requires an api_key or the environment variable OPENAI_API_KEY")
        if not (key.isascii() and key.isprintable()) or not key or key != key.strip():
            raise ConfigError("the api_key must be printable ASCII text, without surrounding spaces or line breaks")
        return key

    def __reduce__(self) -> tuple[Callable[[], Server], tuple[()]]:
        """Omit the key from copies, which may end up in a file or a log."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["api_key"] = _LEFT_OUT if isinstance(self.api_key, str) else self.api_key
        return functools.partial(Server, **values), ()

    def mask(self) -> KeyMask:
        """Create a mask for the key, and for the user name, the password and the keys in the URL."""
        key = self.key
        return KeyMask([*(() if key == NO_KEY else (key,)), *url_secrets(self._whole_url)])

    @property
    def _whole_url(self) -> str:
        return self.base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"

    @property
    def url(self) -> str:
        """The base URL, without a user name, a password or a query."""
        return without_credentials(self._whole_url)

    def remedy(self, status: int | None) -> str:
        """Return the settings to check if the server refuses every request with this status."""
        if status == 404:
            return "the model's name and base_url (on the command line --base-url)"
        if self.api_key is not None and not isinstance(self.api_key, _LeftOut):
            key = "api_key (on the command line --api-key-env)"
        elif self.base_url is None:
            key = "OPENAI_API_KEY"
        else:
            key = (
                "api_key (on the command line --api-key-env), which is not set: "
                "OPENAI_API_KEY is sent only if base_url is None"
            )
        return f"{key}, and whether it may use the model" if status == 403 else key

    @property
    def is_openai(self) -> bool:
        """Whether the server is OpenAI itself, which uses another name for the token budget."""
        return urlsplit(self.url).hostname == "api.openai.com"


def _is_url(url: Any) -> bool:
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
    except ValueError:  # brackets that are not an address
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)
