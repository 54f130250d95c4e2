"""Players to learn from and to measure against.

They look at the game itself, which the environment holds: what is admissible, and the walkthrough of the game file. So
they play where the environment does, in line or in threads.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentsgym.agents.base import Agent
from agentsgym.envs.ALFWorld.engine import read_game
from agentsgym.envs.ALFWorld.env import ALFWorldEnv
from agentsgym.envs.ALFWorld.games import game_file
from agentsgym.errors import AgentError, TaskError
from agentsgym.fields import is_fraction, is_strings, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of
from agentsgym.types import Action, TurnRequest

_GO = "go to "
_LOOKS = ("look", "inventory", "examine ")


@dataclass(slots=True, kw_only=True)
class Notes:
    """A player's memory of one episode.

    Attributes:
        generator: The conversation's random stream.
        left: The commands that are still to be given.
        place: How the player came to where it is; empty at the start.
        turn: Index of the turn.
    """

    generator: random.Random
    left: list[str] = field(default_factory=list[str])
    place: str = ""
    turn: int = 0


class _Player(Agent):
    """A player of households; subclasses choose what to do.

    Args:
        env: The environment whose games are played.
        seed: Makes the random stream of every conversation.
    """

    def __init__(self, env: ALFWorldEnv, seed: int = 0) -> None:
        self._env = env
        self._num_turns: int = env.env_config["max_steps_per_episode"]
        self._seed = seed
        self._conversations = itertools.count()

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Answer each session; its ``agent_state`` is a :class:`Notes`."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: TurnRequest) -> Action | AgentError:
        state = self._env.active_states.get(request.session_id)
        if state is None:
            return AgentError(
                f"{type(self).__name__} looks at the game itself, which this process does not hold: play without a "
                "pool of processes"
            )
        notes: Notes | None = request.agent_state
        try:
            if notes is None or state["num_steps"] == 0:
                notes = self._begin(state, notes.generator if notes else self._new_stream())
            command = self._choose(notes, state["seen"]["commands"])
        except AgentError as error:
            return error
        notes.turn += 1
        notes.place = command if command.startswith(_GO) else notes.place
        return Action(text=command, agent_state=notes)

    def _begin(self, state: Mapping[str, Any], generator: random.Random) -> Notes:
        """Take up a game: a new conversation's, or the next one of a trial."""
        return Notes(generator=generator)

    def _choose(self, notes: Notes, commands: Sequence[str]) -> str:
        raise NotImplementedError

    def _new_stream(self) -> random.Random:
        return random.Random(derive_seed(type(self).__name__, self._seed, next(self._conversations)))


class RandomPlayer(_Player):
    """Gives each command that the engine would take with equal probability."""

    def _choose(self, notes: Notes, commands: Sequence[str]) -> str:
        return notes.generator.choice(commands)


class ReferencePlayer(_Player):
    """Follows the walkthrough that stands in the game file.

    A game without one is an :class:`~agentsgym.errors.AgentError`, as is a walkthrough that cannot be followed.
    """

    def _begin(self, state: Mapping[str, Any], generator: random.Random) -> Notes:
        return Notes(generator=generator, left=self._walkthrough(state["game"]))

    def _walkthrough(self, path: str) -> list[str]:
        try:
            walkthrough = read_game(game_file(self._env.data, path)).get("walkthrough")
        except (TaskError, ValueError) as error:
            raise AgentError(sentence_of(error)) from error
        if not (is_strings(walkthrough) and walkthrough):
            raise AgentError(f"the game {path} has no walkthrough to follow: play games that have one")
        return list(walkthrough)

    def _choose(self, notes: Notes, commands: Sequence[str]) -> str:
        if not notes.left:
            raise AgentError("the walkthrough of the game is at its end, and the task is not solved")
        if notes.left[0] not in commands:
            raise AgentError(f"the walkthrough of the game goes on with {notes.left[0]!r}, which cannot be done here")
        return notes.left.pop(0)


class ImitationPlayer(ReferencePlayer):
    """The demonstrator of a warm start: it follows the walkthrough, and now and then looks around or makes a detour.

    Args:
        env: The environment whose games are played.
        seed: Makes the random stream of every conversation.
        noise: The share of turns in which it does so, in [0, 1], as far as the turns suffice; half of these are looks,
            half are detours to another place and back.
    """

    def __init__(self, env: ALFWorldEnv, seed: int = 0, *, noise: float = 0.2) -> None:
        super().__init__(env, seed)
        require("noise", noise, is_fraction, "a number in [0, 1]")
        self._noise = noise

    def _choose(self, notes: Notes, commands: Sequence[str]) -> str:
        spare = self._num_turns - notes.turn - len(notes.left)
        if notes.left and spare >= 2 and notes.generator.random() < self._noise:
            places = [one for one in commands if one.startswith(_GO) and one != notes.left[0]]
            looks = [one for one in commands if one.startswith(_LOOKS)]
            # Without a place to come back to, as at the start, there is none to leave.
            if notes.place and places and notes.generator.random() < 0.5:
                if not notes.left[0].startswith(_GO):
                    notes.left.insert(0, notes.place)
                return notes.generator.choice(places)
            return notes.generator.choice(looks)
        return super()._choose(notes, commands)
