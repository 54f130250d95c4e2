"""Games that the tests serve, and a server of them in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from guess_game import GuessEnv

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.Tools import ToolEnv
from agentsgym.serving.served_env import ServedEnv
from agentsgym.serving.server import EpisodeServer


class Game(GuessEnv):
    """Guesses; counts the live episodes, and does at a word what an environment should not."""

    task_fields = ("solution",)
    num_closed = 0

    def _system_prompt(self) -> str:
        return "Play."

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        if action == "raise":
            raise RuntimeError("the game broke")
        if action == "sleep":
            time.sleep(0.2)
        if action == "odd":
            return {**state, "hint": "\N{SNOWMAN}"}, 0.5, False, {"num_odd": 1, "nan": float("nan"), "text": "x"}
        return super()._step_episode(session_id, state, action)

    def _last_message(self, state: dict[str, Any]) -> str:
        return "It is over."

    def _close_episode(self, session_id: str, state: dict[str, Any]) -> None:
        self.num_closed += 1


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: One of them.
        second: The other.
    """
    return first + second


TASKS: Mapping[str, list[dict[str, Any]]] = {
    "train": [{"solution": 1 + index % 9, "seed": 100 + index} for index in range(20)],
    "eval": [{"solution": 5}],
}
QUESTIONS = {"train": [{"question": "What is 3 + 4?", "answer": "7", "seed": 1}], "eval": [{"question": "?"}]}


def guesses() -> ServedEnv:
    return ServedEnv(Game(None, {"max_steps_per_episode": 4, "error_allowance": 9}), TASKS)


def sums() -> ServedEnv:
    return ServedEnv(ToolEnv(tools=[add]), QUESTIONS)


def live(served: ServedEnv) -> Mapping[str, Any]:
    env: MultistepEnv = served.env
    return env.active_states


@contextmanager
def running(**options: Any) -> Iterator[str]:
    """Serve both games in a thread; yields the URL."""
    server = EpisodeServer(options.pop("envs", None) or {"guess": guesses(), "sums": sums()}, **options)
    ready = threading.Event()
    urls: list[str] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with server.listening() as url:
            urls.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
