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

MOST_GIVEN_UP = 64  # abandoned calls that are still running, per environment
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
        """Run the function, in the worker's thread."""
        try:
            self.result = self.work()
        except BaseException as error:  # noqa: BLE001  # foreign code; re-raised in the waiting thread
            self.error = error
        self._is_over.release()

    def wait(self, limit_s: float | None) -> bool:
        """Wait until it is done; False if that takes longer than ``limit_s``."""
        return self._is_over.acquire(timeout=-1 if limit_s is None else limit_s)


class Worker(threading.Thread):
    """A thread that runs one job after another and ends after an idle period."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(name="agentsgym-call", daemon=True)
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()  # None ends the thread
        self._runner = runner

    def run(self) -> None:
        """Run jobs until the runner releases the worker."""
        while True:
            try:
                job = self.jobs.get(timeout=_IDLE_S)
            except Empty:
                if self._runner.may_end(self):
                    return
                continue
            if job is None:
                return
            job.run()
            del job  # otherwise its result is held until the next one
            self._runner.take_back(self)


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
        self._idle: deque[Worker] = deque()
        self._given_up: list[Job] = []

    def start(self, work: Callable[[], Any]) -> Job:
        """Start a call.

        Raises:
            EnvError: Too many abandoned calls are still running.
        """
        job = Job(work)
        with self._lock:
            worker = self._idle.pop() if self._idle else None
            self._given_up = [one for one in self._given_up if not one.wait(0)]
            num_stuck = len(self._given_up)
        if num_stuck >= MOST_GIVEN_UP:
            raise EnvError(
                f"{num_stuck} {self._what} have exceeded {self._limit_name} and are still running: no more are "
                "started until some of them return (give them their own time limit)"
            )
        if worker is None:
            worker = Worker(self)
            worker.start()
        worker.jobs.put(job)
        return job

    def finish(self, job: Job, limit_s: float | None) -> Any:
        """Wait for a call and return its result, or re-raise its exception.

        Raises:
            CallTimeoutError: The call takes longer than ``limit_s``, and is abandoned.
        """
        if not job.wait(limit_s):
            with self._lock:
                self._given_up.append(job)
            raise CallTimeoutError
        if job.error is not None:
            raise job.error
        return job.result

    def take_back(self, worker: Worker) -> None:
        """Keep an idle worker for the next call."""
        with self._lock:
            if not self._is_closed:
                self._idle.append(worker)
                return
        worker.jobs.put(None)

    def may_end(self, worker: Worker) -> bool:
        """Whether an idle worker may end; not if it was just assigned a job."""
        with self._lock:
            if worker in self._idle:
                self._idle.remove(worker)
                return True
        return False

    def close(self) -> None:
        """End the threads: the idle ones now, the others when their calls return."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = [*self._idle], deque()
        for worker in idle:
            worker.jobs.put(None)
