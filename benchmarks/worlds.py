"""Measure ALFWorld's engine: a step of ours compared with the stock engine's, many households at once, many games.

Needs the extra ``alfworld``; the households are generated. Times are CPU time of the engine's process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentsgym.envs.ALFWorld.engine import HouseholdEngine
from agentsgym.envs.ALFWorld.env import ALFWorldEnv
from agentsgym.envs.shared.engines import shared_processes
from agentsgym.seeding import derive_seed
from tools.households import generate_households

_ENGINE = "agentsgym.envs.ALFWorld.engine:HouseholdEngine"
_STEPS = 30


class StockEngine:
    """The engine as the wheels have it, used as it is meant to be."""

    def __init__(self) -> None:
        textworld: Any = importlib.import_module("textworld")
        pddl: Any = importlib.import_module("textworld.envs.pddl")
        wrappers: Any = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
        self._game = wrappers.AlfredDemangler(pddl.PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        """Begin a game of a file."""
        self._game.load(game["file"])
        return {"admissible": self._game.reset()["admissible_commands"]}

    def step(self, command: str) -> dict[str, Any]:
        """Play a command."""
        return {"admissible": self._game.step(command)[0]["admissible_commands"]}


def play_alone(engine: Any, games: Sequence[str]) -> dict[str, float]:
    """Play a random walk in each game, and give the medians of beginning and of a step, in ms of CPU time."""
    starts: list[float] = []
    steps: list[float] = []
    for game in games:
        stream = random.Random(derive_seed("walk", Path(game).name))
        taken, answer = _timed(lambda game=game: engine.start({"file": game}))
        starts.append(taken)
        for _ in range(_STEPS):
            command = stream.choice([*answer["admissible"]])
            taken, answer = _timed(lambda command=command: engine.step(command))
            steps.append(taken)
    return {
        "start_ms": round(1e3 * statistics.median(starts), 2),
        "step_ms": round(1e3 * statistics.mean(steps), 3),
        "step_median_ms": round(1e3 * statistics.median(steps), 3),
    }


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    value = call()
    return time.process_time() - start, value


def compare(folder: Path, size: str, num_games: int) -> dict[str, Any]:
    """Play the same games with both engines, each in its own process."""
    made = generate_households(folder / size, {"train": num_games}, size=size)
    games = [str(file) for file in made.games["train"]]
    found: dict[str, dict[str, float]] = {}
    for kind in ("stock", "ours"):
        ran = subprocess.run(
            [sys.executable, __file__, "--engine", kind, "--games", *games], capture_output=True, text=True, check=True
        )
        found[kind] = json.loads(ran.stdout)
    ratios = {name: round(value / found["ours"][name], 1) for name, value in found["stock"].items()}
    return {**found, "times_faster": ratios}


def many_live(folder: Path, num_households: int, num_processes: int) -> dict[str, Any]:
    """Have many medium households live at once, all of them different, and add up the memory."""
    made = generate_households(folder / "live", {"train": num_households}, size="medium")
    processes = shared_processes(_ENGINE, num_processes=num_processes)
    for index, file in enumerate(made.games["train"]):
        answer = processes.begin(f"live {index}", {"file": str(file)})
        for command in answer["admissible"][:5]:
            processes.step(f"live {index}", command)
    memory = {kind: round(sum(_memory_mb(pid, kind) for pid in processes.pids)) for kind in ("Rss", "Pss")}
    for index in range(num_households):
        processes.end(f"live {index}")
    return {"num_households": num_households, "num_processes": len(processes.pids), "memory_mb": memory}


def many_games(folder: Path, num_games: int) -> dict[str, Any]:
    """Play the walkthroughs of many games one after the other, and note files and memory on the way."""
    made = generate_households(folder / "games", {"train": 100}, size="small")
    files = [(str(file), json.loads(file.read_text())["walkthrough"]) for file in made.games["train"]]
    processes = shared_processes(_ENGINE, num_processes=1, step_timeout_s=61.0)
    noted: list[dict[str, float]] = []
    start = time.perf_counter()
    for number in range(1, num_games + 1):
        file, commands = files[number % len(files)]
        processes.begin("game", {"file": file})
        won = [processes.step("game", command)["won"] for command in commands][-1]
        if not won:
            raise AssertionError(file)
        processes.end("game")
        if number in (num_games // 10, num_games // 2, num_games):
            [pid] = processes.pids
            noted.append({"games": number, "pss_mb": round(_memory_mb(pid, "Pss"), 1), **_libraries(pid)})
    return {"num_games": num_games, "wall_s": round(time.perf_counter() - start, 1), "noted": noted}


def _memory_mb(pid: int, kind: str) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith(f"{kind}:")]
    return int(kilobytes) / 1024


def _libraries(pid: int) -> dict[str, float]:
    """Count the copies of the planner's library: those in the folder of temporary files, and those that are mapped."""
    left = [*Path(tempfile.gettempdir()).glob("*/libdownward.so")]
    lines = [one.split() for one in Path(f"/proc/{pid}/maps").read_text().splitlines() if "libdownward" in one]
    return {"temporary_copies": len(left), "mapped_copies": len({line[4] for line in lines})}


def episodes(folder: Path, num_rollouts: int) -> dict[str, Any]:
    """Play whole episodes of the environment, with and without a cache of the engine's answers."""
    generate_households(folder / "episodes", {"train": 12}, size="medium")
    found: dict[str, Any] = {}
    for name, cache_mb in (("asking", 0.0), ("remembering", 64.0)):
        env = ALFWorldEnv(None, {"data": str(folder / "episodes"), "cache_mb": cache_mb})
        rows: Any = ALFWorldEnv.get_train_dataset({"data": str(folder / "episodes")})
        tasks: list[dict[str, Any]] = [*rows["task_data"]]
        player = _reference_player(env)
        env.rollout(tasks[:1], player)  # the process starts
        start = time.perf_counter()
        played = env.rollout(tasks, player, num_rollouts)
        turns = sum(len(one.turns) for one in played)
        found[name] = {"turns": turns, "ms_a_turn": round(1e3 * (time.perf_counter() - start) / turns, 3)}
    return found


def _reference_player(env: ALFWorldEnv) -> Any:
    from agentsgym.envs.players import reference_player  # noqa: PLC0415  # the engines' own processes need none

    return reference_player(env)


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_compared", type=int, default=6, help="games of each size that both engines play")
    parser.add_argument("--num_live", type=int, default=64, help="households at once")
    parser.add_argument("--num_processes", type=int, default=2, help="processes that they live in")
    parser.add_argument("--num_games", type=int, default=2000, help="games one after the other")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--engine", choices=("stock", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--games", nargs="+", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        print(json.dumps(play_alone(StockEngine() if options.engine == "stock" else HouseholdEngine(), options.games)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        result = {
            "small": compare(folder, "small", options.num_compared),
            "medium": compare(folder, "medium", options.num_compared),
            "episodes": episodes(folder, 8),
            "live": many_live(folder, options.num_live, options.num_processes),
            "games": many_games(folder, options.num_games),
        }
    print(json.dumps(result) if options.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
