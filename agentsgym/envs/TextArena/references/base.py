"""The base class of references, and the player that follows a reference's strategy."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentsgym.agents.base import Agent
from agentsgym.envs.spec import Anchors
from agentsgym.errors import AgentError
from agentsgym.fields import is_int, or_none, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown
from agentsgym.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of a game.

    Attributes:
        game: The base id, such as ``"GuessTheNumber-v0"``.
        options: The arguments of the game's constructor.
        max_steps: The agent's maximum number of turns, at least 1.
        seat: The agent's seat in a multiplayer game; None if it is drawn.
    """

    game: str
    options: Mapping[str, Any]
    max_steps: int
    seat: int | None = None

    def turns(self, game_limit: int) -> int:
        """Return the number of turns if the game itself has a limit, which it checks before it counts the turn."""
        return min(self.max_steps, game_limit + 1)


class Reference(ABC):
    """The exact values of a game under its rules, and the players that achieve them on average.

    A reference can be called with a task, as ``evaluate(…, references=reference)`` does.
    """

    opening = ""  # text that occurs in the first prompt of every game of this kind
    num_seats = 1

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._seat(rules.seat)

    @abstractmethod
    def anchors(self, seat: int | None = None) -> Anchors:
        """Return the mean rewards of random and optimal play in a seat, by default the seat in the rules.

        Random play, including that of the other seats, picks each legal move with equal probability.
        """

    @abstractmethod
    def choose(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Choose the best move."""

    @abstractmethod
    def choose_randomly(self, messages: Sequence[Message], rng: random.Random) -> str:
        """Choose a random legal move."""

    def __call__(self, task_data: Mapping[str, Any]) -> Anchors:
        """Return the anchors of a task."""
        return self.anchors(self._seat(task_data.get("seat")))

    def _seat(self, seat: int | None) -> int | None:
        """Check and return a seat, by default the seat in the rules.

        Raises:
            ConfigError: The game does not have this seat.
        """
        seat = self.rules.seat if seat is None else seat
        is_seat = or_none(lambda value: is_int(0)(value) and value < self.num_seats)
        require("seat", seat, is_seat, f"an int in [0, {self.num_seats}) or None for {self.rules.game}")
        return seat

    def optimal_player(self, seed: int = 0) -> ReferencePlayer:
        """Create the optimal player."""
        return ReferencePlayer(self.choose, self.opening, seed=seed)

    def random_player(self, seed: int = 0) -> ReferencePlayer:
        """Create a player of random legal moves."""
        return ReferencePlayer(self.choose_randomly, self.opening, seed=seed)


class ReferencePlayer(Agent):
    """Plays by a strategy that reads only the conversation.

    Conversations are numbered in the order in which they start, and each has a separate random stream, so a new player
    with the same seed plays the same games even if they are interleaved differently.

    Args:
        strategy: The function that chooses a move, given the messages of one game from its first prompt on, and a
            random generator.
        opening: Text in a game's first prompt, by which the games of one conversation are separated.
        seed: The seed of the random streams.
    """

    def __init__(
        self, strategy: Callable[[Sequence[Message], random.Random], str], opening: str, *, seed: int = 0
    ) -> None:
        self._strategy = strategy
        self._opening = opening
        self._seed = seed
        self._conversations = itertools.count()

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Choose a move in the last game of the conversation; ``agent_state`` is the conversation's random stream."""
        rng = agent_state
        if rng is None:
            rng = random.Random(derive_seed("reference player", self._seed, next(self._conversations)))
        starts = [
            index
            for index, message in enumerate(messages)
            if message["role"] != "assistant" and self._opening in message["content"]
        ]
        if not starts:
            raise AgentError(f"this player requires a prompt that contains {self._opening!r}, got {shown(messages[0])}")
        return self._strategy(messages[starts[-1] :], rng), rng


def game_text(messages: Sequence[Message]) -> str:
    """Join the game's messages."""
    return "\n".join(message["content"] for message in messages if message["role"] != "assistant")


def rounds(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Pair each action of the agent with the game's message after it."""
    return [
        (message["content"], following["content"])
        for message, following in itertools.pairwise(messages)
        if message["role"] == "assistant"
    ]
