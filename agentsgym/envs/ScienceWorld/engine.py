"""Play one game of ScienceWorld's; runs in an engine's process."""

from __future__ import annotations

import hashlib
from typing import Any

from agentsgym.envs.ScienceWorld.java import JavaMachine, java_machine

_NOT_UNDERSTOOD = ("No known action matches", "Unknown action")


class ScienceWorldEngine:
    """One game in play; see :class:`agentsgym.envs.shared.engines.Engine`.

    ``start`` takes ``task``, ``variation``, ``simplifications`` (joined by commas), ``gold_path`` and
    ``admissible_commands`` (whether these are asked for, which takes long), and ``memory_mb``.
    """

    def __init__(self) -> None:
        self._machine: JavaMachine | None = None
        self._game: Any = None
        self._lists_commands = False

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        """Load the game, and begin it by looking around."""
        machine = java_machine(game["simplifications"], game["memory_mb"])
        if machine is not self._machine:
            self._machine, self._game = machine, machine.new_game()
        self._lists_commands = game["admissible_commands"]
        self._game.load(game["task"], game["variation"], game["simplifications"], game["gold_path"])
        walkthrough: list[str] = []
        if game["gold_path"]:
            walkthrough = list(self._game.getGoldActionSequence())
            self._game.reset()  # finding the path has played it
        text = self._game.step("look around")
        return {
            "text": f"{self._game.freeActionTaskDesc().strip()}\n\n{text.strip()}",
            "walkthrough": walkthrough,
            **self._seen(),
        }

    def step(self, command: str) -> dict[str, Any]:
        """Play one command."""
        text = self._game.step(command).strip()
        return {"text": text, "understood": not text.startswith(_NOT_UNDERSTOOD), **self._seen()}

    def close(self) -> None:
        """Let go of the game; the JVM goes on with others."""
        self._game = self._machine = None

    def _seen(self) -> dict[str, Any]:
        game = self._game
        score = round(game.getScore(), 2)  # of 1, in steps of a hundredth; -1 where the task has been failed
        done = bool(game.getCompleted()) or score < 0
        won = done and score >= 1
        listed = self._lists_commands and not done
        return {
            "admissible": self._listed() if listed else [],
            "policy": [],
            "won": won,
            "lost": done and not won,
            "score": score,
            "progress": max(0.0, score),
            "key": self._key(score),
        }

    def _listed(self) -> list[str]:
        return sorted(one for one in self._game.getValidActionObjectCombinations() if not one.startswith("reset"))

    def _key(self, score: float) -> str:
        """Hash what is seen here, what is held, and which goals are met."""
        game = self._game
        seen = (game.freeActionLook(), game.freeActionInventory(), game.getGoalProgressStr(), str(score))
        return hashlib.blake2b("\n".join(seen).encode(), digest_size=12).hexdigest()
