"""The configuration, the tasks and the answers of every packaged environment that can be built here."""

from __future__ import annotations

import copy
import json
import tempfile
from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from outcomes import fuzzed, survives
from values import anything, numbers, plain, texts

import agentsgym
from agentsgym import Action, AgentsGymError, MultistepEnv, ScriptedAgent, ToolCall
from agentsgym.envs.config import COMMON_FIELDS
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.naming import find_env

_NAMES = [
    "PriceList",
    "Terminal",
    "TwentyQuestions",
    "Search",
    "Tools",
    "TextArena:TicTacToe-v0",
    "TextArena:Mastermind-v0",
    "Gymnasium:CliffWalking-v1",
    "ReasoningEvals",
    "OpenEnv",
    "TextArena:Wordle-v0",
    "TextArena:KuhnPoker-v0",
]


@cache
def _sound(name: str) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """The class of an environment, a configuration and some tasks."""
    named = find_env(name)
    try:
        env = named.build()
        rows = [*env.get_train_dataset(named.env_config, size=2)]
    except (AgentsGymError, TypeError):
        return named.env_class, dict(named.env_config), [{"seed": 1}]
    return named.env_class, dict(named.env_config), [row["task_data"] for row in rows]


_small = st.sampled_from(
    [0, 1, -1, 2, 1.5, "auto", "", True, None, [], {}, ["a"], {"a": 1}, [{}], [[]], {"name": "x"}, [None]]
)


@st.composite
def configurations(draw: st.DrawFn) -> tuple[str, Any]:
    name = draw(st.sampled_from(_NAMES))
    env_class, config, _ = _sound(name)
    config = copy.deepcopy(config)
    known = sorted({**COMMON_FIELDS, **env_class.config_fields})
    for _ in range(draw(st.integers(1, 3))):
        config[draw(st.sampled_from(known)) if draw(st.integers(0, 9)) else draw(texts)] = draw(_small | anything)
    return name, config if draw(st.integers(0, 19)) else draw(anything)


@fuzzed(300)
@given(configurations(), st.sampled_from(["a", "look", "[1]", "\ud800"]))
def test_configurations(given: tuple[str, Any], answer: str) -> None:
    name, config = given
    env_class, _, tasks = _sound(name)
    env = survives(env_class, None, config)
    survives(env_class.get_train_dataset, config, size=2)
    survives(agentsgym.make, {"env_class_path": class_path(env_class), "env_config": config})
    if isinstance(env, MultistepEnv) and env.env_config["max_steps_per_episode"] < 50:
        survives(env.rollout, tasks[:1], ScriptedAgent([answer] * 3))


@st.composite
def tasks(draw: st.DrawFn) -> tuple[str, Any]:
    name = draw(st.sampled_from(_NAMES))
    _, _, known = _sound(name)
    task = copy.deepcopy(known[draw(st.integers(0, len(known) - 1))])
    places = [task, *(one for one in task.values() if type(one) is dict)]
    for place in draw(st.lists(st.sampled_from(places), min_size=1, max_size=2)):
        key = draw(
            st.sampled_from(["seed", "env_config", *sorted(place, key=str)]) if draw(st.integers(0, 9)) else texts
        )
        if draw(st.integers(0, 4)):
            place[key] = draw(_small | anything)
        else:
            place.pop(key, None)
    return name, task if draw(st.integers(0, 19)) else draw(anything)


@fuzzed(150)
@given(tasks(), st.sampled_from(["a", "[1]", '{"name": 1}']))
def test_tasks(given: tuple[str, Any], answer: str) -> None:
    name, task = given
    env_class, config, _ = _sound(name)
    env = survives(env_class, None, {**config, "max_steps_per_episode": 2})
    if isinstance(env, MultistepEnv):
        survives(env.rollout, [task], ScriptedAgent([answer] * 3))
        survives(env.rollout, task, ScriptedAgent([answer] * 3))
        survives(agentsgym.evaluate, env, [{"task_data": task, "env_config": config}], ScriptedAgent([answer] * 3))


class _Says(agentsgym.Agent):
    """Answers with anything."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    def get_action(self, messages: Any, agent_state: Any) -> Any:
        number = agent_state if isinstance(agent_state, int) else 0
        return self._answers[number % len(self._answers)], number + 1


_calls = st.builds(
    ToolCall,
    name=st.sampled_from(["price", "add", "multiply", "search"]) | texts | anything,
    arguments=st.dictionaries(st.sampled_from(["good", "a", "b", "query"]) | texts, anything, max_size=3) | anything,
    id=st.none() | texts,
    error=st.none() | texts,
)
_ids = st.lists(st.integers(0, 30) | numbers | anything, max_size=4)
_actions = st.one_of(
    st.builds(
        Action,
        text=texts | anything,
        tool_calls=st.lists(_calls, max_size=2) | anything,
        reasoning=st.none() | texts | anything,
        finish_reason=st.sampled_from(["stop", "length"]) | anything,
    ),
    texts,
    plain.map(lambda value: json.dumps({"name": "price", "arguments": value})),
    anything,
)


class _Acts(agentsgym.Agent):
    """Gives actions of any kind, and any number of them."""

    def __init__(self, actions: Any) -> None:
        self._actions = actions

    def act(self, requests: Any) -> Any:
        return [self._actions] * len(requests) if isinstance(self._actions, Action) else self._actions


@fuzzed(150)
@given(st.sampled_from(_NAMES), st.lists(_actions, min_size=1, max_size=3), st.booleans())
def test_answers(name: str, answers: list[Any], acts: bool) -> None:
    env_class, config, known = _sound(name)
    env = survives(env_class, None, {**config, "max_steps_per_episode": 3})
    if isinstance(env, MultistepEnv):
        agent = _Acts(answers[0] if isinstance(answers[0], Action) else answers) if acts else _Says(answers)
        found = survives(env.rollout, known[:1], agent)
        if isinstance(found, list):
            survives(found[0].as_dict)
            survives(found[0]._repr_html_)
            with tempfile.TemporaryDirectory() as folder, agentsgym.RolloutStore.writer(folder) as writer:
                survives(writer.add, found[0])
