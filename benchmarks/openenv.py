"""Measure a step of `OpenEnvEnv` beside a bare client of the same OpenEnv server, which is started for it.

    AGENTSGYM_OPENENV_PYTHON=.venv-openenv/bin/python python benchmarks/openenv.py [--num_steps 500]

The bare client sends a JSON message and reads one, and does nothing else. Both play the same game on one server, in
rounds in which they take turns, so that another process on the machine slows down both; a figure is the median over the
rounds. "A step" is the environment's hook; "a turn" is one of a whole rollout of text, the agent's answer included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from agentsgym import OpenEnvEnv, OpenEnvServer, ScriptedAgent
from agentsgym.reports.tables import text_table
from agentsgym.types import Action

GAMES = Path(__file__).parent.parent / "tests" / "with_worlds" / "openenv_games.py"
NUM_ROUNDS = 15
MESSAGE = "x"  # no number: the game goes on


class BareClient:
    """The protocol and nothing else."""

    def __init__(self, url: str) -> None:
        opened = connect(url.replace("http", "ws", 1) + "/ws", proxy=None, max_size=100 << 20)
        self.socket = opened.__enter__()

    def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
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


def measure(python: str, num_steps: int) -> dict[str, float | int]:
    """Start the server, play both ways in turns, and stop it."""
    command = [python, str(GAMES), "guess", "--port", "{port}", "--sessions", "16"]
    server = OpenEnvServer(command=command, start_timeout_s=120.0)
    env = OpenEnvEnv(None, {"max_steps_per_episode": num_steps}, server=server)
    try:
        env.check_task({"seed": 1})
        state = env.start_session("benchmark", {"seed": 1}, seed=0)
        bare = BareClient(env._link.url())  # pyright: ignore[reportPrivateUsage]
        bare.ask("reset", {"seed": 1})
        action = Action(text=MESSAGE)
        rounds = [
            (
                seconds_of(lambda: env._step_action("benchmark", state, action), num_steps),  # pyright: ignore[reportPrivateUsage]
                seconds_of(lambda: bare.ask("step", {"message": MESSAGE}), num_steps),
                rollout_seconds(env, num_steps, 1),
            )
            for _ in range(NUM_ROUNDS)
        ]
    finally:
        env.close()
    return {
        "num_steps": num_steps,
        "step_ms": round(1000 * statistics.median(one for one, _, _ in rounds), 4),
        "bare_ms": round(1000 * statistics.median(two for _, two, _ in rounds), 4),
        "turn_ms": round(1000 * statistics.median(three for _, _, three in rounds), 4),
        "step_times": round(statistics.median(one / two for one, two, _ in rounds), 3),
        "turn_times": round(statistics.median(three / two for _, two, three in rounds), 3),
    }


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_steps", type=int, default=500, help="steps a round (default: 500)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    python = os.environ.get("AGENTSGYM_OPENENV_PYTHON")
    if python is None:
        sys.exit("set AGENTSGYM_OPENENV_PYTHON to a Python that has OpenEnv (make test-worlds installs one)")
    result = measure(python, options.num_steps)
    if options.json:
        print(json.dumps(result))
        return
    rows = [
        ["the bare client, a step", f"{result['bare_ms']:.3f}", ""],
        ["OpenEnvEnv, a step", f"{result['step_ms']:.3f}", f"{result['step_times']:.2f} times"],
        ["OpenEnvEnv, a turn of a rollout", f"{result['turn_ms']:.3f}", f"{result['turn_times']:.2f} times"],
    ]
    print(text_table(["client", "ms", "of the bare client"], rows))


if __name__ == "__main__":
    main()
