"""Run the grading process, which reads requests as lines of JSON and writes a response to each.

The process is separate because grading may never finish or may exhaust memory. An alarm interrupts slow requests; if a
computation never returns to the interpreter, a watchdog ends the process.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentsgym.envs.ReasoningEvals import SPEC, generated
from agentsgym.envs.shared.child_process import serve
from agentsgym.texts import sentence_of

_MAX_MEMORY = 2 << 30  # bytes per request
_GRACE_S = 1.0  # from the alarm, which may be swallowed, to the end of the process


class _TooLongError(BaseException):
    """Raised by the alarm; not an Exception, since sympy catches those."""


def _limit_memory() -> None:
    """Limit additional memory: libraries may already have reserved far more address space for their threads."""
    if sys.platform != "linux":
        return
    import resource  # noqa: PLC0415  # not available on Windows

    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + _MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    kind, item = request["kind"], None
    if kind == "generated":  # creates and caches the generator before the time limit starts
        item = generated.unpack(request["task"], request["difficulty"], request["entry"])
    limit_s: float | None = request.get("limit_s")
    try:
        _set_alarm(limit_s)
        try:
            if kind == "load":
                SPEC.load(request["package"])
                _limit_memory()
                return {}
            if item is not None:
                return {"score": generated.score(item, request["answer"])}
            untyped: Any = SPEC.load("math_verify")
            settings = [untyped.LatexExtractionConfig(), untyped.ExprExtractionConfig()]
            without_timeout: dict[str, Any] = {"extraction_mode": "first_match", "parsing_timeout": None}
            texts = (request["gold"], request["answer"])  # verify takes the reference first
            parsed = [untyped.parse(f"${text}$", settings, **without_timeout) for text in texts]
            return {"score": float(untyped.verify(*parsed, timeout_seconds=None)) if all(parsed) else 0.0}
        finally:
            _set_alarm(None)
    except _TooLongError:
        return {"score": 0.0, "note": "timeout"}
    except (Exception, RecursionError) as error:  # noqa: BLE001  # an answer that cannot be graded is wrong
        return {"score": 0.0, "note": f"{type(error).__name__}: {sentence_of(error, 200)}"}


def _set_alarm(limit_s: float | None) -> None:
    if hasattr(signal, "setitimer"):  # not on Windows, where the parent process enforces the limit
        signal.setitimer(signal.ITIMER_REAL, limit_s or 0.0)
    if limit_s is None:
        faulthandler.cancel_dump_traceback_later()
    else:
        faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True, file=2)


def main() -> None:
    """Serve requests until the input ends."""

    def interrupt(*_: Any) -> None:
        raise _TooLongError

    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, interrupt)
    logging.disable()
    warnings.simplefilter("ignore")
    serve(_answer)


if __name__ == "__main__":
    main()
