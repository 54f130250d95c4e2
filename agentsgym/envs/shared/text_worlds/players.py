"""Players of text worlds: a random player, one that follows the solution, and one that demonstrates it for imitation.

They read the session's state in the environment in addition to the conversation, so they must run in the environment's
process, without a pool or in threads.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from agentsgym.agents.scripted_player import Notes, ScriptedPlayer
from agentsgym.errors import AgentError
from agentsgym.types import TurnRequest

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv

_LOOK = "look"
_HARMLESS = {"go", "examine", "look", "inventory", "open", "close"}  # reversible, and cannot fail the task


class WorldPlayer(ScriptedPlayer[Notes]):
    """Chooses a command based on the session's state."""

    def __init__(self, env: MultistepEnv, seed: int = 0) -> None:
        super().__init__(env, seed)
        self._env = env

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator)

    def _play(self, request: TurnRequest, notes: Notes) -> str:
        state = self._env.active_states.get(request.session_id)
        if state is None:
            raise AgentError(
                f"{type(self).__name__} needs the environment's state of session {request.session_id}, but that "
                "session is not active in the environment that the player was created for: play in that environment, "
                "without a pool or with an EnvThreadPool"
            )
        return self._choose(state, notes)

    @abstractmethod
    def _choose(self, state: dict[str, Any], notes: Notes) -> str:
        """Choose a command."""


class RandomPlayer(WorldPlayer):
    """Picks each admissible command with equal probability."""

    def _choose(self, state: dict[str, Any], notes: Notes) -> str:
        return notes.generator.choice(state["response"]["admissible"] or [_LOOK])


class ReferencePlayer(WorldPlayer):
    """Follows the walkthrough and, after leaving it, the winning commands that the engine provides, if any."""

    def _choose(self, state: dict[str, Any], notes: Notes) -> str:
        num_followed: int | None = state["num_followed"]
        walkthrough: list[str] = state["first_response"]["walkthrough"]
        if num_followed is not None and num_followed < len(walkthrough):
            return walkthrough[num_followed]
        policy: list[str] = state["response"]["policy"]
        return policy[0] if policy else _LOOK


class ImitationPlayer(ReferencePlayer):
    """Follows the walkthrough, with occasional other, harmless commands if the engine provides the way back.

    Args:
        env: The environment.
        seed: The seed of every conversation's random stream.
        noise: The probability of another command per turn, in [0, 1].
    """

    def __init__(self, env: MultistepEnv, seed: int = 0, *, noise: float = 0.1) -> None:
        super().__init__(env, seed)
        self._noise = noise

    def _choose(self, state: dict[str, Any], notes: Notes) -> str:
        response = state["response"]
        harmless = [command for command in response["admissible"] if command.split()[0] in _HARMLESS]
        if response["policy"] and harmless and notes.generator.random() < self._noise:
            return notes.generator.choice(harmless)
        return super()._choose(state, notes)
