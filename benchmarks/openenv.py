"""Measure a step of `OpenEnvEnv` beside a bare client of the same OpenEnv server, which is started for it.

    AGENTSGYM_OPENENV_PYTHON=.venv-openenv/bin/python python benchmarks/openenv.py [--num_rounds 10]

The bare client sends a JSON message and reads one, and does nothing else. Both play the same game on one server and
take turns step by step, so that another process on the machine slows down both, in several games, since a connection
that begins badly on a busy machine stays slow. A figure is what the fastest tenth of the rounds stay below: a wait for
the processor is nothing that either does. "A step" is the environment's hook; "a turn" is one of a whole rollout of
50 steps, opening and closing of the connection and the agent's answers included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from agentsgym import ScriptedAgent
from agentsgym.envs import OpenEnvEnv, OpenEnvServer
from agentsgym.reports.tables import text_table
from agentsgym.types import Action

GAMES = Path(__file__).parent.parent / "tests" / "with_worlds" / "openenv_games.py"
NUM_STEPS, NUM_GAMES = 50, 6  # steps a round
MESSAGE = "x"  # not a number: the game continues


class BareClient:
    """The protocol and nothing else."""

    def __init__(self, url: str) -> None:
        opened = connect(url.replace("http", "ws", 1) + "/ws", proxy=None, max_size=100 << 20)
        self.socket = opened.__enter__()
        self.close = self.socket.close

    def request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send one message and read its answer."""
        self.socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self.socket.recv(timeout=60.0))
        if answer["type"] == "error":
            raise RuntimeError(answer["data"])
        return answer["data"]


def seconds_of(work: Callable[[], Any], count: int) -> float:
    """The time of one call, in seconds."""
    start = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - start) / count


def rollout_seconds(env: OpenEnvEnv, num_turns: int, num_rollouts: int) -> float:
    """The time of one turn of whole rollouts, in seconds."""
    start = time.perf_counter()
    rollouts = env.rollout([{"seed": 1}], ScriptedAgent([MESSAGE], repeat_last=True), num_rollouts)
    taken = time.perf_counter() - start
    if any(len(one.turns) != num_turns for one in rollouts):
        raise RuntimeError(rollouts[0].error)
    return taken / (num_turns * num_rollouts)


def bare_rollout_seconds(url: str) -> float:
    """The time of one step of a whole game of the bare client's, opening and closing included, in seconds."""
    start = time.perf_counter()
    bare = BareClient(url)
    bare.request("reset", {"seed": 1})
    for _ in range(NUM_STEPS):
        bare.request("step", {"message": MESSAGE})
    bare.close()
    return (time.perf_counter() - start) / NUM_STEPS


def fast_ms(times: list[float]) -> float:
    """What the fastest tenth of times in seconds stay below, in milliseconds."""
    return 1000 * statistics.quantiles(times, n=10)[0]


def played(env: OpenEnvEnv, num_rounds: int) -> list[tuple[float, ...]]:
    """The seconds of a step, of one of the bare client's, of a turn, and of its turn, in each round of one game."""
    state = env.start_session("benchmark", {"seed": 1}, seed=0)
    url = env._connections.url()  # pyright: ignore[reportPrivateUsage]
    bare = BareClient(url)
    bare.request("reset", {"seed": 1})
    action = Action(text=MESSAGE)
    step = partial(env._step_action, "benchmark", state, action)  # pyright: ignore[reportPrivateUsage]
    bare_step = partial(bare.request, "step", {"message": MESSAGE})
    rounds: list[tuple[float, ...]] = []
    for _ in range(num_rounds):
        turn_s, bare_turn_s = rollout_seconds(env, NUM_STEPS, 1), bare_rollout_seconds(url)
        bare_step()  # the server ends the game before
        steps = [(seconds_of(step, 1), seconds_of(bare_step, 1)) for _ in range(NUM_STEPS)]
        step_s, bare_step_s = (statistics.median(one[index] for one in steps) for index in range(2))
        rounds.append((step_s, bare_step_s, turn_s, bare_turn_s))
    bare.close()
    env._close_episode("benchmark", state)  # pyright: ignore[reportPrivateUsage]
    return rounds


def measure(python: str, num_rounds: int) -> dict[str, float | int]:
    """Start the server, play both ways in turns, and stop it."""
    command = [python, str(GAMES), "guess", "--port", "{port}", "--sessions", "16"]
    server = OpenEnvServer(command=command, start_timeout_s=120.0)
    env = OpenEnvEnv(None, {"max_steps_per_episode": NUM_STEPS}, server=server)
    try:
        env.check_task({"seed": 1})
        rounds = [one for _ in range(NUM_GAMES) for one in played(env, num_rounds)]
    finally:
        env.close()
    step_ms, bare_ms, turn_ms, bare_turn_ms = (fast_ms([one[index] for one in rounds]) for index in range(4))
    return {
        "num_rounds": num_rounds,
        "step_ms": round(step_ms, 4),
        "bare_ms": round(bare_ms, 4),
        "turn_ms": round(turn_ms, 4),
        "bare_turn_ms": round(bare_turn_ms, 4),
        "step_times": round(step_ms / bare_ms, 3),
        "turn_times": round(turn_ms / bare_turn_ms, 3),
    }


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_rounds", type=int, default=10, help="rounds in each of 6 games (default: 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    python = os.environ.get("AGENTSGYM_OPENENV_PYTHON")
    if python is None:
        sys.exit("set AGENTSGYM_OPENENV_PYTHON to a Python that has OpenEnv (make test-worlds installs one)")
    result = measure(python, options.num_rounds)
    if options.json:
        print(json.dumps(result))
        return
    rows = [
        ["the bare client, a step", f"{result['bare_ms']:.3f}", ""],
        ["OpenEnvEnv, a step", f"{result['step_ms']:.3f}", f"{result['step_times']:.2f} times"],
        ["the bare client, a turn of a whole game", f"{result['bare_turn_ms']:.3f}", ""],
        ["OpenEnvEnv, a turn of a rollout", f"{result['turn_ms']:.3f}", f"{result['turn_times']:.2f} times"],
    ]
    print(text_table(["client", "ms", "of the bare client"], rows))


if __name__ == "__main__":
    main()
