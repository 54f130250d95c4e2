"""Exact values of small problems, and the transitions of Gymnasium's tabular environments and of its Blackjack."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

#: The outcomes of an action: probability, next state, reward, and whether the episode ends with it.
Outcome = tuple[float, int, float, bool]
#: The outcomes of each state and action.
Transitions = Mapping[int, Mapping[int, Sequence[Outcome]]]
#: A hand of Blackjack: its sum, the dealer's card, whether an ace counts as 11, whether it is a natural.
Hand = tuple[int, int, bool, bool]

_TIE = 1e-12
_CARDS = {card: (4 if card == 10 else 1) / 13 for card in range(1, 11)}  # the deck is infinite; 1 is an ace


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


def value_table(transitions: Sequence[Sequence[Sequence[Outcome]]], horizon: int) -> ValueTable:
    """Solve a finite decision problem by backward induction.

    ``Q_{h+1}(s, a) = Σ p (r + [not ended] V_h(s'))``; ``V_h`` is the maximum over the legal actions for optimal play
    and their mean for random play (Puterman 1994, section 4.3).

    Args:
        transitions: The outcomes, for each state and each of its legal actions (at least one).
        horizon: The maximum number of turns, H.

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


def legal_outcomes(transitions: Transitions, actions: Sequence[int]) -> list[list[Sequence[Outcome]]]:
    """Return the outcomes of the legal actions in each state of a Gymnasium table, whose states are numbered from 0."""
    return [[transitions[state][action] for action in actions] for state in range(len(transitions))]


def blackjack_hands() -> list[Hand]:
    """Return every hand of a Blackjack player, in the order of the state numbers."""
    sums = [(total, ace) for ace in (False, True) for total in range(12 if ace else 4, 22)]
    plain = [(total, dealer, ace, False) for total, ace in sums for dealer in range(1, 11)]
    return [*plain, *((21, dealer, True, True) for dealer in range(1, 11))]


def blackjack_transitions(*, natural: bool = False, sab: bool = False) -> Transitions:
    """Return Gymnasium's Blackjack as a table: action 0 sticks, action 1 draws a card.

    Args:
        natural: Whether a winning natural is rewarded with 1.5.
        sab: Whether a natural wins against any dealer without one (Sutton & Barto 2018, example 5.1); ``natural`` then
            has no effect.
    """
    numbers = {hand: number for number, hand in enumerate(blackjack_hands())}
    payoff = 1.5 if natural and not sab else 1.0
    table: dict[int, dict[int, list[Outcome]]] = {}
    for (total, dealer, ace, is_natural), number in numbers.items():
        stick: list[Outcome] = []
        for (dealer_total, dealer_natural), p in _dealer(dealer).items():
            reward = float((total > dealer_total) - (total < dealer_total))
            if is_natural:
                reward = 1.0 if sab and not dealer_natural else reward
                reward = payoff if reward == 1.0 else reward
            stick.append((p, number, reward, True))
        hit: list[Outcome] = []
        for card, p in _CARDS.items():
            new_total, new_ace = _with_card(total, ace, card)
            if new_total > 21:
                hit.append((p, number, -1.0, True))
            else:
                hit.append((p, numbers[(new_total, dealer, new_ace, False)], 0.0, False))
        table[number] = {0: stick, 1: hit}
    return table


@functools.cache
def _dealer(card: int) -> dict[tuple[int, bool], float]:
    """The dealer's final sums (0 for a bust) and whether they are naturals, with their probabilities."""
    results: dict[tuple[int, bool], float] = {}
    hands = [(*_with_card(*_with_card(0, False, card), second), p, True) for second, p in _CARDS.items()]
    while hands:
        total, ace, p, is_first = hands.pop()
        if total >= 17:
            result = (total if total <= 21 else 0, is_first and total == 21)
            results[result] = results.get(result, 0.0) + p
        else:
            hands += [(*_with_card(total, ace, card), p * q, False) for card, q in _CARDS.items()]
    return results


def _with_card(total: int, ace: bool, card: int) -> tuple[int, bool]:
    hard = total - 10 * ace + card
    usable = (ace or card == 1) and hard + 10 <= 21
    return hard + 10 * usable, usable


def outcomes_of(env: Any) -> Transitions | None:
    """Return the transitions of a tabular environment; None if it has no table, or deviates from it."""
    inner = env.unwrapped
    if getattr(inner, "fickle_passenger", False):  # Taxi's table does not include a passenger who changes their mind
        return None
    transitions: Any = getattr(inner, "P", None)
    return cast("Transitions", transitions) if isinstance(transitions, Mapping) else None
