"""Run one ScienceWorld episode; used in an engine's process."""

from __future__ import annotations

import hashlib
from typing import Any

from agentsgym.envs.ScienceWorld.java import JavaMachine, java_machine

_NOT_UNDERSTOOD = ("No known action matches", "Unknown action")


class ScienceWorldEngine:
    """One active episode; see :mod:`agentsgym.envs.shared.engines`.

    ``start`` takes ``task``, ``variation``, ``simplifications`` (joined by commas), ``gold_path`` and
    ``admissible_commands`` (whether these are computed, which is slow), and ``memory_mb``.
    """

    def __init__(self) -> None:
        self._machine: JavaMachine | None = None
        self._game: Any = None
        self._lists_commands = False

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        """Load the task, and start with a look around."""
        machine = java_machine(game["simplifications"], game["memory_mb"])
        if machine is not self._machine:
            self._machine, self._game = machine, machine.new_game()
        self._lists_commands = game["admissible_commands"]
        self._game.load(game["task"], game["variation"], game["simplifications"], game["gold_path"])
        walkthrough: list[str] = []
        if game["gold_path"]:
            walkthrough = list(self._game.getGoldActionSequence())
            self._game.reset()  # finding the path plays the episode
        text = self._game.step("look around")
        return {
            "text": f"{self._game.freeActionTaskDesc().strip()}\n\n{text.strip()}",
            "walkthrough": walkthrough,
            **self._seen(),
        }

    def step(self, command: str) -> dict[str, Any]:
        """Run one command."""
        text = self._game.step(command).strip()
        return {"text": text, "understood": not text.startswith(_NOT_UNDERSTOOD), **self._seen()}

    def close(self) -> None:
        """Release the episode; the JVM keeps running others."""
        self._game = self._machine = None

    def _seen(self) -> dict[str, Any]:
        game = self._game
        score = round(game.getScore(), 2)  # out of 1, in steps of 0.01; -1 for a failed task
        done = bool(game.getCompleted()) or score < 0
        won = done and score >= 1
        commands: list[str] = []
        if self._lists_commands and not done:
            commands = sorted(one for one in game.getValidActionObjectCombinations() if not one.startswith("reset"))
        # The visible objects, the inventory, and the goals met.
        seen = (game.freeActionLook(), game.freeActionInventory(), game.getGoalProgressStr(), str(score))
        return {
            "admissible": commands,
            "policy": [],
            "won": won,
            "lost": done and not won,
            "score": score,
            "progress": max(0.0, score),
            "key": hashlib.blake2b("\n".join(seen).encode(), digest_size=12).hexdigest(),
        }
