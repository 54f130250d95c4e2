"""An environment whose agent is a program: the policy answers the calls that the program makes."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agentsgym.envs.AgentProgram import SPEC
from agentsgym.envs.AgentProgram.exchange import CallExchange
from agentsgym.envs.AgentProgram.programs import (
    Endpoint,
    Program,
    ProgramOutcome,
    RunningCommand,
    RunningFunction,
    check_command,
)
from agentsgym.envs.AgentProgram.server import current_endpoint
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.config import COMMON_FIELDS
from agentsgym.envs.contract import State, Stepped
from agentsgym.envs.conversation import chat_format_of
from agentsgym.envs.dataset_rows import TaskData
from agentsgym.errors import ConfigError
from agentsgym.fields import Field, is_int, is_number, is_strings, or_none, require
from agentsgym.texts import shown
from agentsgym.tokens.branches import prompt_ids
from agentsgym.tokens.transcript import ChatFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Grade = Callable[[dict[str, Any], ProgramOutcome], Any]
"""A function of the task and the outcome: returns a reward, or a reward and an ``info``."""


class AgentProgramEnv(MultistepEnv):
    """A program that calls the policy through an OpenAI-compatible endpoint; each call is a turn.

    The program is a function or coroutine function of the task and an :class:`~.programs.Endpoint`, or the arguments of
    a command, which finds the endpoint in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``. It is passed in, or a subclass
    sets ``program`` to a command or defines it as a method. A rollout is what it calls until it ends: a tree of exact
    segments, which the turn layout trains. Rewards come from :meth:`_grade`, which the last turn receives, and from the
    program itself, for any call, by :meth:`Endpoint.reward`, ``POST /v1/reward`` or the header ``x-agentsgym-reward``.

    ``info`` counts the calls so far: ``num_calls``, ``num_conversations`` (calls that began a conversation),
    ``num_rejected_calls`` and ``num_undelivered_calls`` (answered after the program had stopped waiting).

    Attributes:
        program: The program, if the class sets it.

    Keys of ``env_config`` in addition to the common ones:

    - ``reward_timeout_s``: how long to wait after the program's end for rewards that arrive late, until the program
      sends ``{"final": true}``.
    - ``max_cpu_s``, ``max_memory_mb``: limits of each process of a command; Linux only.
    """

    spec = SPEC
    program: Any = None
    exchange_class = CallExchange
    never_called: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("_system_prompt", "_format_prompt", "_step_action", "_step_episode"),
        "the turns are the calls of the program, whose outcome _grade rewards",
    )
    default_config: ClassVar[Mapping[str, Any]] = {"max_steps_per_episode": 100}
    config_fields: ClassVar[Mapping[str, Field]] = {
        "reward_timeout_s": Field(default=0.0, expected="a number of at least 0", valid=is_number(0)),
        "max_cpu_s": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
        "max_memory_mb": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
    }

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        env_config: dict[str, Any] | None = None,
        *,
        program: Program | None = None,
        grade: Grade | None = None,
    ) -> None:
        """Check the program; nothing is started.

        Args:
            tokenizer: The tokenizer, as for :class:`MultistepEnv`.
            env_config: The common keys and those of this class.
            program: The program; by default, the class's.
            grade: The reward of an outcome; by default, :meth:`_grade` of the class.

        Raises:
            ConfigError: The program is missing, or a key is invalid.
            MissingDependencyError: The packages of the extra ``programs`` are not installed.
        """
        SPEC.check_installed()
        super().__init__(tokenizer, env_config)
        given: Any = self.program if program is None else program
        if not (callable(given) or (is_strings(given) and given)):
            raise ConfigError(
                f"{type(self).__name__} needs a program: a function of the task and the endpoint, or the arguments of "
                f"a command such as ['python', 'agent.py', '{{question}}'], got {shown(given)}"
            )
        if inspect.isgeneratorfunction(given) or inspect.isasyncgenfunction(given):
            raise ConfigError(f"the program {shown(given)} is a generator function, which would not be run: use return")
        if not callable(given):
            check_command(given)
        self._program: Program = given
        require("grade", grade, or_none(callable), "a function of the task and the outcome")
        self._grade_given = grade
        cpu_s, memory_mb = self.env_config["max_cpu_s"], self.env_config["max_memory_mb"]
        if (cpu_s or memory_mb) and sys.platform != "linux":
            raise ConfigError("env_config['max_cpu_s'] and env_config['max_memory_mb'] require Linux")
        self._limits = {"RLIMIT_CPU": cpu_s, "RLIMIT_AS": memory_mb and memory_mb * 2**20}
        self.env_config["history"] = "calls"
        self._formats: dict[str, ChatFormat | None] = {}

    def _check_config(self, config: dict[str, Any]) -> None:
        for key in ("episodes_per_trial", "system_prompt", "history", "error_allowance"):
            own = COMMON_FIELDS[key].default
            wanted = f"{own!r}, since the program writes its prompts and decides when it ends"
            require(f"env_config[{key!r}]", config[key], lambda given, own=own: given in (own, ""), wanted)

    def __getstate__(self) -> dict[str, Any]:
        """Omit the chat formats, which another process makes itself."""
        return {**super().__getstate__(), "_formats": {}}

    def check_task(self, task_data: TaskData, name: str = "task_data") -> None:
        """Raise :class:`TaskError` also for a task that lacks a key that the command names."""
        super().check_task(task_data, name)
        if not callable(self._program):
            check_command(self._program, {"seed": 0, **task_data})

    # Overridden by subclasses where needed

    def _prepare_folder(self, folder: Path, task_data: dict[str, Any]) -> None:
        """Write what a command finds in its working folder, besides ``task.json``; by default, nothing."""

    def _grade(self, task_data: dict[str, Any], outcome: ProgramOutcome) -> Any:
        """Return the reward of an outcome, a number or a dict by name, or a tuple of it and an ``info``.

        By default, a function returns its reward in this form, or None for 0, and a command is solved with exit code 0.
        May be a coroutine.
        """
        if outcome.exit_code is not None:
            return float(outcome.exit_code == 0), {"success": outcome.exit_code == 0}
        return 0.0 if outcome.output is None else outcome.output

    # Hooks of MultistepEnv

    async def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        server = await current_endpoint()
        session = server.open()
        endpoint = Endpoint(
            base_url=f"{server.url}/v1", api_key=session.key, session=session, loop=asyncio.get_running_loop()
        )
        try:
            running = await self._started(task_data, endpoint)
        except BaseException:
            server.forget(session)
            raise
        session.num_tokens = lambda call: len(prompt_ids(self._format_with(call.tools), call.messages))
        running.outcome.add_done_callback(lambda _: session.ended())
        counts = {"num_rejected": 0, "num_undelivered": 0}
        return {"done": False, "server": server, "session": session, "running": running, **counts}

    async def _started(self, task_data: dict[str, Any], endpoint: Endpoint) -> RunningFunction | RunningCommand:
        if callable(self._program):
            return RunningFunction(self._program, task_data, endpoint)
        return await RunningCommand.start(
            self._program, task_data, endpoint, limits=self._limits, prepare=self._prepare_folder
        )

    def _format_prompt(self, state: State, step: int) -> str:
        raise NotImplementedError("the prompts are the calls of the program")

    def _step_episode(self, session_id: str, state: State, action: str) -> Stepped:
        raise NotImplementedError("the answers go to the program")

    async def _close_episode(self, session_id: str, state: State) -> None:
        session, running = state["session"], state["running"]
        session.close("the episode is over")
        try:
            await running.stop()
        finally:
            running.outcome.exception()  # it has been reported, or the episode failed before
            running.clean_up()
            state["server"].forget(session)

    # Called by CallExchange

    def _format_with(self, tools: Sequence[Mapping[str, Any]]) -> ChatFormat | None:
        """The chat format with the tools of one call."""
        key = json.dumps([*tools], sort_keys=True)
        if key not in self._formats:
            self._formats[key] = chat_format_of(self.tokenizer, self.env_config, tools)
        return self._formats[key]

    async def _graded(self, task_data: dict[str, Any], outcome: ProgramOutcome) -> tuple[str, Any]:
        """Grade the outcome: the name of what graded it, and the grade, which is not checked yet."""
        given: Any = (self._grade_given or self._grade)(task_data, outcome)
        is_own = self._grade_given is not None or type(self)._grade is not AgentProgramEnv._grade
        return "the grade" if is_own else "the program", await given if inspect.isawaitable(given) else given
