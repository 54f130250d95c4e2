"""An environment that opens something in each episode and notes in a file what it opened and closed.

Worker processes import it by this name.
"""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from agentsgym import EnvError, Field, MultistepEnv
from agentsgym.fields import is_str

RELEASE = threading.Event()  # ends what hangs in a thread


class Sandbox(MultistepEnv):
    """A task is ``{"script": "one word a turn"}``; the agent answers the words; ``stop`` ends the episode."""

    config_fields: ClassVar = {"log": Field(default="", expected="a path", valid=is_str)}

    def _note(self, word: str, session_id: str) -> None:
        with Path(self.env_config["log"]).open("a", encoding="utf-8") as file:
            file.write(f"{word} {session_id}\n")

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        if task_data["script"] == "unborn":
            raise OSError("no sandbox left")
        self._note("open", session_id)
        return {"done": task_data["script"] == "over", "words": task_data["script"].split(), "played": []}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return " ".join(state["words"])

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        {
            "break": lambda: 1 / 0,
            "fault": lambda: fail("the sandbox is on fire"),
            "interrupt": interrupt,
            "doze": lambda: time.sleep(0.3),
            "hang": lambda: RELEASE.wait(60),
            "sleep": lambda: (self._note("sleep", session_id), time.sleep(60)),
            "stubborn": stay,
            "exit": lambda: os._exit(7),
        }.get(action, lambda: None)()
        return {**state, "played": [*state["played"], action]}, 1.0, action == "stop", {}

    def _close_episode(self, session_id: str, state: dict[str, Any]) -> None:
        self._note("close", session_id)
        if state["words"][-1] == "leaky" or "leaky" in state["played"]:
            raise OSError("the sandbox does not close")


def fail(sentence: str) -> None:
    raise EnvError(sentence)


def interrupt() -> None:
    raise KeyboardInterrupt


def stay() -> None:
    while True:
        with contextlib.suppress(BaseException):  # as code that no signal interrupts
            time.sleep(60)


def sandbox_tasks(*scripts: str) -> list[dict[str, Any]]:
    return [{"script": script, "seed": 0} for script in scripts]


def noted(env: Sandbox) -> tuple[Counter[str], Counter[str]]:
    """How often each session was opened, and how often it was closed."""
    path = Path(env.env_config["log"])
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    pairs = [line.split() for line in lines]
    opened, closed = (Counter(session for word, session in pairs if word == name) for name in ("open", "close"))
    return opened, closed


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
