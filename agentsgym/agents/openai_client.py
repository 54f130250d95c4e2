"""Send requests to an OpenAI-compatible server: bounded, timed, retried and counted."""

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

from agentsgym.agents.event_loop import agents_loop
from agentsgym.errors import ConfigError, MissingDependencyError
from agentsgym.fields import is_int, is_number, is_positive_number, or_none, require

logger = logging.getLogger(__name__)
MAX_RETRY_AFTER_S = 120.0
MAX_BACKOFF_S = 30.0
_RETRIED = frozenset({200, 408, 409, 429})  # beside every 5xx, and what never came to a status
_NO_KEY = "none"  # sent to a server that needs none

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of what an agent has requested of its server so far.

    Attributes:
        requests: Turns that were requested.
        retries: HTTP requests that were sent again after a failure.
        failures: Turns that got no answer in the end.
        refusals: Turns in which the model or its filter refused to answer.
        prompt_tokens: Tokens read, as far as the server reports them.
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
        require("price_per_million", price_per_million, or_none(_are_prices), "two numbers of at least 0")
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
        """Add the ``usage`` of an answer."""
        usage = _mapping(body.get("usage"))
        cached = _mapping(usage.get("prompt_tokens_details")).get("cached_tokens")
        self.add(
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            cached_tokens=_count(cached),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The address of a server, and the limits of each request to it.

    Attributes:
        base_url: As the ``openai`` package takes it; None for ``OPENAI_BASE_URL``, else OpenAI itself.
        api_key: None for ``OPENAI_API_KEY``, which is sent only where ``base_url`` is None too.
        max_concurrency: The most requests that are open at once.
        timeout_s: The most seconds for one attempt, from sending to the last byte.
        max_retries: How often a request is retried.
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
        require("max_concurrency", self.max_concurrency, is_int(1), "an int of at least 1")
        require("max_retries", self.max_retries, is_int(0), "an int of at least 0")
        require("timeout_s", self.timeout_s, is_positive_number, "a positive number")
        require("backoff_s", self.backoff_s, is_number(0), "a number of at least 0")
        if self.key is None:
            raise ConfigError("OpenAI needs an api_key or the environment variable OPENAI_API_KEY, got neither")

    @property
    def key(self) -> str | None:
        """The key that is sent; None if one is needed and none is known."""
        if self.api_key is not None:
            return self.api_key
        return os.environ.get("OPENAI_API_KEY") if self.base_url is None else _NO_KEY

    @property
    def url(self) -> str:
        """The base URL, without a user name or password."""
        url = urlsplit(self.base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1")
        return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()

    def remedy(self, status: int | None) -> str:
        """The settings to check where the server refuses every request with this status."""
        if status == 404:
            return "the model's name and base_url"
        if self.api_key is not None:
            key = "api_key"
        elif self.base_url is None:
            key = "OPENAI_API_KEY"
        else:
            key = "api_key, which was not given (OPENAI_API_KEY is sent only where base_url is None)"
        return f"{key}, and whether it may use the model" if status == 403 else key

    @property
    def is_openai(self) -> bool:
        """Whether it is OpenAI itself, which has its own name for the budget."""
        return urlsplit(self.url).hostname == "api.openai.com"


class RequestError(Exception):
    """A request got no usable answer.

    Attributes:
        cause: What happened, as the end of a sentence.
        status: The HTTP status, 200 where the body was malformed; None where no status came.
        retry_after_s: How long the server asked to wait; None if it did not.
        is_refusal: Whether the server refuses whatever this agent sends.
    """

    def __init__(self, cause: str, *, status: int | None = 200, retry_after_s: float | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.status = status
        self.retry_after_s = retry_after_s
        self.is_refusal = False

    @property
    def is_retryable(self) -> bool:
        """Whether sending the request again may help."""
        if self.retry_after_s is not None and self.retry_after_s > MAX_RETRY_AFTER_S:
            return False
        return self.status in _RETRIED or (self.status or 500) >= 500


class Client:
    """One agent's connections to its server, on the event loop that all agents share."""

    def __init__(self, server: Server, meter: Meter) -> None:
        """Open nothing yet; to be called on the agents' loop."""
        self.loop = agents_loop()
        self.probe: asyncio.Future[None] | None = None  # by which the agent learns what the server can do
        self._server, self._meter = server, meter
        self._slots = asyncio.Semaphore(server.max_concurrency)
        self._jitter = random.Random()  # its own: environments may have seeded the global one
        self._has_answered = False
        self._refusal: RequestError | None = None
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
            RequestError: The last attempt failed, or one failed with a non-retryable error.
        """
        resource = self._sdk.chat.completions if kind == "chat" else self._sdk.completions
        for attempt in range(self._server.max_retries + 1):
            try:
                return read(await self._send(resource.with_raw_response.create, body))
            except RequestError as failure:
                failure.cause = self._scrubbed(failure.cause)
                if not failure.is_retryable or attempt == self._server.max_retries:
                    raise
                delay_s = self._delay_s(failure, attempt)
                logger.info("%s: %s; retrying in %.1f s", self._server.url, failure.cause, delay_s)
                self._meter.add(retries=1)
                await asyncio.sleep(delay_s)
        raise AssertionError("the last attempt returns or raises")

    def forget_refusal(self) -> None:
        """Send requests again to a server that has refused them."""
        self._refusal = None

    async def close(self) -> None:
        """Close the connections."""
        self._finalizer.detach()
        await self._sdk.close()

    async def _send(self, create: Callable[..., Any], body: Mapping[str, Any]) -> Mapping[str, Any]:
        named = {name: body[name] for name in ("model", "messages", "prompt") if name in body}
        rest = {name: value for name, value in body.items() if name not in named}
        async with self._slots:
            if self._refusal is not None:  # what waited for its slot need not be refused one by one
                raise _copy(self._refusal)
            try:
                async with asyncio.timeout(self._server.timeout_s):
                    raw: Any = await create(**named, extra_body=rest)
            except (TimeoutError, self._openai.APIConnectionError, self._openai.APIStatusError) as error:
                failure = self._failure(error)
                if self._is_refusal(failure, is_chat="messages" in named):
                    failure.is_refusal = True
                    self._refusal = failure
                raise failure from None
        answer = self._parsed(raw.content)
        self._meter.add_body(answer)
        if answer.get("error"):  # some gateways report with status 200
            raise RequestError(f"it reported {self._brief(answer['error'])}")
        self._has_answered = True
        return answer

    def _is_refusal(self, failure: RequestError, *, is_chat: bool) -> bool:
        """Whether the server refuses the key or the model, and not this one request.

        A gateway's filter refuses one prompt with status 403, too, and a server without ``/completions`` answers 404.
        """
        if failure.status == 401:
            return True
        return not self._has_answered and (failure.status == 403 or (failure.status == 404 and is_chat))

    def _parsed(self, content: bytes) -> Mapping[str, Any]:
        try:
            body: Any = json.loads(content)
        except ValueError:
            raise RequestError(f"it answered with something that is not JSON: {self._brief(content)}") from None
        if not isinstance(body, Mapping):
            raise RequestError(f"it answered with something that is not a JSON object: {self._brief(content)}")
        return body  # pyright: ignore[reportUnknownVariableType]  # foreign data

    def _failure(self, error: Any) -> RequestError:
        if isinstance(error, TimeoutError | self._openai.APITimeoutError):
            return RequestError(f"no answer came within {self._server.timeout_s:g} s", status=None)
        if isinstance(error, self._openai.APIConnectionError):
            reason: Any = error.__cause__ or error
            return RequestError(f"the connection failed ({type(reason).__name__}: {self._brief(reason)})", status=None)
        cause = f"it answered {error.status_code}: {self._brief(_message(error))}"
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
        """Without the key, which some servers repeat in their message about it."""
        key = self._server.key
        return text if key is None or key == _NO_KEY else text.replace(key, "***")


def _are_prices(prices: Any) -> bool:
    values = cast("Sequence[Any]", prices) if isinstance(prices, Sequence) else ()
    return len(values) == 2 and all(map(is_number(0), values))


def _is_url(url: Any) -> bool:
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
    except ValueError:  # brackets that are no address
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)


def _count(value: Any) -> int:
    """A number of tokens as a server reports it; 0 for anything else."""
    return value if isinstance(value, int) else 0


def _copy(failure: RequestError) -> RequestError:
    """Copy an error: one object raised by several tasks would collect all their tracebacks."""
    copied = RequestError(failure.cause, status=failure.status)
    copied.is_refusal = failure.is_refusal
    return copied


def load_openai() -> Any:
    """The ``openai`` package.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import openai  # noqa: PLC0415  # an extra, and half a second
    except ImportError as error:
        raise MissingDependencyError("openai", "openai") from error
    return openai


_closing: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly, so that these could be destroyed half done


def _close_soon(loop: asyncio.AbstractEventLoop, sdk: Any) -> None:
    def close() -> None:
        task = loop.create_task(sdk.close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the connections
        loop.call_soon_threadsafe(close)


def _message(error: Any) -> object:
    """The server's own message about an error status."""
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
