"""Run one ScienceWorld episode; used in an engine's process."""

from __future__ import annotations

import hashlib
from typing import Any

from agentsgym.envs.ScienceWorld.java import JavaMachine, java_machine

_NOT_UNDERSTOOD = ("No known action matches", "Unknown action")


class ScienceWorldEngine:
    """Runs one episode at a time; see :mod:`agentsgym.envs.shared.engines`.

    The argument of ``start`` has the keys ``task``, ``variation``, ``simplifications`` (joined by commas),
    ``memory_mb``, ``gold_path`` and ``admissible_commands`` (whether to compute these, which is slow).
    """

    def __init__(self) -> None:
        self._machine: JavaMachine | None = None
        self._game: Any = None
        self._lists_commands = False

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        """Load the task and run the first command, ``look around``."""
        machine = java_machine(game["simplifications"], game["memory_mb"])
        if machine is not self._machine:
            self._machine, self._game = machine, machine.new_game()
        self._lists_commands = game["admissible_commands"]
        self._game.load(game["task"], game["variation"], game["simplifications"], game["gold_path"])
        walkthrough: list[str] = []
        if game["gold_path"]:
            walkthrough = list(self._game.getGoldActionSequence())
            self._game.reset()  # computing the gold path plays the episode
        text = self._game.step("look around")
        return {
            "text": f"{self._game.freeActionTaskDesc().strip()}\n\n{text.strip()}",
            "walkthrough": walkthrough,
            **self._common_response(),
        }

    def step(self, command: str) -> dict[str, Any]:
        """Run one command."""
        text = self._game.step(command).strip()
        return {"text": text, "understood": not text.startswith(_NOT_UNDERSTOOD), **self._common_response()}

    def close(self) -> None:
        """Release the episode; the JVM continues to run other episodes."""
        self._game = self._machine = None

    def _common_response(self) -> dict[str, Any]:
        """Return the part of a response that ``start`` and ``step`` share."""
        game = self._game
        score = round(game.getScore(), 2)  # at most 1, in steps of 0.01; -1 for a failed task
        done = bool(game.getCompleted()) or score < 0
        won = done and score >= 1
        commands: list[str] = []
        if self._lists_commands and not done:
            valid = game.getValidActionObjectCombinations()
            commands = sorted(command for command in valid if not command.startswith("reset"))
        # The visible objects, the inventory, and the goals met.
        position = (game.freeActionLook(), game.freeActionInventory(), game.getGoalProgressStr(), str(score))
        return {
            "admissible": commands,
            "policy": [],
            "won": won,
            "lost": done and not won,
            "score": score,
            "progress": max(0.0, score),
            "key": hashlib.blake2b("\n".join(position).encode(), digest_size=12).hexdigest(),
        }
