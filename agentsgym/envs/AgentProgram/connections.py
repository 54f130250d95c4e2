"""The connections of the endpoint: uvicorn's, with limits of time and number, and without its log.

Imported when an endpoint starts, since uvicorn is an extra.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_SLOW_S = 30.0  # for the headers of a request
_IDLE_S = 60  # between two requests
_MAX_CONNECTIONS = 4096

_logger = logging.getLogger(__name__)
_logger.setLevel(logging.ERROR)  # what clients do wrong is a warning of uvicorn; errors are bugs of the endpoint


class Connection(H11Protocol):
    """One connection."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.logger, self.access_log, self.timeout_keep_alive = _logger, False, _IDLE_S
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Accept the connection, unless there are too many others."""
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.abort()
        self._limit_time()

    def data_received(self, data: bytes) -> None:
        """Read what the client sent."""
        super().data_received(data)
        self._limit_time()

    def on_response_complete(self) -> None:
        """Limit the time for the rest of a rejected body, if there is one."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # the rest of a body that was rejected
            self._limit_time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._deadline is not None:
            self._deadline.cancel()

    def send_400_response(self, msg: str) -> None:
        """Reject what is not HTTP."""
        with contextlib.suppress(h11.LocalProtocolError):  # a request that was answered before its body became invalid
            super().send_400_response(msg)
        self.transport.close()

    def _limit_time(self) -> None:
        """Limit the time of a client that is sending something while no request of it is being answered."""
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = None
        elif self._deadline is None:
            self._deadline = self.loop.call_later(_SLOW_S, self.transport.close)
