"""One process of engines, from its owner's side: the free slots, and the sessions in the others."""

from __future__ import annotations

import threading
from typing import Any

from agentsgym.envs.shared.child_process import ChildProcess
from agentsgym.errors import EnvError

_MODULE = "agentsgym.envs.shared.engines.main"
_LOAD_LIMIT_S = 180.0  # imports, on a busy machine


class EngineError(Exception):
    """An exception that an engine raised in its process."""


class Worker:
    """A process of engines.

    Attributes:
        lock: The lock that is held while the process works; threads take turns.
        is_over: Whether the process has ended; its sessions are then replayed in another one.
        num_games: The number of episodes started so far.
    """

    def __init__(self, engine: str) -> None:
        """Set up; the process starts with its first episode.

        Args:
            engine: The class of the engines, as ``"module:Class"``.
        """
        self.lock = threading.Lock()
        self.is_over = False
        self.num_games = 0
        self._engine = engine
        self._child: ChildProcess | None = None
        self._num_slots = 0
        self._free: list[int] = []
        self._taken: set[int] = set()

    @property
    def num_sessions(self) -> int:
        """The number of sessions in this process."""
        return len(self._taken)

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it has started."""
        return None if self._child is None else self._child.pid

    def take_slot(self) -> int:
        """Take an idle engine's slot, or a new one."""
        slot = self._free.pop() if self._free else self._num_slots
        self._num_slots = max(self._num_slots, slot + 1)
        self._taken.add(slot)
        self.num_games += 1
        return slot

    def free_slot(self, slot: int) -> None:
        """Return a slot; its engine waits for the next episode."""
        if slot in self._taken:
            self._taken.remove(slot)
            self._free.append(slot)

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request; the caller must hold the lock.

        Raises:
            EngineError: The engine raised.
            ChildEndedError: The process ended.
            EnvError: The process cannot be started.
        """
        try:
            if self._child is None:
                self._child = ChildProcess(_MODULE, "a process of engines")
                self._answer({"load": self._engine}, _LOAD_LIMIT_S)
            return self._answer(request, limit_s)
        except EngineError:
            raise
        except BaseException:
            self.end()  # an unread response would be taken for the next request's
            raise

    def _answer(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        if self._child is None:
            raise AssertionError
        reply = self._child.ask(request, limit_s)
        if "error" not in reply:
            return reply["answer"]
        if "load" in request:
            raise EnvError(f"the engine {self._engine} cannot be loaded: {reply['error']}: {reply['sentence']}")
        raise EngineError(f"{reply['error']}: {reply['sentence']}")

    def end(self) -> None:
        """End the process."""
        self.is_over = True
        if self._child is not None:
            self._child.end()

    def forget(self) -> None:
        """Drop the process without ending it, after a fork: it belongs to the parent."""
        self.is_over = True
        if self._child is not None:
            self._child.forget()
