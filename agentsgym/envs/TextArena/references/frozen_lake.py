"""Solve TextArena's FrozenLake, which is not slippery, for all maps of one size together."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentsgym.envs.spec import Anchors
from agentsgym.envs.TextArena.references.base import Reference, Rules, game_text, rounds
from agentsgym.errors import AgentError, ConfigError
from agentsgym.types import Message

_MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_MAX_MAPS = 200_000
_MAPS_PER_BATCH = 2000  # small enough for a processor's cache
_TIE = 1e-6  # the cost of a turn, smaller than any difference in reward, so that ties go to the shorter path
_GAME_LIMIT = 100  # turns, which is not an option of the game
_MAX_PARTIAL_REWARD = 0.95
_MIN_PARTIAL_REWARD = 0.1  # anywhere except the start


def partial_reward(size: int, start: tuple[int, int] = (0, 0)) -> NDArray[np.float64]:
    """Return the reward of a game that ends on a cell other than the goal: its distance from the start, (n, n)."""
    rows, columns = np.indices((size, size))
    distance = (abs(rows - start[0]) + abs(columns - start[1])) / (2 * (size - 1))
    reward = np.maximum(np.minimum(distance, _MAX_PARTIAL_REWARD), _MIN_PARTIAL_REWARD)
    reward[start] = 0.0
    return reward


def solvable_maps(size: int, num_holes: int) -> NDArray[np.bool_]:
    """Return the hole masks of all solvable maps, whose start and goal are in opposite corners, (M, n, n).

    Raises:
        ConfigError: There are more than 200,000 maps.
    """
    inner = range(1, size * size - 1)
    chosen = list(itertools.islice(itertools.combinations(inner, num_holes), _MAX_MAPS + 1))
    if len(chosen) > _MAX_MAPS:
        raise ConfigError(
            f"the exact reference of FrozenLake supports at most {_MAX_MAPS} maps, but size={size} with "
            f"num_holes={num_holes} has more: reduce one of them"
        )
    holes = np.zeros((len(chosen), size * size), dtype=bool)
    holes[np.arange(len(chosen))[:, None], np.array(chosen, dtype=np.int64).reshape(len(chosen), num_holes)] = True
    holes = holes.reshape(-1, size, size)
    reached = np.zeros_like(holes)
    reached[:, 0, 0] = True
    for _ in range(size * size):
        reached |= functools.reduce(np.logical_or, (_shifted(reached, move, fill=False) for move in _MOVES.values()))
        reached &= ~holes
    return holes[reached[:, -1, -1]]


def lake_values(
    holes: NDArray[np.bool_], turns: int, start: tuple[int, int] = (0, 0), *, step_cost: float = 0.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Solve maps by backward induction.

    A game is worth 1 if it ends at the goal, which is opposite the start, and otherwise its last cell's partial reward.

    Args:
        holes: Whether each cell is a hole, (M, n, n).
        turns: The number of turns, T.
        start: The corner where the player begins, from which the partial reward is measured.
        step_cost: The cost of each turn of optimal play.

    Returns:
        The values of the cells: of optimal play, and of random legal moves, where a step off the map is illegal; each
        (M, n, n).
    """
    size = holes.shape[1]
    partial = partial_reward(size, start)
    goal = (size - 1 - start[0], size - 1 - start[1])
    final = np.where(holes, partial, np.nan)
    final[:, goal[0], goal[1]] = 1.0
    is_final = ~np.isnan(final)
    optimal = random_values = np.where(is_final, final, partial)
    num_legal = sum(_shifted(np.ones((1, size, size)), move, fill=0.0) for move in _MOVES.values())
    for t in range(turns):
        if t < size * size:  # no path is longer
            reached = (_shifted(optimal, move, fill=-np.inf) for move in _MOVES.values())
            optimal = np.where(is_final, final, functools.reduce(np.maximum, reached) - step_cost)
        total = sum(_shifted(random_values, move, fill=0.0) for move in _MOVES.values())
        random_values = np.where(is_final, final, total / num_legal)
    return optimal, random_values


@functools.lru_cache(maxsize=8)
def mean_values(size: int, num_holes: int, turns: int) -> tuple[float, float]:
    """Return the mean values of random and optimal play from the start over all maps, which are equally likely."""
    holes = solvable_maps(size, num_holes)
    parts = [lake_values(part, turns) for part in np.array_split(holes, len(holes) // _MAPS_PER_BATCH + 1)]
    optimal, random = (np.concatenate([one[:, 0, 0] for one in values]) for values in zip(*parts, strict=True))
    return float(random.mean()), float(optimal.mean())


class FrozenLake(Reference):
    """The shortest safe path on the map that the game shows."""

    opening = "Welcome to Frozen Lake!"

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.size: int = rules.options["size"]
        self.num_holes = min(rules.options["num_holes"], self.size**2 - 3)
        self.num_turns = rules.turns(_GAME_LIMIT)

    def anchors(self, seat: int | None = None) -> Anchors:
        """Return the mean final rewards over all maps, where a game that misses the goal earns its partial reward."""
        random, optimal = mean_values(self.size, self.num_holes, self.num_turns)
        return Anchors(random=random, optimal=optimal)

    def choose(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Choose the best step for the remaining turns."""
        text = game_text(messages)
        cells = last_map(text)
        start = _place(last_map(text, index=0), "P")
        left = self.num_turns - sum("invalid move" not in reply for _, reply in rounds(messages))
        turns = min(max(0, left - 1), self.size**2)  # no path is longer
        [values] = lake_values((cells == "H")[None], turns, start, step_cost=_TIE)[0]
        row, column = _place(cells, "P")
        return f"[{max(self._steps(row, column), key=lambda step: values[step[1]])[0]}]"

    def choose_randomly(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Choose a random step that stays on the map."""
        return f"[{rng.choice(self._steps(*_place(last_map(game_text(messages)), 'P')))[0]}]"

    def _steps(self, row: int, column: int) -> list[tuple[str, tuple[int, int]]]:
        reached = ((name, (row + down, column + right)) for name, (down, right) in _MOVES.items())
        return [(name, place) for name, place in reached if min(place) >= 0 and max(place) < self.size]


def last_map(text: str, index: int = -1) -> NDArray[np.str_]:
    """Parse a map that the game showed, by default the last one, (n, n).

    Raises:
        AgentError: No map was shown.
    """
    maps = re.findall(r"Current Board:\n\n(.*?)\n\n", text, re.DOTALL)
    lines = [line for line in maps[index].splitlines() if line.startswith("|")] if maps else []
    if not lines:
        raise AgentError("the observation of TextArena's FrozenLake must contain 'Current Board:'")
    return np.array([[cell.strip() for cell in line.strip("|").split("|")] for line in lines])


def _place(cells: NDArray[np.str_], letter: str) -> tuple[int, int]:
    [[row, column]] = np.argwhere(cells == letter)
    return int(row), int(column)


def _shifted(values: NDArray[Any], move: tuple[int, int], *, fill: float) -> NDArray[Any]:
    """Return the value one step away from each cell, or ``fill`` beyond the border, (M, n, n)."""
    padded = np.pad(values, ((0, 0), (1, 1), (1, 1)), constant_values=fill)
    size = values.shape[1]
    row, column = 1 + move[0], 1 + move[1]
    return padded[:, row : row + size, column : column + size]
