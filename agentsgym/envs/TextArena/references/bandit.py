"""Bandit: which button to press and which to choose in the end, by the exact posterior."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentsgym.envs.anchors import Anchors
from agentsgym.envs.TextArena.references.base import Reference, Rules, rounds
from agentsgym.envs.TextArena.references.probes import pay_for_best_button, pay_of_regret
from agentsgym.errors import ConfigError
from agentsgym.types import Message

_LOWEST = 0.1  # probability of a button
_BITS = 9  # of a button's number in the code of a state
_MOST_STATES = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Buttons:
    """What a button's presses say about it, for each pair of successes and failures.

    Attributes:
        odds: Likelihood as the best button over that as another one, (P,).
        mean: The probability of a success of a button that is not the best, given its presses, (P,).
        after: The number of the pair after a failure (column 0) and a success (column 1), (P, 2).
        best: The best button's probability of a success.
    """

    odds: NDArray[np.float64]
    mean: NDArray[np.float64]
    after: NDArray[np.int64]
    best: float


def buttons(p_gap: float, presses: int) -> Buttons:
    """Weigh every pair of successes and failures with at most ``presses`` of both.

    The best button succeeds with probability ``0.5 + p_gap / 2``; each other one with a probability drawn uniformly
    from ``[0.1, 0.5 − p_gap / 2]``. The integrals over it are of polynomials, which Gauss-Legendre quadrature gives
    exactly.
    """
    best, highest = 0.5 + p_gap / 2, 0.5 - p_gap / 2
    nodes, weights = np.polynomial.legendre.leggauss(presses // 2 + 2)
    p = _LOWEST + (nodes + 1) / 2 * (highest - _LOWEST)
    pairs = [(total - failures, failures) for total in range(presses + 1) for failures in range(total + 1)]
    numbers = {pair: number for number, pair in enumerate(pairs)}
    s, f = np.array(pairs).T  # (P,)
    other = (p[None] ** s[:, None] * (1 - p[None]) ** f[:, None]) @ (weights / 2)
    other_success = (p[None] ** (s[:, None] + 1) * (1 - p[None]) ** f[:, None]) @ (weights / 2)
    after = [[numbers.get((a, b + 1), -1), numbers.get((a + 1, b), -1)] for a, b in pairs]
    return Buttons(odds=best**s * (1 - best) ** f / other, mean=other_success / other, after=np.array(after), best=best)


class BanditValues:
    """The best play, by backward induction over what was seen of the buttons, in whatever order they stand.

    A state is the sorted list of the buttons' pairs. In the end a button is chosen.

    Args:
        num_buttons: Buttons.
        p_gap: As the game's option.
        presses: Presses before the choice.
        pay_for_best: What the choice of the best button pays.
        pay_of_regret: What any other choice pays, as a multiple of its regret: -1 in the mended game, 0 for nothing.

    Raises:
        ConfigError: There are too many states.
    """

    def __init__(
        self, num_buttons: int, p_gap: float, presses: int, *, pay_for_best: float, pay_of_regret: float
    ) -> None:
        if num_buttons * _BITS > 63 or presses > 28:
            raise ConfigError(
                f"the optimum of Bandit is known for up to 7 buttons and 28 presses, got {num_buttons} and {presses}"
            )
        self._pay_for_best, self._pay_of_regret = pay_for_best, pay_of_regret
        self._buttons = buttons(p_gap, presses)
        self._levels = [np.zeros((1, num_buttons), dtype=np.int64)]  # states by presses, each (M, B)
        for _ in range(presses):
            states = self._levels[-1]
            following = np.concatenate(
                [self._after(states, button, won) for button in range(num_buttons) for won in (0, 1)]
            )
            codes = np.unique(_codes(following))
            if len(codes) > _MOST_STATES:
                raise ConfigError(
                    f"the optimum of Bandit supports at most {_MOST_STATES} states after a press, got more"
                )
            self._levels.append(_states(codes, num_buttons))
        self._codes = [_codes(states) for states in self._levels]
        self.values = [self._choice_values(self._levels[-1]).max(axis=1)]  # by presses that are left
        for states in reversed(self._levels[:-1]):
            self.values.append(self._press_values(states, self.values[-1]).max(axis=1))

    @property
    def optimal(self) -> float:
        """What the best play earns on average."""
        return float(self.values[-1][0])

    def best_button(self, pairs: Sequence[tuple[int, int]]) -> int:
        """Give the button to press next or, when all presses are spent, to choose.

        Args:
            pairs: Successes and failures of each button.
        """
        numbers = np.array([[_number(pair) for pair in pairs]])
        played = sum(map(sum, pairs))
        num_presses = len(self._levels) - 1
        if played >= num_presses:
            return int(self._choice_values(numbers)[0].argmax())
        return int(self._press_values(numbers, self.values[num_presses - played - 1])[0].argmax())

    def _after(self, states: NDArray[np.int64], button: int, won: int) -> NDArray[np.int64]:
        following = states.copy()
        following[:, button] = self._buttons.after[states[:, button], won]
        return np.sort(following, axis=1)

    def _choice_values(self, states: NDArray[np.int64]) -> NDArray[np.float64]:
        odds = self._buttons.odds[states]  # (M, B)
        total = odds.sum(axis=1, keepdims=True)
        other = self._pay_of_regret * (self._buttons.best - self._buttons.mean[states])
        return (odds * self._pay_for_best + (total - odds) * other) / total

    def _press_values(self, states: NDArray[np.int64], later: NDArray[np.float64]) -> NDArray[np.float64]:
        odds = self._buttons.odds[states]
        total = odds.sum(axis=1, keepdims=True)
        wins = (odds * self._buttons.best + (total - odds) * self._buttons.mean[states]) / total  # (M, B)
        codes = self._codes[int(self._presses_of(states)) + 1]
        values = np.empty(states.shape)
        for button in range(states.shape[1]):
            lost, won = (
                later[np.searchsorted(codes, _codes(self._after(states, button, result)))] for result in (0, 1)
            )
            values[:, button] = (1 - wins[:, button]) * lost + wins[:, button] * won
        return values

    def _presses_of(self, states: NDArray[np.int64]) -> int:
        return sum(int((np.sqrt(8 * number + 1) - 1) // 2) for number in states[0])


@functools.lru_cache(maxsize=4)
def bandit_values(
    num_buttons: int, p_gap: float, presses: int, *, pay_for_best: float = 1.0, pay_of_regret: float = 0.0
) -> BanditValues:
    """Solve a bandit, once for each kind; by default what is made large is the chance to find the best button."""
    return BanditValues(num_buttons, p_gap, presses, pay_for_best=pay_for_best, pay_of_regret=pay_of_regret)


class Bandit(Reference):
    """The best play by the exact posterior over the buttons.

    The best button pays 1, any other minus its regret, which is how much worse it is than the best: see
    :mod:`~agentsgym.envs.TextArena.patches`. The game itself is asked what it pays, so that the values are of what is
    played.
    """

    opening = "Each button is associated with a Bernoulli distribution"

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.names: list[str] = list(rules.options["buttons"])
        self.p_gap: float = rules.options["p_gap"]
        self.presses: int = rules.options["num_turns"]
        self.pay_for_best, self.pay_of_regret = pay_for_best_button(), pay_of_regret()
        if rules.max_steps <= self.presses:
            raise ConfigError(
                f"Bandit needs a turn for each of {self.presses} presses and one for the choice: "
                f"max_steps_per_episode must be at least {self.presses + 1}, got {rules.max_steps}"
            )

    def anchors(self, seat: int | None = None) -> Anchors:
        """Give the mean final rewards."""
        best = 1 / len(self.names)
        other = self.pay_of_regret * (0.5 + self.p_gap / 2 - (_LOWEST + 0.5 - self.p_gap / 2) / 2)
        return Anchors(random=best * self.pay_for_best + (1 - best) * other, optimal=self._values().optimal)

    def choose(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Press or choose the best button."""
        pairs: dict[str, tuple[int, int]] = dict.fromkeys(self.names, (0, 0))
        for _, reply in rounds(messages):
            found = re.search(r"You pressed the (.+?) button and received a reward of (\d)", reply)
            if found:
                won, lost = pairs[found[1]]
                pairs[found[1]] = (won + 1, lost) if found[2] == "1" else (won, lost + 1)
        return f"[{self.names[self._values().best_button(list(pairs.values()))]}]"

    def choose_randomly(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Press or choose any button."""
        return f"[{rng.choice(self.names)}]"

    def _values(self) -> BanditValues:
        return bandit_values(
            len(self.names),
            self.p_gap,
            self.presses,
            pay_for_best=self.pay_for_best,
            pay_of_regret=self.pay_of_regret,
        )


def _number(pair: tuple[int, int]) -> int:
    total = sum(pair)
    return total * (total + 1) // 2 + pair[1]


def _codes(states: NDArray[np.int64]) -> NDArray[np.int64]:
    code = np.zeros(len(states), dtype=np.int64)
    for column in states.T:
        code = (code << _BITS) | column
    return code


def _states(codes: NDArray[np.int64], num_buttons: int) -> NDArray[np.int64]:
    shifts = _BITS * np.arange(num_buttons - 1, -1, -1)
    return (codes[:, None] >> shifts) & ((1 << _BITS) - 1)
