"""The players of random or first legal moves, as opponents and as agents."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from agentsgym.agents.base import Agent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.contract import State
from agentsgym.envs.TextArena.games import PlayedGame
from agentsgym.envs.TextArena.moves import example_moves, filled_moves, listed_moves, usual_moves
from agentsgym.seeding import derive_seed
from agentsgym.types import Action, Message, TurnRequest

_MAX_TRIALS = 300  # moves tried per source of moves
_MAX_WORDS = 500  # the same for word games


class LegalPlayer:
    """Plays a legal move from the game's rules, a list, an example, or a common format, after trying it on a copy.

    Args:
        rng: The generator that shuffles the candidates; if None, the first legal one in a fixed order is played.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng
        self._seen: list[str] = []

    def answer(self, observation: str, game: PlayedGame) -> str:
        """Return a legal move; if none is found, the first candidate."""
        self._seen = [move for move in dict.fromkeys([*self._seen, *example_moves(observation)]) if move.strip("[] ")][
            -200:
        ]
        words = [f"[{word}]" for word in game.words()]
        last = [*words, *self._seen] if words else [*usual_moves()]
        known = game.moves_by_rules(random.Random(0) if self._rng is None else self._rng)
        groups = [known, listed_moves(observation), [*self._seen], filled_moves(self._seen), last]
        for moves in groups:
            if self._rng is not None:
                self._rng.shuffle(moves)
            for move in moves[: _MAX_WORDS if words else _MAX_TRIALS]:
                if game.is_legal(move):
                    return move
        return next((moves[0] for moves in groups if moves), "[pass]")

    def act(self, messages: list[Message], state: State) -> Action:
        """Make the move of an opponent."""
        return Action(text=self.answer(messages[-1]["content"], state["game"]))


class LegalAgent(Agent):
    """A baseline that plays random legal moves in a :class:`~agentsgym.envs.TextArena.TextArenaEnv`.

    Conversations are numbered in the order in which they start, and each has a separate random stream.

    Args:
        env: The environment, on copies of whose games moves are tried; it must run in this process.
        seed: The seed of the random streams.
    """

    def __init__(self, env: MultistepEnv, *, seed: int = 0) -> None:
        self._env, self._seed = env, seed
        self._conversations = itertools.count()

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Return a legal move for each session."""
        actions: list[Action] = []
        for request in requests:
            player: LegalPlayer = request.agent_state
            if player is None:  # pyright: ignore[reportUnnecessaryComparison]  # before the first turn
                player = LegalPlayer(random.Random(derive_seed("legal agent", self._seed, next(self._conversations))))
            game: PlayedGame = self._env.active_states[request.session_id]["game"]
            actions.append(Action(text=player.answer(request.messages[-1]["content"], game), agent_state=player))
        return actions
