"""Measure self-play at Kuhn poker: how far a table of logits stays from equilibrium, alone and against a league.

Both seats are played by one policy, against itself or against a copy from a random earlier moment, and learn by
REINFORCE with ``return_to_go``. Exploitability, and the chips of the first player, are computed exactly, for the last
policy and for the mean of all policies so far (by how often each reaches a decision), as in fictitious self-play.

``python benchmarks/selfplay_kuhn.py`` prints a table: five seeds of each arm, some minutes on one core.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from fractions import Fraction
from itertools import product
from statistics import median
from typing import Final

from agentsgym.credit.advantages import ScoredRollout, return_to_go
from agentsgym.envs.TextArena.references.kuhn_poker import History, expected_chips, exploitability
from agentsgym.seeding import derive_seed
from benchmarks.credit_report import markdown_table

VALUE: Final = -1 / 18  # of the first player (Kuhn 1950)
HISTORIES: Final[tuple[History, ...]] = ("", "c", "b", "cb")
ENDS: Final = {"cc": 1, "bf": 0, "bk": 2, "cbf": 0, "cbk": 2}  # chips at a showdown; 0 if somebody folds
Decision = tuple[int, History]
Chances = dict[Decision, float]
BATCH: Final = 64
SNAPSHOT: Final = 10  # batches


def moves(history: str) -> str:
    """The two moves, the one that adds chips (bet or call) last."""
    return "fk" if history.endswith("b") else "cb"


def sigmoid(logit: float) -> float:
    """The probability of the second move."""
    return 1 / (1 + math.exp(-logit))


def play(seats: tuple[Chances, Chances], generator: random.Random) -> tuple[list[tuple[Decision, bool]], float]:
    """Play a round: each decision with whether the second move was made, and the chips of the first player."""
    cards = generator.sample(range(3), 2)
    history, turns = "", list[tuple[Decision, bool]]()
    while history not in ENDS:
        seat = len(turns) % 2
        decision: Decision = cards[seat], history  # type: ignore[assignment]  # one of the four
        second = generator.random() < seats[seat][decision]
        turns.append((decision, second))
        history += moves(history)[second]
    stake = ENDS[history] or 1
    first_wins = cards[0] > cards[1] if ENDS[history] else history == "bf"
    return turns, stake if first_wins else -stake


def learn(seed: int, *, has_league: bool, num_batches: int, learning_rate: float) -> dict[str, float]:
    """Learn from one seed; return exploitability and distance from the value, of the last policy and of the mean."""
    generator = random.Random(derive_seed("kuhn", seed))
    logits: dict[Decision, float] = dict.fromkeys(product(range(3), HISTORIES), 0.0)
    league: list[Chances] = [dict.fromkeys(logits, 0.5)]
    sums, weights = dict.fromkeys(logits, 0.0), dict.fromkeys(logits, 0.0)
    for batch in range(num_batches):
        own = {decision: sigmoid(logit) for decision, logit in logits.items()}
        for decision, reach in reach_of(own).items():
            sums[decision] += reach * own[decision]
            weights[decision] += reach
        if batch % SNAPSHOT == 0:
            league.append(own)
        update(logits, own, league if has_league else [own], generator, learning_rate * (1 - batch / num_batches))
    mean = {decision: sums[decision] / weights[decision] for decision in logits}
    last = {decision: sigmoid(logit) for decision, logit in logits.items()}
    return {
        f"{name} of the {which} policy": measure
        for which, chances in (("last", last), ("mean", mean))
        for name, measure in (
            ("exploitability", float(exploitability(_exact(chances)))),
            ("distance from the value", abs(float(expected_chips(_exact(chances), _exact(chances))) - VALUE)),
        )
    }


def update(
    logits: dict[Decision, float], own: Chances, league: list[Chances], generator: random.Random, learning_rate: float
) -> None:
    """Play a batch, each seat in half of the rounds, and take a step of REINFORCE."""
    rollouts, taken = list[ScoredRollout](), list[list[tuple[Decision, bool]]]()
    for index in range(BATCH):
        seat = index % 2
        other = generator.choice(league)
        turns, chips = play((own, other) if seat == 0 else (other, own), generator)
        mine = turns[seat::2]
        reward = chips if seat == 0 else -chips
        taken.append(mine)
        rewards = [0.0] * (len(mine) - 1) + [float(reward)] * bool(mine)
        rollouts.append(
            ScoredRollout(turn_rewards=rewards, final_reward=reward, group=seat, state_keys=[None] * len(mine))
        )
    gradient: defaultdict[Decision, float] = defaultdict(float)
    for mine, advantages in zip(taken, return_to_go(rollouts, scale="none"), strict=True):
        for (decision, second), advantage in zip(mine, advantages, strict=True):
            gradient[decision] += advantage * (second - own[decision]) / BATCH
    for decision, slope in gradient.items():
        logits[decision] += learning_rate * slope


def reach_of(chances: Chances) -> Chances:
    """The probability that a player's own moves lead to each decision."""
    return {(card, history): 1 - chances[card, ""] if history == "cb" else 1.0 for card, history in chances}


def _exact(chances: Chances) -> dict[Decision, Fraction]:
    return {decision: Fraction(chance) for decision, chance in chances.items()}


def main() -> None:
    """Print the table."""
    rows, header = list[list[str]](), list[str]()
    for has_league, num_batches in product((False, True), (500, 2000, 8000)):
        runs = [learn(seed, has_league=has_league, num_batches=num_batches, learning_rate=2.0) for seed in range(5)]
        cells = [f"{median(run[name] for run in runs):.3f} ({max(run[name] for run in runs):.3f})" for name in runs[0]]
        rows.append(["earlier copies" if has_league else "itself", f"{num_batches * BATCH:,}", *cells])
        header = ["opponent", "rounds", *runs[0]]
    print("Median of five seeds (and the worst), in chips per round.\n")
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
