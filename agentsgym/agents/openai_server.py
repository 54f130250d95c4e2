"""Describe an OpenAI-compatible server: its address, its key, and the limits of requests; mask keys in its messages."""

from __future__ import annotations

import base64
import functools
import html
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import groupby
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus, urlsplit

from agentsgym.errors import ConfigError
from agentsgym.fields import is_int, is_number, is_seconds, require
from agentsgym.texts import shown

_RUN = 8  # minimum number of consecutive characters in common with a secret that are masked
_MASK = "***"
_SHORTEST = 4  # anything shorter is a placeholder, such as "x", for a server that needs no key
_WORDS = re.compile(r"([\s'\"]+)")
_PART_MASKED = re.compile(r"\*{2,}|\.{3}|…|•{2,}|#{3,}|-{3,}|_{3,}|x{4,}|[\[<(](?:redacted|masked|hidden)[\])>]")
_BEFORE, _AFTER = re.compile(r"[=:,;(\[{<]"), re.compile(r"[=:,;)\]}>]")  # punctuation around it within a word
_REVEALING = 6  # minimum length of an end without digits that is masked even if nothing announces it
_ANNOUNCED = (
    r"(?:\b(?:end|start|begin)\w*\s+(?:in|with|by|on)|\b(?:prefix|suffix)(?:\s+is)?"
    r"|\b(?:first|last|final)(?:\s+\w+)?\s+(?:characters|letters|digits)(?:\s+are)?)\W{1,3}"
)
_KEY_NAME = re.compile("key|token|secret|sig|pass|pwd|auth|cred|code", re.IGNORECASE)  # parameter names in URLs
_PUNCTUATION = ".,:;()[]{}<>"


class KeyMask:
    """A mask for every run of characters that a text has in common with a secret.

    A run has at least eight characters (or is a complete shorter secret); case is ignored, and percent-encoded,
    JSON- and HTML-escaped, base64 and hexadecimal forms count too. A word that is already partly masked, as in
    ``sk-ab***yz``, is masked completely if its ends match those of a secret. A standalone end of four to seven
    characters is masked if it has a digit, or has six characters and does not look like a word, and always if the text
    announces it: "ends with", "starting with", "the last four characters are".

    Args:
        secrets: Keys and passwords; those shorter than four characters are ignored.

    >>> mask = KeyMask(["sk-abcdefghijklmnop"])
    >>> mask.masked("not sk-abcdefghijklmnop, nor efghijkl, nor what ends in mnop, nor sk-ab**op")
    'not ***, nor ***, nor what ends in ***, nor ***'
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = [secret for secret in dict.fromkeys(secrets) if len(secret) >= _SHORTEST]
        self._runs: set[str] = set()
        for form in (form.lower() for secret in self._secrets for form in _forms(secret)):
            length = min(_RUN, len(form))
            self._runs.update(form[start : start + length] for start in range(len(form) - length + 1))
        self._lengths = {len(run) for run in self._runs}
        self._ends = [pattern for secret in self._secrets for pattern in _patterns_of_ends(secret)]

    def masked(self, text: str) -> str:
        """Return the text without the secrets."""
        if not self._runs:
            return text
        text = "".join(map(self._masked_word, _WORDS.split(text)))
        lowered = text.lower()
        if len(lowered) != len(text):  # a few letters become two in lower case
            lowered = text
        hidden = bytearray(len(text))
        for length in self._lengths:
            for start in range(len(text) - length + 1):
                if lowered[start : start + length] in self._runs:
                    hidden[start : start + length] = b"\1" * length
        stretches = groupby(zip(text, hidden, strict=True), key=lambda pair: pair[1])
        text = "".join(_MASK if is_hidden else "".join(one for one, _ in pairs) for is_hidden, pairs in stretches)
        for pattern in self._ends:  # after the runs: masking an end first could leave a rest too short to be a run
            text = pattern.sub(rf"\1{_MASK}", text)
        return text

    def _masked_word(self, word: str) -> str:
        """Return the mask for a partly masked word that shows an end of a secret, otherwise the word."""
        head, *others = _PART_MASKED.split(word.lower())
        if not others:
            return word
        head, tail = head.strip(_PUNCTUATION), others[-1].strip(_PUNCTUATION)
        heads = [one for one in (head, _BEFORE.split(head)[-1]) if len(one) > 1]
        tails = [one for one in (tail, _AFTER.split(tail)[0]) if len(one) > 1]
        for secret in map(str.lower, self._secrets):
            if any(map(secret.startswith, heads)) or any(map(secret.endswith, tails)):
                return _MASK
        return word


def url_secrets(url: str) -> Iterator[str]:
    """Yield the user name, the password and the keys in a URL's query, raw and decoded."""
    try:
        parts = urlsplit(url)
        authority, query = parts.netloc, parts.query
    except ValueError:
        authority, query = url, url.partition("?")[2]
    for name, _, value in (parameter.partition("=") for parameter in query.split("&")):
        if _KEY_NAME.search(unquote(name)):
            yield value
            yield unquote_plus(value)
    for part in authority.rpartition("@")[0].split(":"):
        yield part
        yield unquote(part)


def without_credentials(url: str) -> str:
    """Return a URL, valid or not, without a user name, a password or a query."""
    return re.sub(r"^([^/?#]*//)?[^/?#]*@", r"\1", url.partition("?")[0].partition("#")[0])


def _forms(secret: str) -> Iterator[str]:
    """Yield a secret in the encodings in which servers repeat it."""
    data = secret.encode(errors="replace")
    yield from (secret, quote(secret, safe=""), quote_plus(secret), html.escape(secret), json.dumps(secret)[1:-1])
    if len(secret) >= _RUN:
        yield from (data.hex(), "".join(f"%{byte:02x}" for byte in data))
        for shift in range(3):  # the base64 form depends on the secret's position, modulo 3
            for encode in (base64.b64encode, base64.urlsafe_b64encode):
                yield encode(b"\0" * shift + data).decode()[(shift * 8 + 5) // 6 : (shift + len(data)) * 8 // 6]


def _patterns_of_ends(secret: str) -> Iterator[re.Pattern[str]]:
    """Yield patterns that match a secret's short beginnings and ends where they stand alone."""
    lengths = range(min(_RUN, len(secret)) - 1, _SHORTEST - 1, -1)  # the longest first
    ends = [end for length in lengths for end in (secret[:length], secret[-length:])]
    revealing: list[str] = []  # unlikely to occur by chance: with a digit, or neither a word nor words with hyphens
    for end in ends:
        parts = [part for part in re.split(r"[\W_]+", end) if part]
        is_wordy = all(part.islower() or part.isupper() or part.istitle() for part in parts)
        if any(map(str.isdigit, end)) or (len("".join(parts)) >= _REVEALING and not is_wordy):
            revealing.append(end)
    for introduction, some in ((r"(?<![^\W_])", revealing), (_ANNOUNCED, ends)):
        if choice := "|".join(map(re.escape, some)):
            yield re.compile(rf"({introduction})(?:{choice})(?![^\W_])", re.IGNORECASE)


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
