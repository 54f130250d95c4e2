"""Rollouts to judge, and judges that are scripted."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from agentsgym import Action, Agent, AsyncAgent, Message, MultistepEnv, StopReason, Trajectory, Turn, TurnRequest
from agentsgym.agents.calls import MARK


class Greeting(MultistepEnv):
    """A few turns, each of which is rewarded where the agent answers "hello"."""

    default_config: ClassVar = {"max_steps_per_episode": 2}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "task": task_data}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"Greet guest {step}."

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], Any, bool, dict[str, Any]]:
        return state, float("hello" in action), False, {"length": len(action)}


def conversation(*texts: str, reward: float = 0.0, **fields: Any) -> Trajectory:
    """A rollout by hand: what the environment and the agent answer in turn, beginning with the environment."""
    messages = [Message(role="assistant" if at % 2 else "user", content=text) for at, text in enumerate(texts)]
    turns = [Turn(start=0, stop=0, reward=reward, message_index=at) for at in range(1, len(texts), 2)]
    given = {"messages": messages, "turns": turns, "final_reward": reward * len(turns), "stop_reason": StopReason.DONE}
    return Trajectory(**{"token_ids": [], **given, **fields})


def prompt_of(request: TurnRequest) -> str:
    """The request to a judge as one text."""
    return "\n".join(message["content"] for message in request.messages if message["role"] != "assistant")


def data_of(prompt: str) -> list[str]:
    """The quoted lines of a prompt, without their mark."""
    return [line.removeprefix(MARK) for line in prompt.splitlines() if line.startswith(MARK)]


def instructions_of(prompt: str) -> str:
    """A prompt without what is quoted in it."""
    return "\n".join(line for line in prompt.splitlines() if not line.startswith(MARK))


class ScriptedJudge(Agent):
    """Answers with a function of the prompt; counts the calls and the sizes of their batches."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer = answer
        self.prompts: list[str] = []
        self.batches: list[int] = []
        self.num_finished = 0

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        self.batches.append(len(requests))
        self.prompts += map(prompt_of, requests)
        return [Action(text=as_answer(self.answer(prompt_of(request)))) for request in requests]

    def finish(self) -> None:
        self.num_finished += 1


class WaitingJudge(AsyncAgent):
    """Answers after some time; counts the calls, and how many are open at once."""

    def __init__(self, answer: Callable[[str], Any], seconds: float = 0.0) -> None:
        self.answer, self.seconds = answer, seconds
        self.num_calls = self.num_open = self.most_open = 0

    async def aact(self, request: TurnRequest) -> Action:
        self.num_calls += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(self.seconds)
            return Action(text=as_answer(self.answer(prompt_of(request))))
        finally:
            self.num_open -= 1


def as_answer(given: Any) -> str:
    """The text of an answer."""
    return given if isinstance(given, str) else json.dumps(given)


def longest_first(prompt: str) -> dict[str, list[int]]:
    """Rank candidates by the length of what they state, the longest first; equally long ones by their place."""
    lengths: dict[int, int] = {}
    number = 0
    for line in prompt.splitlines():
        if found := re.fullmatch(r"CANDIDATE (\d+)", line):
            number = int(found[1])
            lengths[number] = 0
        elif line.startswith(MARK) and number:
            lengths[number] += len(line)
    return {"best": sorted(lengths, key=lambda one: (-lengths[one], one))}
