"""The datasets and the settings of Twenty Questions."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import Any

import pytest

from agentsgym import ConfigError, ScriptedAgent, TaskError, make
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES
from agentsgym.envs.TwentyQuestions.knowledge import load_knowledge

TWENTY = {"objects": list(load_knowledge().objects)[:20], "max_steps_per_episode": 7}


def secrets(dataset: Any) -> list[str]:
    return [row["task_data"]["solution"] for row in dataset]


def test_rows_name_the_class_the_configuration_and_the_task() -> None:
    dataset = TwentyQuestionsEnv.get_train_dataset(TWENTY, size=5)
    assert dataset.column_names == ["env_class_path", "env_config", "task_data"]
    assert len(dataset) == 5
    for row in dataset:
        assert row["env_class_path"] == "agentsgym.envs.TwentyQuestions.TwentyQuestionsEnv"
        assert row["env_config"] == TWENTY
        assert set(row["task_data"]) == {"solution", "seed"}
        assert make(row).env_config["max_steps_per_episode"] == 7


def test_training_and_evaluation_share_no_secret_whatever_the_seeds() -> None:
    train = {name for seed in range(3) for name in secrets(TwentyQuestionsEnv.get_train_dataset(seed=seed, size=300))}
    held_out = {name for seed in range(3) for name in secrets(TwentyQuestionsEnv.get_eval_dataset(seed=seed, size=200))}
    assert not train & held_out
    assert train | held_out == {name for name, known in load_knowledge().objects.items() if not known.hard}


def test_all_gives_both_every_secret_and_seeds_that_never_meet() -> None:
    options = {"split": "all", "size": 200}
    train = [TwentyQuestionsEnv.get_train_dataset(TWENTY, seed=seed, **options) for seed in range(3)]
    held_out = [TwentyQuestionsEnv.get_eval_dataset(TWENTY, seed=seed, **options) for seed in range(3)]
    assert set(secrets(train[0])) == set(secrets(held_out[0])) == set(TWENTY["objects"])
    train_seeds, eval_seeds = (
        {row["task_data"]["seed"] for part in parts for row in part} for parts in (train, held_out)
    )
    assert len(train_seeds) == len(eval_seeds) == 600
    assert not train_seeds & eval_seeds


def test_secrets_come_equally_often() -> None:
    counts = Counter(secrets(TwentyQuestionsEnv.get_train_dataset(TWENTY, size=50, split="all")))
    assert set(counts.values()) == {2, 3}


def test_the_same_seed_gives_the_same_rows_and_another_one_another_order() -> None:
    first, again, other = (TwentyQuestionsEnv.get_train_dataset(TWENTY, seed=seed) for seed in (1, 1, 2))
    assert first.to_list() == again.to_list()
    assert secrets(first) != secrets(other)
    assert sorted(secrets(first)) == sorted(secrets(other))
    assert len(first) == 16


def test_hardcore_rows_are_hard() -> None:
    dataset = TwentyQuestionsEnv.get_eval_dataset({"hardcore": True}, split="all")
    assert all(load_knowledge().objects[name].hard for name in secrets(dataset))


@pytest.mark.parametrize(
    "options",
    [
        {"size": 0},
        {"size": "ten"},
        {"size": True},
        {"seed": None},
        {"split": "half"},
        {"eval_fraction": 0.0},
        {"eval_fraction": 1},
        {"sise": 3},
    ],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        TwentyQuestionsEnv.get_train_dataset(TWENTY, **options)


def test_bad_configurations_are_refused() -> None:
    with pytest.raises(ConfigError, match="hardcor"):
        TwentyQuestionsEnv.get_train_dataset({"hardcor": True})
    with pytest.raises(ConfigError, match="gamemaster"):
        TwentyQuestionsEnv.get_eval_dataset({"gamemaster": lambda solution, question: "Yes."})
    with pytest.raises(ConfigError, match="at least 2"):
        TwentyQuestionsEnv.get_eval_dataset({"objects": ["dog"]})


def test_every_row_can_be_played() -> None:
    env = TwentyQuestionsEnv(None, TWENTY)
    for row in TwentyQuestionsEnv.get_eval_dataset(TWENTY):
        state = env._initialize_episode("s", row["task_data"])
        _, reward, done, info = env._step_episode("s", state, f"[{row['task_data']['solution']}]")
        assert (reward, done, info["success"]) == (1.0, True, True)
    assert pickle.loads(pickle.dumps(dict(row))) == row


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
