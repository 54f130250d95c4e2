"""Players of text worlds: a random one, one that follows the solution, one that demonstrates it to a learner.

They use more than the conversation: they read the session's state in the environment, so they run in its process, in
line or in threads.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from agentsgym.agents.scripted_player import Notes, NotesT, ScriptedPlayer
from agentsgym.errors import AgentError
from agentsgym.types import TurnRequest

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv

_LOOK = "look"
_HARMLESS = {"go", "examine", "look", "inventory", "open", "close"}  # reversible, and never fails the task


class WorldPlayer(ScriptedPlayer[NotesT]):
    """Chooses a command based on the session's state.

    Args:
        env: The environment.
        seed: The seed of every conversation's random stream.
    """

    def __init__(self, env: MultistepEnv, seed: int = 0) -> None:
        super().__init__(env, seed)
        self._env = env

    def _state(self, request: TurnRequest) -> dict[str, Any]:
        """Return the state of a session.

        Raises:
            AgentError: The session belongs to another process, or to another environment.
        """
        state = self._env.active_states.get(request.session_id)
        if state is None:
            raise AgentError(
                f"{type(self).__name__} reads the state of its session in the environment, but {request.session_id} "
                "is not being played there: use it without a pool or with an EnvThreadPool, in the environment it "
                "was created for"
            )
        return state


class _Player(WorldPlayer[Notes]):
    """A player without notes beyond the random stream."""

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator)

    def _play(self, request: TurnRequest, notes: Notes) -> str:
        return self._choose(self._state(request), notes.generator)

    def _choose(self, state: dict[str, Any], stream: random.Random) -> str:
        raise NotImplementedError


class RandomPlayer(_Player):
    """Picks each possible command with equal probability."""

    def _choose(self, state: dict[str, Any], stream: random.Random) -> str:
        return stream.choice(state["answer"]["admissible"] or [_LOOK])


class ReferencePlayer(_Player):
    """Follows the walkthrough; off it, the winning commands that the engine provides, if any."""

    def _choose(self, state: dict[str, Any], stream: random.Random) -> str:
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

    def _choose(self, state: dict[str, Any], stream: random.Random) -> str:
        answer = state["answer"]
        harmless = [command for command in answer["admissible"] if command.split()[0] in _HARMLESS]
        if answer["policy"] and harmless and stream.random() < self._noise:
            return stream.choice(harmless)
        return super()._choose(state, stream)
