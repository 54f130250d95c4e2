"""Games in plain English for a small pretrained model: what it must learn is to play well, not to speak."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from agentsgym import Field, MultistepEnv
from agentsgym.fields import is_int


class NumberGuessing(MultistepEnv):
    """Find a number by bisection.

    The reward is 1 for finding it, and -0.1 for every answer that does not name exactly one number.
    """

    config_fields: ClassVar = {"highest": Field(default=100, expected="a positive int", valid=is_int(1))}

    def _initialize_episode(self, session_id: str, task_data: Mapping[str, Any]) -> dict[str, Any]:
        highest = self.env_config["highest"]
        reply = f"I am thinking of a number from 1 to {highest}. Guess it: answer with one number."
        return {"done": False, "secret": self.rng(session_id).randint(1, highest), "reply": reply}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return state["reply"]

    def _last_message(self, state: dict[str, Any]) -> str:
        return state["reply"]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        numbers = re.findall(r"\d+", action)
        if len(numbers) != 1:
            return {**state, "reply": "Name one number."}, -0.1, False, {"invalid": True, "success": False}
        guess, secret = int(numbers[0]), state["secret"]
        reply = "Right." if guess == secret else f"My number is {'higher' if guess < secret else 'lower'} than {guess}."
        return {**state, "reply": reply}, float(guess == secret), guess == secret, {"success": guess == secret}
