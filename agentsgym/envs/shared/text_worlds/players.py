"""Players of text worlds: one that leaves it to chance, one that knows the way, one that shows it to a learner.

They know more than the conversation: they read the state of their session in the environment, so that they play where
it lives, in line or in threads.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentsgym.agents.base import Agent
from agentsgym.errors import AgentError
from agentsgym.seeding import derive_seed
from agentsgym.types import Action, TurnRequest

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv

_LOOK = "look"
_HARMLESS = {"go", "examine", "look", "inventory", "open", "close"}  # what can be undone, and loses no game


class _Player(Agent):
    """Chooses a command by the state of the session.

    Args:
        env: The environment that is played.
        seed: Makes the random stream of every conversation.
    """

    def __init__(self, env: MultistepEnv, seed: int = 0) -> None:
        self._env = env
        self._seed = seed
        self._conversations = itertools.count()

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Answer each session; ``agent_state`` is the conversation's random stream.

        Raises:
            AgentError: A session lives in another process, or in another environment.
        """
        return [self._play(request) for request in requests]

    def _play(self, request: TurnRequest) -> Action:
        stream: random.Random = request.agent_state or self._new_stream()
        state = self._env.active_states.get(request.session_id)
        if state is None:
            raise AgentError(
                f"{type(self).__name__} reads the state of its session in the environment, and {request.session_id} is "
                "not in play there: let it play in line or with an EnvThreadPool, in the environment it was made for"
            )
        return Action(text=self._choose(state, stream), agent_state=stream)

    def _new_stream(self) -> random.Random:
        return random.Random(derive_seed(type(self).__name__, self._seed, next(self._conversations)))

    def _choose(self, state: dict[str, Any], stream: random.Random) -> str:
        raise NotImplementedError


class RandomPlayer(_Player):
    """Gives one of the possible commands, each equally likely."""

    def _choose(self, state: dict[str, Any], stream: random.Random) -> str:
        return stream.choice(state["answer"]["admissible"] or [_LOOK])


class ReferencePlayer(_Player):
    """Follows the walkthrough; off it, the commands that the engine knows to win, where it knows them."""

    def _choose(self, state: dict[str, Any], stream: random.Random) -> str:
        followed: int | None = state["followed"]
        walkthrough: list[str] = state["first"]["walkthrough"]
        if followed is not None and followed < len(walkthrough):
            return walkthrough[followed]
        policy: list[str] = state["answer"]["policy"]
        return policy[0] if policy else _LOOK


class ImitationPlayer(ReferencePlayer):
    """Follows the walkthrough, and now and then does another harmless thing, where the engine knows the way back.

    Args:
        env: The environment that is played.
        seed: Makes the random stream of every conversation.
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
