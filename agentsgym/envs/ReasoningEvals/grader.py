"""Grade in a process of its own, one for each process that plays: started at first use, replaced when it hangs."""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from agentsgym.errors import EnvError
from agentsgym.texts import shown

logger = logging.getLogger(__name__)

_START_LIMIT_S = 120.0  # an import on a busy machine
_GRACE_S = 3.0  # beyond a request's own limit, which the process itself keeps where it can
_GENERATION_LIMIT_S = 30.0  # to make a generator, before the answer is graded
_MODULE = "agentsgym.envs.ReasoningEvals.grader_main"
_PACKAGE = {"math": "math_verify", "generated": "reasoning_gym"}


class _EndedError(Exception):
    """The process ended without an answer.

    Attributes:
        was_killed: Whether that was for time.
    """

    def __init__(self, *, was_killed: bool) -> None:
        super().__init__("the grader's process ended")
        self.was_killed = was_killed


class Grader:
    """A process that grades, one request after the other; threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._loaded: set[str] = set()

    def grade(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Grade an answer.

        Args:
            request: Its ``kind`` is ``"math"`` (``gold``, ``answer``) or ``"generated"`` (``task``, ``difficulty``,
                ``entry``, ``answer``).
            limit_s: Time for it in seconds.

        Returns:
            ``{"score": float}``, in [0, 1]; with a ``note`` where the answer could not be graded, and so is wrong:
            ``"timeout"``, or what was raised.

        Raises:
            EnvError: The process cannot be started, or ends twice on one request.
        """
        extra_s = _GENERATION_LIMIT_S if request["kind"] == "generated" else 0.0
        with self._lock:
            for is_last in (False, True):
                try:
                    self._load(_PACKAGE[request["kind"]])
                    return self._ask({**request, "limit_s": limit_s}, limit_s + _GRACE_S + extra_s)
                except _EndedError as ended:
                    self._end()
                    if ended.was_killed:
                        return {"score": 0.0, "note": "timeout"}
                    if is_last:
                        raise EnvError(f"the grader's process ended twice on {shown(request)}") from ended
            raise AssertionError  # the loop returns or raises

    def close(self) -> None:
        """End the process, if there is one; the next request starts another."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Leave the process to the process that started it, of which this one is a fork."""
        self._lock = threading.Lock()
        process, self._process, self._loaded = self._process, None, set()
        if process is not None:
            process.returncode = 0  # else it is waited for, and is no child of this process
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        os.close(pipe.fileno())  # unflushed: what is in the buffer is the other's
                    with suppress(OSError, ValueError):
                        pipe.close()

    def _load(self, package: str) -> None:
        if self._process is None:
            self._process = _start()
            self._loaded = set()
        if package not in self._loaded:
            reply = self._ask({"kind": "load", "package": package}, _START_LIMIT_S)
            if reply.get("note"):
                raise EnvError(f"the grader cannot load {package}: {reply['note']}")
            self._loaded.add(package)

    def _ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise AssertionError(process)
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            process.kill()

        timer = threading.Timer(limit_s, kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # a broken pipe
            line = ""
        finally:
            timer.cancel()
        if not line.endswith("\n"):
            # Ended by itself in the midst of a request with a limit: its own watch did that, for time.
            raise _EndedError(was_killed=killed.is_set() or (bool(request.get("limit_s")) and _gave_up(process)))
        return json.loads(line)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _gave_up(process: subprocess.Popen[str]) -> bool:
    """Whether the process ended itself, as ``faulthandler`` does with exit code 1."""
    return process.wait() == 1


def _start() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
        )
    except OSError as error:
        raise EnvError(f"the grader's process cannot be started: {error}") from error


shared = Grader()
atexit.register(shared.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=shared.forget)
