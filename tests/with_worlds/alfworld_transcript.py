"""Print what the engine of households states to fixed random walks, stock or mended; run by a test, as a process."""

from __future__ import annotations

import importlib
import json
import random
import sys
from typing import Any

from agentsgym.envs.ALFWorld.patches import cache_commands, patch_engine

WALKS, TURNS = 2, 12


def main(kind: str, games: list[str]) -> None:
    """Play every game twice, with one engine, and print all that it states and allows."""
    if kind == "mended":
        patch_engine()
    textworld: Any = importlib.import_module("textworld")
    pddl: Any = importlib.import_module("textworld.envs.pddl")
    wrappers: Any = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
    engine = wrappers.AlfredDemangler(pddl.PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True, facts=True)))
    for game in games:
        engine.load(game)
        if kind == "mended":
            cache_commands(engine.unwrapped)
        for walk in range(WALKS):
            stream = random.Random(f"{walk} {game.rpartition('train')[2]}")
            output = [reported(engine.reset())]
            commands = output[0]["commands"]
            for turn in range(TURNS):
                state, score, done = engine.step("fly away" if turn == 5 else stream.choice(commands))
                output.append({**reported(state), "score": score, "done": done})
                commands = output[-1]["commands"]
            print(json.dumps(output))


def reported(state: Any) -> dict[str, Any]:
    """What the engine gives out after a command."""
    return {"text": state.feedback, "commands": state.admissible_commands, "facts": sorted(map(str, state.facts))}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
