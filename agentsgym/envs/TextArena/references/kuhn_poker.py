"""KuhnPoker: best replies over a match of several rounds, equilibrium play, and exploitability."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from statistics import mean
from typing import Literal

from agentsgym.envs.spec import Anchors
from agentsgym.envs.TextArena.references.base import Reference, Rules, game_text
from agentsgym.errors import AgentError, ConfigError
from agentsgym.types import Message

#: The actions before a decision: none, a check, a bet, or a check and a bet.
History = Literal["", "c", "b", "cb"]
#: The probability of a bet, or of a call after a bet, by card (0 J, 1 Q, 2 K) and history.
Strategy = Mapping[tuple[int, History], Fraction]
#: The worth of a round's result in chips.
Utility = Callable[[int], Fraction]

_CARDS = "JQK"
_FIRST: tuple[History, History] = ("", "cb")  # before a player's bet or check, and call or fold
_SECOND: tuple[History, History] = ("c", "b")

UNIFORM: Strategy = {(card, history): Fraction(1, 2) for card in range(3) for history in (*_FIRST, *_SECOND)}


def equilibrium(alpha: Fraction = Fraction(1, 3)) -> Strategy:
    """Return the equilibrium of standard Kuhn poker for an alpha in [0, 1/3] (Kuhn 1950).

    The first player bets the jack with probability alpha and the king with probability 3 alpha, and calls with the
    queen with probability alpha + 1/3; the second player's strategy is the same in all equilibria.
    """
    third, no, yes = Fraction(1, 3), Fraction(0), Fraction(1)
    by_history: dict[History, tuple[Fraction, Fraction, Fraction]] = {
        "": (alpha, no, 3 * alpha),
        "cb": (no, alpha + third, yes),
        "c": (third, no, yes),
        "b": (no, third, yes),
    }
    return {(card, history): row[card] for history, row in by_history.items() for card in range(3)}


def round_outcomes(first: Strategy, second: Strategy) -> dict[int, Fraction]:
    """Return the probability of each result of a round, in chips for the first player."""
    results: dict[int, Fraction] = {}
    for mine, theirs in itertools.permutations(range(3), 2):
        sign = 1 if mine > theirs else -1
        bets, bets_later = first[mine, ""], second[theirs, "c"]
        calls, calls_later = second[theirs, "b"], first[mine, "cb"]
        branches = (
            (bets * calls, sign * 2),
            (bets * (1 - calls), 1),
            ((1 - bets) * (1 - bets_later), sign),
            ((1 - bets) * bets_later * calls_later, sign * 2),
            ((1 - bets) * bets_later * (1 - calls_later), -1),
        )
        for p, chips in branches:
            results[chips] = results.get(chips, Fraction(0)) + p / 6
    return results


def best_reply(opponent: Strategy, utility: Utility, *, is_first: bool) -> tuple[Fraction, Strategy]:
    """Solve one round against a known strategy, for a utility of results in chips.

    Returns:
        The expected utility, and the strategy, whose probabilities are 0 or 1.
    """
    mine, theirs = (_FIRST, _SECOND) if is_first else (_SECOND, _FIRST)
    total, strategy = Fraction(0), dict[tuple[int, History], Fraction]()
    for card in range(3):
        bets = checks = fold = call = Fraction(0)
        for other in {0, 1, 2} - {card}:
            sign = 1 if card > other else -1
            their_bet, their_call = opponent[other, theirs[0]], opponent[other, theirs[1]]
            showdown = utility(sign * 2)
            can_bet = 1 if is_first else 1 - their_bet
            bets += can_bet * (their_call * showdown + (1 - their_call) * utility(1))
            checks += (1 - their_bet) * utility(sign)
            fold += their_bet * utility(-1)
            call += their_bet * showdown
        facing_bet = max(fold, call)
        if is_first:
            checks += facing_bet  # only a check lets the opponent bet
        worth = max(bets, checks) if is_first else max(bets, checks) + facing_bet
        total += worth / 6  # each pair of this card and one of the two other cards has probability 1/6
        strategy[card, mine[0]], strategy[card, mine[1]] = Fraction(bets >= checks), Fraction(call >= fold)
    return total, strategy


def expected_chips(first: Strategy, second: Strategy) -> Fraction:
    """Return the first player's expected winnings per round, in chips."""
    return sum((p * chips for chips, p in round_outcomes(first, second).items()), Fraction(0))


def exploitability(strategy: Strategy) -> Fraction:
    """Return the best opponent's expected winnings per round against a strategy, in chips, averaged over both seats.

    It is 0 for an equilibrium and measures the distance from it, unlike a win rate against some opponent.

    >>> exploitability(UNIFORM)
    Fraction(11, 24)
    """
    seats = (best_reply(strategy, Fraction, is_first=is_first)[0] for is_first in (True, False))
    return sum(seats, Fraction(0)) / 2


class Match:
    """A match of several rounds against a random opponent; the player with more chips at the end wins.

    Player 1 begins the odd rounds, counted from 1, and player 0 begins the even ones.
    """

    def __init__(self, num_rounds: int, *, seat: int) -> None:
        self._num_rounds, self._seat = num_rounds, seat
        most = 2 * num_rounds
        #: By round (from 1) and chips: the value of optimal play, and its strategy.
        self._best: dict[tuple[int, int], tuple[Fraction, Strategy]] = {}
        self._random: dict[tuple[int, int], Fraction] = {}
        for chips in range(-most, most + 1):
            sign = Fraction((chips > 0) - (chips < 0))
            self._best[num_rounds + 1, chips] = (sign, {})
            self._random[num_rounds + 1, chips] = sign
        results = round_outcomes(UNIFORM, UNIFORM)
        for number in range(num_rounds, 0, -1):
            is_first = self.is_first(number)
            reach = 2 * (number - 1)
            for chips in range(-reach, reach + 1):
                later = {won: self._best[number + 1, chips + won][0] for won in range(-2, 3)}
                self._best[number, chips] = best_reply(UNIFORM, later.__getitem__, is_first=is_first)
                side = 1 if is_first else -1
                expected = (p * self._random[number + 1, chips + side * won] for won, p in results.items())
                self._random[number, chips] = sum(expected, Fraction(0))

    def is_first(self, number: int) -> bool:
        """Whether the player begins a round."""
        return (number % 2 == 1) == (self._seat == 1)

    @property
    def optimal(self) -> Fraction:
        """The win rate minus the loss rate of the best reply to random play."""
        return self._best[1, 0][0]

    @property
    def random(self) -> Fraction:
        """The win rate minus the loss rate of random play against random play."""
        return self._random[1, 0]

    @property
    def max_turns(self) -> int:
        """The maximum number of the player's turns: two in each round that it begins, one in the others."""
        return sum(1 + self.is_first(number) for number in range(1, self._num_rounds + 1))

    def strategy(self, number: int, chips: int) -> Strategy:
        """Return the best reply in a round, with the chips that the player has won so far."""
        return self._best[number, chips][1]


class KuhnPoker(Reference):
    """The best reply to random play, by wins minus losses of matches.

    A bet adds a chip to the pot, as in the patched game (see :mod:`~agentsgym.envs.TextArena.patches`). For opponents
    who do not play randomly, see :func:`exploitability`.
    """

    opening = "round game of Kuhn Poker."
    num_seats = 2

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._matches = [Match(rules.options["max_rounds"], seat=seat) for seat in (0, 1)]

    def anchors(self, seat: int | None = None) -> Anchors:
        """Return the mean final rewards against random play in a seat; if it is drawn, the mean over both seats."""
        seat = self._seat(seat)
        matches = self._matches if seat is None else [self._matches[seat]]
        needed = max(match.max_turns for match in matches)
        if self.rules.max_steps < needed:
            raise ConfigError(
                "the exact reference of KuhnPoker needs enough turns for all rounds: max_steps_per_episode must be at "
                f"least {needed}, got {self.rules.max_steps}"
            )
        random, optimal = mean(match.random for match in matches), mean(match.optimal for match in matches)
        return Anchors(random=float(random), optimal=float(optimal))

    def choose(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Play the best reply for the current chips and round."""
        text = game_text(messages)
        seat = int(_last(r"You are Player (\d) in a", text, "0"))
        number, card = int(_last(r"### Starting round (\d+)", text)), _CARDS.index(_last(r"Your card is: '(\w)'", text))
        scores = _last(rf"Current scores:.*?Player {seat}: '(-?\d+)'", text, "0")
        faces_bet = "fold" in _actions(text)
        match = self._matches[seat]
        history: History
        history = ("cb" if faces_bet else "") if match.is_first(number) else ("b" if faces_bet else "c")
        is_bold = match.strategy(number, int(scores))[card, history]
        return f"[{('call' if is_bold else 'fold') if faces_bet else ('bet' if is_bold else 'check')}]"

    def choose_randomly(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Choose a random action from those that the game lists."""
        return f"[{rng.choice(_actions(game_text(messages)))}]"


def _actions(text: str) -> list[str]:
    listed = re.findall(r"Your available actions are: ([^\n]*)", text)
    actions: list[str] = re.findall(r"\[(\w+)\]", listed[-1]) if listed else []
    if not actions:
        raise AgentError("the observation of TextArena's KuhnPoker must contain 'Your available actions'")
    return actions


def _last(pattern: str, text: str, default: str | None = None) -> str:
    found: list[str] = re.findall(pattern, text)
    if not found and default is None:
        raise AgentError(f"the observation of TextArena's KuhnPoker must match {pattern!r}")
    return found[-1] if found else str(default)
