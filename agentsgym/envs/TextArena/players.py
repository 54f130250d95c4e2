"""The other players of a game: random or first legal moves, and agents of any kind, by name or as objects."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentsgym.agents.base import Agent, as_agent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.conversation import Conversation
from agentsgym.envs.shared.numbers import strip_reasoning
from agentsgym.envs.TextArena.games import PlayedGame
from agentsgym.envs.TextArena.moves import example_moves, filled_moves, listed_moves, usual_moves
from agentsgym.errors import AgentError, ConfigError, EnvError, did_you_mean
from agentsgym.fields import is_int
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown
from agentsgym.tokens.transcript import ChatFormat
from agentsgym.types import Action, TurnRequest

SELF = "self"
MAX_CHARACTERS = 20_000
_MOST_TRIALS = 300
_MOST_WORDS = 500
_registered: dict[str, Callable[..., Any]] = {}


class LegalPlayer:
    """Plays a legal move, tried on a copy: from the game's rules, a list, an example, or a common format.

    Args:
        rng: The generator that draws among equally likely candidates; None takes the first legal one of a fixed order.
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
        known = game.known_moves(random.Random(0) if self._rng is None else self._rng)
        groups = [known, listed_moves(observation), [*self._seen], filled_moves(self._seen), last]
        for moves in groups:
            if self._rng is not None:
                self._rng.shuffle(moves)
            for move in moves[: _MOST_WORDS if words else _MOST_TRIALS]:
                if game.is_legal(move):
                    return move
        return next((moves[0] for moves in groups if moves), "[pass]")


class AgentPlayer:
    """Lets an agent play a seat, in a separate conversation, with exact tokens if there is a tokenizer.

    Args:
        agent: The agent.
        session_id: The conversation's id.
        rng: The generator that seeds the agent's draws, conversation by conversation; a :class:`SeededAgent` is made
            with it.
        chat_format: The tokenizer's chat format; None for text alone.
        remembers: Whether the conversation continues from one observation to the next.
    """

    def __init__(
        self,
        agent: Agent | SeededAgent,
        session_id: str,
        rng: random.Random,
        chat_format: ChatFormat | None = None,
        *,
        remembers: bool = True,
    ) -> None:
        self._is_own = isinstance(agent, SeededAgent)
        self._agent = agent.made(rng.getrandbits(63)) if isinstance(agent, SeededAgent) else agent
        self._session_id = session_id
        self._rng = rng
        self._chat_format = chat_format
        self._remembers = remembers
        self._begin()

    def _begin(self) -> None:
        self._conversation = Conversation(self._chat_format, "append")
        self._seed = self._rng.getrandbits(63)

    def answer(self, observation: str, game: PlayedGame | None = None) -> str:
        """Return the agent's action without its thoughts, which stay in its conversation.

        Raises:
            EnvError: The agent raised, returned no action, or returned more than ``MAX_CHARACTERS`` characters.
        """
        if not self._remembers:
            self._begin()
        transcript = self._conversation.transcript
        transcript.observe([{"role": "user", "content": observation}])
        request = TurnRequest(
            session_id=self._session_id,
            messages=transcript.messages,
            token_ids=transcript.token_ids,
            agent_state=self._conversation.agent_state,
            seed=self._seed,
        )
        [action] = self._agent.act([request])
        name = type(self._agent).__name__
        if isinstance(action, AgentError):
            raise EnvError(f"{self._session_id}, played by {name}, failed: {action}") from action
        text: Any = getattr(action, "text", None)
        if not isinstance(text, str) or len(text) > MAX_CHARACTERS:
            given = f"{len(text)} characters" if isinstance(text, str) else shown(text)
            raise EnvError(
                f"{self._session_id}, played by {name}, must answer in at most {MAX_CHARACTERS} characters, got {given}"
            )
        transcript.act(action)
        self._conversation.agent_state = action.agent_state
        return strip_reasoning(text)

    def finish(self) -> None:
        """Notify an agent that was made for this player alone that the episode is over."""
        if self._is_own:
            self._agent.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> AgentPlayer:
        return self


#: The player of one seat of one session.
Player = LegalPlayer | AgentPlayer


class LegalAgent(Agent):
    """Plays random legal moves as the agent of a :class:`~agentsgym.envs.TextArena.TextArenaEnv`: a baseline.

    Conversations are numbered in the order in which they start, and each has a separate random stream.

    Args:
        env: The environment, on whose games moves are tried; it must run in this process.
        seed: The seed of the streams.
    """

    def __init__(self, env: MultistepEnv, *, seed: int = 0) -> None:
        self._env = env
        self._seed = seed
        self._num_conversations = 0

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Return a legal move for each session."""
        actions: list[Action] = []
        for request in requests:
            player: LegalPlayer | None = request.agent_state
            if player is None:
                stream = random.Random(derive_seed("legal agent", self._seed, self._num_conversations))
                self._num_conversations += 1
                player = LegalPlayer(stream)
            game: PlayedGame = self._env.active_states[request.session_id]["game"]
            actions.append(Action(text=player.answer(request.messages[-1]["content"], game), agent_state=player))
        return actions


def register_player(name: str, factory: Callable[..., Any]) -> None:
    """Register an agent that ``env_config`` can name as an opponent or a gamemaster, so that dataset rows can hold it.

    Args:
        name: The name; ``"random"``, ``"first"`` and ``"self"`` are reserved.
        factory: The function that makes the agent, once per environment and process; register it in every process. A
            factory with a parameter ``seed`` is called for every seat of every episode, with a number that is the same
            for all rollouts of a task, so that an agent that draws plays the same way whatever else is played.

    Raises:
        ConfigError: The name is reserved or invalid, or the factory is not callable.
    """
    if name in ("random", "first", SELF) or not name:
        raise ConfigError(f"the name of a player must be a new, non-empty string, got {shown(name)}")
    if not callable(factory):  # pyright: ignore[reportUnnecessaryComparison]
        raise ConfigError(f"register_player requires a function that returns an agent, got {shown(factory)}")
    _registered[name] = factory


def is_player_name(value: Any) -> bool:
    """Whether a value is a name, or names by seat such as ``{"1": "random"}``."""
    if isinstance(value, Mapping):
        return all(str(seat).isdecimal() and isinstance(one, str) for seat, one in value.items())  # pyright: ignore
    return isinstance(value, str)


@dataclass(frozen=True, slots=True)
class SeededAgent:
    """An agent that is made for each conversation, by a factory that takes a seed.

    Attributes:
        name: The registered name, which is all that a pickle contains.
        key: The configuration key, for messages.
    """

    name: str
    key: str

    def made(self, seed: int) -> Agent:
        """Make the agent.

        Raises:
            ConfigError: The name is not registered in this process.
        """
        return as_agent(_factory(self.name, self.key)(seed=seed))


def named_agent(name: str, key: str) -> Agent | SeededAgent:
    """Make the agent that is registered under a name, or return a :class:`SeededAgent` if its factory takes a seed.

    Raises:
        ConfigError: The name is not registered.
    """
    factory = _factory(name, key)
    try:
        takes_seed = "seed" in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a function implemented in C
        takes_seed = False
    return SeededAgent(name, key) if takes_seed else as_agent(factory())


def _factory(name: str, key: str) -> Callable[..., Any]:
    if name not in _registered:
        raise ConfigError(
            f"{key} {shown(name)} is not registered{did_you_mean(name, ['random', 'first', SELF, *_registered])}"
            " (agentsgym.envs.TextArena.register_player adds one)"
        )
    return _registered[name]


def by_seat(given: Any) -> dict[int | None, Any]:
    """Parse the players of the other seats: one for all (key None), or one per seat.

    Raises:
        ConfigError: A seat is not a number.
    """
    if not isinstance(given, Mapping):
        return {None: given}
    seats: dict[int | None, Any] = {}
    for seat, one in given.items():  # pyright: ignore[reportUnknownVariableType]
        if not (is_int(0)(seat) or str(seat).isdecimal()):  # pyright: ignore[reportUnknownArgumentType]
            raise ConfigError(f"an opponent's seat must be an int, got {shown(seat)}")  # pyright: ignore[reportUnknownArgumentType]
        seats[int(seat)] = one  # pyright: ignore[reportUnknownArgumentType]
    return seats
