"""Measure the CPU time of a call of a program: from the HTTP request through the recorded tokens to the response.

    python benchmarks/programs.py [--num_calls 300] [--num_rounds 9]

Programs and the endpoint run in one process, in which the threads of the programs measure their own CPU time; the rest
is that of the endpoint, of the recording and of the rollout. The agent returns a fixed answer. The same programs send
the same bodies to a bare Starlette application under uvicorn, which returns the bytes of a recorded response: what
remains above it is what playing a program adds. A third server also renders and tokenizes each conversation, as an
engine does that is not played through this library. All sides take turns, and each figure is a median over the rounds.

The messages of a conversation, at its first call and at its last one, are in the first column; other messages than the
policy's own answers are as many, and one whole beginning is tokenized at the first call.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentsgym import Action, Agent, TurnRequest
from agentsgym.envs.AgentProgram import AgentProgramEnv, Endpoint
from agentsgym.event_loop import agents_loop
from agentsgym.reports.tables import text_table
from agentsgym.testing import chat_tokenizer

TEXT: Final = "The lamp is on the table, next to the letter that nobody has opened since the storm in October. "
LENGTHS: Final = ((1, 10), (1, 50), (101, 10))  # the messages of the first call, and the number of calls
PATH: Final = "/v1/chat/completions"
Post = Callable[[list[dict[str, Any]]], dict[str, Any]]


class Fixed(Agent):
    """Returns the same tokens for each request."""

    def __init__(self, tokenizer: Any) -> None:
        self.ids: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        self.logprobs = [-0.25] * len(self.ids)

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Answer."""
        return [Action(text=TEXT, token_ids=[*self.ids], logprobs=[*self.logprobs]) for _ in requests]


class Program:
    """Calls the policy on one connection, and adds up the CPU time of its own thread.

    Attributes:
        seconds: The CPU time of all programs so far.
        bodies: The last response to each call.
    """

    def __init__(self, num_messages: int, num_calls: int) -> None:
        self.num_messages, self.num_calls = num_messages, num_calls
        self.seconds = 0.0
        self.bodies: list[bytes] = [b""] * num_calls
        self._lock = threading.Lock()

    def __call__(self, task: dict[str, Any], endpoint: Endpoint) -> float:
        """Continue one conversation call by call."""
        self.converse(endpoint.base_url.split("/")[2], endpoint.api_key)
        return 1.0

    def converse(self, host: str, key: str) -> None:
        """Send every call, each with the last answer and a new message."""
        begun = time.thread_time()
        connection = http.client.HTTPConnection(host, timeout=60)
        roles = [*["user", "assistant"] * (self.num_messages // 2), "user"]
        messages = [{"role": role, "content": f"{k} {TEXT * 2}"} for k, role in enumerate(roles)]
        for number in range(self.num_calls):
            body = json.dumps({"model": "policy", "messages": messages, "number": number})
            connection.request(
                "POST", PATH, body, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            )
            response = connection.getresponse()
            self.bodies[number] = raw = response.read()
            if response.status != 200:
                raise RuntimeError(raw.decode())
            answer = json.loads(raw)["choices"][0]["message"]
            messages = [*messages, answer, {"role": "user", "content": f"on {number} {TEXT}"}]
        connection.close()
        with self._lock:
            self.seconds += time.thread_time() - begun


def bare_address(program: Program, tokenizer: Any = None) -> str:
    """Serve the recorded responses on the event loop of the agents, and return the address.

    With a tokenizer, the server first tokenizes the conversation, and returns the same response.
    """

    async def echo(request: Request) -> Response:
        body = json.loads(await request.body())
        if tokenizer is not None:
            tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        return Response(program.bodies[body["number"]], media_type="application/json")

    async def start() -> str:
        config = uvicorn.Config(
            Starlette(routes=[Route(PATH, echo, methods=["POST"])]),
            port=0,
            log_config=None,
            access_log=False,
            lifespan="off",
        )
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        tasks.add(serving)
        return f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    return asyncio.run_coroutine_threadsafe(start(), agents_loop()).result()


tasks: set[asyncio.Task[None]] = set()


def milliseconds(play: Callable[[], Any], program: Program, num_calls: int) -> tuple[float, float]:
    """The CPU milliseconds of one call outside and inside the program."""
    before, inside = time.process_time(), program.seconds
    play()
    client = program.seconds - inside
    return (time.process_time() - before - client) / num_calls * 1e3, client / num_calls * 1e3


def measure(program: Program, num_calls: int, num_rounds: int) -> list[str]:
    """Measure one length of conversations."""
    tokenizer = chat_tokenizer()
    env, agent = AgentProgramEnv(tokenizer, program=program), Fixed(tokenizer)
    number = max(1, num_calls // program.num_calls)

    def played() -> None:
        rollouts = env.rollout([{"seed": seed} for seed in range(number)], agent, max_concurrent=4)
        if failed := [one.error for one in rollouts if one.failed]:
            raise SystemExit(str(failed[0]))

    def echoed(address: str) -> None:
        for _ in range(number // 4 + 1):
            threads = [threading.Thread(target=program.converse, args=(address, "key")) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    played()
    addresses = [bare_address(program), bare_address(program, tokenizer)]
    sides: list[tuple[Callable[[], Any], int]] = [(played, number * program.num_calls)]
    num_echoed = (number // 4 + 1) * 4 * program.num_calls
    sides += [(partial(echoed, address), num_echoed) for address in addresses]
    rounds = [[milliseconds(play, program, calls) for play, calls in sides] for _ in range(num_rounds)]
    ours, bare, tokenizing = (statistics.median(one[side][0] for one in rounds) for side in range(3))
    client = statistics.median(one[0][1] for one in rounds)
    label = f"{program.num_messages} to {program.num_messages + 2 * (program.num_calls - 1)}"
    return [label, *(f"{one:.2f}" for one in (ours, bare, ours - bare, tokenizing, ours - tokenizing, client))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_calls", type=int, default=300, help="Calls a round.")
    parser.add_argument("--num_rounds", type=int, default=9, help="Rounds, in which both sides take turns.")
    given = parser.parse_args()
    rows = [measure(Program(*one), given.num_calls, given.num_rounds) for one in LENGTHS]
    header = ["messages", "call, CPU ms", "bare server", "added", "tokenizing server", "added", "program itself"]
    print(text_table(header, rows))


if __name__ == "__main__":
    main()
