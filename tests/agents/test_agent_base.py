"""Agents that are written or called in the wrong way."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from agentsgym import Agent, AgentError, AsyncAgent, ConfigError, PolicyAgent, TurnRequest, tiny_policy
from agentsgym.agents.base import as_agent

REQUEST = TurnRequest(session_id="s", messages=[], token_ids=())


def test_an_agent_that_answers_requests_shows_how_it_is_played() -> None:
    agent = PolicyAgent(*tiny_policy(["Guess"]))
    sentence = (
        "PolicyAgent does not implement get_action, since it works on token ids: "
        "call env.rollout(tasks, agent) or evaluate(env, agent, tasks) with an environment that has a tokenizer"
    )
    with pytest.raises(NotImplementedError, match=re.escape(sentence)):
        agent.get_action([{"role": "user", "content": "hello"}], None)


def test_an_agent_without_any_answer_names_what_to_define() -> None:
    with pytest.raises(NotImplementedError, match="Agent must define get_action or act"):
        Agent().get_action([], None)


@pytest.mark.parametrize("base", [Agent, AsyncAgent])
@pytest.mark.parametrize("name", ["get_action", "act"])
def test_a_coroutine_where_none_is_awaited_is_refused_with_the_class(base: type[Agent], name: str) -> None:
    async def answer(self: Any, *arguments: Any) -> Any:
        return "hello", None

    with pytest.raises(ConfigError, match=rf"Mine\.{name} is async, and only aact is awaited: .*AsyncAgent"):
        type("Mine", (base,), {name: answer})


def test_any_object_whose_get_action_is_a_coroutine_is_refused() -> None:
    class Foreign:
        """No agent of ours."""

        async def get_action(self, messages: Any, agent_state: Any) -> Any:
            return "hello", agent_state

    with pytest.raises(ConfigError, match=r"Foreign\.get_action is async, and only aact is awaited"):
        as_agent(Foreign())


@pytest.mark.parametrize("function", [lambda messages: "yes", partial(str.join, " "), len])
def test_a_bare_function_in_place_of_an_agent_names_the_agent_that_takes_one(function: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"an agent must define .*: for a function of the messages .*, use DirectOutputAgent\(function\)",
    ):
        as_agent(function)


@pytest.mark.parametrize("base", [object, Agent, AsyncAgent])
def test_a_class_in_place_of_an_agent_is_refused_with_what_to_write(base: type[Any]) -> None:
    mine = type("Mine", (base,), {"get_action": lambda self, messages, agent_state: ("hello", agent_state)})
    with pytest.raises(ConfigError, match=r"an agent must define .*; got the class Mine: pass an instance, Mine\(\)$"):
        as_agent(mine)


@pytest.mark.parametrize("base", [object, Agent])
def test_a_get_action_that_returns_a_coroutine_hears_of_aact(base: type[Any]) -> None:
    async def later() -> Any:
        return "hello", None

    mine = type("Mine", (base,), {"get_action": lambda self, messages, agent_state: later()})
    (failure,) = as_agent(mine()).act([REQUEST])
    assert str(failure) == (
        "Mine.get_action returned a coroutine, and only aact is awaited: subclass agentsgym.AsyncAgent and write "
        "async def aact(self, request) -> Action"
    )


class Raising(Agent):
    """Raises what it is given."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        raise self.error


def test_an_agent_that_cannot_play_at_all_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="the key is refused"):
        Raising(ConfigError("the key is refused")).act([REQUEST])


def test_what_get_action_raises_fails_its_session_with_the_users_line() -> None:
    (failure,) = Raising(OSError("no route")).act([REQUEST])
    assert isinstance(failure, AgentError)
    assert str(failure) == "Raising.get_action raised OSError: no route"
    assert failure.place == f"{__file__}:{Raising.get_action.__code__.co_firstlineno + 1}"
    assert failure.trace.endswith("OSError: no route")
