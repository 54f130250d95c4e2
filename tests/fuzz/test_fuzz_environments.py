"""Configurations, tasks and answers that nobody means, in every environment that needs no engine."""

from __future__ import annotations

from typing import Any

import pytest
from hostile import SCALARS, VALUES, check_played, drawn, mappings, only_sentences
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.envs.datasets.default_tasks import tasks_of
from agentsgym.envs.datasets.naming import find_env
from agentsgym.types import Action, ToolCall

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]

PLAYED = [
    "TwentyQuestions",
    "PriceList",
    "Search",
    "ReasoningEvals",
    "Gymnasium:FrozenLake-v1",
    "Gymnasium:Blackjack-v1",
    "TextArena:Nim-v0",
    "TextArena:Wordle-v0",
]
TEXTS: Any = st.one_of(
    st.text(max_size=40),
    SCALARS,
    st.sampled_from(["[0 1]", "left", "[crane]", "7", "<answer>4</answer>", "Is it alive?", "<search>x</search>"]),
)
CALLS: Any = st.builds(lambda name, arguments: {"name": name, "arguments": arguments}, SCALARS, VALUES)


@pytest.mark.parametrize("name", PLAYED)
def test_a_configuration(name: str) -> None:
    named = find_env(name)
    fields = sorted(
        {**named.env_class.config_fields, **named.env_class().env_config}
        if name == "TwentyQuestions"
        else named.env_class.config_fields
    )

    @drawn(60)
    @given(mappings(fields))
    def play(config: dict[Any, Any]) -> None:
        with only_sentences():
            env = named.env_class(None, {**named.env_config, **config})
            tasks = tasks_of(env, "train", {}, 1)
            for one in env.rollout(tasks, ScriptedAgent(["yes"], repeat_last=True)):
                check_played(one)

    play()


@pytest.mark.parametrize("name", PLAYED)
def test_a_task(name: str) -> None:
    env = find_env(name).build()
    [task] = tasks_of(env, "train", {}, 1)
    names = sorted({*task, *(env.task_fields or {}), "seed"})

    @drawn(60)
    @given(mappings(names), st.booleans())
    def play(changes: dict[Any, Any], keeps: bool) -> None:
        with only_sentences():
            for one in env.rollout([{**(task if keeps else {}), **changes}], ScriptedAgent(["yes"], repeat_last=True)):
                check_played(one)

    play()


@pytest.mark.parametrize("name", PLAYED)
def test_answers(name: str) -> None:
    env = find_env(name).build()
    tasks = tasks_of(env, "train", {}, 4)

    @drawn(60)
    @given(st.sampled_from(tasks), st.lists(TEXTS, min_size=1, max_size=4))
    def play(task: Any, texts: list[Any]) -> None:
        with only_sentences():
            for one in env.rollout([task], ScriptedAgent(texts, repeat_last=True)):
                check_played(one)

    play()


@pytest.mark.parametrize("name", ["PriceList", "Search"])
def test_tool_calls(name: str) -> None:
    env = find_env(name).build()
    tasks = tasks_of(env, "train", {}, 4)

    @drawn(60)
    @given(st.sampled_from(tasks), st.lists(CALLS, min_size=1, max_size=3))
    def play(task: Any, calls: list[Any]) -> None:
        with only_sentences():
            actions = [Action(text="", tool_calls=[ToolCall(**one) for one in calls])]
            for one in env.rollout([task], ScriptedAgent(actions, repeat_last=True)):
                check_played(one)

    play()
