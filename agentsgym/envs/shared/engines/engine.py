"""The engine protocol: one active episode in a worker process."""

from __future__ import annotations

from typing import Any, Protocol


class Engine(Protocol):
    """One active episode at a time; made without arguments, in a worker process, and reused for the next episode.

    The same game and commands must give the same responses: a session whose process was ended by another's fault is
    replayed. All values are JSON.
    """

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        """Load a game and start it."""
        ...

    def step(self, command: str) -> dict[str, Any]:
        """Run one command."""
        ...

    def close(self) -> None:
        """Release the engine's resources; it is not used afterwards."""
        ...
