"""The base class of environments that run a text-world engine in processes, and their players."""

from __future__ import annotations

import random
import re
import uuid
from abc import abstractmethod
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from agentsgym.agents.scripted_player import Notes, ScriptedPlayer
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.contract import State
from agentsgym.envs.shared.engines import EngineProcesses, shared_processes
from agentsgym.errors import AgentError
from agentsgym.fields import Field, is_int, is_seconds
from agentsgym.types import TurnRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEW_GAME = "A new game begins.\n\n"
NO_COMMAND = "You said no command. Answer with one command in one line."
_SECONDS = "a positive number of seconds"
MAX_COMMAND_CHARS = 200
_TAGGED = re.compile(r"<action>(.*?)(?:</action>|$)", re.S | re.I)


def read_command(text: str) -> str | None:
    r"""Return the command in the agent's text; None if there is none.

    The last ``<action>…</action>`` takes precedence; its closing tag may be missing. Otherwise it
    is the last line that is not empty after stripping a leading ``>``, surrounding quotes, asterisks and brackets, and
    a trailing period. Runs of whitespace become one space, and so do unprintable characters, since an interpreter may
    stop at a NUL. A command of more than 200 characters counts as none.

    >>> read_command("I will try.\n> go east."), read_command("<action>open  door</action>")
    ('go east', 'open door')
    """
    tagged = _TAGGED.findall(text)
    for line in reversed((tagged[-1] if tagged else text).splitlines()):
        printable = "".join(char if char.isprintable() else " " for char in line)
        command = " ".join(printable.split()).lstrip("> \"'`*[]").rstrip(". \"'`*[]")
        if command:
            return command if len(command) <= MAX_COMMAND_CHARS else None
    return None


def format_commands(commands: list[str]) -> str:
    """Format the admissible commands for a prompt.

    >>> format_commands(["go east", "look"])
    'Possible commands: go east, look'
    """
    return "Possible commands: " + ", ".join(commands)


def process_fields(num_processes: int) -> dict[str, Field]:
    """Return the keys of ``env_config`` that configure the engine's processes, with their default number."""
    return {
        "num_processes": Field(default=num_processes, expected="a positive int", valid=is_int(1)),
        "step_timeout_s": Field(default=60.0, expected=_SECONDS, valid=is_seconds),
        "start_timeout_s": Field(default=180.0, expected=_SECONDS, valid=is_seconds),
    }


class TextWorldBase(MultistepEnv):
    """An environment whose episodes run in an engine, in a separate process.

    An engine's responses have ``text``, ``admissible`` (the admissible commands; empty if they are not listed),
    ``won``, ``lost``, ``score``, ``progress`` (1 when won; None if unknown), ``policy`` (commands that win from here,
    if known) and ``key``. Responses to ``start`` also have ``walkthrough``; responses to ``step`` also have
    ``understood``. An environment whose engine does not report ``score`` or ``policy`` must override the methods that
    use them: ``_step_episode``, or the players' methods.

    Attributes:
        engine: The engine's class, as ``"module:Class"``.
    """

    engine: ClassVar[str]

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None = None, env_config: dict[str, Any] | None = None
    ) -> None:
        """Check the configuration; no engine is started yet. The arguments are those of every environment.

        Raises:
            ConfigError: The configuration is invalid, or the engine's data are missing.
            MissingDependencyError: The engine, or a program that it needs, is not installed.
        """
        super().__init__(tokenizer, env_config)
        self._name = uuid.uuid4().hex

    def _check_config(self, config: dict[str, Any]) -> None:
        self.spec.check_installed()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_name": uuid.uuid4().hex})

    def _engine_session_id(self, session_id: str) -> str:
        """Return an id that is unique among the sessions of all environments that share the processes."""
        return f"{self._name} {session_id}"

    def _processes(self) -> EngineProcesses:
        keys = ("num_processes", "step_timeout_s", "start_timeout_s")
        return shared_processes(self.engine, **{key: self.env_config[key] for key in keys}, **self._process_limits())

    def _process_limits(self) -> dict[str, Any]:
        """Return further arguments of :func:`~agentsgym.envs.shared.engines.shared_processes`."""
        return {}

    @abstractmethod
    def _engine_task(self, task_data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the engine's description of a task's game."""

    def _rejection_reason(self, state: State, command: str) -> str | None:
        """Return the reason for rejecting a command without passing it to the engine; None to accept it."""
        return None

    def _return(self, response: Mapping[str, Any]) -> float:
        """The cumulative return, starting at 0; a turn's reward is its increase."""
        return response["score"]

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        self._check_task(task_data)
        game = self._engine_task(task_data)
        response = self._processes().begin(self._engine_session_id(session_id), game)
        return {
            "task": task_data,
            "first_response": response,
            "response": response,
            "return": 0.0,
            "num_followed": 0,
            "num_commands": 0,
            "observation": self._observation(response),
            "done": False,
        }

    def _observation(self, response: Mapping[str, Any]) -> str:
        """Return the agent's view of a response: its text and the admissible commands."""
        if not (self.env_config["admissible_commands"] and response["admissible"]):
            return response["text"]
        return f"{response['text']}\n\n{format_commands(response['admissible'])}"

    def _format_prompt(self, state: State, step: int) -> str:
        config = self.env_config
        starts_episode = step == 0 and config["keep_history"] and config["episodes_per_trial"] > 1
        return f"{NEW_GAME}{state['observation']}" if starts_episode else state["observation"]

    def _run(self, session_id: str, state: State, command: str) -> State:
        """Run a command in the engine and return the next state."""
        response = self._processes().step(self._engine_session_id(session_id), command)
        # The number of walkthrough commands followed so far; None once a command has left the walkthrough.
        num_followed: int | None = state["num_followed"]
        if num_followed is not None:
            if [command] == state["first_response"]["walkthrough"][num_followed : num_followed + 1]:
                num_followed += 1
            elif response["key"] != state["response"]["key"]:
                num_followed = None
        return {
            **state,
            "response": response,
            "num_followed": num_followed,
            "num_commands": state["num_commands"] + 1,
            "observation": "" if response["won"] or response["lost"] else self._observation(response),
        }

    def _step_episode(self, session_id: str, state: State, action: str) -> tuple[State, float, bool, dict[str, Any]]:
        command = read_command(action)
        rejection = NO_COMMAND if command is None else self._rejection_reason(state, command)
        if command is None or rejection is not None:
            next_state: State = {**state, "observation": self._observation({**state["response"], "text": rejection})}
        else:
            next_state = self._run(session_id, state, command)
            next_state["return"] = self._return(next_state["response"])
        response: Mapping[str, Any] = next_state["response"]
        info: dict[str, Any] = {"success": bool(response["won"]), "score": response["score"]}
        if rejection is None:
            info["command"] = command
        if rejection is not None or not response["understood"]:
            info["invalid"] = True
        done = bool(response["won"] or response["lost"])
        return next_state, next_state["return"] - state["return"], done, info

    def _state_key(self, state: State) -> Hashable:
        """A hash of the world's facts and the score; states with equal keys have the same remaining task."""
        return state["response"]["key"]

    def _potential(self, state: State) -> float | None:
        """The progress: 1 at the end of a won episode."""
        return state["response"]["progress"]

    def _close_episode(self, session_id: str, state: State) -> None:
        self._processes().end(self._engine_session_id(session_id))


_LOOK = "look"
_HARMLESS = {"go", "examine", "look", "inventory", "open", "close"}  # reversible, and cannot fail the task


class WorldPlayer(ScriptedPlayer[Notes]):
    """Chooses a command based on the session's state, so it must run in the environment's process."""

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
