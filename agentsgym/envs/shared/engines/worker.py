"""One process of engines, from its owner's side."""

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
        taken: The slots of the active sessions; the engines in other slots wait for the next episode.
    """

    def __init__(self, engine: str) -> None:
        """Set up; the process starts with its first episode.

        Args:
            engine: The class of the engines, as ``"module:Class"``.
        """
        self.lock = threading.Lock()
        self.is_over = False
        self.num_games = 0
        self.taken: set[int] = set()
        self._engine = engine
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it has started."""
        return None if self._child is None else self._child.pid

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request; the caller must hold the lock.

        Raises:
            EngineError: The engine raised.
            ChildEndedError: The process ended.
            EnvError: The process cannot be started, or cannot load the engine.
        """
        try:
            if self._child is None:
                self._child = ChildProcess(_MODULE, "a process of engines")
                loaded = self._child.ask({"load": self._engine}, _LOAD_LIMIT_S)
                if "error" in loaded:
                    raise EnvError(  # noqa: TRY301  # as any failure here, it ends the process
                        f"the engine {self._engine} cannot be loaded: {loaded['error']}: {loaded['sentence']}"
                    )
            reply = self._child.ask(request, limit_s)
        except BaseException:
            self.end()  # an unread response would be taken for the next request's
            raise
        if "error" in reply:
            raise EngineError(f"{reply['error']}: {reply['sentence']}")
        return reply["answer"]

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
