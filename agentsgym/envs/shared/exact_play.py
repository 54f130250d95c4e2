"""Solve a finite decision problem over a horizon: the exact values of optimal and random play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: The outcomes of an action: probability, next state, reward, and whether the episode ends with it.
Outcome = tuple[float, int, float, bool]

_TIE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTable:
    """The exact values of a finite decision problem; row h is for h remaining turns.

    Attributes:
        optimal: The expected return under optimal play, (H + 1, S).
        random: The expected return if every legal action is equally likely, (H + 1, S).
        policy: The index of the best legal action, (H + 1, S). Ties go to the action that ends the episode soonest,
            then to the first one. Row 0 is meaningless.
    """

    optimal: NDArray[np.float64]
    random: NDArray[np.float64]
    policy: NDArray[np.int64]


def value_table(
    transitions: Sequence[Sequence[Sequence[Outcome]]], horizon: int, at_limit: Sequence[float] | None = None
) -> ValueTable:
    """Solve a finite decision problem by backward induction.

    ``Q_{h+1}(s, a) = Σ p (r + [not ended] V_h(s'))``; ``V_h`` is the maximum over the legal actions for optimal play
    and their mean for random play (Puterman 1994, section 4.3).

    Args:
        transitions: The outcomes, for each state and each of its legal actions (at least one).
        horizon: The maximum number of turns, H.
        at_limit: ``V_0``, the reward for reaching the turn limit in each state, (S,); None for zeros.

    >>> walk = [[[(1.0, 1, 0.0, False)], [(1.0, 0, 0.0, False)]], [[(1.0, 1, 1.0, True)], [(1.0, 0, 0.0, False)]]]
    >>> table = value_table(walk, horizon=2)
    >>> table.optimal[2].tolist(), table.random[2].tolist(), table.policy[2].tolist()
    ([1.0, 1.0], [0.25, 0.5], [0, 0])
    """
    num_states = len(transitions)
    num_actions = np.array([len(actions) for actions in transitions])  # (S,)
    # A cell is a pair of a state and one of its legal actions; there are C of them.
    starts = np.concatenate([[0], np.cumsum(num_actions)[:-1]])  # the first cell of each state, (S,)
    state_of = np.repeat(np.arange(num_states), num_actions)  # (C,)
    cells = (outcomes for actions in transitions for outcomes in actions)
    rows = [(cell, *outcome) for cell, outcomes in enumerate(cells) for outcome in outcomes]
    cell, p, following, reward, ended = (np.array(column) for column in zip(*rows, strict=True))  # (N,)
    earned = _sums(cell, p * reward, len(state_of))  # (C,)
    weight = p * (1 - ended.astype(np.float64))

    def action_values(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return earned + _sums(cell, weight * values[following], len(state_of))  # (C,)

    optimal = np.zeros((horizon + 1, num_states))
    random = np.zeros((horizon + 1, num_states))
    policy = np.zeros((horizon + 1, num_states), dtype=np.int64)
    num_turns = np.zeros(num_states)  # the expected number of further turns under optimal play
    if at_limit is not None:
        optimal[0] = random[0] = at_limit
    for h in range(1, horizon + 1):
        best = action_values(optimal[h - 1])
        optimal[h] = np.maximum.reduceat(best, starts)
        is_best = best >= optimal[h][state_of] - _TIE
        takes = np.where(is_best, 1 + _sums(cell, weight * num_turns[following], len(state_of)), np.inf)
        num_turns = np.minimum.reduceat(takes, starts)
        first = np.where(takes <= num_turns[state_of] + _TIE, np.arange(len(best)), len(best))
        policy[h] = np.minimum.reduceat(first, starts) - starts
        random[h] = np.add.reduceat(action_values(random[h - 1]), starts) / num_actions
    return ValueTable(optimal=optimal, random=random, policy=policy)


def _sums(cell: NDArray[np.int64], values: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Sum the values of each cell, (C,)."""
    return np.bincount(cell, values, size).astype(np.float64)
