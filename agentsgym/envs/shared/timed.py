"""Run calls of foreign code, tools and retrievers, in threads, each within a time limit.

Python cannot end a thread. A call that exceeds its limit is abandoned: its thread continues until the code returns, the
result is dropped, and no later call waits for it, since a thread is started if none is idle. All threads are daemons,
so that a call that never returns does not keep the process alive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from agentsgym.errors import EnvError

MAX_ABANDONED = 64  # abandoned calls that are still running, per environment
_IDLE_S = 10.0  # how long an idle thread waits before it ends


class CallTimeoutError(Exception):
    """A call exceeded its time limit; never raised from within the call itself."""


class Job:
    """One call: its function and, once it is done, its result."""

    __slots__ = ("_is_over", "error", "result", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self._is_over = threading.Lock()  # faster than an Event
        self._is_over.acquire()

    def run(self) -> None:
        """Run the function, in its thread."""
        try:
            self.result = self.work()
        except BaseException as error:  # noqa: BLE001  # foreign code; re-raised in the waiting thread
            self.error = error
        self._is_over.release()

    def wait(self, limit_s: float | None) -> bool:
        """Wait until it is done; False if that takes longer than ``limit_s``."""
        return self._is_over.acquire(timeout=-1 if limit_s is None else limit_s)


class Runner:
    """Threads for calls, as many as run concurrently.

    Args:
        what: The name of the calls in errors.
        limit_name: The name of the setting that limits a call.
    """

    def __init__(self, what: str, limit_name: str) -> None:
        self._what, self._limit_name = what, limit_name
        self._is_closed = False
        self._lock = threading.Lock()
        self._idle: deque[SimpleQueue[Job | None]] = deque()  # the queues of the idle threads; None ends a thread
        self._abandoned: list[Job] = []

    def start(self, work: Callable[[], Any]) -> Job:
        """Start a call.

        Raises:
            EnvError: Too many abandoned calls are still running.
        """
        job = Job(work)
        with self._lock:
            self._abandoned = [one for one in self._abandoned if not one.wait(0)]
            if len(self._abandoned) >= MAX_ABANDONED:
                raise EnvError(
                    f"{len(self._abandoned)} {self._what} have exceeded {self._limit_name} and are still running: no "
                    "more are started until some of them return (give them their own time limit)"
                )
            jobs = self._idle.pop() if self._idle else None
        if jobs is None:
            jobs = SimpleQueue[Job | None]()
            threading.Thread(target=self._serve, args=(jobs,), name="agentsgym-call", daemon=True).start()
        jobs.put(job)
        return job

    def finish(self, job: Job, limit_s: float | None) -> Any:
        """Wait for a call and return its result, or re-raise its exception.

        Raises:
            CallTimeoutError: The call takes longer than ``limit_s``, and is abandoned.
        """
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
        """Run one job after another in a thread, which ends after an idle period, or once the runner is closed."""
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
            del job  # otherwise its result is held until the next one
            with self._lock:
                if self._is_closed:
                    return
                self._idle.append(jobs)
