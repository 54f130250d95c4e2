"""The games themselves: a process that plays one imports this module, and nothing that trains."""

from __future__ import annotations

from typing import Any, ClassVar

from agentsgym.envs.base import MultistepEnv

NUMBERS = ["one", "two", "three", "four", "five", "six"]


class GuessNumber(MultistepEnv):
    """Every turn costs a tenth; the secret word gives 1 and ends the game, so episodes differ in length.

    A task with ``cannot_start`` raises at once, one with ``breaks`` at its second turn, one with ``fears`` where that
    word is answered.
    """

    default_config: ClassVar = {"max_steps_per_episode": 4, "error_allowance": 99}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        if task_data.get("cannot_start"):
            raise RuntimeError("there is no such number")
        secret = task_data.get("secret", self.rng(session_id).randrange(len(NUMBERS)))
        return {"done": False, "secret": secret, "output": "", "breaks": task_data.get("breaks", False)} | (
            {"fears": task_data["fears"]} if "fears" in task_data else {}
        )

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return "Guess a number from one to six." if step == 0 else state["output"]

    def _state_key(self, state: dict[str, Any]) -> str:
        return state["output"]

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        if state["breaks"] and state["output"]:
            raise RuntimeError("the game is broken")
        if state.get("fears", action + "?") in action:
            raise RuntimeError("that word again")
        guesses = [NUMBERS.index(word) for word in action.split() if word in NUMBERS]
        won = state["secret"] in guesses
        output = "A number, please." if not guesses else "Higher." if guesses[0] < state["secret"] else "Lower."
        reward = 1.0 if won else -0.1
        return {**state, "output": output}, reward, won, {"success": won, "invalid": not guesses}


class SayBlue(MultistepEnv):
    """Two turns; each gives 1 where the answer holds the word blue."""

    default_config: ClassVar = {"max_steps_per_episode": 2}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "blues": 0, "turn": 0}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return "Say a color."

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        is_blue = "blue" in action.split()
        blues, turn = state["blues"] + is_blue, state["turn"] + 1
        return {"blues": blues, "turn": turn}, float(is_blue), turn == 2, {"success": blues == 2}
