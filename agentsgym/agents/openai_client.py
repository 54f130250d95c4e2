"""Send requests to an OpenAI-compatible server: bounded, timed, retried and counted."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import logging
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agentsgym.agents.answer_limits import AnswerError, bounded_client
from agentsgym.agents.openai_server import Server
from agentsgym.agents.usage import Meter, as_mapping
from agentsgym.errors import MissingDependencyError
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
        self._openai = load_openai()
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


def load_openai() -> Any:
    """Import the ``openai`` package."""
    try:
        import openai  # noqa: PLC0415  # an extra, and half a second
    except ImportError as error:
        raise MissingDependencyError("openai", "openai") from error
    return openai


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
