"""Screen the candidates of ``credit_graphs`` in seconds: a table of logits for each map, without a language model.

::

    python -m benchmarks.credit_tables --worlds fetch --arms gigpo g2po     # from the repository's root

Random maps of 4 x 4 cells (or ``--size``) with a win as the only reward. In ``lake``, holes end the episode and the
goal lies in the far corner. In ``fetch``, the agent takes a thing from there and brings it back, holes are walls. Each
generation plays 8 rollouts of each of 6 maps. A table has a logit for each action in each state, and follows the policy
gradient, averaged and divided by a moving root mean square, so that only its direction matters.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from agentsgym.credit.registry import get_estimator
from agentsgym.credit.scored import ScoredRollout
from benchmarks.credit_graphs import ARMS
from benchmarks.credit_report import Run

_LOST, _WON = -1, -2
_MOVES: Final = ((0, -1), (1, 0), (0, 1), (-1, 0))
Table = NDArray[np.int64]


def transitions(world: str, size: int, generator: np.random.Generator) -> Table:
    """The state after each action in each state of a random map whose far corner can be reached, (2·cells, 4)."""
    while True:
        ice = generator.random((size, size)) < 0.8
        ice[0, 0] = ice[-1, -1] = True
        table = np.array([[_after(world, ice, state, move) for move in _MOVES] for state in range(2 * size**2)])
        seen, before = {0}, 0
        while len(seen) > before:
            before = len(seen)
            seen |= {int(following) for state in seen if state >= 0 for following in table[state]}
        if _WON in seen:
            return table


def _after(world: str, ice: NDArray[np.bool_], state: int, move: tuple[int, int]) -> int:
    size = len(ice)
    (row, column), carries = divmod(state // 2, size), state % 2
    to = row + move[0], column + move[1]
    if min(to) < 0 or max(to) >= size:
        to = row, column
    elif not ice[to]:
        if world == "lake":
            return _LOST
        to = row, column
    far, home = to == (size - 1, size - 1), to == (0, 0)
    if (world == "lake" and far) or (world == "fetch" and home and carries):
        return _WON
    return 2 * (to[0] * size + to[1]) + int(carries or (world == "fetch" and far))


def play(
    tables: NDArray[np.int64], logits: NDArray[np.float64], maps: Table, num_turns: int, generator: np.random.Generator
) -> tuple[list[ScoredRollout], list[list[int]]]:
    """One rollout for each entry of ``maps``, and its actions."""
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    bounds = np.cumsum(odds / odds.sum(-1, keepdims=True), axis=-1)[..., :-1]
    states, keys, actions = np.zeros_like(maps), [list[int]() for _ in maps], [list[int]() for _ in maps]
    for _ in range(num_turns):
        going = np.flatnonzero(states >= 0)
        now = states[going]
        chosen = (generator.random(len(going))[:, None] > bounds[maps[going], now]).sum(-1)
        for i, state, action in zip(going, now, chosen, strict=True):
            keys[i].append(int(state))
            actions[i].append(int(action))
        states[going] = tables[maps[going], now, chosen]
    won = [float(state == _WON) for state in states]
    return [
        ScoredRollout(turn_rewards=[0.0] * (len(own) - 1) + [win], final_reward=win, group=int(group), state_keys=own)
        for own, win, group in zip(keys, won, maps, strict=True)
    ], actions


def learn(
    world: str, estimate: Callable[..., Any], seed: int, *, size: int, num_generations: int, learning_rate: float
) -> tuple[list[float], float]:
    """The fraction of wins of each generation, and the CPU seconds of the estimator."""
    generator = np.random.default_rng(seed)
    tables = np.array([transitions(world, size, generator) for _ in range(6)])
    logits, average, square = np.zeros(tables.shape), np.zeros(tables.shape), 0.0
    maps, wins, seconds = np.repeat(np.arange(len(tables)), 8), list[float](), 0.0
    for generation in range(1, num_generations + 1):
        rollouts, actions = play(tables, logits, maps, 10 * size, generator)
        wins.append(fmean(one.final_reward for one in rollouts))
        start = time.process_time()
        advantages = np.concatenate([*map(np.asarray, estimate(rollouts))])
        seconds += time.process_time() - start
        where = (
            np.concatenate([[one.group] * len(one.state_keys) for one in rollouts]),
            np.concatenate([np.array(one.state_keys) for one in rollouts]),
        )
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        scores = np.eye(4)[np.concatenate(actions)] - (odds / odds.sum(-1, keepdims=True))[where]
        gradient = np.zeros(tables.shape)
        np.add.at(gradient, where, advantages[:, None] * scores / len(scores))
        average = 0.9 * average + 0.1 * gradient
        square = 0.99 * square + 0.01 * float((gradient**2).sum())
        step = average / (1 - 0.9**generation) / (np.sqrt(square / (1 - 0.99**generation)) + 1e-8)
        logits = logits + learning_rate * step
    return wins, seconds


def main() -> None:
    """Learn, and print a line of JSON a run, as ``credit_graphs --ratios`` reads them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=("lake", "fetch"), default=["lake", "fetch"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--size", type=int, default=4, help="rows and columns of a map")
    parser.add_argument("--generations", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=2.0)
    options = parser.parse_args()
    for seed, world, arm in product(options.seeds, options.worlds, options.arms):
        estimate = partial(
            get_estimator(ARMS[arm].estimator), discount=ARMS[arm].discount, scale=cast("Any", ARMS[arm].scale)
        )
        wins, seconds = learn(
            world,
            estimate,
            seed,
            size=options.size,
            num_generations=options.generations,
            learning_rate=options.learning_rate,
        )
        run = Run(
            game=f"table_{world}_{options.size}",
            arm=arm,
            seed=seed,
            batch_size=48,
            random_score=0.0,
            optimal_score=1.0,
            scores=wins,
            final_score=fmean(wins[-5:]),
            final_win_rate=fmean(wins[-5:]),
            num_evaluated=5 * 48,
            cpu_s=round(seconds, 2),
        )
        print(json.dumps(asdict(run)), flush=True)


if __name__ == "__main__":
    main()
