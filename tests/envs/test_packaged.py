"""What holds for every packaged environment: the contract, equal episodes wherever they run, copies that play alike."""

import copy
import dataclasses
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from mcp_stdio_server import __file__ as mcp_script
from packaged import OF_ENGINES, OF_SERVERS, PACKAGED, QUESTIONS, Listener, add, packaged, packaged_tasks
from tool_chat import tool_family

from agentsgym import Action, EnvProcessPool, EnvThreadPool, ScriptedAgent, ToolCall, Trajectory, check_env, envs
from agentsgym.envs import McpServer, ToolEnv
from agentsgym.envs.dataset_rows import class_path


@pytest.fixture(scope="module")
def threads() -> Iterator[EnvThreadPool]:
    with EnvThreadPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def processes() -> Iterator[EnvProcessPool]:
    with EnvProcessPool(1) as pool:
        yield pool


def played(env: Any, name: str, **options: Any) -> list[Trajectory]:
    """Two rollouts of each task, without the names of their sessions."""
    trajectories = env.rollout(packaged_tasks(name), Listener(), num_rollouts=2, **options)
    return [dataclasses.replace(one, session_id="") for one in trajectories]


def test_every_class_that_rows_may_name_is_here() -> None:
    played_here = {class_path(env_class) for env_class, _, _ in PACKAGED.values()}
    assert played_here | OF_ENGINES | OF_SERVERS == {*envs.PACKAGED.values()}


@pytest.mark.parametrize("name", PACKAGED)
def test_it_keeps_the_contract(name: str) -> None:
    report = check_env(packaged(name, tool_family("qwen3")), packaged_tasks(name), raise_on="warning")
    assert not report.findings
    assert report.num_turns > report.num_episodes


@pytest.mark.parametrize("name", PACKAGED)
def test_it_plays_the_same_in_line_in_threads_in_processes_and_as_a_copy(
    name: str, threads: EnvThreadPool, processes: EnvProcessPool
) -> None:
    env = packaged(name, tool_family("qwen3"))
    in_line = played(env, name)
    assert not any(one.failed for one in in_line), [one.error for one in in_line if one.failed]
    assert sum(one.num_turns for one in in_line) > len(in_line)
    assert played(env, name, pool=threads) == in_line
    assert played(env, name, pool=processes) == in_line
    for twin in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert played(twin, name) == in_line
    assert played(env, name) == in_line


def test_each_process_of_a_pool_opens_mcp_servers_of_its_own() -> None:
    calls = [("price", {"good": "pear"}), ("add", {"a": 1, "b": 2}), ("price", {"good": "no such"}), ("tick", {})]
    turns = [Action(text="", tool_calls=[ToolCall(name=name, arguments=given)]) for name, given in calls]
    server = McpServer(command=[sys.executable, mcp_script])
    env = ToolEnv(env_config={"tool_timeout_s": 20.0}, tools=[server, add])
    try:
        in_line = env.rollout(QUESTIONS[:2], ScriptedAgent([*turns, "2"]))
        with EnvProcessPool(2) as pool:
            elsewhere = env.rollout(QUESTIONS[:2], ScriptedAgent([*turns, "2"]), pool=pool)
    finally:
        env.close()
    assert [one.error for one in [*in_line, *elsewhere]] == [None] * 4
    assert [one.success for one in elsewhere] == [one.success for one in in_line] == [True, False]
    reported = [[m["content"] for m in one.messages if m["role"] == "tool"] for one in [*in_line, *elsewhere]]
    assert all(one[:2] == ["3", "3"] and one[2].startswith("Error: ") for one in reported), reported
    servers = [one[3].rpartition(" ")[2] for one in reported]
    assert servers[0] == servers[1]  # one server for all sessions of a process
    assert len({*servers}) == 3  # this process has one, and each worker another
