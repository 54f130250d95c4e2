"""vLLM servers that get new weights while they answer: they pause, nobody is lost, and every answer bears a version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Semaphore, Thread
from typing import Any

import pytest
from vllm_engines import agent_of, ready, scripted, started, wait_less
from vllm_stub import StubServer, stub_servers

from agentsgym import AgentError, AgentsGymError, ConfigError, TurnRequest
from agentsgym.event_loop import agents_loop


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_less(monkeypatch, pulse_s=0.02)


@pytest.fixture
def servers() -> Iterator[list[StubServer]]:
    with stub_servers(scripted) as made:
        yield made


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def query(agent: Any, name: str) -> Any:
    """Ask for one turn of a session, without waiting for the answer."""
    request = TurnRequest(session_id=name, messages=[], token_ids=[5])
    return asyncio.run_coroutine_threadsafe(agent.aact(request), agents_loop())


def test_a_server_pauses_while_it_gets_weights_and_open_requests_go_on(servers: list[StubServer]) -> None:
    agent = ready(*servers, pauses=True)
    for server in servers:
        server.events.clear()
        server.seconds = 0.3
    before = [query(agent, f"before-{i}") for i in range(6)]
    wait_until(lambda: sum(server.num_open for server in servers) == 6)
    agent.prepare(started(1))
    after = [query(agent, f"after-{i}") for i in range(6)]
    assert [one.result(10).policy_version for one in before] == [0] * 6  # what sampled its first token
    assert [one.result(10).policy_version for one in after] == [1] * 6
    assert [server.events for server in servers] == [["pause keep, clear_cache=true", "mark", "resume"]] * 2
    assert not any(server.lost for server in agent._engine.servers)
    agent.finish()


@contextmanager
def getting_weights(agent: Any, step: int) -> Iterator[Callable[[], None]]:
    """Prepare an agent on a thread, each push of weights waiting for a call of what is yielded."""
    goes_on, push = Semaphore(0), agent.generation.sync_weights

    def waiting_push() -> None:
        assert goes_on.acquire(timeout=10)
        push()

    agent.generation.sync_weights = waiting_push
    thread = Thread(target=agent.prepare, args=[started(step)])
    thread.start()
    yield goes_on.release
    thread.join(10)
    assert not thread.is_alive()


def test_a_turn_bears_the_version_that_sampled_its_first_token_also_where_it_was_sent_in_a_pause(
    servers: list[StubServer],
) -> None:
    agent = ready(*servers, pauses=True)
    for server in servers:
        server.seconds = 0.05
    homes = [query(agent, name).result(10) for name in ("first", "second")]
    assert [one.policy_version for one in homes] == [0, 0]
    for server in servers:
        server.events.clear()
        server.completions.clear()
    with getting_weights(agent, 1) as let_go:
        wait_until(lambda: servers[0].events == ["pause keep, clear_cache=true", "mark"])
        in_pause = query(agent, "first")
        assert query(agent, "second").result(10).policy_version == 0  # its server has the older weights
        assert servers[0].completions == []
        let_go()
        wait_until(lambda: len(servers[1].events) == 2)
        assert in_pause.result(10).policy_version == 1
        assert query(agent, "first").result(10).policy_version == 1  # before all servers have them
        late = query(agent, "second")
        let_go()
    assert late.result(10).policy_version == 1
    assert query(agent, "second").result(10).policy_version == 1
    agent.finish()


def test_requests_that_are_held_back_are_sent_though_the_push_fails(servers: list[StubServer]) -> None:
    agent = ready(servers[0], pauses=True)
    held = list[Any]()

    def failing() -> None:
        held.append(query(agent, "s"))
        raise ZeroDivisionError

    agent.generation.sync_weights = failing
    with pytest.raises(AgentsGymError, match="ZeroDivisionError"):
        agent.prepare(started(1))
    assert held[0].result(10).token_ids
    agent.finish()


def test_many_pushes_beside_a_pulse_lose_no_server(servers: list[StubServer]) -> None:
    agent = ready(*servers, pauses=True)
    for server in servers:
        server.seconds = 1.5
    open_ones = [query(agent, f"s{i}") for i in range(4)]
    for step in range(1, 25):
        agent.prepare(started(step))
    assert all(one.result(10).token_ids for one in open_ones)
    assert not any(server.lost for server in agent._engine.servers)
    agent.finish()


def test_a_server_that_died_in_play_is_called_again_once_it_is_back(servers: list[StubServer]) -> None:
    agent = ready(*servers, pauses=True)
    for server in servers:
        server.seconds = 0.5
    open_ones = [query(agent, f"s{i}") for i in range(4)]
    wait_until(lambda: sum(server.num_open for server in servers) == 4)
    servers[1].stop()
    assert all(one.result(10).token_ids for one in open_ones)  # the other one has answered
    assert agent._engine.servers[1].lost
    assert [server.num_sessions for server in agent._engine.servers] == [4, 0]  # they have moved
    servers[1].start()
    agent.prepare(started(1))
    count = len(servers[1].completions)
    assert all(query(agent, f"new-{i}").result(10).policy_version == 1 for i in range(4))
    assert len(servers[1].completions) > count
    agent.finish()


def test_sessions_that_are_over_make_room(servers: list[StubServer]) -> None:
    agent = ready(*servers, pauses=True)
    for i in range(6):
        query(agent, f"s{i}").result(10)
    assert [server.num_sessions for server in agent._engine.servers] == [3, 3]
    agent.forget([f"s{i}" for i in range(0, 6, 2)] + ["never seen"])
    assert sum(server.num_sessions for server in agent._engine.servers) == 3
    agent.finish()


def test_a_server_that_cannot_pause_is_refused() -> None:
    with ExitStack() as stack:
        server = StubServer(scripted)
        server.knows_pauses = False
        server.start()
        stack.callback(server.stop)
        agent = agent_of(server, pauses=True)
        with pytest.raises(ConfigError, match=r"cannot pause.*VLLM_SERVER_DEV_MODE=1"):
            agent.prepare(started(0))


def test_a_push_that_fails_is_reported_also_where_the_server_does_not_resume(
    servers: list[StubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = ready(servers[0], pauses=True)
    agent.generation.sync_weights = lambda: 1 / 0
    servers[0].hangs = {"/resume"}
    monkeypatch.setattr("agentsgym.agents.vllm.server.ANSWER_S", 0.5)
    with pytest.raises(AgentsGymError, match="ZeroDivisionError"):
        agent.prepare(started(1))
    agent.finish()


def test_a_request_of_a_server_that_went_for_good_fails_its_own_session(servers: list[StubServer]) -> None:
    agent = ready(servers[0], pauses=True)
    servers[0].seconds = 5.0
    one = query(agent, "s")
    wait_until(lambda: servers[0].num_open == 1)
    servers[0].stop()
    began = time.monotonic()
    with pytest.raises(AgentError, match="no vLLM server is left"):
        one.result(10)
    assert time.monotonic() - began < 5
    with pytest.raises(AgentError, match="no vLLM server is left"):
        query(agent, "s").result(10)
    assert agent._engine.servers[0].num_sessions == 0
    agent.finish()
