"""Keep a retriever of the user's within a limit of time."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from agentsgym.envs.calls.timed import Runner


def within_time(retriever: Callable[[str, int], Any], limit_s: float | None) -> Callable[[str, int], Any]:
    """Give a retriever whose calls raise ``CallTimeoutError`` where they take longer; itself where there is no limit.

    Each call runs in a thread, one beside the other where searches overlap or one has been given up.
    """
    return retriever if limit_s is None else _Timed(retriever, limit_s)


class _Timed:
    """A retriever and the threads of this process that call it."""

    def __init__(self, retriever: Callable[[str, int], Any], limit_s: float) -> None:
        self._retriever, self._limit_s = retriever, limit_s
        self._begin()

    def __call__(self, query: str, k: int) -> Any:
        runner = self._runner_here()
        return runner.finish(runner.start(partial(self._retriever, query, k)), self._limit_s)

    def _begin(self) -> None:
        self._process_id = os.getpid()
        self._runner = Runner("searches", "env_config['search_timeout_s']")
        weakref.finalize(self, self._runner.close)

    def _runner_here(self) -> Runner:
        """The threads; new ones in a process that was forked off."""
        if self._process_id != os.getpid():
            self._begin()
        return self._runner
