"""Requests to an OpenAI-compatible server: bounded, timed, tried again and counted."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import logging
import os
import random
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from agentsgym.agents.asynchronous import agents_loop
from agentsgym.errors import ConfigError, MissingDependency

logger = logging.getLogger(__name__)
MAX_RETRY_AFTER_S = 120.0
MAX_BACKOFF_S = 30.0
_TRIED_AGAIN = frozenset({200, 408, 409, 429})  # beside every 5xx, and what never came to a status
_NO_KEY = "none"  # what is sent to a server that asks for none

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an agent has asked of its server so far.

    Attributes:
        requests: Turns that were asked for.
        retries: HTTP requests that were sent again.
        failures: Turns that got no answer in the end.
        refusals: Turns in which the model or its filter refused to answer.
        prompt_tokens: Tokens read, as far as the server told.
        completion_tokens: Tokens written, reasoning included.
        cached_tokens: Those of ``prompt_tokens`` that the server had in its cache.
        cost: What the tokens cost, cached ones at full price; None if the agent knows no prices.
    """

    requests: int = 0
    retries: int = 0
    failures: int = 0
    refusals: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float | None = None


class Meter:
    """Adds up usage; written on the agents' event loop alone."""

    def __init__(self, price_per_million: tuple[float, float] | None) -> None:
        if price_per_million is not None and not _are_prices(price_per_million):
            raise ConfigError(f"price_per_million must be two numbers of at least 0, got {price_per_million!r}")
        self.prices = price_per_million
        self.usage = Usage(cost=None if price_per_million is None else 0.0)

    def add(self, **counts: int) -> None:
        """Add to the fields of that name."""
        usage = replace(self.usage, **{name: getattr(self.usage, name) + count for name, count in counts.items()})
        if self.prices is not None:
            price_in, price_out = self.prices
            cost = (usage.prompt_tokens * price_in + usage.completion_tokens * price_out) / 1e6
            usage = replace(usage, cost=cost)
        self.usage = usage

    def add_body(self, body: Mapping[str, Any]) -> None:
        """Add what an answer's ``usage`` tells."""
        told = _mapping(body.get("usage"))
        cached = _mapping(told.get("prompt_tokens_details")).get("cached_tokens")
        self.add(
            prompt_tokens=_count(told.get("prompt_tokens")),
            completion_tokens=_count(told.get("completion_tokens")),
            cached_tokens=_count(cached),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where the server is, and how patient to be with it.

    Attributes:
        base_url: As the ``openai`` package takes it; None for ``OPENAI_BASE_URL``, else OpenAI itself.
        api_key: None for ``OPENAI_API_KEY``, which is sent only where ``base_url`` is None too.
        max_concurrency: The most requests that are open at once.
        timeout_s: The most seconds for one try, from sending to the last byte.
        max_retries: How often a request is sent again.
        backoff_s: Seconds before the first retry; doubled each time.
    """

    base_url: str | None
    api_key: str | None = field(repr=False)
    max_concurrency: int
    timeout_s: float
    max_retries: int
    backoff_s: float

    def __post_init__(self) -> None:
        if self.base_url is not None and not _is_url(self.base_url):
            raise ConfigError(f"base_url must begin with http:// or https:// and name a host, got {self.base_url!r}")
        check_count("max_concurrency", self.max_concurrency, least=1)
        check_count("max_retries", self.max_retries, least=0)
        if not (_is_number(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(f"timeout_s must be a positive number, got {self.timeout_s!r}")
        if not (_is_number(self.backoff_s) and self.backoff_s >= 0):
            raise ConfigError(f"backoff_s must be a number of at least 0, got {self.backoff_s!r}")
        if self.key is None:
            raise ConfigError("OpenAI needs an api_key or the environment variable OPENAI_API_KEY, got neither")

    @property
    def key(self) -> str | None:
        """The key that is sent; None if there is one to send and it is not known."""
        if self.api_key is not None:
            return self.api_key
        return os.environ.get("OPENAI_API_KEY") if self.base_url is None else _NO_KEY

    @property
    def url(self) -> str:
        """The base URL, without a user name or password."""
        url = urlsplit(self.base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1")
        return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()

    @property
    def is_openai(self) -> bool:
        """Whether it is OpenAI itself, which has a name of its own for the budget."""
        return urlsplit(self.url).hostname == "api.openai.com"


class RequestError(Exception):
    """A request got no answer that can be used.

    Attributes:
        cause: What happened, as the end of a sentence.
        status: The HTTP status, 200 where the body was not what it should be; None if it did not come to one.
        retry_after_s: How long the server asked to wait; None if it did not.
    """

    def __init__(self, cause: str, *, status: int | None = 200, retry_after_s: float | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def may_pass(self) -> bool:
        """Whether sending the request again may help."""
        if self.retry_after_s is not None and self.retry_after_s > MAX_RETRY_AFTER_S:
            return False
        return self.status in _TRIED_AGAIN or (self.status or 500) >= 500


class Client:
    """One agent's connections to its server, on the event loop that all agents share."""

    def __init__(self, server: Server, meter: Meter) -> None:
        """Open nothing yet; to be called on the agents' loop."""
        self.loop = agents_loop()
        self.probe: asyncio.Future[None] | None = None  # by which the agent finds out what the server can do
        self._server, self._meter = server, meter
        self._slots = asyncio.Semaphore(server.max_concurrency)
        self._jitter = random.Random()  # of its own: games may have seeded the global one
        self._openai = load_openai()
        self._sdk = self._openai.AsyncOpenAI(
            api_key=server.key, base_url=server.base_url, timeout=server.timeout_s, max_retries=0
        )
        self._finalizer = weakref.finalize(self, _close_soon, self.loop, self._sdk)
        self._finalizer.atexit = False  # the loop ends there, and with it the connections

    async def post(self, kind: str, body: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
        """Send a request until its answer can be read.

        Args:
            kind: ``"chat"`` or ``"completions"``.
            body: The request's fields.
            read: Takes what is wanted from the answer's body; raises :class:`RequestError` if it is not there.

        Raises:
            RequestError: The last try failed, or one did that no other can mend.
        """
        resource = self._sdk.chat.completions if kind == "chat" else self._sdk.completions
        for attempt in range(self._server.max_retries + 1):
            try:
                return read(await self._send(resource.with_raw_response.create, body))
            except RequestError as failure:
                failure.cause = self._scrubbed(failure.cause)
                if not failure.may_pass or attempt == self._server.max_retries:
                    raise
                delay_s = self._delay_s(failure, attempt)
                logger.info("%s: %s; trying again in %.1f s", self._server.url, failure.cause, delay_s)
                self._meter.add(retries=1)
                await asyncio.sleep(delay_s)
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Close the connections."""
        self._finalizer.detach()
        await self._sdk.close()

    async def _send(self, create: Callable[..., Any], body: Mapping[str, Any]) -> Mapping[str, Any]:
        named = {name: body[name] for name in ("model", "messages", "prompt") if name in body}
        rest = {name: value for name, value in body.items() if name not in named}
        async with self._slots:
            try:
                async with asyncio.timeout(self._server.timeout_s):
                    raw: Any = await create(**named, extra_body=rest)
            except (TimeoutError, self._openai.APIConnectionError, self._openai.APIStatusError) as error:
                raise self._failure(error) from None
        answer = self._parsed(raw.content)
        self._meter.add_body(answer)
        if answer.get("error"):  # some gateways report with status 200
            raise RequestError(f"it reported {self._brief(answer['error'])}")
        return answer

    def _parsed(self, content: bytes) -> Mapping[str, Any]:
        try:
            body: Any = json.loads(content)
        except ValueError:
            raise RequestError(f"it answered what is no JSON: {self._brief(content)}") from None
        if not isinstance(body, Mapping):
            raise RequestError(f"it answered what is no JSON object: {self._brief(content)}")
        return body  # pyright: ignore[reportUnknownVariableType]  # foreign data

    def _failure(self, error: Any) -> RequestError:
        if isinstance(error, TimeoutError | self._openai.APITimeoutError):
            return RequestError(f"no answer came within {self._server.timeout_s:g} s", status=None)
        if isinstance(error, self._openai.APIConnectionError):
            reason: Any = error.__cause__ or error
            return RequestError(f"the connection failed ({type(reason).__name__}: {self._brief(reason)})", status=None)
        cause = f"it answered {error.status_code}: {self._brief(_said(error))}"
        return RequestError(cause, status=error.status_code, retry_after_s=_retry_after_s(error.response.headers))

    def _delay_s(self, failure: RequestError, attempt: int) -> float:
        if failure.retry_after_s:  # 0 says nothing about when it will be better
            return failure.retry_after_s
        return min(self._server.backoff_s * 2.0**attempt, MAX_BACKOFF_S) * self._jitter.uniform(0.5, 1.0)

    def _brief(self, value: object, width: int = 300) -> str:
        """One line of it; the key is taken out first, since no part of it may be left by the cut."""
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        text = " ".join(self._scrubbed(text).split())
        return text if len(text) <= width else f"{text[:width]}…"

    def _scrubbed(self, text: str) -> str:
        """Without the key, which some servers repeat in what they say about it."""
        key = self._server.key
        return text if key is None or key == _NO_KEY else text.replace(key, "***")


def check_count(name: str, value: Any, *, least: int) -> None:
    """Raise :class:`ConfigError` for what is no int of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an int of at least {least}, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_prices(prices: Any) -> bool:
    values = cast("Sequence[Any]", prices) if isinstance(prices, Sequence) else ()
    return len(values) == 2 and all(_is_number(value) and value >= 0 for value in values)


def _is_url(url: Any) -> bool:
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
    except ValueError:  # brackets that are no address
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)


def _count(told: Any) -> int:
    """A number of tokens as a server told it: nothing, where it is none."""
    return told if isinstance(told, int) else 0


def load_openai() -> Any:
    """The ``openai`` package.

    Raises:
        MissingDependency: It is not installed.
    """
    try:
        import openai  # noqa: PLC0415  # an extra, and half a second
    except ImportError as error:
        raise MissingDependency("openai", "openai") from error
    return openai


def _close_soon(loop: asyncio.AbstractEventLoop, sdk: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the connections
        loop.call_soon_threadsafe(lambda: loop.create_task(sdk.close()))


def _said(error: Any) -> object:
    """The server's own words about a bad status."""
    if isinstance(error.body, str):
        return error.body
    body = _mapping(error.body)
    return body.get("message") or body.get("error") or body.get("detail") or error.response.text or "nothing more"


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """How long a ``Retry-After`` asks to wait: seconds, or a date (RFC 9110, 10.2.3)."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(seconds, 0.0)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}  # pyright: ignore[reportUnknownVariableType]  # foreign data
