"""Bandit: the best button to press, and to choose in the end, by the exact posterior."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentsgym.envs.anchors import Anchors
from agentsgym.envs.TextArena.references.base import Reference, Rules, rounds, start_game
from agentsgym.errors import ConfigError
from agentsgym.types import Message

_MIN_PROBABILITY = 0.1  # the lowest success probability of a button
_BITS = 9  # bits per button in the integer that encodes a state
_MAX_STATES = 2_000_000


def button_tables(p_gap: float, presses: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Tabulate the likelihoods of each pair (successes, failures) with at most ``presses`` presses in total.

    The best button succeeds with probability ``0.5 + p_gap / 2``, and each other button with a probability drawn
    uniformly from ``[0.1, 0.5 − p_gap / 2]``. The integrands are polynomials in that probability, for which
    Gauss-Legendre quadrature is exact.

    Returns:
        The likelihood of each pair for the best button, divided by that for another button, (P,); the success chance
        of a button that is not the best, given the pair, (P,); and the number of the pair after a failure (column 0)
        and a success (column 1), (P, 2).
    """
    best, highest = 0.5 + p_gap / 2, 0.5 - p_gap / 2
    nodes, weights = np.polynomial.legendre.leggauss(presses // 2 + 2)
    p = _MIN_PROBABILITY + (nodes + 1) / 2 * (highest - _MIN_PROBABILITY)
    pairs = [(total - failures, failures) for total in range(presses + 1) for failures in range(total + 1)]
    numbers = {pair: number for number, pair in enumerate(pairs)}
    s, f = np.array(pairs).T  # (P,)
    other = (p[None] ** s[:, None] * (1 - p[None]) ** f[:, None]) @ (weights / 2)
    other_success = (p[None] ** (s[:, None] + 1) * (1 - p[None]) ** f[:, None]) @ (weights / 2)
    after = [[numbers.get((a, b + 1), -1), numbers.get((a + 1, b), -1)] for a, b in pairs]
    return best**s * (1 - best) ** f / other, other_success / other, np.array(after)


class BanditValues:
    """Optimal play, by backward induction over the numbers of successes and failures of each button.

    A state is the sorted list of the numbers of the buttons' pairs, so states that differ only in the order of the
    buttons are merged. In the end a button is chosen.

    Args:
        num_buttons: The number of buttons.
        p_gap: The game's option.
        presses: The number of presses before the choice.
        best_reward: The reward of choosing the best button.
        regret_weight: The reward of choosing another button, divided by its regret; -1 in the patched game.

    Raises:
        ConfigError: There are too many states.
    """

    def __init__(
        self, num_buttons: int, p_gap: float, presses: int, *, best_reward: float, regret_weight: float
    ) -> None:
        if num_buttons * _BITS > 63 or presses > 28:
            raise ConfigError(
                "the optimum of Bandit can only be computed for up to 7 buttons and 28 presses, got "
                f"{num_buttons} buttons and {presses} presses"
            )
        self._best_reward, self._regret_weight = best_reward, regret_weight
        self._p_best = 0.5 + p_gap / 2
        self._likelihood_ratio, self._p_other, self._pair_after = button_tables(p_gap, presses)
        self._levels = [np.zeros((1, num_buttons), dtype=np.int64)]  # states by presses, each (M, B)
        shifts = _BITS * np.arange(num_buttons - 1, -1, -1)
        for _ in range(presses):
            states = self._levels[-1]
            following = np.concatenate(
                [self._after(states, button, won) for button in range(num_buttons) for won in (0, 1)]
            )
            codes = np.unique(_codes(following))
            if len(codes) > _MAX_STATES:
                raise ConfigError(
                    f"the optimum of Bandit cannot be computed: more than {_MAX_STATES} states are possible "
                    "after the same number of presses; use fewer buttons or presses"
                )
            self._levels.append((codes[:, None] >> shifts) & ((1 << _BITS) - 1))
        self._codes = [_codes(states) for states in self._levels]
        self.values = [self._choice_values(self._levels[-1]).max(axis=1)]  # by remaining presses
        for states in reversed(self._levels[:-1]):
            self.values.append(self._press_values(states, self.values[-1]).max(axis=1))

    @property
    def optimal(self) -> float:
        """The expected reward of optimal play."""
        return float(self.values[-1][0])

    def best_button(self, pairs: Sequence[tuple[int, int]]) -> int:
        """Return the button to press next or, when no presses remain, to choose, by the results of each button."""
        played = [won + lost for won, lost in pairs]
        numbers = [total * (total + 1) // 2 + lost for total, (_, lost) in zip(played, pairs, strict=True)]
        left = len(self._levels) - 1 - sum(played)
        states = np.array([numbers])
        values = self._press_values(states, self.values[left - 1]) if left > 0 else self._choice_values(states)
        return int(values[0].argmax())

    def _after(self, states: NDArray[np.int64], button: int, won: int) -> NDArray[np.int64]:
        following = states.copy()
        following[:, button] = self._pair_after[states[:, button], won]
        return np.sort(following, axis=1)

    def _choice_values(self, states: NDArray[np.int64]) -> NDArray[np.float64]:
        odds = self._likelihood_ratio[states]  # (M, B)
        total = odds.sum(axis=1, keepdims=True)
        other = self._regret_weight * (self._p_best - self._p_other[states])
        return (odds * self._best_reward + (total - odds) * other) / total

    def _press_values(self, states: NDArray[np.int64], later: NDArray[np.float64]) -> NDArray[np.float64]:
        odds = self._likelihood_ratio[states]
        total = odds.sum(axis=1, keepdims=True)
        wins = (odds * self._p_best + (total - odds) * self._p_other[states]) / total  # (M, B)
        num_presses = sum(int((np.sqrt(8 * number + 1) - 1) // 2) for number in states[0])  # equal for all states
        codes = self._codes[num_presses + 1]
        values = np.empty(states.shape)
        for button in range(states.shape[1]):
            lost, won = (
                later[np.searchsorted(codes, _codes(self._after(states, button, result)))] for result in (0, 1)
            )
            values[:, button] = (1 - wins[:, button]) * lost + wins[:, button] * won
        return values


def _codes(states: NDArray[np.int64]) -> NDArray[np.int64]:
    """Encode each state as one number, (M,)."""
    code = np.zeros(len(states), dtype=np.int64)
    for column in states.T:
        code = (code << _BITS) | column
    return code


@functools.lru_cache(maxsize=4)
def bandit_values(
    num_buttons: int, p_gap: float, presses: int, *, best_reward: float = 1.0, regret_weight: float = 0.0
) -> BanditValues:
    """Solve a bandit, once per setting; by default the value is the probability of finding the best button."""
    return BanditValues(num_buttons, p_gap, presses, best_reward=best_reward, regret_weight=regret_weight)


@functools.cache
def choice_rewards() -> tuple[float, float]:
    """Play Bandit to measure the reward of the best button, and the reward of another button divided by its regret."""
    measured: list[tuple[float, float]] = []  # the reward and the regret of the best and of the worst button
    for rank in (-1, 0):
        game = start_game("Bandit-v0", {"num_turns": 1}, num_players=1)
        chances: dict[str, float] = game.state.game_state["ground_truth"]
        chosen = sorted(chances, key=lambda name: chances[name])[rank]
        for _ in range(2):  # a press and the choice
            game.move(f"[{chosen}]")
        measured.append((game.rewards()[0], max(chances.values()) - chances[chosen]))
    (best_reward, _), (reward, regret) = measured
    return best_reward, round(reward / regret, 9)


class Bandit(Reference):
    """Optimal play by the exact posterior over the buttons.

    The best button is rewarded with 1, and any other button with minus its regret, its difference in success
    probability from the best (see :mod:`~agentsgym.envs.TextArena.patches`). The rewards are measured in the game, so
    that the values match the installed game.
    """

    opening = "Each button is associated with a Bernoulli distribution"

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.names: list[str] = list(rules.options["buttons"])
        self.p_gap: float = rules.options["p_gap"]
        self.presses: int = rules.options["num_turns"]
        self.best_reward, self.regret_weight = choice_rewards()
        if rules.max_steps <= self.presses:
            raise ConfigError(
                f"Bandit needs a turn for each of {self.presses} presses and one for the choice: "
                f"max_steps_per_episode must be at least {self.presses + 1}, got {rules.max_steps}"
            )

    def anchors(self, seat: int | None = None) -> Anchors:
        """Return the mean final rewards."""
        best = 1 / len(self.names)
        other = self.regret_weight * (0.5 + self.p_gap / 2 - (_MIN_PROBABILITY + 0.5 - self.p_gap / 2) / 2)
        return Anchors(random=best * self.best_reward + (1 - best) * other, optimal=self._values().optimal)

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
        """Press or choose a random button."""
        return f"[{rng.choice(self.names)}]"

    def _values(self) -> BanditValues:
        return bandit_values(
            len(self.names), self.p_gap, self.presses, best_reward=self.best_reward, regret_weight=self.regret_weight
        )
