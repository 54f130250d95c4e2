"""The server: played by this library's own client; what is closed to whom; and what it survives."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from served_games import Game, guesses, live, running
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from agentsgym import Action, ConfigError, EnvThreadPool, ScriptedAgent, ToolCall, check_env
from agentsgym.envs import OpenEnvEnv
from agentsgym.serving.server import MAX_MESSAGE_BYTES, EpisodeServer


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running() as url:
        yield url


def connected(url: str, **options: Any) -> ClientConnection:
    return connect(url.replace("http", "ws", 1) + "/ws", proxy=None, **options)


def reported(connection: ClientConnection, kind: str, data: Any = None) -> dict[str, Any]:
    connection.send(json.dumps({"type": kind, **({} if data is None else {"data": data})}))
    return json.loads(connection.recv(timeout=30))


def got(url: str, path: str, **headers: str) -> tuple[int, Any]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_the_own_client_plays_the_episodes_that_the_environment_plays(url: str) -> None:
    client = OpenEnvEnv(None, {"success": "success"}, server=f"{url}/guess")
    served = guesses().env
    tasks = [{"task_data": {"solution": 1 + index, "seed": index}} for index in range(6)]
    agent = ScriptedAgent(["1", "hm", "3", "5"])
    there = client.rollout([{"task": one["task_data"]} for one in tasks], agent)
    here = served.rollout(tasks, agent)
    for one, other in zip(there, here, strict=True):
        assert one.error is None
        assert one.messages[0]["content"] == "\n\n".join(message["content"] for message in other.messages[:2])
        assert one.messages[1:] == other.messages[2 : 2 + len(one.messages) - 1]
        assert one.turn_rewards == other.turn_rewards
        assert one.success == other.success
    assert {one.stop_reason for one in there} == {"done", "max_turns"}
    client.close()


def test_check_env_finds_nothing_in_a_served_environment(url: str) -> None:
    client = OpenEnvEnv(None, {"success": "success"}, server=f"{url}/guess")
    check_env(client)
    client.close()


def test_tools_are_tools_of_the_own_client(url: str) -> None:
    client = OpenEnvEnv(None, {"success": "success"}, server=f"{url}/sums")
    assert [one["function"]["name"] for one in client.tool_schemas] == ["add", "answer"]
    script = [
        Action(text="", tool_calls=[ToolCall(name=name, arguments=arguments)])
        for name, arguments in (("add", {"first": 3, "second": 4}), ("answer", {"action": "7"}))
    ]
    [one] = client.rollout([{"seed": 1}], ScriptedAgent(script))
    assert one.error is None
    assert next(message["content"] for message in one.messages if message["role"] == "tool") == "7"
    assert (one.success, one.final_reward) == (True, 1.0)
    client.close()


@pytest.mark.parametrize("num_threads", [1, 4])
def test_many_sessions_play_at_once_and_leave_nothing(num_threads: int) -> None:
    served = guesses()
    with running(envs={"guess": served}, num_threads=num_threads) as url:
        client = OpenEnvEnv(None, {"success": "success"}, server=url)
        with EnvThreadPool(8) as pool:
            rollouts = client.rollout(
                [{"seed": seed} for seed in range(64)], ScriptedAgent(["hm", "4", "6"], repeat_last=True), pool=pool
            )
        assert not any(one.failed for one in rollouts)
        assert len({one.messages[2]["content"] for one in rollouts}) > 10
        client.close()
    assert live(served) == {}
    assert isinstance(served.env, Game)
    assert served.env.num_closed == served.env.num_initialized


def test_steps_of_several_threads_overlap() -> None:
    inside = threading.Barrier(3, timeout=30)

    class Meeting(Game):
        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            inside.wait()  # breaks unless three are inside
            return super()._step_episode(session_id, state, action)

    served = guesses()
    served.env = Meeting(None, {"max_steps_per_episode": 4})
    with running(envs={"guess": served}, num_threads=3) as url, ThreadPoolExecutor(3) as clients:

        def play(seed: int) -> str:
            with connected(url) as connection:
                reported(connection, "reset", {"seed": seed})
                return reported(connection, "step", {"message": "hm"})["type"]

        assert [*clients.map(play, range(3))] == ["observation"] * 3


def test_one_environment_is_at_the_root_and_several_are_not(url: str) -> None:
    assert got(url, "/health") == got(url, "/guess/health") == (200, {"status": "healthy"})
    assert got(url, "/guess/schema")[1]["action"]["required"] == ["message"]
    assert got(url, "/sums/schema")[1]["action"]["required"] == ["tool_name"]
    for path in ("/schema", "/ws", "/none/schema", "/guess", "/guess/other", "/none/health", "/"):
        status, answer = got(url, path)
        assert (status, "/guess/ws, /sums/ws" in answer["error"]) == (404, True)
    with running(envs={"guess": guesses()}) as alone:
        assert got(alone, "/schema") == got(alone, "/guess/schema")
        with connected(alone) as connection:
            assert reported(connection, "reset", {"seed": 1})["type"] == "observation"


def test_other_host_names_and_web_pages_are_rejected(url: str) -> None:
    port = urlsplit(url).port
    assert got(url, "/health", Host=f"localhost:{port}")[0] == 200
    for host in ("example.org", f"example.org:{port}", "localhost", f"127.0.0.1.example.org:{port}", ""):
        assert got(url, "/health", Host=host)[0] == 403
    assert got(url, "/guess/schema", Origin="http://localhost:3000")[0] == 403
    with pytest.raises(InvalidStatus, match="403"):
        connected(f"{url}/guess", origin="http://example.org")  # type: ignore[arg-type]  # any text
    with pytest.raises(InvalidStatus, match="403"):
        connected(f"{url}/guess", additional_headers={"Host": "example.org"})


def test_a_full_server_reports_it_and_has_room_when_a_session_ends() -> None:
    with running(envs={"guess": guesses()}, max_sessions=2) as url:
        with connected(url) as first, connected(url) as second:
            assert reported(first, "state")["type"] == reported(second, "state")["type"] == "state"
            with connected(url) as third:
                refused = json.loads(third.recv(timeout=30))["data"]
                assert (refused["code"], refused["active_sessions"], refused["max_sessions"]) == (
                    "CAPACITY_REACHED",
                    2,
                    2,
                )
                with pytest.raises(ConnectionClosed):
                    third.recv(timeout=30)
        client = OpenEnvEnv(None, server=url)
        with pytest.raises(
            ConfigError, match=r"3 episodes are to run concurrently, .* has room for 2 \(its total limit"
        ):
            client.rollout([{"seed": 1}], ScriptedAgent(["1"], repeat_last=True), 3)
        rollouts = client.rollout([{"seed": 1}], ScriptedAgent(["1"], repeat_last=True), 3, max_concurrent=2)
        assert not any(one.failed for one in rollouts)
        client.close()


def test_a_message_that_is_too_large_ends_its_session_alone(url: str) -> None:
    with connected(f"{url}/guess") as other, connected(f"{url}/guess") as large:
        reported(other, "reset", {"seed": 1})
        longest = "x" * (MAX_MESSAGE_BYTES - 100)
        reported(large, "reset", {"seed": 1})
        assert reported(large, "step", {"message": longest})["data"]["metadata"]["invalid"] is True
        large.send("x" * (MAX_MESSAGE_BYTES + 1))
        with pytest.raises(ConnectionClosed, match=f"1009 .*exceeds limit of {MAX_MESSAGE_BYTES} bytes"):
            large.recv(timeout=30)
        assert reported(other, "step", {"message": "hm"})["type"] == "observation"


def test_a_client_that_goes_away_without_a_word_leaves_no_episode() -> None:
    served = guesses()
    with running(envs={"guess": served}) as url:
        for _ in range(3):
            with connected(url) as connection:
                reported(connection, "reset", {"seed": 1})
                connection.socket.shutdown(socket.SHUT_RDWR)
        with connected(url) as last, connected(url) as other:
            reported(last, "reset", {"seed": 1})
            reported(other, "reset", {"seed": 1})
            other.send('{"type": "close"}')
            with pytest.raises(ConnectionClosed):
                other.recv(timeout=30)
    assert live(served) == {}
    assert isinstance(served.env, Game)
    assert served.env.num_closed == served.env.num_initialized == 5


def test_what_is_no_websocket_client_costs_nothing(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    address = (urlsplit(url).hostname, urlsplit(url).port)
    for garbage in (b"\x16\x03\x01\x00", b"GET / HTTP/9\r\n\r\n", b"GET /guess/ws HTTP/1.1\r\n\r\n", b"x" * 100_000):
        with socket.create_connection(address, timeout=30) as raw:
            raw.sendall(garbage)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(65536):
                pass
    assert got(url, "/health")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_bug_of_ours_ends_its_session_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    served = guesses()
    served.trial = lambda arguments: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with running(envs={"guess": served}) as url, connected(url) as connection:
        connection.send('{"type": "reset"}')
        with pytest.raises(ConnectionClosed, match="1011"):
            connection.recv(timeout=30)
        assert got(url, "/health")[0] == 200
    assert "ZeroDivisionError" in caplog.text


def test_limits_that_are_none_are_sentences() -> None:
    with pytest.raises(ConfigError, match="envs must be at least one environment"):
        EpisodeServer({})
    with pytest.raises(ConfigError, match="max_sessions must be a positive int, got 0"):
        EpisodeServer({"guess": guesses()}, max_sessions=0)
    with pytest.raises(ConfigError, match="num_threads must be a positive int, got 0"):
        EpisodeServer({"guess": guesses()}, num_threads=0)


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("127.0.0.1", 70_000), ("no such host", 0)])
def test_an_address_that_cannot_be_used_is_a_sentence(host: str, port: int) -> None:
    async def run() -> None:
        async with EpisodeServer({"guess": guesses()}).listening(host, port):
            pass

    with pytest.raises(ConfigError, match=f"^port {port} of {host} cannot be used: "):
        asyncio.run(run())
