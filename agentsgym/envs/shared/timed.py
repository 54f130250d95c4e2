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
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from agentsgym.errors import EnvError
from agentsgym.event_loop import can_wait_on_loop, run_coroutine

MAX_ABANDONED = 64  # abandoned calls that are still running, per environment
_IDLE_S = 10.0  # how long an idle thread waits before it ends


class CallTimeoutError(Exception):
    """A call exceeded its limit; a ``TimeoutError`` that the called code raises is re-raised unchanged instead."""


class Job:
    """One call: its function and, once it is done, its result."""

    __slots__ = ("_done", "_notify", "error", "result", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self._done = threading.Lock()  # released when the call is done; faster than an Event
        self._done.acquire()
        self._notify: Callable[[], object] | None = None

    def run(self) -> None:
        """Run the function; called in a worker thread."""
        try:
            self.result = self.work()
        except BaseException as error:  # noqa: BLE001  # user code; re-raised in the waiting thread
            self.error = error
        self._done.release()
        if self._notify is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._notify()

    def wait(self, limit_s: float | None) -> bool:
        """Wait until the call is done, and return True; return False if that takes longer than ``limit_s`` seconds."""
        if can_wait_on_loop():
            return run_coroutine(self._wait_on_loop(limit_s))
        return self._done.acquire(timeout=-1 if limit_s is None else limit_s)

    async def _wait_on_loop(self, limit_s: float | None) -> bool:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        self._notify = lambda: loop.call_soon_threadsafe(event.set)
        if not self._done.acquire(blocking=False):
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), limit_s)
            return event.is_set()
        return True


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
        self._idle: deque[SimpleQueue[Job | None]] = deque()  # the queues of the idle threads; None ends a thread
        self._abandoned: list[Job] = []

    def start(self, work: Callable[[], Any]) -> Job:
        """Start a call."""
        job = Job(work)
        with self._lock:
            self._abandoned = [abandoned for abandoned in self._abandoned if not abandoned.wait(0)]
            if len(self._abandoned) >= MAX_ABANDONED:
                raise EnvError(
                    f"{len(self._abandoned)} {self._what} exceeded {self._limit_name} and are still running, so no new "
                    "ones are started until some of them return: set a timeout inside the called code, such as on its "
                    "network requests"
                )
            jobs = self._idle.pop() if self._idle else None
        if jobs is None:
            jobs = SimpleQueue[Job | None]()
            threading.Thread(target=self._serve, args=(jobs,), name="agentsgym-call", daemon=True).start()
        jobs.put(job)
        return job

    def finish(self, job: Job, limit_s: float | None) -> Any:
        """Wait for a call and return its result, or re-raise its exception."""
        if not job.wait(limit_s):
            with self._lock:
                self._abandoned.append(job)
            raise CallTimeoutError
        if job.error is not None:
            raise job.error
        return job.result

    def close(self) -> None:
        """End the threads: the idle ones now, the others when their calls return."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = [*self._idle], deque()
        for jobs in idle:
            jobs.put(None)

    def _serve(self, jobs: SimpleQueue[Job | None]) -> None:
        """Run jobs one after another in this thread until it has been idle for a while or the runner is closed."""
        while True:
            try:
                job = jobs.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if jobs in self._idle:  # otherwise it was just assigned a job
                        self._idle.remove(jobs)
                        return
                continue
            if job is None:
                return
            job.run()
            del job  # otherwise its result stays in memory until the next job
            with self._lock:
                if self._is_closed:
                    return
                self._idle.append(jobs)
