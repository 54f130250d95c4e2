"""Players to learn from and to measure against.

They read the engine's state, which the environment holds: the admissible commands, and the walkthrough of the game
file. They therefore run in the environment's process, in line or in threads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentsgym.agents import scripted_player
from agentsgym.envs.ALFWorld.engine import read_game
from agentsgym.envs.ALFWorld.env import GO, ALFWorldEnv
from agentsgym.envs.ALFWorld.games import game_file
from agentsgym.envs.shared.text_worlds.players import WorldPlayer
from agentsgym.errors import AgentError, TaskError
from agentsgym.fields import is_fraction, is_strings, require
from agentsgym.texts import sentence_of
from agentsgym.types import TurnRequest

_LOOKS = ("look", "inventory", "examine ")


@dataclass(slots=True, kw_only=True)
class Notes(scripted_player.Notes):
    """A player's memory of one episode.

    Attributes:
        left: The remaining commands.
        place: The command that brought the player to its place; empty at the start.
    """

    left: list[str] = field(default_factory=list[str])
    place: str = ""


class _Player(WorldPlayer[Notes]):
    """A player of households; subclasses choose the actions.

    Args:
        env: The environment.
        seed: The seed of every conversation's random stream.
    """

    def __init__(self, env: ALFWorldEnv, seed: int = 0) -> None:
        super().__init__(env, seed)
        self._data = env.data

    def _is_new_episode(self, request: TurnRequest) -> bool:
        return self._state(request)["num_steps"] == 0

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator)

    def _play(self, request: TurnRequest, notes: Notes) -> str:
        command = self._choose(notes, self._state(request)["seen"]["commands"])
        notes.place = command if command.startswith(GO) else notes.place
        return command

    def _choose(self, notes: Notes, commands: Sequence[str]) -> str:
        raise NotImplementedError


class RandomPlayer(_Player):
    """Picks each admissible command with equal probability."""

    def _choose(self, notes: Notes, commands: Sequence[str]) -> str:
        return notes.generator.choice(commands)


class ReferencePlayer(_Player):
    """Follows the walkthrough in the game file.

    A game without one raises :class:`~agentsgym.errors.AgentError`, as does a walkthrough that cannot be followed.
    """

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator, left=self._walkthrough(self._state(request)["game"]))

    def _walkthrough(self, path: str) -> list[str]:
        try:
            walkthrough = read_game(game_file(self._data, path)).get("walkthrough")
        except (TaskError, ValueError) as error:
            raise AgentError(sentence_of(error)) from error
        if not (is_strings(walkthrough) and walkthrough):
            raise AgentError(f"the game {path} has no walkthrough to follow: play games that have one")
        return list(walkthrough)

    def _choose(self, notes: Notes, commands: Sequence[str]) -> str:
        if not notes.left:
            raise AgentError("the walkthrough of the game ended without solving the task")
        if notes.left[0] not in commands:
            raise AgentError(f"the next command of the walkthrough, {notes.left[0]!r}, is not possible here")
        return notes.left.pop(0)


class ImitationPlayer(ReferencePlayer):
    """The demonstrator of a warm start: it follows the walkthrough, and occasionally looks around or makes a detour.

    Args:
        env: The environment.
        seed: The seed of every conversation's random stream.
        noise: The share of such turns, in [0, 1], as far as the turn limit allows; half of these are looks, half are
            detours to another place and back.
    """

    def __init__(self, env: ALFWorldEnv, seed: int = 0, *, noise: float = 0.2) -> None:
        super().__init__(env, seed)
        require("noise", noise, is_fraction, "a number in [0, 1]")
        self._noise = noise

    def _choose(self, notes: Notes, commands: Sequence[str]) -> str:
        spare = self._num_turns - notes.turn - len(notes.left)
        if notes.left and spare >= 2 and notes.generator.random() < self._noise:
            places = [one for one in commands if one.startswith(GO) and one != notes.left[0]]
            looks = [one for one in commands if one.startswith(_LOOKS)]
            # Without a place to return to, as at the start, the player cannot leave.
            if notes.place and places and notes.generator.random() < 0.5:
                if not notes.left[0].startswith(GO):
                    notes.left.insert(0, notes.place)
                return notes.generator.choice(places)
            return notes.generator.choice(looks)
        return super()._choose(notes, commands)
