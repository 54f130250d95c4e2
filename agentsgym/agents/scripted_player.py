"""The base class of rule-based players for one environment, which serve as baselines or as demonstrators."""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from agentsgym.agents.base import Agent
from agentsgym.errors import AgentError
from agentsgym.seeding import derive_seed
from agentsgym.types import Action, TurnRequest


@dataclass(slots=True, kw_only=True)
class Notes:
    """A player's memory of one episode.

    Attributes:
        generator: The conversation's random stream.
        turn: Index of the turn.
    """

    generator: random.Random
    turn: int = 0


NotesT = TypeVar("NotesT", bound=Notes)


class ScriptedPlayer(Agent, Generic[NotesT]):
    """The base class of agents that play one environment by fixed rules.

    Conversations are numbered in the order in which they start, and each has its own random stream: a new player with
    the same seed plays the same episodes, however they are interleaved.

    Args:
        env: The environment to play.
        seed: Seed of the conversations' random streams.
    """

    def __init__(self, env: Any, seed: int = 0) -> None:
        self._num_turns: int = env.env_config["max_steps_per_episode"]
        self._seed = seed
        self._conversations = itertools.count()

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Answer each session; its ``agent_state`` is the player's notes."""
        answers: list[Action | AgentError] = []
        for request in requests:
            notes: NotesT | None = request.agent_state
            try:
                if notes is None or self._is_new_episode(request):
                    notes = self._begin(request, self._new_stream() if notes is None else notes.generator)
                move = self._play(request, notes)
            except AgentError as error:
                answers.append(error)
                continue
            notes.turn += 1
            action = Action(text=move) if isinstance(move, str) else move
            answers.append(replace(action, agent_state=notes))
        return answers

    def _is_new_episode(self, request: TurnRequest) -> bool:
        """Whether this request starts another episode of an ongoing conversation, with its history kept."""
        return False

    @abstractmethod
    def _begin(self, request: TurnRequest, generator: random.Random) -> NotesT:
        """Create the notes for an episode."""

    @abstractmethod
    def _play(self, request: TurnRequest, notes: NotesT) -> str | Action:
        """Return the answer's text, or an action without ``agent_state``; an ``AgentError`` fails only this session."""

    def _new_stream(self) -> random.Random:
        return random.Random(derive_seed(type(self).__name__, self._seed, next(self._conversations)))
