"""Measure what TextArenaEnv adds to a turn of the bare game, in processor time, and how long games take to begin.

The bare game is TextArena's own ``-raw`` form, seeded alike and given the same actions; the environment's hooks are
called as a trial calls them, without the record of tokens, which every environment has.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from agentsgym.envs.TextArena import TextArenaEnv
from agentsgym.envs.TextArena.games import GameFactory
from agentsgym.envs.TextArena.isolation import GameContext, textarena

# pyright: reportPrivateUsage=false
# The hooks are measured one by one.

GAMES = {
    "GuessTheNumber-v0": [f"[{number}]" for number in range(1, 21)],
    "FrozenLake-v0": ["[down]", "[up]"] * 10,
    "2048-v0": ["[up]", "[left]", "[down]", "[right]"] * 5,
    "TowerOfHanoi-v0": ["[A C]", "[C A]"] * 8,
    "Wordle-v0": ["[crane]", "[slate]", "[built]", "[money]", "[proud]", "[fight]"],
}


def bare_turns(game: str, actions: list[str], seed: int) -> Iterator[int]:
    """Play a bare game; gives the number of turns."""
    context = GameContext(random.Random(seed))
    played = GameFactory(game)(context)
    with context:
        played.reset(num_players=1, seed=seed)
    turns = 0
    start = time.process_time_ns()
    for action in actions:
        played.get_observation()
        turns += 1
        if played.step(action)[0]:
            break
    yield time.process_time_ns() - start
    yield turns


def env_turns(env: TextArenaEnv, actions: list[str], seed: int) -> Iterator[int]:
    """Play the same through the environment's hooks."""
    state = env.start_session("session", {}, seed=seed)
    turns = 0
    start = time.process_time_ns()
    for action in actions:
        env._format_prompt(state, turns)
        turns += 1
        state, _, done, _ = env._step_episode("session", state, action)
        if done:
            break
    yield time.process_time_ns() - start
    yield turns


def microseconds(play: Callable[[int], Iterator[int]], num_games: int) -> float:
    """Median over five batches of the microseconds a turn takes."""
    medians: list[float] = []
    for batch in range(5):
        found = [tuple(play(batch * num_games + game)) for game in range(num_games)]
        medians.append(sum(one[0] for one in found) / sum(one[1] for one in found) / 1000)
    return statistics.median(medians)


def measure(num_games: int) -> dict[str, dict[str, float]]:
    """Microseconds of a turn by game, bare and as an environment, and milliseconds of a start."""
    textarena()
    result: dict[str, dict[str, float]] = {}
    for game, actions in GAMES.items():
        env = TextArenaEnv(env_config={"game": game})

        def bare(seed: int, game: str = game, actions: list[str] = actions) -> Iterator[int]:
            return bare_turns(game, actions, seed)

        def adapted(seed: int, env: TextArenaEnv = env, actions: list[str] = actions) -> Iterator[int]:
            return env_turns(env, actions, seed)

        bare_us, env_us = microseconds(bare, num_games), microseconds(adapted, num_games)
        start = time.process_time()
        for seed in range(num_games):
            env.start_session("session", {}, seed=seed)
        result[game] = {
            "bare_us": round(bare_us, 1),
            "env_us": round(env_us, 1),
            "added_us": round(env_us - bare_us, 1),
            "ratio": round(env_us / bare_us, 2),
            "start_ms": round(1000 * (time.process_time() - start) / num_games, 3),
        }
    return result


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_games", type=int, default=200, help="games in each of five batches (default: 200)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result: dict[str, Any] = measure(options.num_games)
    if options.json:
        print(json.dumps(result))
        return
    for game, one in result.items():
        print(f"{game:20} {one['bare_us']:6.1f} us bare, {one['added_us']:5.1f} us more ({one['ratio']:.2f} times), "
              f"start {one['start_ms']:.2f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
