"""A small real game: guess a number, answered "higher" or "lower"; some games last longer than others."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from agentsgym import Agent, Field, Message, MultistepEnv, TaskError, Trajectory
from agentsgym.fields import is_int
from agentsgym.seeding import derive_seed

WIN, MISS, INVALID = 1.0, -0.25, -1.0


class GuessEnv(MultistepEnv):
    """The number is given by the task or drawn; each hint ends with a number drawn from the session's generator."""

    config_fields: ClassVar = {"highest": Field(default=9, expected="a positive int", valid=is_int(1))}
    num_initialized = 0

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        if not isinstance(task_data.get("solution"), int | None):
            raise TaskError(f"task_data['solution'] must be an int, got {task_data['solution']!r}")

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        self.num_initialized += 1
        solution = task_data.get("solution") or self.rng(session_id).randint(1, self.env_config["highest"])
        return {"done": False, "solution": solution, "hint": "", "guesses": []}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str | list[Message]:
        return state["hint"] if step else f"Guess a number from 1 to {self.env_config['highest']}."

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        draw = self.rng(session_id).randint(0, 99)
        if not action.strip().isdecimal():
            return {**state, "hint": f"That is no number. {draw}"}, INVALID, False, {"invalid": True, "success": False}
        guess = int(action)
        won = guess == state["solution"]
        hint = f"{'Higher' if guess < state['solution'] else 'Lower'}. {draw}"
        state = {**state, "hint": hint, "guesses": [*state["guesses"], guess]}
        return state, WIN if won else MISS, won, {"success": won}


class Quiet(MultistepEnv):
    """A game that ends with the first action, whatever it is."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False}

    def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
        return "go"

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        return state, 1.0, True, {}


class Chatty(Agent):
    """A function of the conversation alone: guesses by hash, and now and then answers something that is no number."""

    def __init__(self, highest: int = 9) -> None:
        self.highest = highest

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        number = derive_seed([message["content"] for message in messages])
        return ("hm" if number % 7 == 0 else str(number % self.highest + 1)), agent_state


class Counting(Agent):
    """Guesses 1, 2, 3, …; the count is its state, so it starts again with each conversation."""

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        number = (agent_state or 0) + 1
        return str(number), number


def bare(trajectory: Trajectory) -> Trajectory:
    """The trajectory without what distinguishes the sessions that played it."""
    return dataclasses.replace(trajectory, session_id="", task_index=0, rollout_index=0)


def tasks(*solutions: int) -> list[dict[str, Any]]:
    return [{"solution": solution, "seed": 0} for solution in solutions]
