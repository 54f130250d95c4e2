"""The common base of environments over text-world engines: sessions in processes, prompts, commands, rewards."""

from __future__ import annotations

import re
import uuid
from abc import abstractmethod
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.contract import State
from agentsgym.envs.shared.engines import EngineProcesses, shared_processes
from agentsgym.envs.shared.numbers import without_thoughts
from agentsgym.fields import Field, is_int, is_positive_number

NEW_GAME = "A new game begins.\n\n"
NO_COMMAND = "You said no command. Answer with one command in one line."
_SECONDS = "a positive number of seconds"
MOST_CHARS = 200  # in a command
_TAGGED = re.compile(r"<action>(.*?)(?:</action>|$)", re.S | re.I)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_command(text: str) -> str | None:
    r"""Return the command in the agent's text; None if there is none.

    Thoughts are ignored. The last ``<action>…</action>``, which the end of the text may close, takes precedence;
    otherwise the last line that is not empty after removing a leading prompt sign and surrounding quotes, stars,
    brackets and a full stop; spaces are single. Unprintable characters count as spaces: an interpreter may stop at a
    NUL.

    >>> read_command("I will try.\n> go east."), read_command("<action>open  door</action>"), read_command("<think>Hm")
    ('go east', 'open door', None)
    """
    text = without_thoughts(text)
    tagged = _TAGGED.findall(text)
    for line in reversed((tagged[-1] if tagged else text).splitlines()):
        printable = "".join(char if char.isprintable() else " " for char in line)
        command = " ".join(printable.split()).lstrip("> \"'`*[]").rstrip(". \"'`*[]")
        if command:
            return command if len(command) <= MOST_CHARS else None
    return None


def listed(commands: list[str]) -> str:
    """Format the admissible commands for a prompt.

    >>> listed(["go east", "look"])
    'Possible commands: go east, look'
    """
    return "Possible commands: " + ", ".join(commands)


def process_fields(num_processes: int) -> dict[str, Field]:
    """Return the keys of ``env_config`` that configure the engine's processes, with the given default number."""
    return {
        "num_processes": Field(default=num_processes, expected="a positive int", valid=is_int(1)),
        "step_timeout_s": Field(default=60.0, expected=_SECONDS, valid=is_positive_number),
        "start_timeout_s": Field(default=180.0, expected=_SECONDS, valid=is_positive_number),
    }


class TextWorldBase(MultistepEnv):
    """An environment whose episodes run in an engine, in a separate process.

    An engine's responses have ``text``, ``admissible`` (the admissible commands; empty if they are not listed),
    ``won``, ``lost``, ``score``, ``progress`` (1 when won; None if unknown), ``policy`` (commands that win from here,
    if known) and ``key``; that of ``start`` also ``walkthrough``, that of ``step`` ``understood``. An environment whose
    engine gives no ``score`` or ``policy`` overrides what reads them: the step, or the players.

    Attributes:
        engine: The engine's class, as ``"module:Class"``.
    """

    engine: ClassVar[str]

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None = None, env_config: dict[str, Any] | None = None
    ) -> None:
        """Check the configuration; no engine is started yet. Arguments as for every environment.

        Raises:
            ConfigError: As for every environment.
            MissingDependencyError: The engine is not installed.
        """
        super().__init__(tokenizer, env_config)
        self.spec.check_installed()
        self._name = uuid.uuid4().hex

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_name": uuid.uuid4().hex})

    def _in_engine(self, session_id: str) -> str:
        """Return a session id that is unique among all environments that share the processes."""
        return f"{self._name} {session_id}"

    def _processes(self) -> EngineProcesses:
        keys = ("num_processes", "step_timeout_s", "start_timeout_s")
        return shared_processes(self.engine, **{key: self.env_config[key] for key in keys}, **self._process_limits())

    def _process_limits(self) -> dict[str, Any]:
        """Return further arguments of :func:`~agentsgym.envs.shared.engines.shared_processes`."""
        return {}

    @abstractmethod
    def _game_of(self, task_data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the engine's description of a task's game."""

    def _refusal(self, state: State, command: str) -> str | None:
        """Return why a command is not passed to the engine; None if it is."""
        return None

    def _return(self, answer: Mapping[str, Any]) -> float:
        """The return so far, from 0 on; a turn's reward is its increase."""
        return answer["score"]

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        self._check_task(task_data)
        game = self._game_of(task_data)
        answer = self._processes().begin(self._in_engine(session_id), game)
        return {
            "task": task_data,
            "first": answer,
            "answer": answer,
            "return": 0.0,
            "followed": 0,
            "num_commands": 0,
            "shown": self._shown(answer),
            "done": False,
        }

    def _shown(self, answer: Mapping[str, Any]) -> str:
        """Return what the agent sees of a response: its text and the admissible commands."""
        if not (self.env_config["admissible_commands"] and answer["admissible"]):
            return answer["text"]
        return f"{answer['text']}\n\n{listed(answer['admissible'])}"

    def _format_prompt(self, state: State, step: int) -> str:
        config = self.env_config
        is_next = step == 0 and config["keep_history"] and config["episodes_per_trial"] > 1
        return f"{NEW_GAME}{state['shown']}" if is_next else state["shown"]

    def _run(self, session_id: str, state: State, command: str) -> State:
        """Run a command in the engine and return the next state."""
        answer = self._processes().step(self._in_engine(session_id), command)
        # The number of walkthrough commands followed so far; None after a command off the walkthrough.
        followed: int | None = state["followed"]
        if followed is not None:
            if [command] == state["first"]["walkthrough"][followed : followed + 1]:
                followed += 1
            elif answer["key"] != state["answer"]["key"]:
                followed = None
        return {
            **state,
            "answer": answer,
            "followed": followed,
            "num_commands": state["num_commands"] + 1,
            "shown": "" if answer["won"] or answer["lost"] else self._shown(answer),
        }

    def _step_episode(self, session_id: str, state: State, action: str) -> tuple[State, float, bool, dict[str, Any]]:
        command = read_command(action)
        refusal = NO_COMMAND if command is None else self._refusal(state, command)
        if command is None or refusal is not None:
            next_state: State = {**state, "shown": self._shown({**state["answer"], "text": refusal})}
        else:
            next_state = self._run(session_id, state, command)
            next_state["return"] = self._return(next_state["answer"])
        answer: Mapping[str, Any] = next_state["answer"]
        info: dict[str, Any] = {"success": bool(answer["won"]), "score": answer["score"]}
        if refusal is None:
            info["command"] = command
        if refusal is not None or not answer["understood"]:
            info["invalid"] = True
        done = bool(answer["won"] or answer["lost"])
        return next_state, next_state["return"] - state["return"], done, info

    def _state_key(self, state: State) -> Hashable:
        """The facts of the world and the score, hashed: equal keys imply that the same remains to be done."""
        return state["answer"]["key"]

    def _potential(self, state: State) -> float | None:
        """The progress: 1 at the end of a won episode."""
        return state["answer"]["progress"]

    def _close_episode(self, session_id: str, state: State) -> None:
        self._processes().end(self._in_engine(session_id))
