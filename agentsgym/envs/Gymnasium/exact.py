"""The transition tables of Gymnasium's tabular environments and of its Blackjack."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentsgym.envs.shared.exact_play import Outcome

#: The outcomes of each state and action: probability, next state, reward, and whether the episode ends with it.
Transitions = Mapping[int, Mapping[int, Sequence[Outcome]]]


def legal_outcomes(transitions: Transitions, actions: Sequence[int]) -> list[list[Sequence[Outcome]]]:
    """Return the outcomes of the legal actions in each state of a Gymnasium table, whose states are numbered from 0."""
    return [[transitions[state][action] for action in actions] for state in range(len(transitions))]


_CARDS = {card: (4 if card == 10 else 1) / 13 for card in range(1, 11)}  # the deck is infinite; 1 is an ace

#: A hand of Blackjack: its sum, the dealer's card, whether an ace counts as 11, whether it is a natural.
Hand = tuple[int, int, bool, bool]


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
