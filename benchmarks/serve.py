"""Measure `agentsgym serve`: turns per second beside the same games in this process, and memory over many episodes.

Each game is played with one action, 64 episodes at a time, with the same tasks both ways. Here, `rollout` does so with
a scripted agent; the server runs in a process of its own, and one client here holds 64 connections, since in OpenEnv's
protocol a connection is a session. The client does nothing but send and parse JSON. A round is one episode of each
session. The two ways take turns, so that other work on the machine slows down both, and a figure is what the fastest
tenth of the rounds reach: a wait for the processor is nothing that either does. The processor time of a turn depends
less on other work; the client's is not part of what is served. "Echo" is a bare server that reads each message and
answers with a constant: no server in Python with this WebSocket library can be faster than it and the game together.

Memory is the resident set of the server after every tenth of the episodes, which are short, on connections that are
opened anew for every ten episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from agentsgym import MultistepEnv, ScriptedAgent
from agentsgym.envs.datasets.naming import find_env
from agentsgym.envs.datasets.options import tasks_of
from agentsgym.reports.tables import text_table

ROOT = Path(__file__).parent.parent
GAMES = {"TwentyQuestions": "Is it alive?", "TextArena:Wordle-v0": "[crane]", "Gymnasium:FrozenLake-v1": "left"}
SHORT_GAME, SHORT_ACTION = "Gymnasium:FrozenLake-v1", "down"  # some steps to the first hole
NUM_SESSIONS = 64
EPISODES_PER_CONNECTION = 10


ECHO = """
import asyncio, json
from websockets.asyncio.server import serve

answer = json.dumps({"type": "observation", "data": {"observation": {"text": "No."}, "reward": 0, "done": False}})

async def play(connection):
    async for raw in connection:
        json.loads(raw)
        await connection.send(answer)

async def main():
    async with serve(play, "127.0.0.1", 0, compression=None) as listener:
        print(next(iter(listener.sockets)).getsockname()[1], flush=True)
        await asyncio.Future()

asyncio.run(main())
"""
ECHOES_PER_ROUND = 20


@contextmanager
def echoing() -> Generator[str]:
    """Start the bare server; yield its address."""
    with subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True) as one:
        try:
            yield f"ws://127.0.0.1:{one.stdout.readline().strip() if one.stdout else 0}"
        finally:
            one.terminate()


async def measure_echo(num_rounds: int) -> float:
    """Return the microseconds of a message and its answer on the bare server."""

    async def send(connection: ClientConnection) -> None:
        for _ in range(ECHOES_PER_ROUND):
            await request(connection, "step", {"message": "Is it alive?"})

    times: list[float] = []
    with echoing() as url:
        async with connected(url) as connections:
            for _ in range(num_rounds):
                start = time.perf_counter()
                await asyncio.gather(*map(send, connections))
                times.append(1e6 * (time.perf_counter() - start) / (NUM_SESSIONS * ECHOES_PER_ROUND))
    return round(fastest_tenth(times), 1)


def fastest_tenth(times: list[float]) -> float:
    """Return what the fastest tenth of the rounds reach."""
    return statistics.quantiles(times, n=10)[0]


@contextmanager
def served() -> Generator[tuple[dict[str, str], int]]:
    """Start the server; yield the games' addresses and its process id."""
    command = [sys.executable, "-m", "agentsgym.cli.app", "serve", *GAMES, "--port", "0", "-n", str(NUM_SESSIONS)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables) as one:
        try:
            lines = [one.stdout.readline() for _ in GAMES] if one.stdout else []
            if not all(" at http" in line for line in lines):
                raise RuntimeError("the server did not start")
            yield (
                {name: line.split()[-1].replace("http", "ws", 1) for name, line in zip(GAMES, lines, strict=True)},
                one.pid,
            )
        finally:
            one.terminate()


def processor_s(pid: int) -> float:
    """The processor time of a process's main thread so far, in seconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def resident_mib(pid: int) -> float:
    """The memory of a process, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def request(connection: ClientConnection, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Send one message and read its answer."""
    await connection.send(json.dumps({"type": kind, "data": data}))
    answer = json.loads(await connection.recv())
    if answer["type"] == "error":
        raise RuntimeError(answer["data"]["message"])
    return answer["data"]


async def play(connection: ClientConnection, index: int, action: str) -> int:
    """Play an episode; return the number of its turns."""
    await request(connection, "reset", {"index": index})
    num_turns, done = 0, False
    while not done:
        done = (await request(connection, "step", {"message": action}))["done"]
        num_turns += 1
    return num_turns


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[list[ClientConnection]]:
    """Open a connection for each session."""
    async with AsyncExitStack() as opened:
        yield [
            await opened.enter_async_context(connect(f"{url}/ws", proxy=None, compression=None))
            for _ in range(NUM_SESSIONS)
        ]


def played_here(env: MultistepEnv, tasks: list[Any], action: str) -> int:
    """Play each task in this process; return the number of turns."""
    return sum(len(one.turns) for one in env.rollout(tasks, ScriptedAgent([action], repeat_last=True)))


async def measure_speed(game: str, url: str, pid: int, num_rounds: int) -> dict[str, float]:
    """Play a game both ways in turns."""
    found: dict[str, list[float]] = {}
    env, action = find_env(game).build(), GAMES[game]
    tasks = tasks_of(env, "train", {}, NUM_SESSIONS)
    async with connected(url) as connections:
        for number in range(num_rounds + 1):
            start, start_cpu = time.perf_counter(), time.process_time()
            num_here = played_here(env, tasks, action)
            here_s, here_cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
            start, start_cpu, start_server = time.perf_counter(), time.process_time(), processor_s(pid)
            episodes = [play(one, index, action) for index, one in enumerate(connections)]
            num_served = sum(await asyncio.gather(*episodes))
            measured = {
                "here_us": here_s / num_here,
                "here_cpu_us": here_cpu_s / num_here,
                "served_us": (time.perf_counter() - start) / num_served,
                "client_cpu_us": (time.process_time() - start_cpu) / num_served,
                "server_cpu_us": (processor_s(pid) - start_server) / num_served,
            }
            if num_here != num_served:
                raise RuntimeError(f"{game} has {num_here} turns here and {num_served} served")
            for name, seconds in measured.items() if number else ():  # the first round is not counted
                found.setdefault(name, []).append(1e6 * seconds)
    figures = {name: round(fastest_tenth(times), 1) for name, times in found.items()}
    return {**figures, "ratio": round(figures["here_us"] / figures["served_us"], 3)}


async def measure_memory(url: str, pid: int, num_episodes: int) -> dict[str, Any]:
    """Play many short episodes on ever new connections, and note the server's memory after each tenth of them."""

    async def session(connection: ClientConnection, number: int) -> None:
        for one in range(EPISODES_PER_CONNECTION):
            await play(connection, (number + one) % NUM_SESSIONS, SHORT_ACTION)

    played, points = 0, [resident_mib(pid)]
    while len(points) <= 10:
        async with connected(url) as connections:
            await asyncio.gather(*(session(one, number) for number, one in enumerate(connections)))
        played += NUM_SESSIONS * EPISODES_PER_CONNECTION
        if played >= num_episodes / 10 * len(points):
            points.append(resident_mib(pid))
    return {"num_episodes": played, "resident_mib": [round(one, 2) for one in points]}


async def measure(num_rounds: int, num_episodes: int) -> dict[str, Any]:
    """Start the server, and measure both."""
    echo_us = await measure_echo(num_rounds)
    with served() as (urls, pid):
        speed = {game: await measure_speed(game, urls[game], pid, num_rounds) for game in GAMES}
        return {"echo_us": echo_us, "speed": speed, "memory": await measure_memory(urls[SHORT_GAME], pid, num_episodes)}


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_rounds", type=int, default=30, help="rounds of both ways (default: 30)")
    parser.add_argument("--num_episodes", type=int, default=10_000, help="episodes for memory (default: 10000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = asyncio.run(measure(options.num_rounds, options.num_episodes))
    if options.json:
        print(json.dumps(result))
        return
    rows = [
        [
            game,
            f"{1e6 / one['here_us']:,.0f}",
            f"{1e6 / one['served_us']:,.0f}",
            f"{one['ratio']:.2f}",
            f"{one['here_us'] / (one['here_us'] + result['echo_us']):.2f}",
            *(f"{one[name]:.0f}" for name in ("here_cpu_us", "server_cpu_us", "client_cpu_us")),
        ]
        for game, one in result["speed"].items()
    ]
    print(
        text_table(
            ["game", "turns/s here", "served", "ratio", "with an echo", "CPU µs a turn here", "server", "client"], rows
        )
    )
    print(f"\nthe bare server takes {result['echo_us']} µs a message")
    memory = result["memory"]
    print(f"\nthe server's memory over {memory['num_episodes']:,} episodes, MiB: {memory['resident_mib']}")


if __name__ == "__main__":
    main()
