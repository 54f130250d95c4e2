"""Limit the size of a server's responses while they are received and decompressed.

A response of a few kilobytes can decompress to gigabytes before any time limit is checked. Each response is therefore
decompressed in small pieces, between which the event loop runs.
"""

from __future__ import annotations

import asyncio
import importlib
import zlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from typing import Any

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
