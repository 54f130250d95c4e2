"""TowerOfHanoi: the solution of every position of the disks, with one move per turn."""

from __future__ import annotations

import ast
import functools
import itertools
import random
import re
from collections.abc import Sequence

from agentsgym.envs.anchors import Anchors
from agentsgym.envs.shared.exact_play import Outcome, ValueTable, value_table
from agentsgym.envs.TextArena.references.base import Reference, Rules, game_text, rounds
from agentsgym.errors import AgentError, ConfigError
from agentsgym.types import Message

#: The tower of each disk, the smallest first.
Position = tuple[int, ...]
Move = tuple[int, int]

_TOWERS = "ABC"
_MAX_DISKS = 8


def legal_moves(position: Position) -> list[Move]:
    """Return the moves between towers that put no disk on a smaller one.

    >>> legal_moves((0, 0))
    [(0, 1), (0, 2)]
    """
    top = {tower: disk for disk, tower in reversed(list(enumerate(position)))}
    pairs = itertools.permutations(range(3), 2)
    return [(a, b) for a, b in pairs if a in top and top[a] < top.get(b, len(position))]


def after(position: Position, move: Move) -> Position:
    """Move the top disk of a tower."""
    disk = position.index(move[0])
    return (*position[:disk], move[1], *position[disk + 1 :])


def fraction_done(position: Position) -> float:
    """Return the fraction of the disks in place on the last tower, counted from the largest disk.

    >>> fraction_done((0, 0, 2))
    0.3333333333333333
    """
    placed = itertools.takewhile(lambda tower: tower == 2, reversed(position))
    return len(list(placed)) / len(position)


@functools.lru_cache(maxsize=8)
def hanoi_values(num_disks: int, turns: int) -> tuple[ValueTable, dict[Position, int]]:
    """Solve the puzzle, whose reward is 1 for solving it, or the fraction of disks in place at the turn limit.

    Returns:
        The values, and the state number of each position.

    Raises:
        ConfigError: There are more than 8 disks.
    """
    if num_disks > _MAX_DISKS:
        raise ConfigError(f"the exact reference of TowerOfHanoi supports at most {_MAX_DISKS} disks, got {num_disks}")
    numbers = {position: number for number, position in enumerate(itertools.product(range(3), repeat=num_disks))}
    done = (2,) * num_disks
    transitions: list[list[list[Outcome]]] = []
    for position in numbers:
        reached = [after(position, move) for move in legal_moves(position)]
        transitions.append([[(1.0, numbers[one], float(one == done), one == done)] for one in reached])
    return value_table(transitions, turns, [fraction_done(position) for position in numbers]), numbers


class TowerOfHanoi(Reference):
    """The shortest solution, ``2^n − 1`` moves for n disks.

    The values assume one move per turn, as the prompt requires. The game executes every move in an action, so an agent
    that ignores the prompt can finish in one turn.
    """

    opening = "You are playing Tower of Hanoi"

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.num_disks: int = rules.options["num_disks"]
        self.num_turns = rules.turns(rules.options["max_turns"])
        self._values, self._numbers = hanoi_values(self.num_disks, self.num_turns)

    def anchors(self, seat: int | None = None) -> Anchors:
        """Return the final rewards, including partial rewards at the turn limit."""
        start = self._numbers[(0,) * self.num_disks]
        random, optimal = (float(one[self.num_turns, start]) for one in (self._values.random, self._values.optimal))
        return Anchors(random=random, optimal=optimal)

    def choose(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Choose the best move for the remaining turns."""
        position = position_of(messages)
        played = sum("invalid move" not in reply for _, reply in rounds(messages))
        left = max(1, self.num_turns - played)
        return _action(legal_moves(position)[int(self._values.policy[left, self._numbers[position]])])

    def choose_randomly(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Choose a random legal move."""
        return _action(rng.choice(legal_moves(position_of(messages))))


def position_of(messages: Sequence[Message]) -> Position:
    """Parse the last towers that the game showed.

    Raises:
        AgentError: No towers were shown.
    """
    found = re.findall(r"A: (\[.*?\])\nB: (\[.*?\])\nC: (\[.*?\])", game_text(messages))
    if not found:
        raise AgentError("the observation of TextArena's TowerOfHanoi must contain the towers A, B and C")
    tower_of = {disk: tower for tower, disks in enumerate(found[-1]) for disk in ast.literal_eval(disks)}
    return tuple(tower_of[disk] for disk in sorted(tower_of))


def _action(move: Move) -> str:
    return f"[{_TOWERS[move[0]]} {_TOWERS[move[1]]}]"
