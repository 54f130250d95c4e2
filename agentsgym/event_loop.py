"""Run the coroutines of all agents and environments on one event loop, in a separate thread.

A second loop runs the coroutines of programs and the clients of tool servers, since their code may block.

Each loop lives as long as the process, so that an agent's HTTP client or lock stays bound to an open loop between
rollouts. Any thread can wait for it, even if another loop is running there, as in a notebook. Before it stops, tasks
are ended, since an unfinished task would be reported on stderr as the process exits.

A plain function that :func:`run_on_loop` runs is not a coroutine, and may still wait for one: it is run in a greenlet,
which :func:`run_coroutine` leaves until the coroutine has ended. So trials need not be written twice.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from types import CoroutineType
from typing import Any, TypeVar, cast

from greenlet import getcurrent, greenlet

from agentsgym.interruptions import process_exit

T = TypeVar("T")

_CLOSING_S = 0.2  # time for tasks, such as closing connections, to end by themselves before the loop stops
_CANCELLING_S = 0.5  # time for tasks to end after they are canceled


class SharedLoop:
    """An event loop for the life of the process, in a separate thread.

    Attributes:
        thread: The thread that runs it; None before the first use.
        is_stopping: Whether it was stopped, which happens as the process exits.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self.thread: threading.Thread | None = None
        self.is_stopping = False

    def started(self) -> asyncio.AbstractEventLoop:
        """Return the loop, which is started at the first call (and again in a forked process)."""
        with self._lock:
            if self.thread is None or not self.thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self.thread = threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True)
                self.thread.start()
                atexit.unregister(self._stop)
                atexit.register(self._stop)
            return self._loop

    def _stop(self) -> None:
        """End the loop and the thread; a coroutine that blocks keeps both alive until the process ends."""
        self.is_stopping = True
        if self.thread is not None and self.thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self.thread.join(timeout=1.0)
        if self.thread is None or not self.thread.is_alive():
            self._loop.close()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then end its tasks."""
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
            break
        except (SystemExit, KeyboardInterrupt):
            continue  # raised by a coroutine: it stops the loop, but is handled where the coroutine is awaited
    with suppress(SystemExit, KeyboardInterrupt):
        loop.run_until_complete(_end_tasks())


async def _end_tasks() -> None:
    """Wait for the other tasks of the running loop, and cancel those that do not end."""
    for limit_s, is_cancelling in ((_CLOSING_S, False), (_CANCELLING_S, True)):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks if is_cancelling else ():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)
    await asyncio.get_running_loop().shutdown_asyncgens()


_agents, _programs = SharedLoop("agentsgym-agents"), SharedLoop("agentsgym-programs")


def agents_loop() -> asyncio.AbstractEventLoop:
    """Return the agents' event loop."""
    return _agents.started()


def programs_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of programs and tool servers, whose code may block it.

    Raises:
        RuntimeError: The caller is a coroutine on the loop, which must not wait for another one.
    """
    loop = _programs.started()
    if threading.current_thread() is _programs.thread:
        raise RuntimeError(
            "a coroutine of a program must call code that waits for tool servers in a thread, with asyncio.to_thread"
        )
    return loop


def is_on_agents_loop() -> bool:
    """Whether this thread runs :func:`agents_loop`: waiting here for one of its coroutines would never end."""
    return threading.current_thread() is _agents.thread


class _Waiting(greenlet):
    """Runs a function for :func:`run_on_loop`; it switches to its parent with the coroutine that it waits for."""


async def run_on_loop(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function on the running loop; while it waits in :func:`run_coroutine`, the loop runs other coroutines.

    Cancellation is raised in the coroutine that the function waits for.
    """
    running = _Waiting(function)
    outcome = running.switch(*arguments)  # the next coroutine that it waits for, and at the end its result
    while not running.dead:
        try:
            result = await outcome
        except BaseException as error:  # noqa: BLE001  # raised in the function, which may handle it
            outcome = running.throw(type(error), error, error.__traceback__)
        else:
            outcome = running.switch(result)
    return outcome


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on :func:`agents_loop` and wait for its result.

    Raises:
        RuntimeError: The caller is a coroutine on the loop, which would wait for itself forever; or Python is exiting.
    """
    if sys.is_finalizing():
        coroutine.close()
        raise RuntimeError("the process exits, so no coroutine can be awaited")
    current = getcurrent()
    if isinstance(current, _Waiting):
        return current.parent.switch(coroutine)  # pyright: ignore[reportOptionalMemberAccess]  # every one has a parent
    loop = agents_loop()
    if is_on_agents_loop():
        coroutine.close()
        raise RuntimeError(
            "a coroutine of an agent or an environment must await another agent's aact instead of calling its act or "
            "get_action"
        )
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except CancelledError:
        if _agents.is_stopping:
            raise process_exit() from None  # so that a thread that is still waiting ends without a traceback
        raise
    finally:
        future.cancel()  # if the wait was interrupted


async def on_agents_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that must run on :func:`agents_loop`, from a coroutine on any loop."""
    if is_on_agents_loop():
        return await coroutine
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, agents_loop()))


async def gathered(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await coroutines at the same time, and return their results in order; the first error cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def awaited(returned: Any) -> Any:
    """Return what a function returned, or the result of the coroutine that it returned."""
    return run_coroutine(cast("Any", returned)) if type(returned) is CoroutineType else returned


def can_wait_on_loop() -> bool:
    """Whether the caller is a function of :func:`run_on_loop`, so that it must not block its thread."""
    return isinstance(getcurrent(), _Waiting)
