"""Run one program for an episode: a function in its own thread, or a command in its own process group and folder."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from agentsgym.credit.components import GivenReward
from agentsgym.envs.AgentProgram.server import MODEL
from agentsgym.envs.AgentProgram.session import Session
from agentsgym.event_loop import programs_loop
from agentsgym.processes import ProcessGroup

Program = Callable[[dict[str, Any], "Endpoint"], Any] | Sequence[str]
"""A function or coroutine function of the task and the endpoint, or the arguments of a command."""

_MAX_OUTPUT_BYTES: Final = 2**20
_TERMINATING_S: Final = 2.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a program finds the policy: what an OpenAI or Anthropic client needs.

    Attributes:
        base_url: The URL for OpenAI clients, which ends with ``/v1``.
        api_key: The key of this episode; valid until its end.
        model: The name of the model, which may be any text.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str = MODEL
    session: Session = field(repr=False)
    loop: asyncio.AbstractEventLoop = field(repr=False)

    def reward(self, value: GivenReward, call_id: str | None = None) -> None:
        """Reward a call; may be called from any thread of the program.

        Args:
            value: A number, or a dict of numbers by name.
            call_id: The id of the call, as in the response's ``id``; None for the call that was answered last.

        Raises:
            CallError: No call was answered yet, or none with this id.
        """

        async def add() -> None:
            self.session.add_reward(value, call_id)

        asyncio.run_coroutine_threadsafe(add(), self.loop).result()

    def environment(self) -> dict[str, str]:
        """The variables by which clients find the endpoint."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutcome:
    """What a program left, for its grade.

    Attributes:
        output: What the function returned, or the standard output of the command, at most 1 MiB of it; None if the
            program was ended.
        exit_code: The exit code of the command; None for a function.
        errors: The end of the command's standard error.
        folder: The command's working folder; None for a function.
        is_complete: Whether the program ended by itself, rather than because the episode was over.
    """

    output: Any = None
    exit_code: int | None = None
    errors: str = ""
    folder: Path | None = None
    is_complete: bool = True


class RunningFunction:
    """A function in a separate thread; a coroutine runs on an event loop that all programs of the process share.

    Many async clients stay bound to the loop on which they were first used, and some packages share one among all
    agents. A function that does not end cannot be killed: once the episode is over, its calls are rejected.

    Attributes:
        outcome: Its outcome, or the exception that ended it.
    """

    def __init__(self, function: Callable[..., Any], task_data: dict[str, Any], endpoint: Endpoint) -> None:
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[ProgramOutcome] = self._loop.create_future()
        self._cancel: Callable[[], Any] = lambda: None
        arguments = (function, task_data, endpoint)
        threading.Thread(target=self._run, args=arguments, name="agentsgym-program", daemon=True).start()

    def _run(self, function: Callable[..., Any], task_data: dict[str, Any], endpoint: Endpoint) -> None:
        try:
            output = function(task_data, endpoint)
            if inspect.iscoroutine(output):
                output = self._awaited(output)
        except BaseException as error:  # noqa: BLE001  # reported as the failure of the episode
            self._end(error)
        else:
            self._end(ProgramOutcome(output=output))

    def _awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine until it has ended, also if it is canceled."""
        has_ended = threading.Event()

        async def run() -> Any:
            try:
                return await coroutine
            finally:
                has_ended.set()

        running = asyncio.run_coroutine_threadsafe(run(), programs_loop())
        self._cancel = running.cancel
        try:
            return running.result()
        finally:
            has_ended.wait(_TERMINATING_S)  # canceling the future does not wait for the coroutine

    def _end(self, outcome: ProgramOutcome | BaseException) -> None:
        def settle() -> None:
            if self.outcome.done():
                return
            if isinstance(outcome, ProgramOutcome):
                self.outcome.set_result(outcome)
            else:
                given = outcome if isinstance(outcome, Exception) else RuntimeError(f"the program raised {outcome!r}")
                self.outcome.set_exception(given)

        with contextlib.suppress(RuntimeError):  # the loop is closed, since the process exits
            self._loop.call_soon_threadsafe(settle)

    async def stop(self) -> None:
        """Cancel it if it is a coroutine, and wait for a moment."""
        self._cancel()
        await asyncio.wait([self.outcome], timeout=_TERMINATING_S)
        if not self.outcome.done():
            self.outcome.set_result(ProgramOutcome(is_complete=False))

    def clean_up(self) -> None:
        """Do nothing."""


class RunningCommand:
    """A command in a separate process group and a temporary folder.

    Attributes:
        outcome: Its outcome, or the exception that ended it.
    """

    def __init__(self, folder: Path, group: ProcessGroup, process: asyncio.subprocess.Process) -> None:
        self._folder, self._group, self._process = folder, group, process
        self.outcome: asyncio.Future[ProgramOutcome] = asyncio.ensure_future(self._finish())
        self._is_stopped = False

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        task_data: dict[str, Any],
        endpoint: Endpoint,
        *,
        limits: Mapping[str, int | None],
        prepare: Callable[[Path, dict[str, Any]], None],
    ) -> RunningCommand:
        """Start it.

        Args:
            command: The program and its arguments, in which ``{key}`` stands for the task's value.
            task_data: The task, which is also written to ``task.json`` in the folder.
            endpoint: The endpoint, which the environment's variables name.
            limits: The limits of each of its processes, as in :class:`~agentsgym.processes.ProcessGroup`.
            prepare: Writes files for the task into the folder.
        """
        folder = Path(tempfile.mkdtemp(prefix="agentsgym-program-"))
        try:
            (folder / "task.json").write_text(json.dumps(task_data), encoding="utf-8")
            prepare(folder, task_data)
            filled = [_filled(argument, task_data) for argument in command]
            group = ProcessGroup(filled, limits=limits, grace_s=_TERMINATING_S)
            process = await group.start_on_loop(
                cwd=str(folder),
                env={**os.environ, **endpoint.environment()},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(folder, group, process)

    async def _finish(self) -> ProgramOutcome:
        streams = (self._process.stdout, self._process.stderr)
        reading = asyncio.gather(*(_read(cast("asyncio.StreamReader", stream)) for stream in streams))
        exit_code = await self._process.wait()
        output, errors = await reading
        return ProgramOutcome(
            output=None if self._is_stopped else output,
            exit_code=exit_code,
            errors=errors[-2000:],
            folder=self._folder,
            is_complete=not self._is_stopped,
        )

    async def stop(self) -> None:
        """End its process group."""
        if not self.outcome.done():
            self._is_stopped = True
            self._group.end()
            await asyncio.wait([self.outcome])

    def clean_up(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


async def _read(stream: asyncio.StreamReader) -> str:
    """Read a stream to its end, and return the beginning of it."""
    kept = bytearray()
    while chunk := await stream.read(2**16):
        kept += chunk[: _MAX_OUTPUT_BYTES - len(kept)]
    return kept.decode("utf-8", "replace")


def _filled(argument: str, task_data: Mapping[str, Any]) -> str:
    """Replace ``{key}`` by the task's value, and nothing else in braces."""
    for key, value in task_data.items():
        argument = argument.replace(f"{{{key}}}", value if isinstance(value, str) else json.dumps(value))
    return argument
