"""One event loop for every agent that answers with coroutines, on a thread of its own.

It lives as long as the process, so that what an agent keeps between rollouts (an HTTP client, a lock) stays bound to a
loop that is open, and it can be waited for from any thread, also one whose own loop is running, as in a notebook.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread(threading.Thread):
    """A thread that runs an event loop until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(name="agentsgym-agents", daemon=True)
        self.loop = asyncio.new_event_loop()

    def run(self) -> None:
        """Serve the loop."""
        asyncio.set_event_loop(self.loop)
        while not self._serve():
            pass

    def _serve(self) -> bool:
        """Whether the loop was told to stop: a coroutine that raises SystemExit ends it too, and does so elsewhere."""
        try:
            self.loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            return False
        return True

    def stop(self) -> None:
        """End the loop and the thread; a coroutine that blocks keeps both alive for what is left of the process."""
        if self.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.join(timeout=1.0)
        if not self.is_alive():
            self.loop.close()


_lock = threading.Lock()
_thread: LoopThread | None = None


def agents_loop() -> asyncio.AbstractEventLoop:
    """The loop, started at the first call (and again in a process that was forked off)."""
    global _thread  # noqa: PLW0603  # one loop for the process is the point
    with _lock:
        if _thread is None or not _thread.is_alive():
            if _thread is not None:
                atexit.unregister(_thread.stop)
            _thread = LoopThread()
            _thread.start()
            atexit.register(_thread.stop)
        return _thread.loop


def is_on_agents_loop() -> bool:
    """Whether this is the thread that runs :func:`agents_loop`: to wait here for a coroutine on it takes forever."""
    return threading.current_thread() is _thread


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on :func:`agents_loop` and wait for what it returns or raises.

    Raises:
        RuntimeError: It is called on the loop itself, which would wait for itself forever.
    """
    loop = agents_loop()
    if is_on_agents_loop():
        coroutine.close()
        raise RuntimeError("an agent's coroutine must await another agent's aact, not call its act or get_action")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    finally:
        future.cancel()  # of use where the waiting was interrupted
