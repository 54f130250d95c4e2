"""What an engine is: one game in play, in a worker process."""

from __future__ import annotations

from typing import Any, Protocol


class Engine(Protocol):
    """One game in play at a time; made without arguments, in a worker process, and used again for the next game.

    The same game and commands must give the same answers: a session whose process ended through another's fault is
    replayed. All values are JSON.
    """

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        """Load a game and begin it."""
        ...

    def step(self, command: str) -> dict[str, Any]:
        """Play one command."""
        ...

    def close(self) -> None:
        """Free what the engine holds; it is not used any more."""
        ...
