"""Simulated rollouts for the cost model: three kinds of episodes, on engines that decode many sequences at once.

Everything here is computed; nothing runs on a GPU. All numbers are assumptions, made in :class:`Engine`,
:class:`Learner` and ``TASKS``.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

from agentsgym.seeding import derive_seed

WEIGHTS: Final = 7.6e9  # of the policy
BANDWIDTH: Final = 3.35e12  # bytes a second that a GPU reads from its memory
FLOPS: Final = 400e12  # a second that a GPU reaches, in bf16
KV_BYTES: Final = 57_344  # a token: 28 layers, 4 key/value heads of 128, keys and values, bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How long a GPU takes to sample: decoding is bound by what it reads, prefill by what it computes.

    Attributes:
        step_s: Seconds of a decoding step of no context: all weights are read once, and a half more for all the rest.
        context_s: Seconds that a token of context adds to a step, for each sequence: its keys and values are read.
        prefill_s: Seconds that a new token of a prompt takes; decoding waits meanwhile. Earlier turns are in the
            prefix cache, and cost nothing.
    """

    step_s: float = 1.5 * 2 * WEIGHTS / BANDWIDTH
    context_s: float = KV_BYTES / BANDWIDTH
    prefill_s: float = 2 * WEIGHTS / FLOPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """How long learning takes.

    Attributes:
        token_s: Seconds a GPU takes for a token of a trajectory, forward and backward.
        update_s: Seconds of an optimizer step and of handing the weights to the engines.
    """

    token_s: float = 6 * WEIGHTS / FLOPS
    update_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """What is drawn is ``exp`` of a normal draw, and cut.

    Attributes:
        median: Half of the draws are below it.
        sigma: The spread, of the logarithm; 0 for none.
        most: Where draws are cut.
    """

    median: float
    sigma: float
    most: float

    def draw(self, rng: random.Random) -> float:
        """Draw."""
        return min(self.most, self.median * math.exp(rng.gauss(0.0, self.sigma)))


class Turn(NamedTuple):
    """A turn: tokens that are sampled, then seconds that the environment takes."""

    tokens: int
    env_s: float


Episode = tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A kind of episode.

    Attributes:
        turns: Turns of an episode.
        tokens: Sampled tokens of a turn.
        env_s: Seconds that the environment takes for a turn.
        prompt: Tokens of the first prompt.
        observation: Tokens that each turn adds beside those that are sampled.
        pace: The spread of a factor on the tokens of all turns of an episode: some are wordy throughout.
    """

    turns: Lognormal
    tokens: Lognormal
    env_s: Lognormal
    prompt: int
    observation: int
    pace: float = 0.3

    def episode(self, *seed: object) -> Episode:
        """Draw an episode, the same one for the same seed."""
        return self.drawn_by(random.Random(derive_seed(*seed)))

    def drawn_by(self, rng: random.Random) -> Episode:
        """Draw the next episode of a generator."""
        pace = math.exp(rng.gauss(0.0, self.pace))
        num_turns = max(1, round(self.turns.draw(rng)))
        return tuple(Turn(max(1, round(pace * self.tokens.draw(rng))), self.env_s.draw(rng)) for _ in range(num_turns))

    def new_tokens(self, turn: int) -> int:
        """Tokens that are new to the engine before a turn: the first prompt, or the observation."""
        return self.observation if turn else self.prompt

    def num_tokens(self, episode: Episode) -> int:
        """Tokens of a whole trajectory."""
        return self.prompt + self.observation * (len(episode) - 1) + sum(turn.tokens for turn in episode)


TASKS: Final = {
    "short games": Task(
        turns=Lognormal(median=6, sigma=0.5, most=20),
        tokens=Lognormal(median=60, sigma=0.6, most=512),
        env_s=Lognormal(median=0.1, sigma=0.5, most=2.0),
        prompt=300,
        observation=30,
    ),
    "tools": Task(
        turns=Lognormal(median=8, sigma=0.7, most=40),
        tokens=Lognormal(median=200, sigma=0.9, most=2048),
        env_s=Lognormal(median=0.5, sigma=0.8, most=20.0),
        prompt=1000,
        observation=200,
    ),
    "software tasks": Task(
        turns=Lognormal(median=25, sigma=0.6, most=100),
        tokens=Lognormal(median=250, sigma=0.9, most=2048),
        env_s=Lognormal(median=2.0, sigma=1.0, most=60.0),
        prompt=3000,
        observation=400,
    ),
}


class Sampling:
    """One engine in play: every running sequence gets a token a step, so that one of n tokens ends n steps on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now, self.steps, self.debt_s, self.context = 0.0, 0.0, 0.0, 0.0
        self.running: list[tuple[float, int, float]] = []  # (steps at its end, episode, mean context)

    def _step_s(self) -> float:
        return self.engine.step_s + self.engine.context_s * self.context

    def work_until(self, time: float) -> None:
        """Go on until then; no sequence ends before."""
        gone = time - self.now
        if self.running:
            paid = min(gone, self.debt_s)
            self.debt_s -= paid
            if gone > paid:
                self.steps += (gone - paid) / self._step_s()
        self.now = time

    def add(self, index: int, new: float, context: float, tokens: int) -> None:
        """Start a sequence of ``tokens`` tokens after a context, of which ``new`` tokens are not cached."""
        mean_context = context + tokens / 2
        self.debt_s += new * self.engine.prefill_s
        self.context += mean_context
        heapq.heappush(self.running, (self.steps + tokens, index, mean_context))

    def next_end(self) -> float:
        """When the next sequence ends."""
        left = max(0.0, self.running[0][0] - self.steps)
        return self.now + self.debt_s + (left * self._step_s() if left else 0.0)

    def pop(self) -> int:
        """End that sequence, and return its number."""
        steps, index, context = heapq.heappop(self.running)
        self.steps = max(self.steps, steps)
        self.context = self.context - context if self.running else 0.0
        return index


@dataclass(slots=True)
class _Live:
    """An episode in play: its engine, its turn, and the tokens behind it."""

    episode: Episode
    place: int
    turn: int = 0
    context: float = 0.0


class Play:
    """Episodes in play, each going on as soon as it can; a session stays with its engine for the prefix cache.

    Args:
        task: The kind of the episodes.
        num_engines: How many engines there are.
        engine: What one takes.
    """

    def __init__(self, task: Task, num_engines: int, engine: Engine) -> None:
        self.now = 0.0
        self._task = task
        self._engines = [Sampling(engine) for _ in range(num_engines)]
        self._live: dict[int, _Live] = {}
        self._stamps = [0] * num_engines
        self._sessions = [0] * num_engines
        self._events: list[tuple[float, int, int, int]] = []  # (time, tie, engine or -1, its stamp or the episode)
        self._ties = count()
        self._changed: set[int] = set()

    @property
    def num_live(self) -> int:
        """Episodes in play."""
        return len(self._live)

    def begin(self, index: int, episode: Episode, place: int | None = None) -> None:
        """Begin an episode now, at the engine with the fewest sessions unless one is named."""
        if place is None:
            place = min(range(len(self._sessions)), key=self._sessions.__getitem__)
        self._sessions[place] += 1
        self._live[index] = _Live(episode, place)
        self._ask(index)

    def _ask(self, index: int) -> None:
        live = self._live[index]
        engine, new = self._engines[live.place], self._task.new_tokens(live.turn)
        engine.work_until(self.now)
        live.context += new
        tokens = live.episode[live.turn].tokens
        engine.add(index, new, live.context, tokens)
        live.context += tokens
        self._changed.add(live.place)

    def _announce(self) -> None:
        """Say anew when the next sequence of each engine that changed will end."""
        for place in self._changed:
            self._stamps[place] += 1
            if self._engines[place].running:
                end = self._engines[place].next_end()
                heapq.heappush(self._events, (end, next(self._ties), place, self._stamps[place]))
        self._changed.clear()

    def next_time(self) -> float:
        """When something happens next; infinity if nothing is in play."""
        self._announce()
        while self._events:
            time, _, place, stamp = self._events[0]
            if place < 0 or stamp == self._stamps[place]:
                return time
            heapq.heappop(self._events)
        return math.inf

    def advance(self) -> int | None:
        """Let the next thing happen; returns the episode that ended by it, None for none."""
        self.now = self.next_time()
        _, _, place, number = heapq.heappop(self._events)
        if place >= 0:
            engine = self._engines[place]
            engine.work_until(self.now)
            index = engine.pop()
            self._changed.add(place)
            live = self._live[index]
            wakes = self.now + live.episode[live.turn].env_s
            heapq.heappush(self._events, (wakes, next(self._ties), -1, index))
            return None
        live = self._live[number]
        live.turn += 1
        if live.turn < len(live.episode):
            self._ask(number)
            return None
        del self._live[number]
        self._sessions[live.place] -= 1
        return number


def continuous(batch: Iterable[Episode], places: Iterable[int | None], play: Play) -> list[float]:
    """Play a batch, each episode going on as soon as it can.

    Args:
        batch: The episodes.
        places: The engine of each; None for the one with the fewest sessions.
        play: Where nothing is in play.

    Returns:
        When each ended, in seconds from now, in order.
    """
    begun = play.now
    for index, (episode, place) in enumerate(zip(batch, places, strict=True)):
        play.begin(index, episode, place)
    ends: list[float] = []
    while play.num_live:
        if play.advance() is not None:
            ends.append(play.now - begun)
    return ends


def lockstep(task: Task, shares: list[list[Episode]], engine: Engine, *, by_rank: bool) -> list[float]:
    """Play a batch in rounds: the next turn begins when the last answer of the round is there.

    Args:
        task: The kind of the episodes.
        shares: The episodes of each engine.
        engine: What one takes.
        by_rank: Whether each engine has its own rounds; otherwise a round ends when it has ended on all engines.

    Returns:
        When each episode ended, in seconds, in order.
    """
    now = [0.0] * len(shares)
    ends: list[float] = []
    live = [deque((episode, 0.0) for episode in share) for share in shares]
    turn = 0
    while any(live):
        for place, episodes in enumerate(live):
            if episodes:
                now[place] += _round_s(task, [(one[turn], context) for one, context in episodes], turn, engine)
        if not by_rank:
            now = [max(now)] * len(now)
        for place, episodes in enumerate(live):
            ends += [now[place] for one, _ in episodes if len(one) == turn + 1]
            live[place] = deque(
                (one, context + task.new_tokens(turn) + one[turn].tokens)
                for one, context in episodes
                if len(one) > turn + 1
            )
        turn += 1
    return sorted(ends)


def _round_s(task: Task, turns: list[tuple[Turn, float]], turn: int, engine: Engine) -> float:
    """Seconds of a round: the answers of all, then the slowest environment."""
    new = task.new_tokens(turn)
    sampling = Sampling(engine)
    for index, (one, context) in enumerate(turns):
        sampling.add(index, new, context + new, one.tokens)
    while sampling.running:
        sampling.work_until(sampling.next_end())
        sampling.pop()
    return sampling.now + max(one.env_s for one, _ in turns)
