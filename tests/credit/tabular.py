"""A language model and a game that are small enough to enumerate: expectations as sums, without sampling.

Three states that recur. A turn is a word of one token or two, drawn one by one from a softmax whose logits stand in a
table by state, place in the word and token before it. A word leads from state to state and costs something; one ends
the game in the first state for a small prize, one in the last state for a large one, none in the middle. Episodes that
go on are cut at the horizon.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from agentsgym import ScoredRollout, StopReason, Trajectory, Turn
from agentsgym.credit.rewards import scatter_to_tokens
from agentsgym.credit.weights import aggregation_weights

Array = NDArray[np.float64]
Word = tuple[int, ...]

WORDS: tuple[Word, ...] = ((0,), (1, 0), (1, 1))  # token 0 ends the turn at once, token 1 requests another
RULES: dict[tuple[int, Word], tuple[float, int | None]] = {  # the reward of a word, and the next state; None is the end
    (0, (0,)): (-0.1, 0),
    (0, (1, 0)): (-0.1, 1),
    (0, (1, 1)): (0.1, None),
    (1, (0,)): (-0.2, 0),
    (1, (1, 0)): (-0.3, 1),
    (1, (1, 1)): (-0.1, 2),
    (2, (0,)): (2.0, None),
    (2, (1, 0)): (-0.3, 1),
    (2, (1, 1)): (-0.1, 2),
}
LOGITS = np.array(  # (3, 2, 2): state; first token, or second behind token 1; token
    [[[0.3, 0.5], [0.6, -0.2]], [[-0.4, 0.1], [0.2, 0.5]], [[-0.3, 0.4], [0.7, 0.3]]]
)
EVEN_ODDS = np.log([[[1, 1], [3, 1]], [[1, 3], [1, 1]], [[1, 1], [1, 3]]])  # every probability a number of quarters
POTENTIALS = (-0.2, -0.1, 0.6)  # of the three states: a rough guess of what they are worth


class Step(NamedTuple):
    """One turn of an episode."""

    state: int
    word: Word
    reward: float
    following: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Play:
    """One of the episodes that can happen.

    Attributes:
        task: Where it starts, which distinguishes task groups.
        steps: Its turns, (K,).
        probability: How often it happens.
        scores: The gradient of each token's log-probability, (n, P); the tokens of all turns in one row.
        values: What the rest of the episode is expected to give before each token of each turn, (K, n_k): exact.
    """

    task: int
    steps: tuple[Step, ...]
    probability: float
    scores: Array
    values: tuple[tuple[float, ...], ...]

    @cached_property
    def rewards(self) -> list[float]:
        """The reward of each turn, (K,)."""
        return [step.reward for step in self.steps]

    @cached_property
    def final_reward(self) -> float:
        """R."""
        return math.fsum(self.rewards)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each turn, (K,)."""
        return [len(step.word) for step in self.steps]

    @cached_property
    def turn_scores(self) -> Array:
        """The gradient of each turn's log-probability, (K, P)."""
        edges = np.cumsum([0, *self.lengths])
        return np.array([self.scores[start:stop].sum(0) for start, stop in itertools.pairwise(edges)])

    @cached_property
    def is_agent(self) -> NDArray[np.bool_]:
        """Which tokens of the trajectory are the agent's, (T,)."""
        return np.array(self.trajectory.agent_token_mask) == 1

    @property
    def truncated(self) -> bool:
        """Whether the horizon ended it, not the game."""
        return self.steps[-1].following is not None

    @cached_property
    def scored(self) -> ScoredRollout:
        """What an estimator sees of it; the role names where it began."""
        return ScoredRollout(
            turn_rewards=self.rewards,
            final_reward=self.final_reward,
            group=self.task,
            state_keys=[step.state for step in self.steps],
            environment="tabular",
            roles=[f"from {self.task}"] * len(self.steps),
            potentials=[POTENTIALS[step.state] for step in self.steps],
            values=self.values,
        )

    @cached_property
    def trajectory(self) -> Trajectory:
        """Its tokens, with two of the environment before the first turn and one before each of the others."""
        turns: list[Turn] = []
        ids = [9]
        for step in self.steps:
            ids.append(8)
            turns.append(Turn(start=len(ids), stop=len(ids) + len(step.word), reward=step.reward))
            ids += step.word
        return Trajectory(
            token_ids=ids,
            turns=turns,
            messages=[],
            final_reward=self.final_reward,
            stop_reason=StopReason.MAX_TURNS if self.truncated else StopReason.DONE,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Game:
    """The game from one start state, up to so many turns, under one policy.

    Attributes:
        horizon: Turns after which an episode is cut; 41 episodes where it is 4, 17 where it is 3.
        start: The first state.
        logits: The policy, (3, 2, 2); P = 12 parameters.
    """

    horizon: int
    start: int = 0
    logits: Array

    @cached_property
    def plays(self) -> list[Play]:
        """Every episode."""
        return [self._play(steps) for steps in _episodes(self.start, self.horizon)]

    @cached_property
    def expected_return(self) -> float:
        """J, the mean final reward."""
        return math.fsum(play.probability * play.final_reward for play in self.plays)

    @cached_property
    def gradient(self) -> Array:
        """The gradient of J, ``Σ p·R·∇log p``, (P,)."""
        return sum((play.probability * play.final_reward * play.scores.sum(0) for play in self.plays), np.zeros(12))

    @cached_property
    def policy(self) -> Array:
        """The probability of each token, (3, 2, 2)."""
        weights = np.exp(self.logits)
        return weights / weights.sum(-1, keepdims=True)

    def chance(self, state: int, word: Word) -> float:
        """The probability of a word."""
        return math.prod(self.policy[place] for place in _places(state, word))

    def value(self, state: int | None, num_left: int) -> float:
        """The expected return in a state with so many turns left."""
        return 0.0 if state is None or num_left == 0 else self._value_before(state, (), num_left)

    def _value_before(self, state: int, output: Word, num_left: int) -> float:
        """The same in the middle of a turn, when part of the word is answered."""
        total = weight = 0.0
        for word in WORDS:
            if word[: len(output)] == output:
                reward, following = RULES[state, word]
                chance = self.chance(state, word)
                total += chance * (reward + self.value(following, num_left - 1))
                weight += chance
        return total / weight

    def _play(self, steps: tuple[Step, ...]) -> Play:
        places = [place for step in steps for place in _places(step.state, step.word)]
        scores = np.zeros((len(places), *self.logits.shape))
        for t, (state, position, token) in enumerate(places):
            scores[t, state, position] -= self.policy[state, position]
            scores[t, state, position, token] += 1
        return Play(
            task=self.start,
            steps=steps,
            probability=math.prod(self.policy[place] for place in places),
            scores=scores.reshape(len(places), -1),
            values=tuple(
                tuple(
                    self._value_before(step.state, step.word[:output], self.horizon - k)
                    for output in range(len(step.word))
                )
                for k, step in enumerate(steps)
            ),
        )


@cache
def game(horizon: int, start: int = 0) -> Game:
    """The game under the usual policy; made once."""
    return Game(horizon=horizon, start=start, logits=LOGITS)


def _episodes(state: int | None, num_left: int) -> list[tuple[Step, ...]]:
    if state is None or num_left == 0:
        return [()]
    found: list[tuple[Step, ...]] = []
    for word in WORDS:
        reward, following = RULES[state, word]
        step = Step(state, word, reward, following)
        found += [(step, *rest) for rest in _episodes(following, num_left - 1)]
    return found


def _places(state: int, word: Word) -> list[tuple[int, int, int]]:
    """Where each token of a word stands in the table: the second is always answered behind token 1."""
    return [(state, position, token) for position, token in enumerate(word)]


Group = tuple[float, Sequence[Play]]
"""How often these episodes are drawn together, and they."""

Estimate = Callable[[Sequence[Play]], Sequence[Array]]
"""From the episodes of a batch to one number for each agent token of each, (n,) a play."""

View = Callable[[Play], ScoredRollout]
"""What an estimator sees of an episode."""

Estimator = Callable[[Sequence[ScoredRollout]], Sequence[Sequence[float | Sequence[float]]]]
"""From what it sees of a batch to one entry a turn."""


def ordered_groups(*games: Game, num_rollouts: int) -> Iterator[Group]:
    """Every batch of ``num_rollouts`` independent episodes of each game, those of one game behind each other."""
    for plays in itertools.product(*(one.plays for one in games for _ in range(num_rollouts))):
        yield math.prod(play.probability for play in plays), plays


def unordered_groups(*games: Game, num_rollouts: int) -> Iterator[Group]:
    """The same where the order of the episodes of a game does not matter: far fewer."""
    choices = (itertools.combinations_with_replacement(one.plays, num_rollouts) for one in games)
    for groups in itertools.product(*choices):
        plays = tuple(itertools.chain.from_iterable(groups))
        repeats = math.prod(map(math.factorial, Counter(map(id, plays)).values()))
        orders = math.factorial(num_rollouts) ** len(games) // repeats
        yield orders * math.prod(play.probability for play in plays), plays


def in_proportion(one: Game) -> list[Play]:
    """Each episode as often as it happens under ``EVEN_ODDS``: what a batch comes to as it grows."""
    smallest = 4 ** (2 * one.horizon)  # a turn has two tokens at most
    return [play for play in one.plays for _ in range(round(smallest * play.probability))]


def as_played(play: Play) -> ScoredRollout:
    """The episode with the exact values."""
    return play.scored


@cache
def with_wrong_values(play: Play) -> ScoredRollout:
    """With values that have nothing to do with the game: any number of what stands before the token."""
    values: list[list[float]] = []
    for k, step in enumerate(play.steps):
        seen = [(play.steps[:k], step.state, step.word[:output]) for output in range(len(step.word))]
        values.append([3 * crc32(repr(one).encode()) / 2**32 - 1 for one in seen])
    return replace(play.scored, values=values)


def at_turns(estimator: Estimator, view: View = as_played) -> Estimate:
    """Give each token of a turn what the estimator gave for the turn (or, where it gave one each, its own)."""

    def estimate(plays: Sequence[Play]) -> list[Array]:
        return [
            np.array(
                [number for entry, length in zip(row, play.lengths, strict=True) for number in _each(entry, length)]
            )
            for row, play in zip(estimator([view(play) for play in plays]), plays, strict=True)
        ]

    return estimate


def masking_truncated(estimate: Estimate) -> Estimate:
    """Nothing for what the horizon ended, though the estimator has seen it."""
    return lambda plays: [numbers * (not play.truncated) for numbers, play in zip(estimate(plays), plays, strict=True)]


def at_tokens(estimator: Estimator, view: View = as_played) -> Estimate:
    """The same by way of trajectories that hold tokens of the environment too."""

    def estimate(plays: Sequence[Play]) -> list[Array]:
        found: list[Array] = []
        for row, play in zip(estimator([view(play) for play in plays]), plays, strict=True):
            placed = np.array(scatter_to_tokens(play.trajectory, row))  # (T,)
            assert not placed[~play.is_agent].any()
            found.append(placed[play.is_agent])
        return found

    return estimate


def _each(entry: float | Sequence[float], length: int) -> Sequence[float]:
    return entry if isinstance(entry, Sequence) else [entry] * length


def aggregated(estimate: Estimate, aggregation: str, constant: int | None = None) -> Estimate:
    """With the weights of a loss aggregation, under a loss that divides by the number of tokens of the batch."""

    def weighted(plays: Sequence[Play]) -> list[Array]:
        lengths = [play.lengths for play in plays]
        groups, included = [play.task for play in plays], [True] * len(plays)
        weights = aggregation_weights(lengths, groups, included, aggregation, constant=constant)
        scale = len(plays) / sum(map(sum, lengths))  # `moments` divides by the number of episodes instead
        return [
            scale * numbers * np.repeat(row, own)
            for numbers, row, own in zip(estimate(plays), weights, lengths, strict=True)
        ]

    return weighted


class Moments(NamedTuple):
    """What a gradient estimate is worth, over all batches.

    Attributes:
        mean: Its expectation, (P,).
        variance: The trace of its covariance.
    """

    mean: Array
    variance: float


def moments(groups: Iterable[Group], estimate: Estimate) -> Moments:
    """The expectation and the spread of ``Σ_i Σ_t A_it ∇ log π_it / B`` over all batches of B episodes.

    Args:
        groups: All batches, each with how often it is drawn.
        estimate: Gives the A of a batch.
    """
    mean, square = np.zeros(LOGITS.size), 0.0
    for probability, plays in groups:
        pairs = zip(estimate(plays), plays, strict=True)
        gradient = sum((numbers @ play.scores for numbers, play in pairs), np.zeros(LOGITS.size)) / len(plays)
        mean += probability * gradient
        square += probability * float(gradient @ gradient)
    return Moments(mean, square - float(mean @ mean))


def expected(estimate: Estimate, *, num_rollouts: int = 2, horizon: int = 4) -> Array:
    """The expectation over all ordered groups of the usual game, (P,)."""
    return moments(ordered_groups(game(horizon), num_rollouts=num_rollouts), estimate).mean


def largest(difference: Array) -> float:
    """The largest absolute value."""
    return float(np.abs(difference).max())


class Fit(NamedTuple):
    """How an expected gradient lies to the true one.

    Attributes:
        cosine: Of the angle between the two.
        scale: The length of its part along the true one, in lengths of the true one.
        off: The length of its part at right angles, in lengths of the part along.
    """

    cosine: float
    scale: float
    off: float


def fit(gradient: Array, truth: Array) -> Fit:
    """Compare an expected gradient with the true one, both (P,)."""
    scale = float(gradient @ truth / (truth @ truth))
    along = scale * truth
    lengths = [float(np.linalg.norm(one)) for one in (gradient, truth, gradient - along, along)]
    return Fit(float(gradient @ truth) / (lengths[0] * lengths[1]), scale, lengths[2] / lengths[3])
