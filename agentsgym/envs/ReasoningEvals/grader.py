"""Grade answers in a separate process, which is started at first use and replaced when it hangs."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from typing import Any

from agentsgym.envs.shared.child_process import ChildExitedError, ChildProcess
from agentsgym.errors import EnvError
from agentsgym.texts import shown

_START_LIMIT_S = 120.0  # imports on a busy machine
_GRACE_S = 3.0  # in addition to a request's limit, which the process normally enforces itself
_GENERATION_LIMIT_S = 30.0  # to create a generator before an answer is graded
_MODULE = "agentsgym.envs.ReasoningEvals.grader_main"
_PACKAGE = {"math": "math_verify", "generated": "reasoning_gym"}


class Grader:
    """A client of the grading process, which handles one request at a time; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None
        self._loaded: set[str] = set()

    def grade(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Grade an answer.

        Args:
            request: The request, with ``kind`` ``"math"`` (``gold``, ``answer``) or ``"generated"`` (``task``,
                ``difficulty``, ``entry``, ``answer``).
            limit_s: The time limit in seconds.

        Returns:
            ``{"score": float}``, in [0, 1]. If the answer could not be graded and is therefore wrong, ``note`` is
            ``"timeout"`` or the exception.
        """
        package = _PACKAGE[request["kind"]]
        extra_s = _GENERATION_LIMIT_S if request["kind"] == "generated" else 0.0
        with self._lock:
            for is_last in (False, True):
                try:
                    if self._process is None:
                        self._process, self._loaded = ChildProcess(_MODULE, "the grader's process"), set()
                    if package not in self._loaded:
                        reply = self._process.call({"kind": "load", "package": package}, _START_LIMIT_S)
                        if reply.get("note"):
                            raise EnvError(f"the grader cannot load {package}: {reply['note']}")
                        self._loaded.add(package)
                    return self._process.call({**request, "limit_s": limit_s}, limit_s + _GRACE_S + extra_s)
                except ChildExitedError as ended:
                    self._end()
                    watchdog_fired = ended.returncode == 1 and package in self._loaded  # the watchdog exits with 1
                    if ended.timed_out or watchdog_fired:
                        return {"score": 0.0, "note": "timeout"}
                    if is_last:
                        raise EnvError(f"the grading process crashed twice on {shown(request)}") from ended
            raise AssertionError  # the loop returns or raises

    def close(self) -> None:
        """End the process, if it is running; the next request starts a new one."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Forget the process without ending it, since after a fork it belongs to the parent."""
        self._lock, self._process = threading.Lock(), None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


shared = Grader()
atexit.register(shared.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=shared.forget)
