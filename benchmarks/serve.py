"""Measure `agentsgym serve`: turns per second beside the same game in this process, and memory over many episodes.

Both play TwentyQuestions to its 20th turn with the same question, 64 episodes at a time. Here, `rollout` does it with a
scripted agent; the server runs in a process of its own, and one client here holds 64 connections, since in OpenEnv's
protocol a connection is a session. The client does nothing but send and parse JSON. The two ways take turns, so that
other work on the machine slows down both, and the figure is the median over the rounds; the processor time of the
server depends less on other work than the turns per second do.

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
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from agentsgym import ScriptedAgent
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.reports.tables import text_table

ROOT = Path(__file__).parent.parent
QUESTION = "Is it alive?"
NUM_SESSIONS, NUM_TASKS = 64, 256
EPISODES_PER_CONNECTION = 10


@contextmanager
def served(max_turns: int) -> Generator[tuple[str, int]]:
    """Start the server; yield its URL and its process id."""
    command = [sys.executable, "-m", "agentsgym.cli.app", "serve", "TwentyQuestions", "--port", "0"]
    command += ["-c", f"max_steps_per_episode={max_turns}", "-n", str(NUM_TASKS)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables
    ) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if " at http" not in line:
                raise RuntimeError("the server did not start")
            yield line.split()[-1].replace("http", "ws", 1) + "/ws", process.pid
        finally:
            process.terminate()


def processor_s(pid: int) -> float:
    """The processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """The memory of a process, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def request(connection: ClientConnection, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Send one message and read its answer."""
    await connection.send(json.dumps({"type": kind, "data": data}))
    answer = json.loads(await connection.recv())
    if answer["type"] == "error":
        raise RuntimeError(answer["data"]["message"])
    return answer["data"]


async def play(connection: ClientConnection, seed: int) -> int:
    """Play an episode; return the number of its turns."""
    await request(connection, "reset", {"seed": seed})
    num_turns, done = 0, False
    while not done:
        done = (await request(connection, "step", {"message": QUESTION}))["done"]
        num_turns += 1
    return num_turns


async def play_connected(url: str, num_episodes: int) -> int:
    """Open 64 connections and play episodes on each; return the number of turns."""

    async def session(number: int) -> int:
        async with connect(url, proxy=None, compression=None) as connection:
            return sum([await play(connection, number * num_episodes + one) for one in range(num_episodes)])

    return sum(await asyncio.gather(*map(session, range(NUM_SESSIONS))))


def played_here(num_episodes: int) -> int:
    """Play as many episodes in this process; return the number of turns."""
    env = TwentyQuestionsEnv()
    rows = env.get_train_dataset(size=NUM_TASKS)
    tasks: list[dict[str, Any]] = [rows[index % len(rows)]["task_data"] for index in range(NUM_SESSIONS * num_episodes)]
    agent = ScriptedAgent([QUESTION], repeat_last=True)
    return sum(len(one.turns) for one in env.rollout(tasks, agent, max_concurrent=NUM_SESSIONS))


def measure_speed(num_rounds: int, num_episodes: int) -> dict[str, float]:
    """Play both ways in turns."""
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    with served(20) as (url, pid):
        asyncio.run(play_connected(url, 1))
        played_here(1)
        for _ in range(num_rounds):
            start, start_cpu = time.perf_counter(), time.process_time()
            num_turns = played_here(num_episodes)
            here_s = time.perf_counter() - start
            note("here_turns_per_s", num_turns / here_s)
            note("here_cpu_us", 1e6 * (time.process_time() - start_cpu) / num_turns)
            start, start_cpu, start_server = time.perf_counter(), time.process_time(), processor_s(pid)
            num_turns = asyncio.run(play_connected(url, num_episodes))
            there_s = time.perf_counter() - start
            note("served_turns_per_s", num_turns / there_s)
            note("client_cpu_us", 1e6 * (time.process_time() - start_cpu) / num_turns)
            note("server_cpu_us", 1e6 * (processor_s(pid) - start_server) / num_turns)
            note("ratio", here_s / there_s)
    return {name: round(statistics.median(values), 3) for name, values in found.items()}


def measure_memory(num_episodes: int) -> dict[str, Any]:
    """Play many short episodes on ever new connections, and note the server's memory after each tenth of them."""
    per_round = NUM_SESSIONS * EPISODES_PER_CONNECTION
    points: list[float] = []
    with served(3) as (url, pid):
        played, wanted = 0, num_episodes / 10
        while len(points) < 10:
            asyncio.run(play_connected(url, EPISODES_PER_CONNECTION))
            played += per_round
            while played >= wanted * (len(points) + 1) and len(points) < 10:
                points.append(round(resident_mib(pid), 2))
    return {"num_episodes": played, "resident_mib": points, "growth_mib": round(points[-1] - points[0], 2)}


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_rounds", type=int, default=10, help="rounds of both ways (default: 10)")
    parser.add_argument("--num_episodes", type=int, default=10_000, help="episodes for memory (default: 10000)")
    parser.add_argument("--quick", action="store_true", help="two rounds of one episode, and few episodes for memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    num_rounds, per_round, num_episodes = options.num_rounds, 4, options.num_episodes
    if options.quick:
        num_rounds, per_round, num_episodes = 2, 1, 640
    speed, memory = measure_speed(num_rounds, per_round), measure_memory(num_episodes)
    if options.json:
        print(json.dumps({**speed, **memory}))
        return
    rows = [
        ["in this process", f"{speed['here_turns_per_s']:,.0f}", f"{speed['here_cpu_us']:.0f}"],
        ["served, 64 connections", f"{speed['served_turns_per_s']:,.0f}", f"{speed['server_cpu_us']:.0f} (server)"],
        ["", f"{speed['ratio']:.2f} times", f"{speed['client_cpu_us']:.0f} (client)"],
    ]
    print(text_table(["TwentyQuestions", "turns/s", "CPU µs a turn"], rows))
    print(f"\nthe server's memory over {memory['num_episodes']:,} episodes, MiB: {memory['resident_mib']}")


if __name__ == "__main__":
    main()
