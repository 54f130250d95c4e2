"""Players of text worlds: a random one, one that follows the solution, one that demonstrates it to a learner.

They use more than the conversation: they read the session's state in the environment, so they run in its process, in
line or in threads.
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
_HARMLESS = {"go", "examine", "look", "inventory", "open", "close"}  # reversible, and never fails the task


class WorldPlayer(ScriptedPlayer[Notes]):
    """Chooses a command based on the session's state.

    Args:
        env: The environment.
        seed: The seed of every conversation's random stream.
    """

    def __init__(self, env: MultistepEnv, seed: int = 0) -> None:
        super().__init__(env, seed)
        self._env = env

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator)

    def _play(self, request: TurnRequest, notes: Notes) -> str:
        state = self._env.active_states.get(request.session_id)
        if state is None:
            raise AgentError(
                f"{type(self).__name__} reads the state of its session in the environment, but {request.session_id} "
                "is not being played there: use it without a pool or with an EnvThreadPool, in the environment it "
                "was created for"
            )
        return self._choose(state, notes)

    @abstractmethod
    def _choose(self, state: dict[str, Any], notes: Notes) -> str:
        """Choose a command."""


class RandomPlayer(WorldPlayer):
    """Picks each possible command with equal probability."""

    def _choose(self, state: dict[str, Any], notes: Notes) -> str:
        return notes.generator.choice(state["answer"]["admissible"] or [_LOOK])


class ReferencePlayer(WorldPlayer):
    """Follows the walkthrough; off it, the winning commands that the engine provides, if any."""

    def _choose(self, state: dict[str, Any], notes: Notes) -> str:
        followed: int | None = state["followed"]
        walkthrough: list[str] = state["first"]["walkthrough"]
        if followed is not None and followed < len(walkthrough):
            return walkthrough[followed]
        policy: list[str] = state["answer"]["policy"]
        return policy[0] if policy else _LOOK


class ImitationPlayer(ReferencePlayer):
    """Follows the walkthrough, with occasional harmless other commands if the engine knows the way back.

    Args:
        env: The environment.
        seed: The seed of every conversation's random stream.
        noise: The probability of another command, in [0, 1].
    """

    def __init__(self, env: MultistepEnv, seed: int = 0, *, noise: float = 0.1) -> None:
        super().__init__(env, seed)
        self._noise = noise

    def _choose(self, state: dict[str, Any], notes: Notes) -> str:
        answer = state["answer"]
        harmless = [command for command in answer["admissible"] if command.split()[0] in _HARMLESS]
        if answer["policy"] and harmless and notes.generator.random() < self._noise:
            return notes.generator.choice(harmless)
        return super()._choose(state, notes)
