"""Scripted players: a reference for evaluation, and a demonstrator for imitation.

They read the admissible commands and the game file's walkthrough from the environment's state, so they must run in the
environment's process, without a pool or in threads.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from agentsgym.agents import scripted_player
from agentsgym.envs.ALFWorld.env import GO, ALFWorldEnv
from agentsgym.envs.shared.text_worlds import WorldPlayer
from agentsgym.errors import AgentError
from agentsgym.fields import is_fraction, require
from agentsgym.types import TurnRequest

_LOOKS = ("look", "inventory", "examine ")


@dataclass(slots=True, kw_only=True)
class Notes(scripted_player.Notes):
    """A player's memory of one episode.

    Attributes:
        remaining: The remaining commands of the walkthrough.
        place: The command that brought the player to its current place; empty at the start.
    """

    remaining: list[str] = field(default_factory=list[str])
    place: str = ""


class ReferencePlayer(WorldPlayer):
    """Follows the walkthrough in the game file.

    It raises :class:`~agentsgym.errors.AgentError` if there is no walkthrough, or if it cannot be followed.
    """

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator)

    def _choose(self, state: dict[str, Any], notes: Any) -> str:
        if state["num_commands"] == 0:
            notes.remaining, notes.place = [*state["first_response"]["walkthrough"]], ""
            if not notes.remaining:
                raise AgentError(
                    f"the game {state['task']['game']} has no walkthrough to follow: choose games that have one"
                )
        if not notes.remaining:
            raise AgentError("the walkthrough of the game ended without solving the task")
        command = self._next(state, notes)
        notes.place = command if command.startswith(GO) else notes.place
        return command

    def _next(self, state: dict[str, Any], notes: Notes) -> str:
        if notes.remaining[0] not in state["response"]["admissible"]:
            raise AgentError(f"the next command of the walkthrough, {notes.remaining[0]!r}, is not admissible now")
        return notes.remaining.pop(0)


class ImitationPlayer(ReferencePlayer):
    """The demonstrator for a warm start, which follows the walkthrough with occasional looks around and detours.

    Args:
        env: The environment.
        seed: The seed of every conversation's random stream.
        noise: The probability of such a turn, in [0, 1], as far as the turn limit allows: a look or, equally likely, a
            detour to another place and back.
    """

    def __init__(self, env: ALFWorldEnv, seed: int = 0, *, noise: float = 0.2) -> None:
        super().__init__(env, seed)
        require("noise", noise, is_fraction, "a number in [0, 1]")
        self._noise = noise

    def _next(self, state: dict[str, Any], notes: Notes) -> str:
        spare = self._num_turns - state["num_commands"] - len(notes.remaining)
        if spare >= 2 and notes.generator.random() < self._noise:
            commands: list[str] = state["response"]["admissible"]
            places = [command for command in commands if command.startswith(GO) and command != notes.remaining[0]]
            looks = [command for command in commands if command.startswith(_LOOKS)]
            # At the start there is no place to return to, so the player makes no detour.
            if notes.place and places and notes.generator.random() < 0.5:
                if not notes.remaining[0].startswith(GO):
                    notes.remaining.insert(0, notes.place)
                return notes.generator.choice(places)
            return notes.generator.choice(looks)
        return super()._next(state, notes)
