"""A zero-sum game of two seats that is small enough to enumerate, and the exact gradients of its seats.

X moves, then O, then X; X may end the game at once, and O after one of X's moves, so that some roles of some episodes
never move. Both seats share one policy: a softmax over tables that X's first move, O's moves and X's second move have
in common, so that the seats pull at the same parameters. What X is given O loses, on the way and at the end: part of it
before O's first move and after X's last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from agentsgym import ScoredRollout, StopReason, Trajectory, Turn
from agentsgym.credit.components import attribute_rewards

Array = NDArray[np.float64]

# The moves so far → the actions there are; no actions where the game is over.
ACTIONS = {(): 3, (1,): 2, (2,): 2, (1, 1): 2, (2, 0): 2, (2, 1): 2}
PAID_TO_X = {  # what X is given for the move that leads there, and O loses
    (0,): 0.5,
    (1,): -0.25,
    (2,): 0.75,
    (1, 0): -1.0,
    (1, 1): 0.5,
    (2, 0): -0.5,
    (2, 1): 0.25,
    (1, 1, 0): 2.0,
    (1, 1, 1): -1.5,
    (2, 0, 0): 1.0,
    (2, 0, 1): -2.0,
    (2, 1, 0): -0.75,
    (2, 1, 1): 1.25,
}
LOGITS = np.array([0.3, -0.4, 0.2, 0.5, -0.1])  # of the first move's actions, and of the two of every later move
ROLES = ("X", "O", "X")


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """One of the episodes that can happen.

    Attributes:
        moves: The action of each turn, (K,).
        probability: How often it happens.
        scores: The gradient of each turn's log-probability, (K, P).
    """

    moves: tuple[int, ...]
    probability: float
    scores: Array

    @cached_property
    def earned_to_x(self) -> list[float]:
        """What X is given at each step, (K,)."""
        return [PAID_TO_X[self.moves[: k + 1]] for k in range(len(self.moves))]

    def final_reward(self, role: str) -> float:
        """What a role is given in all."""
        return math.fsum(self.earned_to_x) * (1 if role == "X" else -1)

    def earned_from(self, k: int) -> float:
        """What the role of turn k is given from that turn on, and before it if it is the role's first."""
        first = k if k != ROLES.index(ROLES[k]) else 0
        return math.fsum(self.earned_to_x[first:]) * (1 if ROLES[k] == "X" else -1)


def episodes(logits: Array = LOGITS) -> list[Episode]:
    """Every episode under a policy; eleven of them."""
    return list(_episodes((), logits))


def _episodes(moves: tuple[int, ...], logits: Array) -> Iterator[Episode]:
    if moves not in ACTIONS:
        yield _episode(moves, logits)
        return
    for action in range(ACTIONS[moves]):
        yield from _episodes((*moves, action), logits)


def _episode(moves: tuple[int, ...], logits: Array) -> Episode:
    probability, scores = 1.0, np.zeros((len(moves), logits.size))
    for k, action in enumerate(moves):
        table = slice(0, 3) if k == 0 else slice(3, 5)
        weights = np.exp(logits[table])
        policy = weights / weights.sum()
        probability *= float(policy[action])
        scores[k, table] -= policy
        scores[k, table.start + action] += 1
    return Episode(moves=moves, probability=probability, scores=scores)


def value(role: str, policies: dict[str, Array]) -> float:
    """What a role can expect where each seat has a policy of its own."""
    total = 0.0
    for one in episodes():
        chance = 1.0
        for k, action in enumerate(one.moves):
            logits = policies[ROLES[k]][slice(0, 3) if k == 0 else slice(3, 5)]
            chance *= float(np.exp(logits[action]) / np.exp(logits).sum())
        total += chance * one.final_reward(role)
    return total


@cache
def seat_gradient(role: str) -> tuple[float, ...]:
    """The gradient of a role's value by its own moves alone, ``Σ p · R_role · Σ_{its turns} ∇log π``, (P,)."""
    total = np.zeros(LOGITS.size)
    for one in episodes():
        own = [k for k in range(len(one.moves)) if ROLES[k] == role]
        total += one.probability * one.final_reward(role) * one.scores[own].sum(0)
    return tuple(total)


Estimate = Callable[[Sequence[Episode]], Sequence[Sequence[float]]]
"""From the episodes of a batch to one advantage a turn."""


def expected(estimate: Estimate, num_rollouts: int) -> Array:
    """The expectation of ``Σ_i Σ_k A_ik ∇log π_ik / n`` over all ordered groups of n rollouts, (P,)."""
    total = np.zeros(LOGITS.size)
    for group in product(episodes(), repeat=num_rollouts):
        chance = math.prod(one.probability for one in group)
        for numbers, one in zip(estimate(group), group, strict=True):
            total += chance * (np.array(numbers) @ one.scores) / num_rollouts
    return total


def scored(one: Episode, *, reported: bool = True) -> ScoredRollout:
    """What an estimator sees of an episode; without their owners, the rewards are X's: those of every turn."""
    earned = [{"X": amount, "O": -amount} if reported else None for amount in one.earned_to_x]
    turns = [
        Turn(
            start=k, stop=k + 1, reward=own, role=ROLES[k], role_rewards=earned[k], state_key=one.moves[:k], potential=k
        )
        for k, own in enumerate(one.earned_to_x)
    ]
    settled, final_rewards = attribute_rewards(turns)
    record = Trajectory(
        token_ids=list(range(len(turns))),
        turns=settled,
        messages=[],
        final_reward=one.final_reward("X"),
        final_rewards=final_rewards,
        stop_reason=StopReason.DONE,
    )
    rollout = ScoredRollout.from_trajectory(record, group=0, environment="two seats")
    # Values of what stands before the move, and of nothing else: any numbers do.
    wrong = [[crc32(repr(one.moves[:k]).encode()) / 2**31 - 1] for k in range(len(turns))]
    return replace(rollout, values=wrong)
