"""A verifiers module as a user writes one: `vf-eval guess_in_verifiers` plays the environment."""

from __future__ import annotations

from typing import Any

from agentsgym import MultistepEnv
from agentsgym.interop import as_verifiers


class Guess(MultistepEnv):
    """Guess a number from 1 to 4; raises at 4, and ends after three turns."""

    def _system_prompt(self) -> str:
        return "Play."

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        secret = task_data.get("secret") or self.rng(session_id).randint(1, 3)
        return {"done": False, "secret": secret, "text": "Guess: 1 to 4.", "turn": 0}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return state["text"]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        if action == "4":
            raise RuntimeError("the game broke")
        won = action == str(state["secret"])
        state = {**state, "text": f"No, says {self.rng(session_id).random()}.", "turn": state["turn"] + 1}
        return state, 1.0 if won else -0.25, won, {"success": won, "num_turns": state["turn"]}


TASKS = [{"secret": 1, "seed": 1}, {"secret": 3, "seed": 2}, {"secret": 4, "seed": 3}, {}]
ENV = Guess(None, {"max_steps_per_episode": 4})

GuessTaskset, GuessPlayer = as_verifiers(ENV, TASKS)

__all__ = ["GuessPlayer", "GuessTaskset"]
