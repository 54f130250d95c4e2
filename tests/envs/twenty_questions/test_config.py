from __future__ import annotations

import json
from typing import Any

import pytest

from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.envs.datasets.registry import make
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, TwentyQuestionsEnv
from agentsgym.envs.TwentyQuestions.knowledge import load_knowledge
from agentsgym.errors import ConfigError, TaskError


def test_the_defaults() -> None:
    env = TwentyQuestionsEnv()
    assert env.env_config["max_steps_per_episode"] == 20
    assert env.env_config["reward_scheme"] == "win_plus_information"
    assert env.env_config["final_guess"] is False
    assert env.env_config["gamemaster"] is None
    known = load_knowledge().objects
    assert env.candidates.objects == tuple(name for name in known if not known[name].hard)
    json.dumps(env.env_config)


def test_the_registry_makes_it() -> None:
    row = {"env_class_path": "agentsgym.envs.TwentyQuestions.TwentyQuestionsEnv", "env_config": {"hardcore": True}}
    env = make(row)
    assert isinstance(env, TwentyQuestionsEnv)
    assert all(load_knowledge().objects[name].hard for name in env.candidates.objects)


def test_a_subset_keeps_its_order() -> None:
    env = TwentyQuestionsEnv(None, {"objects": DEMO_OBJECTS, "properties": list(DEMO_PROPERTIES)})
    assert env.candidates.objects == DEMO_OBJECTS
    assert env.candidates.properties == DEMO_PROPERTIES


@pytest.mark.parametrize(
    ("env_config", "message"),
    [
        ({"max_steps_per_episode": "ten"}, "must be a positive int, got 'ten'"),
        ({"max_steps": 3}, "['max_steps'] is unknown; did you mean 'max_steps_per_episode'"),
        ({"reward_scheme": "winn"}, "'reward_scheme'"),
        ({"objects": "some"}, "'all' or a list of object names, got 'some'"),
        ({"objects": []}, "'all' or a list of object names"),
        ({"objects": ["dog", 3]}, "'all' or a list of object names"),
        ({"objects": ["cat", "puppy"]}, "contains the unknown object 'puppy', which is another name of 'dog'"),
        ({"objects": ["dog", "clok"]}, "contains the unknown object 'clok'; did you mean 'clock'"),
        ({"objects": ["dog", "cat", "dog"]}, "got 'dog' twice"),
        ({"properties": ["alive", "alive"]}, "got 'alive' twice"),
        ({"properties": ["alife"]}, "did you mean 'alive'"),
        ({"objects": ["dog", "cat", "car"], "properties": ["alive"]}, "distinguishes 'dog' and 'cat'"),
        ({"objects": ["dog", "cat"], "hardcore": True}, "'hardcore'"),
        ({"hardcore": 1}, "True or False"),
        ({"final_guess": "yes"}, "True or False"),
        ({"invalid_penalty": -0.1}, "'invalid_penalty'"),
        ({"repeat_penalty": float("nan")}, "'repeat_penalty'"),
        ({"unknown_penalty": None}, "'unknown_penalty'"),
        ({"gamemaster": "gpt"}, "a callable"),
        ("hardcore", "must be a dict"),
    ],
)
def test_bad_configurations_are_named(env_config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TwentyQuestionsEnv(None, env_config)
    assert message in str(caught.value)


@pytest.mark.parametrize("argument", ["prompt", "env_id", "seed", "system_prompt", "train_dataset_size"])
def test_the_constructor_takes_a_tokenizer_and_a_configuration_only(argument: str) -> None:
    with pytest.raises(TypeError):
        TwentyQuestionsEnv(**{argument: None})
    assert not hasattr(TwentyQuestionsEnv, "get_rubric")


@pytest.mark.parametrize(
    "task", [{}, {"seed": 1}, {"solution": None}, {"solution": 7}, {"solution": ""}, {"solution": " ?"}]
)
def test_bad_tasks_are_refused_before_anything_is_played(task: dict[str, Any]) -> None:
    agent = ScriptedAgent(["Is it alive?"])
    env = TwentyQuestionsEnv()
    with pytest.raises(TaskError, match="solution"):
        env.rollout([{"solution": "clock"}, task], agent)
    assert env.active_states == {}


def test_configurations_are_not_shared() -> None:
    given = {"objects": ["dog", "cat"]}
    env = TwentyQuestionsEnv(None, given)
    given["objects"].append("car")
    assert env.env_config["objects"] == ["dog", "cat"]
