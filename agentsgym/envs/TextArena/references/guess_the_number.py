"""GuessTheNumber: binary search, adapted to the number of turns left."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentsgym.envs.spec import Anchors
from agentsgym.envs.TextArena.references.base import Reference, Rules, rounds
from agentsgym.types import Message


def interval_values(num_numbers: int, turns: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Solve the game with N numbers and T turns, at least 1 each, by dynamic programming over intervals.

    A right guess is rewarded with 1, and a wrong guess on the last turn with ``1 − |guess − number| / (N − 1)``, as in
    TextArena. With t turns left and an interval of length L,
    ``W_t(L) = 1 + max_k [W_{t-1}(k) + W_{t-1}(L − 1 − k)]``; with one turn left, the best guess is the middle.

    Returns:
        By the remaining turns and the interval's length, (T + 1, N + 1): the expected reward of optimal play, summed
        over the interval's numbers, and the offset of the best guess from the start of the interval.
    """
    lengths = np.arange(num_numbers + 1)
    total, guess = np.zeros((turns + 1, num_numbers + 1)), np.zeros((turns + 1, num_numbers + 1), dtype=np.int64)
    guess[:] = np.maximum(0, (lengths - 1) // 2)
    distances = lengths**2 // 4  # the sum of the distances of all numbers from the middle one
    credit = (lengths - 1) - distances / max(1, num_numbers - 1)
    total[1] = np.where(lengths > 0, 1.0 + credit, 0.0)
    for t in range(2, turns + 1):
        for length in range(1, num_numbers + 1):
            split = total[t - 1, :length] + total[t - 1, length - 1 :: -1]
            from_middle = abs(np.arange(length) - (length - 1) / 2)
            guess[t, length] = np.where(split >= split.max() - 1e-12, from_middle, np.inf).argmin()
            total[t, length] = 1.0 + split.max()
    return total, guess


def random_value(num_numbers: int, turns: int) -> float:
    """Return the expected reward of random guesses without repetition that ignore the hints.

    The number is among T guesses with probability ``T / N``; otherwise the last guess is a random other number, whose
    mean distance from the secret is ``(N + 1) / 3``.
    """
    if turns >= num_numbers:
        return 1.0
    won = turns / num_numbers
    return won + (1 - won) * (1 - (num_numbers + 1) / (3 * (num_numbers - 1)))


class GuessTheNumber(Reference):
    """Binary search, which is optimal with any number of turns."""

    opening = "You have to guess the number between"

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.low: int = rules.options["min_number"]
        self.high: int = rules.options["max_number"]
        self.num_numbers = self.high - self.low + 1
        self.num_turns = rules.turns(rules.options["max_turns"])
        self._total, self._guess = interval_values(self.num_numbers, self.num_turns)

    def anchors(self, seat: int | None = None) -> Anchors:
        """Return the mean final rewards, including partial rewards at the turn limit."""
        optimal = self._total[self.num_turns, self.num_numbers] / self.num_numbers
        return Anchors(random=random_value(self.num_numbers, self.num_turns), optimal=float(optimal))

    def choose(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Guess the number that leaves the best two intervals for the remaining turns."""
        low, high = self.low, self.high
        played = self._played(messages)
        for number, reply in played:
            if "target number is lower" in reply:
                high = min(high, number - 1)
            elif "target number is higher" in reply:
                low = max(low, number + 1)
        left = max(1, self.num_turns - len(played))
        return f"[{low + int(self._guess[left, high - low + 1])}]"

    def choose_randomly(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Guess a random number that has not been guessed before."""
        guessed = {number for number, _ in self._played(messages)}
        return f"[{rng.choice([one for one in range(self.low, self.high + 1) if one not in guessed])}]"

    def _played(self, messages: Sequence[Message]) -> list[tuple[int, str]]:
        found = ((re.search(r"\[(\d+)\]", action), reply) for action, reply in rounds(messages))
        return [(int(match[1]), reply) for match, reply in found if match]
