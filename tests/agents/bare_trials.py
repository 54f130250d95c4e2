"""Trials that are plain generators, for tests of what plays them."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from agentsgym.rollouts import driver


class BareTrial:
    """A trial that wraps a generator and is never abandoned."""

    env: Any = None
    session_id = ""
    may_wait = False

    def __init__(self, generator: Generator[Any, Any, Any]) -> None:
        self.generator = generator

    def play(self) -> Generator[Any, Any, Any]:
        return self.generator

    def abandon(self, error: Exception, /) -> Any:
        raise error


def drive(trials: Iterable[Any], agent: Any, **options: Any) -> list[Any]:
    wrapped = (BareTrial(trial) if isinstance(trial, Generator) else trial for trial in trials)
    return driver.drive(wrapped, agent, **options)
