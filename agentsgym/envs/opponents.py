"""Let others play the roles that the agent does not play, each in a separate conversation that is not trained on.

::

    Trial._turn ─▶ _step_episode(the agent's action) ─▶ Table.follow: until it is the agent's turn again,
                   _format_prompt ─▶ the opponent ─▶ _step_episode(its action)

With ``env_config["opponent"] = "self"`` the agent plays every role instead, and each role has its own view of the game.
"""

from __future__ import annotations

import inspect
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from agentsgym.agents.base import Agent, as_agent
from agentsgym.credit.components import Reward, sum_components
from agentsgym.envs.boundary import (
    Step,
    action_error,
    as_hashable,
    as_messages,
    as_step,
    call_environment,
    system_messages,
)
from agentsgym.envs.contract import PlayableEnv, State
from agentsgym.envs.conversation import Conversation
from agentsgym.errors import AgentError, ConfigError, EnvError, did_you_mean
from agentsgym.fields import is_dict, is_str, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown
from agentsgym.tokens.calls.reader import read_answer
from agentsgym.tokens.transcript import ChatFormat
from agentsgym.types import Action, Message, TurnRequest

# pyright: reportPrivateUsage=false
# The hooks are private for users of an environment; opponents move through them.

SELF = "self"
MAX_CHARACTERS = 20_000
MAX_MOVES = 1000
MAX_STARTS = 10  # attempts to start an episode that does not end before the agent's first turn
_registered: dict[str, Callable[..., Any]] = {}
Player = Agent | Callable[[int], Agent]
"""An agent, or a function that creates one for each conversation from a seed."""


def register_player(name: str, factory: Callable[..., Any]) -> None:
    """Register an agent under a name, by which ``env_config`` and dataset rows can refer to an opponent or gamemaster.

    Args:
        name: The name; ``"random"``, ``"first"`` and ``"self"`` are reserved.
        factory: The function that creates the agent, once per environment and process; register it in every process. A
            factory with a parameter ``seed`` is called for every role of every episode, with a seed that is the same
            for all rollouts of a task, so that the play of a random agent does not depend on other episodes.

    Raises:
        ConfigError: The name is reserved or invalid, or the factory is not callable.
    """
    wanted = "a non-empty string other than 'random', 'first' and 'self'"
    require("the name of a player", name, lambda it: it and it not in ("random", "first", SELF), wanted)
    require("register_player(factory)", factory, callable, "a function that returns an agent")
    _registered[name] = factory


def is_player_name(value: Any) -> bool:
    """Whether a value is a name, or names by role such as ``{"1": "random"}``."""
    return is_str(value) or (is_dict(value) and all(map(is_str, value.values())))


def named_agent(name: Any, key: str, own_names: Collection[str] = ()) -> Player:
    """Create the agent registered under a name, or return a function that does if its factory accepts a seed.

    Args:
        name: The name; an agent is returned as it is.
        key: The key of ``env_config``, for the error.
        own_names: The names of the environment's own players, for the error.

    Raises:
        ConfigError: The name is not registered (for the function: in the process that calls it).
    """
    if not isinstance(name, str):
        return as_agent(name)
    factory = _factory(name, key, own_names)
    try:
        takes_seed = "seed" in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a function implemented in C
        takes_seed = False
    return partial(_seeded_agent, name, key) if takes_seed else as_agent(factory())


def _seeded_agent(name: str, key: str, seed: int) -> Agent:
    return as_agent(_factory(name, key)(seed=seed))  # by its name, since not every factory can be pickled


def _factory(name: str, key: str, own_names: Collection[str] = ()) -> Callable[..., Any]:
    if name not in _registered:
        raise ConfigError(
            f"{key} {shown(name)} is not registered{did_you_mean(name, [*own_names, SELF, *_registered])}"
            " (agentsgym.envs.opponents.register_player adds one)"
        )
    return _registered[name]


class AgentPlayer:
    """Lets an agent play a role, in a separate conversation, with exact tokens if there is a tokenizer.

    Args:
        agent: The agent.
        session_id: The conversation's id.
        rng: The generator that seeds each of the agent's conversations, and the agent if it is created for them.
        chat_format: The tokenizer's chat format; None to exchange only text.
        tools: The JSON schemas of the tools that the agent may call.
        remembers: Whether the conversation continues from one observation to the next.
        is_strict: Whether a call that needs a repair is malformed.
    """

    def __init__(  # noqa: PLR0913  # keywords, most of them usually omitted
        self,
        agent: Player,
        session_id: str,
        rng: random.Random,
        chat_format: ChatFormat | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        remembers: bool = True,
        is_strict: bool = False,
    ) -> None:
        self._is_own = not isinstance(agent, Agent)
        self._agent = agent if isinstance(agent, Agent) else agent(rng.getrandbits(63))
        self._session_id, self._rng, self._chat_format = session_id, rng, chat_format
        self._tools, self._remembers, self._is_strict = tools, remembers, is_strict
        self._begin()

    def _begin(self) -> None:
        self._conversation = Conversation(self._chat_format, "append")
        self._seed = self._rng.getrandbits(63)

    def answer(self, observation: str | list[Message]) -> str:
        """Return the text of the agent's action without its reasoning, which remains in its conversation.

        Raises:
            EnvError: The agent raised, returned no action, or returned more than ``MAX_CHARACTERS`` characters.
        """
        return self.act(as_messages(observation)).text

    def act(self, messages: list[Message], state: State | None = None) -> Action:
        """Return the agent's action, with its tool calls parsed; otherwise like :meth:`answer`."""
        if not self._remembers:
            self._begin()
        transcript = self._conversation.transcript
        transcript.observe(messages)
        request = TurnRequest(
            session_id=self._session_id,
            messages=transcript.messages,
            token_ids=transcript.token_ids,
            agent_state=self._conversation.agent_state,
            seed=self._seed,
            tools=self._tools,
        )
        name = f"{type(self._agent).__name__}, which plays {self._session_id},"
        answers: Any = call_environment(self._agent.act, [request])
        is_one = type(answers) in (list, tuple) and len(answers) == 1
        action: Any = answers[0] if is_one else answers
        if isinstance(action, AgentError):
            raise EnvError(f"{name} failed: {action}") from action
        text: Any = getattr(action, "text", None)
        if not isinstance(text, str) or len(text) > MAX_CHARACTERS:
            given = f"{len(text)} characters" if isinstance(text, str) else shown(text)
            raise EnvError(f"{name} must return at most {MAX_CHARACTERS} characters of text, got {given}")
        size = math.inf if self._chat_format is None else self._chat_format.vocabulary_size
        if error := action_error(action, None, size):
            raise EnvError(f"{name} failed: {error}")
        action = read_answer(action, self._chat_format, self._tools or None, is_strict=self._is_strict)
        transcript.act(action)
        self._conversation.agent_state = action.agent_state
        return action

    def finish(self) -> None:
        """Notify the agent that the episode is over, if it was created for this player only."""
        if self._is_own:
            self._agent.finish()


Move = Callable[[list[Message], State], Action]
"""An opponent: the new messages for its role and the state, to its action."""


class Opponents:
    """The opponents of an environment, by role.

    Attributes:
        roles: The environment's roles.
        is_self: Whether the agent plays every role.
    """

    def __init__(self, given: Any, roles: Sequence[Hashable], own_names: Collection[str]) -> None:
        """Parse ``env_config["opponent"]``, or the argument ``opponent``.

        Raises:
            ConfigError: There is a single role, a role or a name is unknown, or ``"self"`` is given for one role.
        """
        self.roles = roles
        self._players = {role: _parsed(one, own_names) for role, one in _by_role(given, roles).items()}
        self.is_self = SELF in self._players.values()
        is_valid = not self.is_self or {*self._players} == {None}
        require("env_config['opponent']", given, lambda _: is_valid, "only 'self' for the agent to play every role")

    @property
    def roles_of_agent(self) -> list[Hashable]:
        """The roles that the agent can play, since every other one has a player."""
        return [role for role in self.roles if all(self.player(one) is not None for one in self.roles if one != role)]

    def player(self, role: Hashable) -> Player | str | None:
        """The player of a role; None if there is none."""
        return self._players.get(role, self._players.get(None))

    @property
    def players(self) -> list[Player | str]:
        """Who plays the roles."""
        return [*self._players.values()]

    def names(self, role: Hashable) -> bool:
        """Whether a player was given for this very role."""
        return role in self._players

    def check_role(self, role: Any, name: str, error: type[Exception]) -> None:
        """Check that the agent can play a role, None if it is drawn: every other role needs a player.

        Args:
            role: The role.
            name: The name of the value in the error.
            error: The class of the error.
        """
        if role is not None and role not in self.roles:
            raise error(f"{name} must be one of {_listed(self.roles)}, or None to draw it, got {shown(role)}")
        possible = self.roles_of_agent
        if role in possible or (role is None and possible):
            return
        missing = [one for one in self.roles if one != role and self.player(one) is None]
        agents = "the agent's, which is drawn" if role is None else f"the agent's, {shown(role)}"
        raise error(
            f"env_config['opponent'] must name a player for every role but {agents}: got none for {_listed(missing)}"
        )

    def finish(self) -> None:
        """Notify the agents among the players, each once."""
        for agent in {id(one): one for one in self._players.values() if isinstance(one, Agent)}.values():
            agent.finish()


def opponents_of(env: Any, given: Any) -> Opponents | None:
    """Create the opponents of an environment; None if there are none, or only one role.

    Args:
        env: The environment, whose configuration is checked.
        given: The argument ``opponent``; None for ``env_config["opponent"]``.
    """
    config = env.env_config
    field = env.config_fields.get("opponent")
    is_default = given is None and config["opponent"] == (field and field.default)  # also in games for one player
    given = config["opponent"] if given is None else given
    if given is None:
        return None
    found = Opponents(given, env.roles, env.own_opponents)
    if len(found.roles) < 2 and not is_default:
        raise ConfigError(f"{type(env).__name__} has a single role here, and no opponent can play: omit {shown(given)}")
    if len(found.roles) < 2:
        return None
    if not found.is_self:
        found.check_role(config.get(env.role_key), f"env_config[{env.role_key!r}]", ConfigError)
    return found


def _by_role(given: Any, roles: Sequence[Hashable]) -> dict[Hashable | None, Any]:
    """Return players by role; the key None stands for all roles. Roles may be given as their text, as in JSON."""
    if not roles:
        raise ConfigError(
            "env_config['opponent'] requires an environment with several roles: list them in the class attribute "
            "'roles', and return the one that moves from _role"
        )
    if not isinstance(given, Mapping):
        return {None: given}
    known = {str(role): role for role in roles}
    players = cast("Mapping[Any, Any]", given)
    for key in players:
        require("the role of an opponent", key, lambda it: str(it) in known, f"one of {_listed(roles)}")
    return {known[str(key)]: one for key, one in players.items()}


def _parsed(one: Any, own_names: Collection[str]) -> Player | str:
    is_own = isinstance(one, str) and (one == SELF or one in own_names)
    return one if is_own else named_agent(one, "env_config['opponent']", own_names)


def _listed(roles: Sequence[Hashable]) -> str:
    return ", ".join(map(shown, roles))


def player_stream(rng: random.Random, name: str) -> random.Random:
    """Draw a generator for a player from that of its session."""
    return random.Random(derive_seed(name, rng.getrandbits(63)))


class Table:
    """The players of one session: the agent in one role, opponents in the others, with their ``num_moves``."""

    def __init__(self, env: PlayableEnv, session_id: str, role: Hashable) -> None:
        self._env, self._session_id, self._role = env, session_id, role
        self._opponents = cast("Opponents", env.opponents)
        self._moves: dict[Hashable, Move] = {}
        self._own: list[AgentPlayer] = []
        self.num_moves = Counter[Hashable]()
        self._totals = Counter[Hashable]()
        self._earned: list[Reward] = []  # by the agent's role, and not yet part of a turn

    def _move_of(self, role: Hashable, rng: random.Random) -> Move:
        env, player = self._env, self._opponents.player(role)
        if isinstance(player, str):
            return env._own_opponent(player, rng)
        name = f"{self._session_id}/player {role}"
        is_strict = env.env_config["tool_calls"] == "strict"
        given = cast("Player", player)
        seated = AgentPlayer(given, name, rng, env.chat_format, tools=env.tool_schemas, is_strict=is_strict)
        self._own.append(seated)
        return seated.act

    def begin(self, state: State, rng: random.Random) -> tuple[State, bool]:
        """Seat the opponents, and let them move until it is the agent's turn.

        Returns:
            The state, and whether the episode is over.
        """
        for role in self._opponents.roles:
            if role != self._role:
                self._moves[role] = self._move_of(role, player_stream(rng, self._env.opponent_stream))
        state, step, _ = self._until_the_agent(state, Step(), {})
        return state, step.done

    def follow(self, state: State, step: Step, info: dict[str, Any]) -> tuple[State, Step, dict[str, Any]]:
        """Let the opponents move after the agent's step until it is the agent's turn again, or the episode is over.

        Returns:
            The state, and the agent's step and ``info``, to which the opponents' moves added rewards of the agent's
            role, the end of the episode, and ``info["success"]``. With different rewards, the role with the highest
            has won; otherwise the environment's ``info["success"]`` counts, and without it, nobody has won.
        """
        is_invalid = step.invalid
        state, step, found = self._until_the_agent(state, step, info)
        found.pop("rewards", None)
        if step.done:
            own, best = self._totals[self._role], max(self._totals[role] for role in self._moves)
            found["success"] = own > best if own != best else bool(found.get("success"))
        earned, self._earned = self._earned, []
        reward, components = float(sum(number for number, _ in earned)), sum_components(earned)
        return state, Step(reward, step.done, is_invalid, truncated=step.truncated, components=components), found

    def _until_the_agent(self, state: State, step: Step, info: dict[str, Any]) -> tuple[State, Step, dict[str, Any]]:
        found = dict(info)
        self._note(step, self._role)
        for _ in range(MAX_MOVES):
            role = self._role if step.done else as_hashable("_role", call_environment(self._env._role, state))
            if role == self._role:
                return state, step, found
            if role not in self._moves:
                raise EnvError(f"_role must return one of {_listed([self._role, *self._moves])}, got {shown(role)}")
            state, step, latest = self._moved(role, state)
            self._note(step, role)
            found |= {key: value for key, value in latest.items() if key != "invalid"}
        state["done"] = found["truncated"] = True
        return state, step._replace(done=True, truncated=True), found

    def _moved(self, role: Hashable, state: State) -> tuple[State, Step, dict[str, Any]]:
        env = self._env
        messages = as_messages(call_environment(env._format_prompt, state, self.num_moves[role]))
        if not self.num_moves[role]:
            messages = [*system_messages(env), *messages]
        self.num_moves[role] += 1
        action = call_environment(self._moves[role], messages, state)
        hook, given = (env._step_action, action) if env.overrides_step_action else (env._step_episode, action.text)
        state, step, info = as_step(call_environment(hook, self._session_id, state, given), hook.__name__)
        env.active_states[self._session_id] = state
        return state, step, info

    def _note(self, step: Step, role: Hashable) -> None:
        """Add up the rewards of a step, a plain number as the reward of the role that moved."""
        by_role, named = step.role_rewards, step.role_components or {}
        if by_role is None:
            by_role, named = {role: step.reward}, {role: step.components}
        if unknown := [one for one in by_role if one not in self._opponents.roles]:
            known = _listed(self._opponents.roles)
            raise EnvError(f"the roles in _step_episode's info['rewards'] must be {known}, got {shown(unknown[0])}")
        self._totals.update(by_role)
        own = by_role.get(self._role, 0.0), named.get(self._role)
        if any(own):
            self._earned.append(own)

    def finish(self, is_last: bool) -> None:
        """Notify the agents that were created for this session that it is over; after the last session, all agents."""
        for player in self._own:
            player.finish()
        if is_last:
            self._opponents.finish()
