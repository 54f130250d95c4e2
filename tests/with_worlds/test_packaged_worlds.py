"""What holds for every packaged environment, of those whose engines are not at hand elsewhere."""

import copy
import dataclasses
import pickle
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packaged import OF_ENGINES
from tool_chat import tool_family

from agentsgym import Action, Agent, EnvProcessPool, EnvThreadPool, Trajectory, TurnRequest, check_env
from agentsgym.envs import ALFWorldEnv, ScienceWorldEnv, TextWorldEnv
from agentsgym.envs.dataset_rows import class_path
from agentsgym.seeding import derive_seed

WORLDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ALFWorld": (ALFWorldEnv, {"show_commands": "here"}),
    "TextWorld": (TextWorldEnv, {"kind": "coin_collector", "options": {"level": 2}, "admissible_commands": True}),
    "ScienceWorld": (ScienceWorldEnv, {}),
}


class Wanderer(Agent):
    """Gives a command that is listed, or one that goes anywhere; each follows from its conversation alone."""

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: TurnRequest) -> Action:
        output = [message["content"] for message in request.messages]
        stream = random.Random(derive_seed("wanderer", *output))
        _, found, listed = output[-1].rpartition("\n\n")
        _, colon, commands = listed.partition(": ")
        if found and colon and ", " in commands:
            return Action(text=stream.choice(commands.rstrip(".").split(", ")))
        return Action(text=stream.choice(["look", "inventory", "go east", "go west", "open door", "dance"]))


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, list[dict[str, Any]]]:
    """A world with a tokenizer, and three of its tasks."""
    env_class, config = WORLDS[request.param]
    config = {"max_steps_per_episode": 8, **config}
    if request.param == "ScienceWorld" and shutil.which("java") is None:
        pytest.skip("ScienceWorld needs Java")
    if request.param == "ALFWorld":
        config["data"] = str(request.getfixturevalue("households"))
    if request.param == "TextWorld":
        config["cache_dir"] = str(tmp_path)
    tasks = [dict(row["task_data"]) for row in env_class.get_train_dataset(config, size=3)]
    return env_class(tool_family("qwen3"), config), tasks


def played(world: tuple[Any, list[dict[str, Any]]], **options: Any) -> list[Trajectory]:
    """Two rollouts of each task, without the names of their sessions."""
    env, tasks = world
    return [dataclasses.replace(one, session_id="") for one in env.rollout(tasks, Wanderer(), 2, **options)]


def test_every_environment_of_an_engine_is_here() -> None:
    assert {class_path(env_class) for env_class, _ in WORLDS.values()} == OF_ENGINES


def test_it_keeps_the_contract(world: tuple[Any, list[dict[str, Any]]]) -> None:
    env, tasks = world
    report = check_env(env, tasks[:2], raise_on="error")
    assert not report.findings, report


def test_it_plays_the_same_in_line_in_threads_in_processes_and_as_a_copy(
    world: tuple[Any, list[dict[str, Any]]],
) -> None:
    in_line = played(world)
    assert not any(one.failed for one in in_line), [one.error for one in in_line if one.failed]
    assert sum(one.num_turns for one in in_line) > len(in_line)
    with EnvThreadPool(2) as threads:
        assert played(world, pool=threads) == in_line
    with EnvProcessPool(1) as processes:
        assert played(world, pool=processes) == in_line
    env, tasks = world
    for twin in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert played((twin, tasks)) == in_line
