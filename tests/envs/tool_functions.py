"""Tools and agents that the tests of tool environments share."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

from agentsgym import Action, Agent, ToolCall, Trajectory, TurnRequest
from agentsgym.envs import ToolEnv


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


def divide(a: int, b: int) -> float:
    """Divide.

    Args:
        a: One number.
        b: Another.
    """
    return a / b


class Calls(Agent):
    """Plays a list of moves: a text is an answer, a list of calls is a turn that makes them."""

    def __init__(self, *moves: Any) -> None:
        self.moves = moves
        self.tools: list[Any] = []

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        self.tools = [*requests[0].tools]
        return [self.answer(request) for request in requests]

    def answer(self, request: TurnRequest) -> Action:
        turn = request.agent_state or 0
        move = self.moves[min(turn, len(self.moves) - 1)]
        if isinstance(move, Action):
            return Action(
                text=move.text, tool_calls=move.tool_calls, finish_reason=move.finish_reason, agent_state=turn + 1
            )
        if isinstance(move, str):
            return Action(text=move, agent_state=turn + 1)
        return Action(text="", tool_calls=tuple(move), agent_state=turn + 1)


def call(name: str, id: str | None = None, **arguments: Any) -> ToolCall:
    """A well-formed call."""
    return ToolCall(name=name, arguments=arguments, id=id)


def play(env: ToolEnv, *moves: Any, **task: Any) -> Trajectory:
    """One rollout of the moves."""
    [trajectory] = env.rollout([{"question": "What?", **task}], Calls(*moves))
    return trajectory


def results(trajectory: Trajectory) -> list[str]:
    """What the tools answered."""
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


class Gate:
    """A tool that returns only once it is made to."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.num_inside = 0

    def wait(self) -> str:
        """Wait for the gate."""
        self.num_inside += 1
        self.opened.wait(20)
        return json.dumps("open")
