"""Run calls to user code (tools and retrievers) in threads, each with a time limit.

Python cannot kill a thread, so a call that exceeds its limit is abandoned: its thread keeps running until the code
returns, and the result is discarded. Later calls do not wait for it, since a new thread is started whenever none is
idle. All threads are daemons, so a call that never returns does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from agentsgym.errors import EnvError
from agentsgym.event_loop import can_wait_on_loop, run_coroutine

MAX_ABANDONED = 64  # abandoned calls that are still running, per environment
_IDLE_S = 10.0  # how long an idle thread waits before it ends


class CallTimeoutError(Exception):
    """A call exceeded its limit; a ``TimeoutError`` that the called code raises is re-raised unchanged instead."""


_Queue = SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


class Runner:
    """A thread pool that grows to one thread per concurrent call.

    Args:
        what: The plural name of the calls in error messages, such as ``"tool calls"``.
        limit_name: The name of the setting that limits the time of a call.
    """

    def __init__(self, what: str, limit_name: str) -> None:
        self._what, self._limit_name = what, limit_name
        self._is_closed = False
        self._lock = threading.Lock()
        self._idle: deque[_Queue] = deque()  # the queues of the idle threads; None ends a thread
        self._abandoned: list[Future[Any]] = []

    def start(self, work: Callable[[], Any]) -> Future[Any]:
        """Start a call, whose result :meth:`finish` returns."""
        call: Future[Any] = Future()
        with self._lock:
            self._abandoned = [abandoned for abandoned in self._abandoned if not abandoned.done()]
            if len(self._abandoned) >= MAX_ABANDONED:
                raise EnvError(
                    f"{len(self._abandoned)} {self._what} exceeded {self._limit_name} and are still running, so no new "
                    "ones are started until some of them return: set a timeout inside the called code, such as on its "
                    "network requests"
                )
            calls = self._idle.pop() if self._idle else None
        if calls is None:
            calls = _Queue()
            threading.Thread(target=self._serve, args=(calls,), name="agentsgym-call", daemon=True).start()
        calls.put((call, work))
        return call

    def finish(self, call: Future[Any], limit_s: float | None) -> Any:
        """Wait for a call and return its result, or re-raise its exception."""
        if can_wait_on_loop():
            run_coroutine(_wait_on_loop(call, limit_s))
        else:
            with suppress(TimeoutError):
                call.exception(limit_s)
        if not call.done():
            with self._lock:
                self._abandoned.append(call)
            raise CallTimeoutError
        return call.result()

    def close(self) -> None:
        """End the threads: the idle ones now, the others when their calls return."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = [*self._idle], deque()
        for calls in idle:
            calls.put(None)

    def _serve(self, calls: _Queue) -> None:
        """Run calls one after another in this thread until it has been idle for a while or the runner is closed."""
        while True:
            try:
                next_call = calls.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if calls in self._idle:  # otherwise it was just assigned a call
                        self._idle.remove(calls)
                        return
                continue
            if next_call is None:
                return
            call, work = next_call
            try:
                call.set_result(work())
            except BaseException as error:  # noqa: BLE001  # user code; re-raised in the waiting thread
                call.set_exception(error)
            del call, work, next_call  # otherwise its result stays in memory until the next call
            with self._lock:
                if self._is_closed:
                    return
                self._idle.append(calls)


async def _wait_on_loop(call: Future[Any], limit_s: float | None) -> None:
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def notify(_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(event.set)

    call.add_done_callback(notify)
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)
