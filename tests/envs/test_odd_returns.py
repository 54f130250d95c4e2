"""Whatever user code returns fails only what it was asked for, unless it is right: odd values at every hook.

The places are the hooks of environments, tools, programs, agents and judges; what is right follows from their
annotations. All values of a place are returned in one run, each in an episode of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from guess_game import Quiet
from program_client import Client, user
from tool_functions import Calls, call

from agentsgym import FailurePolicy, Judge, MultistepEnv, ScriptedAgent, Trajectory, serve_policy
from agentsgym.envs import ToolEnv, ToolResult
from agentsgym.envs.AgentProgram import AgentProgramEnv
from agentsgym.envs.user_checks import MAY_BE_ASYNC


async def stream() -> Any:
    yield 1


VALUES: list[Any] = [
    *(None, True, False, 0, 1, 0.2, -1, math.nan, math.inf, 10**400, "42", "", b"1", "\ud800"),
    *([], [1.0], [None], (), (1.0, {}), (1.0, None), (None, {}), (1.0, {}, 2), {}, {"a": 1.0}, {"a": "x"}, {"": 1.0}),
    *({1: 2.0}, {"done": True}, {"success": 0.2}, object(), float, ValueError("x"), stream, Decimal("0.5"), range(2)),
    *(np.float32(0.5), np.bool_(True), np.array([1.0, 2.0]), torch.tensor(1.0), torch.tensor([1.0, 2.0])),
]
TASKS = [{"question": f"odd {index}", "seed": index} for index in range(len(VALUES))]
Play = Callable[[], list[Trajectory]]
KEEP = FailurePolicy(max_failed_fraction=1.0)


def odd(*arguments: Any) -> Any:
    """The value of the episode that one of the arguments belongs to."""
    found = re.search(r"odd (\d+)", repr([getattr(one, "messages", one) for one in arguments]))
    assert found is not None, arguments
    value = VALUES[int(found[1])]
    return dict(value) if isinstance(value, dict) else value


def is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str | bytes) and abs(float(value)) < 1e38
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def is_flag(value: Any) -> bool:
    is_plain = isinstance(value, int | float | np.generic) or (isinstance(value, torch.Tensor) and value.ndim == 0)
    return value is None or (is_plain and value in (0, 1))


def is_reward(value: Any) -> bool:
    return is_number(value) or (
        isinstance(value, dict) and all(type(key) is str and key and is_number(one) for key, one in value.items())
    )


def is_text(value: Any) -> bool:
    return isinstance(value, str) and "\ud800" not in value


def is_info(value: Any) -> bool:
    return isinstance(value, dict) and is_flag(value.get("success"))


def is_grade(value: Any) -> bool:
    reward, info = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    return is_reward(reward) and is_info(info)


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


#: What is right, by the annotation of a hook.
RIGHT: dict[Any, Callable[[Any], bool]] = {
    "State": lambda value: isinstance(value, dict) and not value.get("done"),
    "str": is_text,
    "Prompt": is_text,  # the lists among the values have no messages
    "list[Message]": lambda value: False,
    "list[float]": lambda value: isinstance(value, list) and not value,  # without a tokenizer there are no tokens
    "GivenReward": is_reward,
    "float": is_number,
    "Hashable": is_hashable,
    "None": lambda value: value is None,
    "Stepped": lambda value: False,
    "Answered": lambda value: False,
    "ToolResult": lambda value: False,
}


def right_of(hook: str) -> Callable[[Any], bool]:
    """What is right by the annotation of a hook."""
    parts = getattr(MultistepEnv, hook, getattr(ToolEnv, hook)).__annotations__["return"].split(" | ")
    return lambda value: any(RIGHT[part](value) for part in parts if not part.startswith("Awaitable"))


class Echo(Quiet):
    """The prompt names the episode, and one answer ends it."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        self.task = task_data["question"]
        return {"done": False, "task": self.task}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return state.get("task", "?")


def look() -> str:
    """Look."""
    return "seen"


def returning(
    hook: str, wrap: Callable[[Any, Any], Any] = lambda value, state: value
) -> Callable[..., list[Trajectory]]:
    """Play all values as what a hook of an environment returns."""

    def returns(self: Any, *arguments: Any) -> Any:
        value = odd(self.task) if hook == "_system_prompt" else odd(*arguments)
        return wrap(value, next((one for one in arguments if isinstance(one, dict)), {}))

    def play() -> list[Trajectory]:
        if hasattr(MultistepEnv, hook):
            agent: Any = ScriptedAgent(["answer"] * len(TASKS), repeat_last=True)
            return type("Odd", (Echo,), {hook: returns})().rollout(TASKS, agent, failures=KEEP)
        env = type("Odd", (ToolEnv,), {hook: returns})(tools=look)
        return env.rollout(TASKS, Calls([call("look")], "answer"), failures=KEEP)

    return play


def tool_result(**field: str) -> Any:
    [(name, _)] = field.items()
    return returning("_call_tool", lambda value, _: ToolResult(content="seen", **{"done": True, name: value}))


def step(place: str) -> Any:
    """One part of what a step returns."""

    def wrap(value: Any, state: Any) -> Any:
        parts: dict[str, Any] = {"state": state, "reward": 0.5, "done": True, "info": {}}
        parts[place] = value
        return parts["state"], parts["reward"], parts["done"], parts["info"]

    return returning("_step_episode", wrap)


def info(name: str) -> Any:
    return returning("_step_episode", lambda value, state: (state, 1.0, True, {name: value}))


def program(returns: Callable[[Any, Any], Any], **options: Any) -> Play:
    def play(task: Any, endpoint: Any) -> Any:
        Client(endpoint).speak(user("go"))
        return returns(odd(task), endpoint)

    def run() -> list[Trajectory]:
        return AgentProgramEnv(program=play, **options).rollout(TASKS, ScriptedAgent(["ok"] * 99), failures=KEEP)

    return run


def sessions(finish: Callable[[Any, Any], Trajectory]) -> Play:
    def run() -> list[Trajectory]:
        played: list[Trajectory] = []
        with serve_policy(ScriptedAgent(["ok"] * 99)) as server:
            for value in VALUES:
                session = server.open({})
                Client(session.endpoint).speak(user("go"))
                played.append(finish(session, value))
        return played

    return run


class OddAgent:
    def get_action(self, messages: Any, agent_state: Any) -> Any:
        return odd(messages), agent_state


class OddPair:
    def get_action(self, messages: Any, agent_state: Any) -> Any:
        return odd(messages)


def play_with(agent: Any, env: MultistepEnv | None = None) -> Play:
    return lambda: (env or Echo()).rollout(TASKS, agent, failures=KEEP)


def judged(scope: Any) -> list[Trajectory]:
    env = Echo()
    env.judges = [Judge(OddAgent(), rubric="Is it good?", scope=scope, max_retries=0)]
    return env.rollout(TASKS, ScriptedAgent(["answer"] * len(TASKS)), 2 if scope == "group" else 1, failures=KEEP)


HOOKS = [name for name in MAY_BE_ASYNC if name not in ("_close_episode", "_step_action")]
PLACES: dict[str, tuple[Play, Callable[[Any], bool]]] = {
    **{hook: (returning(hook), right_of(hook)) for hook in HOOKS},
    "_close_episode": (returning("_close_episode"), lambda value: True),
    "state of a step": (step("state"), lambda value: isinstance(value, dict)),
    "reward": (step("reward"), is_reward),
    "done": (step("done"), is_flag),
    "info": (step("info"), is_info),
    **{f"info[{name!r}]": (info(name), is_flag) for name in ("success", "invalid", "truncated")},
    "info['optimal_reward']": (info("optimal_reward"), lambda value: value is None or is_number(value)),
    "info['rewards']": (info("rewards"), lambda value: value is None or (isinstance(value, dict) and not value)),
    "ToolResult.reward": (tool_result(reward=""), is_reward),
    **{f"ToolResult.{name}": (tool_result(**{name: ""}), is_flag) for name in ("done", "failed", "success")},
    "ToolResult.content": (tool_result(content=""), lambda value: True),
    "program": (program(lambda value, _: value), lambda value: value is None or is_grade(value)),
    "endpoint.reward": (program(lambda value, endpoint: endpoint.reward(value)), is_reward),
    "grade": (program(lambda value, _: None, grade=lambda task, _: odd(task)), is_grade),
    "session.finish": (
        sessions(lambda session, value: session.finish(value)),
        lambda value: value is None or is_reward(value),
    ),
    "success of session.finish": (sessions(lambda session, value: session.finish(1.0, success=value)), is_flag),
    "the text of an agent": (play_with(OddAgent()), is_text),
    "get_action": (play_with(OddPair()), lambda value: False),
    "history": (play_with(ScriptedAgent(["a"] * 99), Echo(env_config={"history": odd})), lambda value: False),
    "judge": (lambda: judged("episode"), lambda value: False),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_odd_value_fails_its_own_episode_or_is_right(place: str) -> None:
    play, is_right = PLACES[place]
    played = play()
    differ = [index for index, one in enumerate(played) if one.failed == bool(is_right(VALUES[index]))]
    assert [(VALUES[index], played[index].error) for index in differ] == []


def test_there_are_enough_of_them() -> None:
    assert len(PLACES) * len(VALUES) > 400


def test_an_odd_answer_of_a_judge_of_groups_fails_its_group() -> None:
    assert all(one.failed for one in judged("group"))
