"""Mastermind: a greedy player whose worst case is known."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentsgym.envs.anchors import Anchors
from agentsgym.envs.TextArena.references.base import Reference, Rules, rounds
from agentsgym.errors import ConfigError
from agentsgym.types import Message

Code = tuple[int, ...]
_MAX_CODES = 2000  # every pair is compared


def all_codes(length: int, num_numbers: int, *, duplicates: bool) -> list[Code]:
    """Return every code, in order."""
    numbers = range(1, num_numbers + 1)
    codes = itertools.product(numbers, repeat=length) if duplicates else itertools.permutations(numbers, length)
    return list(codes)


def feedback_table(codes: Sequence[Code]) -> NDArray[np.int16]:
    """Return the feedback of every guess on every secret as one number, ``black · (L + 1) + white``, (C, C)."""
    length = len(codes[0])
    digits = np.array(codes, dtype=np.int16)  # (C, L)
    black = (digits[:, None, :] == digits[None, :, :]).sum(axis=2)
    both = np.zeros_like(black)
    for number in range(digits.min(), digits.max() + 1):
        count = (digits == number).sum(axis=1)
        both += np.minimum(count[:, None], count[None, :])
    return (black * (length + 1) + both - black).astype(np.int16)


class GreedyTree:
    """The game tree of the player that makes the guess with the most expected information.

    Ties go to a code that may be the secret, then to the first. With the 360 codes of ``Mastermind-v0`` it needs 4.03
    guesses on average and 5 at most.

    Attributes:
        guesses: The number of guesses for each code, (C,).
    """

    def __init__(self, codes: Sequence[Code]) -> None:
        self._codes = codes
        self._table = feedback_table(codes)
        self._choices: dict[bytes, int] = {}
        self.guesses = np.zeros(len(codes), dtype=np.int64)
        self._walk(np.arange(len(codes)), 1)

    def choose(self, left: NDArray[np.int64]) -> int:
        """Choose a guess, given the indices of the codes that may be the secret."""
        if len(left) <= 2:
            return int(left[0])
        key = left.tobytes()
        if key in self._choices:
            return self._choices[key]
        replies = self._table[:, left].astype(np.int64)  # (C, M)
        num_replies = int(self._table.max()) + 1
        cells = replies + np.arange(len(replies))[:, None] * num_replies
        counts = np.bincount(cells.ravel(), minlength=len(replies) * num_replies).reshape(-1, num_replies)
        spread = (counts * np.log2(np.maximum(counts, 1))).sum(axis=1) / len(left)  # the entropy is log2(M) minus this
        best = np.flatnonzero(spread <= spread.min() + 1e-9)
        fitting = best[np.isin(best, left)]
        self._choices[key] = int(fitting[0] if len(fitting) else best[0])
        return self._choices[key]

    def _walk(self, left: NDArray[np.int64], depth: int) -> None:
        guess = self.choose(left)
        replies = self._table[guess, left]
        for reply in np.unique(replies):
            part = left[replies == reply]
            if len(part) == 1 and part[0] == guess:
                self.guesses[guess] = depth
            else:
                self._walk(part, depth + 1)

    def consistent(self, played: Sequence[tuple[Code, tuple[int, int]]]) -> NDArray[np.int64]:
        """Return the indices of the codes that are consistent with all feedback."""
        index = {code: number for number, code in enumerate(self._codes)}
        length = len(self._codes[0])
        fits = np.ones(len(self._codes), dtype=bool)
        for guess, (black, white) in played:
            fits &= self._table[index[guess]] == black * (length + 1) + white
        return np.flatnonzero(fits)


@functools.lru_cache(maxsize=8)
def greedy_tree(length: int, num_numbers: int, *, duplicates: bool) -> GreedyTree:
    """Create the greedy player's tree, once per kind of code.

    Raises:
        ConfigError: There are more than 2,000 codes.
    """
    num_codes = num_numbers**length if duplicates else math.perm(num_numbers, length)
    if num_codes > _MAX_CODES:
        raise ConfigError(f"the exact reference of Mastermind supports at most {_MAX_CODES} codes, got {num_codes}")
    return GreedyTree(all_codes(length, num_numbers, duplicates=duplicates))


def random_value(length: int, num_numbers: int, turns: int, *, duplicates: bool) -> float:
    """Return the expected reward of random guesses without repetition that ignore the feedback.

    One of T guesses is right with probability ``T / C``. Otherwise the last is a random wrong code, with the reward
    ``(black + white / 2) / length``, whose mean over all pairs of codes is known in closed form.
    """
    num_codes = num_numbers**length if duplicates else math.perm(num_numbers, length)
    if turns >= num_codes:
        return 1.0
    black = 1 / num_numbers  # the mean fraction of positions that agree
    if duplicates:
        p = 1 / num_numbers
        least = [
            sum(math.comb(length, i) * p**i * (1 - p) ** (length - i) for i in range(k, length + 1))
            for k in range(length + 1)
        ]
        both = num_numbers * sum(one**2 for one in least[1:]) / length  # E min(X, Y) = Σ_k P(X >= k) P(Y >= k)
    else:
        both = length / num_numbers
    any_code = (black + both) / 2
    wrong_code = (any_code - 1 / num_codes) / (1 - 1 / num_codes)  # the reward of the secret itself is 1
    won = turns / num_codes
    return won + (1 - won) * wrong_code


class Mastermind(Reference):
    """The greedy player, whose reward is optimal if there are enough turns for it to solve every code."""

    opening = "You need to find the code that is"

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        options = rules.options
        self.length: int = options["code_length"]
        self.num_numbers: int = options["num_numbers"]
        self.duplicates: bool = options["duplicate_numbers"]
        self.num_turns = rules.turns(options["max_turns"])
        self._tree = greedy_tree(self.length, self.num_numbers, duplicates=self.duplicates)
        self._codes = all_codes(self.length, self.num_numbers, duplicates=self.duplicates)

    def anchors(self, seat: int | None = None) -> Anchors:
        """Return the mean final rewards.

        Raises:
            ConfigError: There are fewer turns than the greedy player may need, so the optimum is unknown.
        """
        worst = int(self._tree.guesses.max())
        if self.num_turns < worst:
            raise ConfigError(
                f"the optimum of Mastermind is known only if at least {worst} turns are allowed (enough to solve every "
                f"code), but max_steps_per_episode and max_turns allow only {self.num_turns}"
            )
        value = random_value(self.length, self.num_numbers, self.num_turns, duplicates=self.duplicates)
        return Anchors(random=value, optimal=1.0)

    def choose(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Choose the guess with the most expected information."""
        code = self._codes[self._tree.choose(self._tree.consistent(self._played(messages)))]
        return f"[{' '.join(map(str, code))}]"

    def choose_randomly(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Guess a random code that has not been guessed before."""
        guessed = {code for code, _ in self._played(messages)}
        while (code := rng.choice(self._codes)) in guessed:
            pass
        return f"[{' '.join(map(str, code))}]"

    def _played(self, messages: Sequence[Message]) -> list[tuple[Code, tuple[int, int]]]:
        played: list[tuple[Code, tuple[int, int]]] = []
        for _, reply in rounds(messages):
            found = re.search(r"Submitted \[([\d\s]+)\]\. Feedback: (\d+) black peg\(s\), (\d+) white", reply)
            if found:
                played.append((tuple(map(int, found[1].split())), (int(found[2]), int(found[3]))))
        return played
