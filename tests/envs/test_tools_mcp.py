"""Tools of an MCP server: a real one in another process, one in memory, and all that goes wrong with them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp_stdio_server import MCPServer
from tool_functions import Calls, add, call, play, results

from agentsgym import ConfigError, EnvError
from agentsgym.envs.Tools import McpServer, ToolEnv, mcp_client, register_tools
from agentsgym.envs.Tools.mcp_client import Connections
from agentsgym.event_loop import programs_loop

SCRIPT = Path(__file__).parent / "mcp_stdio_server.py"


def stdio(**options: object) -> McpServer:
    return McpServer(command=[sys.executable, str(SCRIPT)], **options)


def memory_server() -> MCPServer:
    server = MCPServer("memory")

    @server.tool()
    def double(number: int) -> int:
        """Double a number."""
        if number > 100:
            raise ValueError("too large to double")
        return 2 * number

    @server.tool()
    async def slow() -> str:
        """Take long."""
        await asyncio.sleep(30)
        return "done"

    return server


@pytest.fixture(scope="module")
def shop() -> Iterator[ToolEnv]:
    env = ToolEnv(env_config={"tool_timeout_s": 20.0}, tools=[stdio(), add])
    yield env
    env.close()


@pytest.fixture
def memory() -> Iterator[ToolEnv]:
    env = ToolEnv(env_config={"tool_timeout_s": 0.2}, tools=McpServer(server=memory_server))
    yield env
    env.close()


def test_tools_of_a_server_in_another_process_and_functions_are_called_side_by_side(shop: ToolEnv) -> None:
    moves = [call("price", good="pear"), call("add", a=3, b=4)]
    trajectory = play(shop, moves, "7", answer=7)
    assert results(trajectory) == ["3", "7"]
    assert trajectory.info["success"] is True
    names = [schema["function"]["name"] for schema in shop.tool_schemas]
    assert names == ["price", "tick", "sleep", "die", "babble", "complain", "add"]
    assert shop.tool_schemas[0]["function"]["parameters"]["required"] == ["good"]


def test_a_server_that_dies_fails_its_sessions_and_is_started_again_for_the_next(shop: ToolEnv) -> None:
    agent = Calls([call("die")], [call("tick")], "done")
    dead, also_dead = shop.rollout([{"question": "What?"}, {"question": "What?"}], agent)
    for trajectory in (dead, also_dead):
        assert trajectory.failed
        assert "the MCP server" in str(trajectory.error)
        assert "is no longer connected" in str(trajectory.error)
    alive = play(shop, [call("tick")], [call("tick")], "done")
    assert not alive.failed
    first, second = results(alive)
    assert (first[0], second[0]) == ("1", "2")
    assert first[2:] == second[2:]  # one process


def test_a_server_that_ended_while_nobody_called_is_started_again_before_the_next_session() -> None:
    env = ToolEnv(env_config={"tool_timeout_s": 20.0}, tools=stdio())
    [before] = results(play(env, [call("tick")], "done"))
    [connection] = env._process._connections._shared.values()
    os.kill(int(before.split()[-1]), signal.SIGKILL)
    connection.serving.result(20)  # it is over as soon as the end is seen
    trajectories = env.rollout([{"question": "What?"}] * 4, Calls([call("tick")], "done"))
    env.close()
    assert [trajectory.error for trajectory in trajectories] == [None] * 4
    assert sorted(results(one)[0][0] for one in trajectories) == ["1", "2", "3", "4"]


def test_the_stderr_of_a_program_is_logged_and_its_end_shown_where_it_fails(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    env = ToolEnv(env_config={"tool_timeout_s": 20.0}, tools=stdio())
    with caplog.at_level(logging.DEBUG, logger=mcp_client.logger.name):
        [trajectory] = env.rollout(
            [{"question": "What?"}], Calls([call("complain", lines=1000)], [call("die")], "done")
        )
    env.close()
    assert str(trajectory.error).endswith("complaint 998\ncomplaint 999")
    assert "complaint 900" not in str(trajectory.error)
    logged = [record.getMessage() for record in caplog.records if "complaint" in record.getMessage()]
    assert [text.rpartition(" printed: ")[2] for text in logged] == [f"complaint {n}" for n in range(1000)]
    assert "complaint" not in "".join(capfd.readouterr())


def test_a_program_that_ends_at_once_shows_what_it_printed_and_leaves_nothing_open() -> None:
    def num_open() -> int:
        gc.collect()
        return len([*Path("/proc/self/fd").iterdir()])

    def printed(*command: str) -> str:
        env = ToolEnv(tools=McpServer(command=command))
        with pytest.raises(ConfigError, match="cannot be used") as raised:
            env.check_task({"question": "What?"})
        env.close()
        return str(raised.value).partition("; it printed:\n")[2]

    script = "import sys; sys.exit('Set SHOP_KEY\\x1b[2J first')"
    before = num_open()
    assert printed(sys.executable, "-c", script) == r"Set SHOP_KEY\x1b[2J first"
    assert printed("no-such-program") == ""
    assert num_open() == before


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_class_may_give_a_server_which_is_opened_once_and_closed_with_the_environment(is_listed: bool) -> None:
    made: list[McpServer] = []

    class Ticking(ToolEnv):
        def _tools(self) -> Any:
            made.append(stdio(tools=["tick"]))
            return [made[-1], add] if is_listed else made[-1]

    env = Ticking(env_config={"tool_timeout_s": 20.0})
    for _ in range(2):
        first, second = env.rollout([{"question": "What?"}] * 2, Calls([call("tick")], "done"))
        assert len({results(one)[0].split()[-1] for one in (first, second)}) == 1
    assert len(made) == 1
    [connection] = env._process._connections._shared.values()
    env.close()
    assert connection.is_lost()
    assert [text[0] for text in results(play(env, [call("tick")], "done"))] == ["1"]
    assert len(made) == 2
    env.close()


def test_a_forked_process_leaves_the_connections_of_its_parent_alone(memory: ToolEnv) -> None:
    assert results(play(memory, [call("double", number=2)], "4")) == ["4"]
    process = memory._process
    with pytest.MonkeyPatch.context() as patch:  # what finalizers do in a child, without a fork of a process of threads
        patch.setattr(os, "getpid", lambda: -1)
        process.close()
        process._connections.close()
        assert not memory._processes.get(-1)
    assert memory._process is process
    assert results(play(memory, [call("double", number=3)], "6")) == ["6"]


def test_nonsense_on_stdout_does_not_end_the_conversation(shop: ToolEnv) -> None:
    trajectory = play(shop, [call("babble")], [call("price", good="egg")], "done")
    assert results(trajectory) == ["output", "4"]


def test_each_session_has_a_server_of_its_own_where_it_is_requested() -> None:
    env = ToolEnv(env_config={"tool_timeout_s": 20.0}, tools=stdio(per_session=True, tools=["tick"]))
    one, two = env.rollout([{"question": "What?"}] * 2, Calls([call("tick")], [call("tick")], "done"))
    env.close()
    for trajectory in (one, two):
        assert [text[0] for text in results(trajectory)] == ["1", "2"]
    assert results(one)[0][2:] != results(two)[0][2:]


def test_what_a_tool_reports_as_wrong_is_its_result(memory: ToolEnv) -> None:
    trajectory = play(memory, [call("double", number=4), call("double", number=200)], [call("double", number="x")], "8")
    right, wrong, mistyped = results(trajectory)
    assert right == "8"
    assert wrong.startswith("Error: ")
    assert mistyped == "Error: the argument 'number' of 'double' must be an integer, got 'x'"
    assert trajectory.info["num_failed_calls"] == 2


def test_a_call_that_takes_too_long_is_cut_off_and_the_next_one_works(memory: ToolEnv) -> None:
    trajectory = play(memory, [call("slow")], [call("double", number=4)], "8")
    assert results(trajectory) == ["Error: slow took longer than 0.2 s", "8"]


def test_nothing_is_opened_before_it_is_needed_and_all_is_closed_with_the_environment() -> None:
    def num_tasks() -> int:
        return len(asyncio.all_tasks(programs_loop()))

    before = num_tasks()
    env = ToolEnv(tools=McpServer(server=memory_server))
    assert num_tasks() == before
    assert results(play(env, [call("double", number=2)], "4")) == ["4"]
    assert num_tasks() > before
    env.close()
    assert num_tasks() == before
    assert results(play(env, [call("double", number=3)], "6")) == ["6"]  # opened again
    env.close()


def test_all_environments_use_the_event_loop_of_programs() -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    server = MCPServer("loops")

    @server.tool()
    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    envs = [ToolEnv(tools=McpServer(server=server)) for _ in range(2)]
    for env in envs:
        play(env, [call("note")], "done")
        env.close()
    assert loops == [programs_loop()] * 2


def test_a_coroutine_of_a_program_must_not_wait_for_a_server() -> None:
    env = ToolEnv(tools=McpServer(server=memory_server))

    async def program() -> None:
        with pytest.raises(RuntimeError, match=r"in a thread, with asyncio\.to_thread"):
            play(env, "7")
        assert results(await asyncio.to_thread(play, env, [call("double", number=2)], "4")) == ["4"]

    asyncio.run_coroutine_threadsafe(program(), programs_loop()).result()
    env.close()


def test_a_copy_opens_connections_of_its_own(memory: ToolEnv) -> None:
    assert results(play(memory, [call("double", number=2)], "4")) == ["4"]
    for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert results(play(other, [call("double", number=5)], "10")) == ["10"]
        assert other._process is not memory._process
        other.close()


def test_rows_name_a_registered_server_and_cannot_bring_a_command() -> None:
    register_tools("test memory", McpServer(server=memory_server, tools=["double"]))
    env = ToolEnv(env_config={"tools": "test memory"})
    assert results(play(env, [call("double", number=2)], "4")) == ["4"]
    env.close()
    with pytest.raises(ConfigError, match="did you mean 'test memory'"):
        ToolEnv(env_config={"tools": "test memori"})
    with pytest.raises(ConfigError, match=r"env_config\['tools'\] must be a name"):
        ToolEnv(env_config={"tools": {"command": ["rm"]}})


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (McpServer(command=["/no/such/program"]), "/no/such/program"),
        (McpServer(command=[sys.executable, "-c", "print('hello')"], start_timeout_s=20), "cannot be used"),
        (McpServer(command=[sys.executable, "-c", "import time; time.sleep(60)"], start_timeout_s=0.3), "within 0.3 s"),
        (McpServer(server=memory_server, tools=["triple"]), "the server has no tool 'triple'"),
    ],
)
def test_a_server_that_cannot_be_used_is_reported_before_anything_is_played(server: McpServer, message: str) -> None:
    env = ToolEnv(tools=server)
    with pytest.raises(ConfigError, match=message):
        play(env, "7")
    env.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of command, url and server"),
        ({"command": ["a"], "url": "http://b"}, "one of command, url and server, got command, url"),
        ({"command": "python server.py"}, "a list of program and arguments"),
        ({"url": "localhost:1"}, "must be an HTTP URL, got"),
        ({"url": "http://localhost", "start_timeout_s": 0}, "start_timeout_s must be a positive number"),
        ({"url": "http://localhost", "tools": "price"}, "a list of names"),
    ],
)
def test_a_server_that_is_described_wrongly_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        McpServer(**options)


def test_connections_can_be_closed_twice() -> None:
    connections = Connections()
    connection = connections.open(McpServer(server=memory_server))
    connection.close()
    for _ in range(2):
        connections.close()
        with pytest.raises(EnvError):
            connection.call("tick", {}, 1.0)


def test_a_server_over_http_that_began_anew_while_nobody_called_is_opened_anew(monkeypatch: Any) -> None:
    monkeypatch.setattr(mcp_client, "_PING_EVERY_S", -1.0)
    port = _free_port()
    env = ToolEnv(tools=McpServer(url=f"http://127.0.0.1:{port}/mcp", start_timeout_s=20))
    for _ in range(2):
        with _http_server(port):
            assert [text[0] for text in results(play(env, [call("tick")], [call("tick")], "done"))] == ["1", "2"]
    env.close()


def test_a_server_over_http_is_used_and_used_again_once_it_is_back() -> None:
    port = _free_port()
    env = ToolEnv(tools=McpServer(url=f"http://127.0.0.1:{port}/mcp", start_timeout_s=20))
    with pytest.raises(ConfigError, match="cannot be used"):
        play(env, "7")
    with _http_server(port):
        assert results(play(env, [call("price", good="pear")], "3")) == ["3"]
    assert play(env, [call("price", good="pear")], "3").failed
    with _http_server(port):
        assert results(play(env, [call("price", good="egg")], "4")) == ["4"]
    env.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def _http_server(port: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        for line in process.stderr:
            if "running on" in line:
                break
        yield
    finally:
        process.kill()
        process.communicate()
