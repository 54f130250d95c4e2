"""Players to learn from and to measure against.

They read the engine's state, which the environment holds: the admissible commands, and the walkthrough of the game
file. They therefore run in the environment's process, in line or in threads.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from agentsgym.agents import scripted_player
from agentsgym.envs.ALFWorld.env import GO, ALFWorldEnv
from agentsgym.envs.shared.text_worlds.players import WorldPlayer
from agentsgym.errors import AgentError
from agentsgym.fields import is_fraction, require
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


class ReferencePlayer(WorldPlayer):
    """Follows the walkthrough in the game file.

    A game without one raises :class:`~agentsgym.errors.AgentError`, as does a walkthrough that cannot be followed.
    """

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator)

    def _choose(self, state: dict[str, Any], notes: Any) -> str:
        if state["num_commands"] == 0:
            notes.left, notes.place = [*state["first"]["walkthrough"]], ""
            if not notes.left:
                raise AgentError(
                    f"the game {state['task']['game']} has no walkthrough to follow: play games that have one"
                )
        if not notes.left:
            raise AgentError("the walkthrough of the game ended without solving the task")
        command = self._next(state, notes)
        notes.place = command if command.startswith(GO) else notes.place
        return command

    def _next(self, state: dict[str, Any], notes: Notes) -> str:
        if notes.left[0] not in state["answer"]["admissible"]:
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

    def _next(self, state: dict[str, Any], notes: Notes) -> str:
        spare = self._num_turns - state["num_commands"] - len(notes.left)
        if spare >= 2 and notes.generator.random() < self._noise:
            commands: list[str] = state["answer"]["admissible"]
            places = [one for one in commands if one.startswith(GO) and one != notes.left[0]]
            looks = [one for one in commands if one.startswith(_LOOKS)]
            # Without a place to return to, as at the start, the player cannot leave.
            if notes.place and places and notes.generator.random() < 0.5:
                if not notes.left[0].startswith(GO):
                    notes.left.insert(0, notes.place)
                return notes.generator.choice(places)
            return notes.generator.choice(looks)
        return super()._next(state, notes)
