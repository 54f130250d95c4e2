"""Run the coroutines of all agents on one event loop, in a separate thread.

The loop lives as long as the process, so that an agent's HTTP client or lock stays bound to an open loop between
rollouts. Any thread can wait for it, even if another loop is running there, as in a notebook. Before it stops, tasks
are ended, since an unfinished task would be reported on stderr as the process exits.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

from agentsgym.interruptions import process_exit

T = TypeVar("T")

_CLOSING_S = 0.2  # time for tasks, such as closing connections, to end by themselves before the loop stops
_CANCELLING_S = 0.5  # time for tasks to end after they are canceled


class LoopThread(threading.Thread):
    """A thread that runs an event loop until :meth:`stop`.

    Attributes:
        loop: The event loop.
        is_stopping: Whether :meth:`stop` was called, which happens as the process exits.
    """

    def __init__(self) -> None:
        super().__init__(name="agentsgym-agents", daemon=True)
        self.loop = asyncio.new_event_loop()
        self.is_stopping = False

    def run(self) -> None:
        """Run the loop until it is stopped, then end its tasks."""
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                break
            except (SystemExit, KeyboardInterrupt):
                continue  # raised by a coroutine: it stops the loop, but is handled where the coroutine is awaited
        with suppress(SystemExit, KeyboardInterrupt):
            self.loop.run_until_complete(_end_tasks())

    def stop(self) -> None:
        """End the loop and the thread; a coroutine that blocks keeps both alive until the process ends."""
        self.is_stopping = True
        if self.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.join(timeout=1.0)
        if not self.is_alive():
            self.loop.close()


async def _end_tasks() -> None:
    """Wait for the other tasks of the running loop, and cancel those that do not end."""
    for limit_s, is_cancelling in ((_CLOSING_S, False), (_CANCELLING_S, True)):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks if is_cancelling else ():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)
    await asyncio.get_running_loop().shutdown_asyncgens()


_lock = threading.Lock()
_thread: LoopThread | None = None


def agents_loop() -> asyncio.AbstractEventLoop:
    """Return the agents' event loop, which is started at the first call (and again in a forked process)."""
    global _thread  # noqa: PLW0603  # one loop per process
    with _lock:
        if _thread is None or not _thread.is_alive():
            if _thread is not None:
                atexit.unregister(_thread.stop)
            _thread = LoopThread()
            _thread.start()
            atexit.register(_thread.stop)
        return _thread.loop


def is_on_agents_loop() -> bool:
    """Whether this thread runs :func:`agents_loop`: waiting here for one of its coroutines would never end."""
    return threading.current_thread() is _thread


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on :func:`agents_loop` and wait for its result.

    Raises:
        RuntimeError: The caller is on the loop itself, which would wait for itself forever.
    """
    loop = agents_loop()
    thread = _thread
    if is_on_agents_loop():
        coroutine.close()
        raise RuntimeError(
            "an agent's coroutine must await another agent's aact instead of calling its act or get_action"
        )
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except CancelledError:
        if thread is not None and thread.is_stopping:
            raise process_exit() from None  # so that a thread that is still waiting ends without a traceback
        raise
    finally:
        future.cancel()  # if the wait was interrupted
