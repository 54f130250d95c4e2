"""Calls of an agent outside of episodes: where they run, what is canceled, and what is counted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentsgym import Action, Agent, AgentError, AsyncAgent, ConfigError, Message, TurnRequest
from agentsgym.agents.calls import Caller, Cost, UnreadableError
from agentsgym.agents.usage import Meter
from agentsgym.event_loop import agents_loop, gathered, is_on_agents_loop, run_coroutine

OPTIONS: dict[str, Any] = {
    "cache": None,
    "agent_name": None,
    "max_concurrent": 8,
    "max_retries": 0,
    "retry_delay_s": 0.0,
    "timeout_s": 30.0,
    "num_corrections": 1,
}


class Blocking(Agent):
    """Blocks until it is released, and keeps the batches and the threads in which they are answered."""

    def __init__(self) -> None:
        self.released, self.entered = threading.Event(), threading.Event()
        self.batches: list[list[str]] = []
        self.threads: set[threading.Thread] = set()
        self.is_on_loop = False

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        self.threads.add(threading.current_thread())
        self.is_on_loop = self.is_on_loop or is_on_agents_loop()
        self.batches.append([request.messages[0]["content"] for request in requests])
        self.entered.set()
        assert self.released.wait(30)
        return [Action(text=request.messages[0]["content"].upper()) for request in requests]


def number_of(action: Action) -> int:
    """Read an answer."""
    if not action.text.isdigit():
        raise UnreadableError(f"{action.text!r} is not a number")
    return int(action.text)


def text_of(action: Action) -> str:
    """Read any answer."""
    return action.text


def corrected(reason: str) -> Message:
    """Request a number."""
    return Message(role="user", content=reason)


async def read(caller: Caller, text: str, parse: Any = text_of, cost: Cost | None = None) -> Any:
    """Call the agent of a caller with one message."""
    async with caller.slots:
        messages = [Message(role="user", content=text)]
        found, _ = await caller.read(messages, parse, corrected, key=f"{text:>16}", seed=0, cost=cost or Cost())
        return found


def test_an_agent_that_blocks_answers_batches_in_one_thread_off_the_loop() -> None:
    agent = Blocking()
    agent.released.set()
    caller = Caller(agent, "Judge", **{**OPTIONS, "max_concurrent": 4})
    words = [chr(ord("a") + n) for n in range(12)]
    assert run_coroutine(gathered(read(caller, word) for word in words)) == [word.upper() for word in words]
    assert [word for batch in agent.batches for word in batch] == words
    assert max(map(len, agent.batches)) == 4
    assert len(agent.threads) == 1
    assert not agent.is_on_loop


def test_the_loop_runs_while_an_agent_blocks() -> None:
    agent = Blocking()
    answer = asyncio.run_coroutine_threadsafe(read(Caller(agent, "Judge", **OPTIONS), "a"), agents_loop())
    assert agent.entered.wait(30)
    assert run_coroutine(asyncio.sleep(0, "free")) == "free"
    agent.released.set()
    assert answer.result(30) == "A"


def test_a_canceled_request_is_in_no_later_batch() -> None:
    agent = Blocking()
    caller = Caller(agent, "Judge", **OPTIONS)
    first, second, third = (
        asyncio.run_coroutine_threadsafe(read(caller, word), agents_loop()) for word in ("a", "b", "c")
    )
    assert agent.entered.wait(30)
    late = [asyncio.run_coroutine_threadsafe(read(caller, word), agents_loop()) for word in ("d", "e")]
    run_coroutine(asyncio.sleep(0))
    late[0].cancel()
    second.cancel()
    agent.released.set()
    assert [first.result(30), third.result(30), late[1].result(30)] == ["A", "C", "E"]
    assert "d" not in [word for batch in agent.batches for word in batch]


def test_an_agent_that_cannot_be_used_ends_every_call_of_its_batch() -> None:
    class Refused(Agent):
        def act(self, requests: Any) -> Any:
            raise ConfigError("the key was rejected")

    caller = Caller(Refused(), "Judge", **OPTIONS)
    for _ in range(2):
        with pytest.raises(ConfigError, match="the key was rejected"):
            run_coroutine(gathered(read(caller, word) for word in "abc"))


def test_the_agent_corrects_an_answer_that_cannot_be_read() -> None:
    class Counting(AsyncAgent):
        async def aact(self, request: TurnRequest) -> Action:
            return Action(text=str(len(request.messages)) if len(request.messages) > 1 else "one")

    cost = Cost()
    caller = Caller(Counting(), "Judge", **OPTIONS)
    assert run_coroutine(read(caller, "how many?", number_of, cost)) == 3  # with the answer and the correction
    assert (cost.calls, cost.cached) == (2, 0)
    with pytest.raises(UnreadableError, match="'one' is not a number"):
        run_coroutine(read(Caller(Counting(), "Judge", **{**OPTIONS, "num_corrections": 0}), "how many?", number_of))


def test_only_answers_that_can_be_read_come_from_the_cache(tmp_path: Path) -> None:
    class Answers(AsyncAgent):
        async def aact(self, request: TurnRequest) -> Action:
            return Action(text="7")

    caller = Caller(Answers(), "Judge", **{**OPTIONS, "cache": tmp_path, "agent_name": "seven"})
    costs = [Cost() for _ in range(2)]
    assert [run_coroutine(read(caller, "a", number_of, cost)) for cost in costs] == [7, 7]
    assert [(cost.calls, cost.cached) for cost in costs] == [(1, 0), (0, 1)]
    [file] = tmp_path.rglob("*.json")
    file.write_text('{"answer": "seven"}')
    assert run_coroutine(read(caller, "a", number_of, cost := Cost())) == 7
    assert (cost.calls, cost.cached) == (1, 0)


def test_tokens_of_a_batch_are_divided_among_its_requests() -> None:
    class Metered(AsyncAgent):
        def __init__(self) -> None:
            self.meter = Meter(None)

        async def aact(self, request: TurnRequest) -> Action:
            self.meter.add(prompt_tokens=9, completion_tokens=1)
            return Action(text="yes")

    class Wrapped(Agent):
        """Blocks, and has another agent answer."""

        def __init__(self) -> None:
            self.own = Metered()

        def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
            return self.own.get_action(messages, agent_state)

    costs = [Cost() for _ in range(4)]
    caller = Caller(Wrapped(), "Judge", **OPTIONS)
    run_coroutine(gathered(read(caller, str(n), cost=cost) for n, cost in enumerate(costs)))
    assert [cost.tokens for cost in costs] == [10.0] * 4


def test_an_asynchronous_agent_is_awaited_on_the_loop_and_ended_with_the_caller() -> None:
    class Sleeping(AsyncAgent):
        num_open = 0

        async def aact(self, request: TurnRequest) -> Action:
            assert is_on_agents_loop()
            self.num_open += 1
            try:
                await asyncio.sleep(30)
            finally:
                self.num_open -= 1
            return Action(text="late")

    agent = Sleeping()
    with pytest.raises(AgentError, match=r"Sleeping took longer than timeout_s = 0\.05"):
        run_coroutine(read(Caller(agent, "Judge", **{**OPTIONS, "timeout_s": 0.05}), "a"))
    waiting = asyncio.run_coroutine_threadsafe(read(Caller(agent, "Judge", **OPTIONS), "a"), agents_loop())
    deadline = time.monotonic() + 30
    while not agent.num_open and time.monotonic() < deadline:
        time.sleep(0.01)
    waiting.cancel()
    while agent.num_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert agent.num_open == 0
