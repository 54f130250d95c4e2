"""Send requests to an OpenAI-compatible server: bounded, timed, retried and counted.

A response of a few kilobytes can decompress to gigabytes before any time limit is checked. Each response is therefore
limited while it is received, and decompressed in small pieces, between which the event loop runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import importlib
import json
import logging
import random
import time
import weakref
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from agentsgym.agents.openai_server import Server
from agentsgym.agents.usage import Meter, as_mapping
from agentsgym.errors import import_extra
from agentsgym.event_loop import agents_loop
from agentsgym.texts import sentence_of, shown, visible

logger = logging.getLogger(__name__)
MAX_RETRY_AFTER_S = 120.0
MAX_BACKOFF_S = 30.0
_RETRIED = frozenset({200, 408, 409, 429})  # in addition to 5xx and requests without a status
_REFUSED_S = 60.0  # how long to stop sending requests to a server that refuses all of them
# The key or the model is considered refused after status 403 for this many different prompts in a row, or this many
# requests, since all rollouts of a task may start with the same filtered prompt.
_MAX_FORBIDDEN_PROMPTS = 10
_MAX_FORBIDDEN = 50
_READ_CHARACTERS = 10_000  # maximum length of an error message, only the start of which is shown

T = TypeVar("T")


class RequestError(Exception):
    """A request got no usable response.

    Attributes:
        cause: The failure, as the end of a sentence.
        status: The HTTP status, 200 if the body was malformed; None if there was no response.
        retry_after_s: The wait that the server requested, in seconds; None if it requested none.
        is_refusal: Whether the server refuses every request of this agent.
    """

    def __init__(self, cause: str, *, status: int | None = 200, retry_after_s: float | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.status = status
        self.retry_after_s = retry_after_s
        self.is_refusal = False


class Client:
    """One agent's connections to its server, on the event loop that all agents share."""

    def __init__(self, server: Server, meter: Meter) -> None:
        """Create a client without connecting; must be called on the agents' event loop."""
        self.loop = agents_loop()
        self.probe: asyncio.Future[None] | None = None  # the agent's check of whether the server returns token ids
        self._server, self._meter = server, meter
        self._slots = asyncio.Semaphore(server.max_concurrency)
        self._jitter = random.Random()  # a separate generator: environments may have seeded the global one
        self._has_answered = False
        self._refusal: RequestError | None = None
        self._refused_at = 0.0
        self._forbidden: Counter[int] = Counter()  # requests with status 403 since the last answer, by their prompts
        self._mask = server.mask()
        self._openai = import_extra("openai", "openai")  # takes half a second
        self._sdk = self._openai.AsyncOpenAI(
            api_key=server.key,
            base_url=server.base_url,
            timeout=server.timeout_s,
            max_retries=0,
            http_client=bounded_client(self._openai, server.timeout_s, server.max_answer_bytes),
            default_headers={"Accept-Encoding": "gzip"},
        )
        self._finalizer = weakref.finalize(self, _close_soon, self.loop, self._sdk)
        self._finalizer.atexit = False  # at exit, the connections end with the loop

    async def post(self, kind: str, body: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
        """Send a request, with retries, until its response can be read.

        Args:
            kind: ``"chat"`` or ``"completions"``.
            body: The request's fields.
            read: Function that reads the response body; raises :class:`RequestError` if it is malformed.

        Raises:
            RequestError: The last attempt failed, or one failed with a non-retryable error.
        """
        resource = self._sdk.chat.completions if kind == "chat" else self._sdk.completions
        for attempt in range(self._server.max_retries + 1):
            try:
                return read(await self._send(resource.with_raw_response.create, body))
            except RequestError as failure:
                failure.cause = self._mask.masked(failure.cause)
                is_retryable = failure.status in _RETRIED or (failure.status or 500) >= 500
                is_short_wait = (failure.retry_after_s or 0.0) <= MAX_RETRY_AFTER_S
                if not (is_retryable and is_short_wait) or attempt == self._server.max_retries:
                    raise
                backoff_s = min(self._server.backoff_s * 2.0**attempt, MAX_BACKOFF_S)
                delay_s = failure.retry_after_s or backoff_s * self._jitter.uniform(0.5, 1.0)
                logger.info("%s: %s; retrying in %.1f s", self._server.url, failure.cause, delay_s)
                self._meter.add(retries=1)
                await asyncio.sleep(delay_s)
        raise AssertionError("the last attempt returns or raises")

    def clear_refusal(self) -> None:
        """Clear a remembered refusal, so that requests are sent to the server again."""
        self._refusal = None

    async def close(self) -> None:
        """Close the connections."""
        self._finalizer.detach()
        await self._sdk.close()

    async def _send(self, create: Callable[..., Any], body: Mapping[str, Any]) -> Mapping[str, Any]:
        named = {name: body[name] for name in ("model", "messages", "prompt") if name in body}
        rest = {name: value for name, value in body.items() if name not in named}
        async with self._slots:
            if self._refusal is not None and time.monotonic() - self._refused_at < _REFUSED_S:
                # Fail the requests that wait for a slot rather than send each to be refused. Raise a copy, since an
                # error raised by several tasks would accumulate their tracebacks.
                failure = RequestError(self._refusal.cause, status=self._refusal.status)
                failure.is_refusal = True
                raise failure
            try:
                async with asyncio.timeout(self._server.timeout_s):
                    raw: Any = await create(**named, extra_body=rest)
            except (TimeoutError, AnswerError, self._openai.APIConnectionError, self._openai.APIStatusError) as error:
                failure = self._failure(error)
                if self._is_refusal(failure, named):
                    failure.is_refusal = True
                    self._refusal, self._refused_at = failure, time.monotonic()
                raise failure from None
        answer = self._parsed(raw.content)
        self._meter.add_body(answer)
        if answer.get("error"):  # some gateways report errors with status 200
            raise RequestError(f"it reported {self._brief(answer['error'])}")
        self._has_answered = True
        self._forbidden.clear()
        return answer

    def _is_refusal(self, failure: RequestError, named: Mapping[str, Any]) -> bool:
        """Whether the server refuses the key or the model rather than only this request.

        A gateway's filter also rejects single prompts with status 403, but rarely many in a row; and a server without
        ``/completions`` responds with 404.
        """
        if failure.status == 403:
            self._forbidden[hash(repr(named))] += 1
            is_persistent = len(self._forbidden) >= _MAX_FORBIDDEN_PROMPTS or self._forbidden.total() >= _MAX_FORBIDDEN
            return is_persistent or not self._has_answered
        if failure.status == 401:
            return True
        return not self._has_answered and failure.status == 404 and "messages" in named

    def _parsed(self, content: bytes) -> Mapping[str, Any]:
        try:
            body: Any = json.loads(content)
        except RecursionError:
            raise RequestError("the response is JSON that is nested too deeply to be parsed") from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise RequestError(f"the response is not JSON: {self._brief(content)}") from None
        except ValueError as error:  # a number with too many digits
            raise RequestError(f"the response is JSON that cannot be parsed: {self._brief(error)}") from None
        if not isinstance(body, Mapping):
            raise RequestError(f"the response is not a JSON object: {self._brief(content)}")
        return body  # pyright: ignore[reportUnknownVariableType]  # unchecked data

    def _failure(self, error: Any) -> RequestError:
        if isinstance(error, TimeoutError | self._openai.APITimeoutError):
            return RequestError(f"no response within {self._server.timeout_s:g} s", status=None)
        reason: Any = error.__cause__ or error
        if isinstance(reason, AnswerError):
            return RequestError(str(reason), status=422 if reason.is_final else 200)
        if isinstance(error, self._openai.APIConnectionError):
            return RequestError(f"the connection failed ({type(reason).__name__}: {self._brief(reason)})", status=None)
        message: object = error.body
        if not isinstance(message, str):
            body = as_mapping(message)
            message = body.get("message") or body.get("error") or body.get("detail") or error.response.text
        cause = f"status {error.status_code}: {self._brief(message or '(empty body)')}"
        return RequestError(cause, status=error.status_code, retry_after_s=_retry_after_s(error.response.headers))

    def _brief(self, value: object, width: int = 300) -> str:
        """Format a value as one line; the key is masked before truncation, which could leave part of it visible."""
        if isinstance(value, bytes | str):
            start = value[:_READ_CHARACTERS]
            text = visible(start.decode(errors="replace") if isinstance(start, bytes) else start)
        elif isinstance(value, BaseException):
            text = sentence_of(value, _READ_CHARACTERS)
        else:
            text = shown(value, _READ_CHARACTERS)
        text = " ".join(self._mask.masked(text).split())
        return text if len(text) <= width else f"{text[:width]}…"


_closing: set[asyncio.Task[None]] = set()  # a loop references its tasks weakly: unreferenced ones might never finish


def _close_soon(loop: asyncio.AbstractEventLoop, sdk: Any) -> None:
    def close() -> None:
        task = loop.create_task(sdk.close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    with contextlib.suppress(RuntimeError):  # the loop is closed, and so are the connections
        loop.call_soon_threadsafe(close)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Read the wait that a ``Retry-After`` requests: seconds, or a date (RFC 9110, 10.2.3)."""
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
    return max(0.0, seconds)  # in this order, NaN becomes 0


_PIECE_BYTES = 1 << 16
_PIECES_PER_PAUSE = 16  # about a millisecond of work
_ERROR_BYTES = 1 << 16  # maximum length of an error response


class AnswerError(Exception):
    """A response cannot be read; the text is the end of a sentence.

    Attributes:
        is_final: Whether a retry would fail in the same way.
    """

    def __init__(self, cause: str, *, is_final: bool = False) -> None:
        super().__init__(cause)
        self.is_final = is_final


def bounded_client(openai: Any, timeout_s: float, max_bytes: int) -> Any:
    """Create an HTTP client for the ``openai`` client that reads at most ``max_bytes`` and refuses other servers.

    Args:
        openai: The ``openai`` package.
        timeout_s: Seconds for each step of a request.
        max_bytes: Maximum decompressed bytes of a response.
    """
    stream_class = _stream_class(openai)

    async def limit(response: Any) -> None:
        if response.has_redirect_location:
            _check_redirect(response.request.url, response.request.url.join(response.headers["location"]))
        is_answer = 200 <= response.status_code < 300
        encoding = response.headers.pop("content-encoding", "identity").strip().lower()
        pieces = _limited(_decoded(response.stream, encoding), max_bytes if is_answer else _ERROR_BYTES, is_answer)
        response.stream = stream_class(pieces, response.stream)
        response.encoding = "utf-8"  # regardless of the header: some codecs need hours for a megabyte

    return openai.DefaultAsyncHttpxClient(timeout=timeout_s, event_hooks={"response": [limit]})


def _check_redirect(url: Any, target: Any) -> None:
    """Refuse to redirect a request to another server, or to an unencrypted one."""
    ports = {"http": 80, "https": 443}
    port, target_port = url.port or ports.get(url.scheme), target.port or ports.get(target.scheme)
    is_upgrade = (url.scheme, port, target.scheme, target_port) == ("http", 80, "https", 443)
    if url.host != target.host or ((url.scheme, port) != (target.scheme, target_port) and not is_upgrade):
        raise AnswerError(
            f"it redirects to another server, {target.scheme}://{target.host}:{target_port}, and the conversation is "
            "not sent there: if that is the intended server, set base_url to its address",
            is_final=True,
        )


def _stream_class(openai: Any) -> type[Any]:
    """Define a stream class for the HTTP library that this version of the package uses (httpx or httpx2)."""
    kinds: tuple[type[Any], ...] = openai.DefaultAsyncHttpxClient.__mro__
    library_module = next(kind.__module__ for kind in kinds if not kind.__module__.startswith("openai"))
    library: Any = importlib.import_module(library_module.partition(".")[0])

    class Stream(library.AsyncByteStream):
        """A stream of a generator's bytes; closing it closes the source stream."""

        def __init__(self, pieces: AsyncGenerator[bytes, None], source: Any) -> None:
            self._pieces, self._source = pieces, source

        def __aiter__(self) -> AsyncGenerator[bytes, None]:
            return self._pieces

        async def aclose(self) -> None:
            await self._source.aclose()

    return Stream


async def _decoded(stream: Any, encoding: str) -> AsyncGenerator[bytes, None]:
    if encoding not in ("identity", "", "gzip", "x-gzip", "deflate"):
        raise AnswerError(f"the response is encoded as {encoding[:50]!r}, but only gzip was requested")
    decompressor = None if encoding in ("identity", "") else zlib.decompressobj(32 + zlib.MAX_WBITS)  # gzip or zlib
    num_bytes = num_pieces = 0
    async for data in stream:
        num_bytes += len(data)
        for piece in (data,) if decompressor is None else _decompressed(decompressor, data):
            yield piece
            num_pieces += 1
            if num_pieces % _PIECES_PER_PAUSE == 0:
                await asyncio.sleep(0)  # so that time limits are checked
    if decompressor is not None and num_bytes and not decompressor.eof:
        raise AnswerError("the response is cut off")


def _decompressed(decompressor: Any, data: bytes) -> Iterator[bytes]:
    """Decompress in small pieces; data after the end is dropped."""
    rest = b"" if decompressor.eof else data
    while rest:
        try:
            yield decompressor.decompress(rest, _PIECE_BYTES)
        except zlib.error as error:
            raise AnswerError(f"the response cannot be decompressed ({error})") from None
        rest = decompressor.unconsumed_tail


async def _limited(pieces: AsyncGenerator[bytes, None], max_bytes: int, is_answer: bool) -> AsyncGenerator[bytes, None]:
    """Yield at most ``max_bytes``; longer answers raise, and error responses are cut, since their status is enough."""
    num_left = max_bytes
    ignored = () if is_answer else (AnswerError,)
    with suppress(*ignored):
        async with aclosing(pieces):
            async for piece in pieces:
                if is_answer and len(piece) > num_left:
                    raise AnswerError(f"the response is longer than max_answer_bytes = {max_bytes}", is_final=True)
                yield piece[:num_left]
                num_left -= len(piece)
                if num_left <= 0 and not is_answer:
                    return
