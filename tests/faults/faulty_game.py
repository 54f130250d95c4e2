"""A game whose tasks state which hook raises what, and agents that do the same in the turn they are made to.

Worker processes import it by this name.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, NoReturn

from agentsgym import Action, Agent, AsyncAgent, Message, MultistepEnv, Trajectory, TurnRequest


class Foreign(BaseException):
    """Somebody's own, which nobody else knows."""


def exhaust_the_stack() -> NoReturn:
    exhaust_the_stack()


FAULTS: dict[str, Any] = {
    "RuntimeError": RuntimeError,
    "SystemExit": SystemExit,
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "MemoryError": MemoryError,
    "RecursionError": None,
    "Foreign": Foreign,
}
HOOKS = (
    "_initialize_episode",
    "_format_prompt",
    "_system_prompt",
    "_state_key",
    "_role",
    "_potential",
    "_step_episode",
    "_final_reward",
    "_calculate_rewards",
    "history",
)


def raise_fault(fault: str) -> NoReturn:
    if fault == "RecursionError":
        exhaust_the_stack()
    raise FAULTS[fault]


def prompt_of(messages: Any) -> str:
    return next(message["content"] for message in messages if message["role"] == "user")


def break_history(messages: list[Message]) -> list[Message]:
    """A history that changes nothing and raises where the first prompt reports it."""
    hook, _, fault = prompt_of(messages).partition(" ")
    if hook == "history":
        raise_fault(fault)
    return messages


class FaultyGame(MultistepEnv):
    """Two turns long. A task is ``{"breaks": "_step_episode SystemExit"}``, or ``"nothing"``."""

    _breaks = threading.local()  # for the hook that is reported nothing

    def _break(self, hook: str, breaks: str) -> None:
        self._breaks.now = breaks
        if breaks.startswith(hook + " "):
            raise_fault(breaks.partition(" ")[2])

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        self._break("_initialize_episode", task_data["breaks"])
        return {"done": False, "breaks": task_data["breaks"], "turns": 0}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        self._break("_format_prompt", state["breaks"])
        return f"turn {step}" if step else state["breaks"]

    def _system_prompt(self) -> str | None:
        self._break("_system_prompt", self._breaks.now)
        return None

    def _state_key(self, state: dict[str, Any]) -> Any:
        self._break("_state_key", state["breaks"])

    def _role(self, state: dict[str, Any]) -> Any:
        self._break("_role", state["breaks"])

    def _potential(self, state: dict[str, Any]) -> float | None:
        self._break("_potential", state["breaks"])
        return None

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        self._break("_step_episode", state["breaks"])
        turns = state["turns"] + 1
        return {**state, "turns": turns}, 1.0, turns == 2, {}

    def _final_reward(self, state: dict[str, Any], turn_rewards: list[float]) -> float:
        self._break("_final_reward", state["breaks"])
        return sum(turn_rewards)

    def _calculate_rewards(self, trajectory: Trajectory) -> list[float]:
        self._break("_calculate_rewards", prompt_of(trajectory.messages))
        return super()._calculate_rewards(trajectory)

    def _close_episode(self, session_id: str, state: dict[str, Any]) -> None:
        self._break("_close_episode", state["breaks"])


class Simple(Agent):
    """Answers each conversation by itself, and raises where the first prompt makes this method do so."""

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        hook, _, fault = prompt_of(messages).partition(" ")
        if hook == "agent":
            raise_fault(fault)
        return "go", None


class Batching(Agent):
    """Answers all at once."""

    def act(self, requests: Any) -> list[Action]:
        return [Action(text=Simple().get_action(list(request.messages), None)[0]) for request in requests]


class Concurrent(AsyncAgent):
    """Answers with coroutines."""

    async def aact(self, request: TurnRequest) -> Action:
        await asyncio.sleep(0)
        return Action(text=Simple().get_action(list(request.messages), None)[0])


def tasks(*breaks: str) -> list[dict[str, Any]]:
    return [{"breaks": each, "seed": 0} for each in breaks]
