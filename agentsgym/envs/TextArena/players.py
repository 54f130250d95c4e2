"""The other players of a game: players of random or first legal moves, and any agents, by name or as objects."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

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
_MAX_TRIALS = 300  # moves tried per source of moves
_MAX_WORDS = 500  # the same for word games
_registered: dict[str, Callable[..., Any]] = {}


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


class AgentPlayer:
    """Lets an agent play a seat, in a separate conversation, with exact tokens if there is a tokenizer.

    Args:
        agent: The agent.
        session_id: The conversation's id.
        rng: The generator that seeds each of the agent's conversations, and the agent if it is a :class:`SeededAgent`.
        chat_format: The tokenizer's chat format; None to exchange only text.
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
        """Return the agent's action without its reasoning, which remains in its conversation.

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
            raise EnvError(f"{name}, which plays {self._session_id}, failed: {action}") from action
        text: Any = getattr(action, "text", None)
        if not isinstance(text, str) or len(text) > MAX_CHARACTERS:
            given = f"{len(text)} characters" if isinstance(text, str) else shown(text)
            limit = f"at most {MAX_CHARACTERS} characters of text"
            raise EnvError(f"{name}, which plays {self._session_id}, must return {limit}, got {given}")
        transcript.act(action)
        self._conversation.agent_state = action.agent_state
        return strip_reasoning(text)

    def finish(self) -> None:
        """Notify the agent that the episode is over, if it was created for this player only."""
        if self._is_own:
            self._agent.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> AgentPlayer:
        return self


#: The player of one seat of one session.
Player = LegalPlayer | AgentPlayer


class LegalAgent(Agent):
    """A baseline that plays random legal moves in a :class:`~agentsgym.envs.TextArena.TextArenaEnv`.

    Conversations are numbered in the order in which they start, and each has a separate random stream.

    Args:
        env: The environment, on copies of whose games moves are tried; it must run in this process.
        seed: The seed of the random streams.
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
    """Register an agent under a name, by which ``env_config`` and dataset rows can refer to an opponent or gamemaster.

    Args:
        name: The name; ``"random"``, ``"first"`` and ``"self"`` are reserved.
        factory: The function that creates the agent, once per environment and process; register it in every process. A
            factory with a parameter ``seed`` is called for every seat of every episode, with a seed that is the same
            for all rollouts of a task, so that the play of a random agent does not depend on other episodes.

    Raises:
        ConfigError: The name is reserved or invalid, or the factory is not callable.
    """
    if name in ("random", "first", SELF) or not name:
        raise ConfigError(
            f"the name of a player must be a non-empty string other than 'random', 'first' and 'self', got "
            f"{shown(name)}"
        )
    if not callable(factory):
        raise ConfigError(f"register_player requires a function that returns an agent, got {shown(factory)}")
    _registered[name] = factory


def is_player_name(value: Any) -> bool:
    """Whether a value is a name, or names by seat such as ``{"1": "random"}``."""
    if isinstance(value, Mapping):
        return all(str(seat).isdecimal() and isinstance(one, str) for seat, one in value.items())  # pyright: ignore
    return isinstance(value, str)


@dataclass(frozen=True, slots=True)
class SeededAgent:
    """An agent that is created for each conversation by a factory with a ``seed`` parameter.

    Attributes:
        name: The registered name, by which another process looks up the factory.
        key: The configuration key, for error messages.
    """

    name: str
    key: str

    def made(self, seed: int) -> Agent:
        """Create the agent.

        Raises:
            ConfigError: The name is not registered in this process.
        """
        return as_agent(_factory(self.name, self.key)(seed=seed))


def named_agent(name: str, key: str) -> Agent | SeededAgent:
    """Create the agent registered under a name, or return a :class:`SeededAgent` if its factory accepts a seed.

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
    """Return the players of the other seats by seat; the key None stands for all seats.

    Raises:
        ConfigError: A seat is not a number.
    """
    if not isinstance(given, Mapping):
        return {None: given}
    seats = cast("Mapping[Any, Any]", given)
    for seat in seats:
        if not (is_int(0)(seat) or str(seat).isdecimal()):
            raise ConfigError(f"an opponent's seat must be an int, got {shown(seat)}")
    return {int(seat): one for seat, one in seats.items()}
