"""What a reference of a game gives: the anchors of its scale, and the players that earn them."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentsgym.agents.base import Agent
from agentsgym.envs.anchors import Anchors
from agentsgym.errors import AgentError
from agentsgym.fields import is_int, or_none, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown
from agentsgym.types import Message

#: Chooses a move from the messages of one game, the prompt first, and a stream of random numbers.
Strategy = Callable[[Sequence[Message], random.Random], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Under which rules a game is played.

    Attributes:
        game: The base id, ``"GuessTheNumber-v0"``.
        options: The arguments of the game's constructor.
        max_steps: Turns of the agent, at least 1.
        seat: The agent's seat in a game of several; None where it is drawn.
    """

    game: str
    options: Mapping[str, Any]
    max_steps: int
    seat: int | None = None

    def turns(self, own_limit: int) -> int:
        """Give the turns of a game that has a limit of its own, which TextArena compares before it counts the turn."""
        return min(self.max_steps, own_limit + 1)


class Reference(ABC):
    """The exact values of a game under its rules, and the players that earn them on average.

    A reference can be called with a task, as ``evaluate(…, references=reference)`` does.
    """

    opening = ""  # words of the prompt that every game of the kind begins with
    num_seats = 1

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._seat(rules.seat)

    @abstractmethod
    def anchors(self, seat: int | None = None) -> Anchors:
        """Give what random and optimal play earn on average; in a game of several, in this seat, by default the rules'.

        Random play takes each legal move with equal probability; so do the other seats.
        """

    @abstractmethod
    def choose(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Choose the best move."""

    @abstractmethod
    def choose_randomly(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Choose any legal move."""

    def __call__(self, task_data: Mapping[str, Any]) -> Anchors:
        """Give the anchors of a task."""
        return self.anchors(self._seat(task_data.get("seat")))

    def _seat(self, seat: int | None) -> int | None:
        """Check a seat; None is the rules'.

        Raises:
            ConfigError: There is no such seat.
        """
        seat = self.rules.seat if seat is None else seat
        is_one = or_none(lambda value: is_int(0)(value) and value < self.num_seats)
        require("seat", seat, is_one, f"an int in [0, {self.num_seats}) or None for {self.rules.game}")
        return seat

    def optimal_player(self, seed: int = 0) -> ReferencePlayer:
        """Make the best player."""
        return ReferencePlayer(self.choose, self.opening, seed=seed)

    def random_player(self, seed: int = 0) -> ReferencePlayer:
        """Make a player of random legal moves."""
        return ReferencePlayer(self.choose_randomly, self.opening, seed=seed)


class ReferencePlayer(Agent):
    """Plays a strategy on what the game said, and on nothing else.

    Each conversation has a random stream of its own, numbered in the order in which conversations start: a fresh player
    with the same seed plays the same games, however they are interleaved.

    Args:
        strategy: Chooses a move.
        opening: Words of the prompt with which a game begins, so that the next game of one conversation is told from
            the last.
        seed: Makes the random streams.
    """

    def __init__(self, strategy: Strategy, opening: str, *, seed: int = 0) -> None:
        self._strategy = strategy
        self._opening = opening
        self._seed = seed
        self._conversations = itertools.count()

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Play on the last game of the conversation; ``agent_state`` is the conversation's random stream."""
        rng = agent_state if agent_state is not None else self._new_stream()
        starts = [
            index
            for index, message in enumerate(messages)
            if message["role"] != "assistant" and self._opening in message["content"]
        ]
        if not starts:
            raise AgentError(f"this player requires a prompt that contains {self._opening!r}, got {shown(messages[0])}")
        return self._strategy(messages[starts[-1] :], rng), rng

    def _new_stream(self) -> random.Random:
        return random.Random(derive_seed("reference player", self._seed, next(self._conversations)))


def said_by_game(messages: Sequence[Message]) -> str:
    """Join what the game said."""
    return "\n".join(message["content"] for message in messages if message["role"] != "assistant")


def rounds(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Pair each answer of the agent with what the game said after it."""
    return [
        (one["content"], following["content"])
        for one, following in itertools.pairwise(messages)
        if one["role"] == "assistant"
    ]
