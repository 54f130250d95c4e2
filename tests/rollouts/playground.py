"""An environment that does what its actions state, even hang and crash, and agents that state the first prompt's words.

Worker processes import it by this name.
"""

import asyncio
import os
import signal
import subprocess
import threading
import time
from typing import Any

from agentsgym import Action, Agent, AsyncAgent, Message, MultistepEnv, Trajectory, TurnRequest

RELEASE = threading.Event()  # ends what hangs
PAIR = threading.Barrier(2)


class Playground(MultistepEnv):
    """A task is ``{"script": "one word a turn"}``; ``stop`` ends the episode."""

    num_running = most_running = 0

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        words = task_data["script"].split()
        if words[0] == "unborn":
            os._exit(9)
        return {"done": False, "script": task_data["script"], "seen": "", "words": [], "closing": words[-1]}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return state["seen"] if step else state["script"]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        seen = {
            "hang": lambda: RELEASE.wait(60),
            "pair": lambda: PAIR.wait(60),
            "doze": lambda: time.sleep(0.05),
            "exit": lambda: os._exit(7),
            "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "pid": os.getpid,
            "start": lambda: subprocess.Popen(["sleep", "600"]).pid,
            "break": lambda: 1 / 0,
        }.get(action, lambda: self.rng(session_id).randint(0, 999))()
        self.num_running -= 1
        state = {**state, "seen": f"{action}: {seen}", "words": [*state["words"], action]}
        info = {"success": True, "words": state["words"], **({"secret": lambda: 0} if action == "secret" else {})}
        return state, float(len(action)), action == "stop", info


class Parrot(Agent):
    """Answers the words of the first prompt, over and over, and keeps its requests."""

    def __init__(self) -> None:
        self.requested: list[Any] = []
        self.rounds: list[int] = []
        self.finished = 0

    def act(self, requests: Any) -> Any:
        self.rounds.append(len(requests))
        return [self.answer(request) for request in requests]

    def answer(self, request: TurnRequest) -> Action:
        known = (list(request.messages), list(request.token_ids), request.agent_state, request.max_new_tokens)
        self.requested.append(known)
        turn = request.agent_state[0] if request.agent_state else 0
        # What no process can be sent stays with the agent.
        words = next(one["content"] for one in request.messages if one["role"] == "user").split()
        return Action(text=words[turn % len(words)], agent_state=(turn + 1, threading))

    def finish(self) -> None:
        self.finished += 1


class AsyncParrot(AsyncAgent):
    """The same, after giving way; on the word ``mute`` it never answers."""

    def __init__(self) -> None:
        self.parrot = Parrot()
        self.requested = self.parrot.requested
        self.finished = 0
        self.cancelled: list[str] = []

    async def aact(self, request: TurnRequest) -> Action:
        await asyncio.sleep(0)
        answer = self.parrot.answer(request)
        if answer.text != "mute":
            return answer
        try:
            return await asyncio.Future[Action]()
        finally:
            self.cancelled.append(request.session_id)

    def finish(self) -> None:
        self.finished += 1


def tasks(*scripts: str) -> list[dict[str, Any]]:
    return [{"script": script, "seed": seed} for seed, script in enumerate(scripts)]


def recent(messages: list[Message]) -> list[Message]:
    """A history that drops everything but the first prompt and the last message."""
    return [messages[0], *messages[1:][-1:]]


def texts(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "assistant"]


class AsyncPlayground(Playground):
    """The same, with hooks that give way; on the word ``wait`` a step never ends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.interrupted: list[str] = []
        self.closed: list[str] = []

    async def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return super()._initialize_episode(session_id, task_data)

    async def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        await asyncio.sleep(0)
        return super()._format_prompt(state, step)

    async def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        try:
            await (asyncio.Future[None]() if action == "wait" else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.interrupted.append(session_id)
            raise
        return super()._step_episode(session_id, state, action)

    async def _close_episode(self, session_id: str, state: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        self.closed.append(session_id)
