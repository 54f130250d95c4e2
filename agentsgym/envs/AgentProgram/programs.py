"""Run one program for an episode: a function in its own thread, or a command in its own process group and folder."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from agentsgym.credit.components import GivenReward
from agentsgym.envs.AgentProgram.server import MODEL
from agentsgym.envs.AgentProgram.session import Session
from agentsgym.errors import ConfigError, TaskError, did_you_mean
from agentsgym.event_loop import programs_loop
from agentsgym.processes import ProcessGroup
from agentsgym.texts import shown

Program = Callable[[dict[str, Any], "Endpoint"], Any] | Sequence[str]
"""A function or coroutine function of the task and the endpoint, or the arguments of a command."""

_MAX_OUTPUT_BYTES: Final = 2**20
_MAX_ERROR_CHARACTERS: Final = 2000
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
                # A future refuses a StopIteration, and its outcome would never be set.
                is_plain = isinstance(outcome, Exception) and not isinstance(outcome, StopIteration)
                self.outcome.set_exception(outcome if is_plain else RuntimeError(f"the program raised {outcome!r}"))

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
            command: The program and its arguments (see :func:`filled`).
            task_data: The task, which is also written to ``task.json`` in the folder.
            endpoint: The endpoint, which the environment's variables name.
            limits: The limits of each of its processes, as in :class:`~agentsgym.processes.ProcessGroup`.
            prepare: Writes files for the task into the folder.
        """
        folder = Path(tempfile.mkdtemp(prefix="agentsgym-program-"))
        try:
            (folder / "task.json").write_text(json.dumps(task_data), encoding="utf-8")
            prepare(folder, task_data)
            group = ProcessGroup(filled(command, task_data), limits=limits, grace_s=_TERMINATING_S)
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
        process, output, errors = self._process, bytearray(), bytearray()
        reading = asyncio.gather(
            _read(process.stdout, output, dropped=slice(_MAX_OUTPUT_BYTES, None)),
            _read(process.stderr, errors, dropped=slice(-4 * _MAX_ERROR_CHARACTERS)),
        )
        # Process.wait also waits for the pipes, which a process may keep open that has left the group.
        has_ended = False
        while not reading.done() and not has_ended:
            has_ended = process.returncode is not None
            await asyncio.wait([reading], timeout=_TERMINATING_S)
        if not reading.done():
            cast("Any", process)._transport.close()
        await reading
        return ProgramOutcome(
            output=None if self._is_stopped else output.decode("utf-8", "replace"),
            exit_code=await process.wait(),
            errors=errors.decode("utf-8", "replace")[-_MAX_ERROR_CHARACTERS:],
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


async def _read(stream: asyncio.StreamReader | None, kept: bytearray, *, dropped: slice) -> None:
    """Read a stream to its end, and keep its beginning or its end, without what is beyond the limit."""
    while stream is not None and (chunk := await stream.read(2**16)):
        kept += chunk
        del kept[dropped]


_FIELD: Final = re.compile(r"\{\{([^{}]+)\}\}|\{([^{}]+)\}")
_LANGUAGES: Final = "python|pypy|perl|ruby|node|nodejs|php|lua|Rscript|julia|bun"
_INTERPRETER: Final = re.compile(rf"(env|(ba|da|z|k|mk|a|fi|c|tc|pw|xon)?sh|({_LANGUAGES})[\d.]*)")
_SCRIPT: Final = re.compile(r"-(\w*[ceEprS]|-(eval|exec|command|print|split-string))")
_HAS_VALUE: Final = re.compile(r"[-+]\w*[oOWXI]|--(require|import|loader|rcfile|init-file)")  # followed by one


def _is_field(name: str, task_data: Mapping[str, Any]) -> bool:
    return name in task_data or name.isidentifier()


def _scripts(command: Sequence[str], given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what the shells and other interpreters in a command may run, their options and scripts, also as given."""
    rest = [*zip(command, given, strict=True)]
    while rest:
        name, reads_script, has_value = Path(rest.pop(0)[0]).name, False, False
        while rest and _INTERPRETER.fullmatch(name):
            argument = rest[0][1]
            if argument[:1] in {"-", "+"}:
                yield rest[0]
                reads_script = reads_script or _SCRIPT.fullmatch(argument) is not None
                has_value = _HAS_VALUE.fullmatch(argument) is not None
            elif has_value or (name == "env" and "=" in argument):
                has_value = False
            else:
                break
            del rest[0]
            if argument == "--":
                break
        if reads_script:
            yield from rest[:1]
            del rest[:2]  # the script and its name for itself, which may be "sh", too


def check_command(command: Sequence[str], task_data: Mapping[str, Any] | None = None) -> None:
    """Check that no ``{key}`` is in a script or an option of an interpreter, which would run the task's text.

    Args:
        command: The program and its arguments.
        task_data: A task, whose keys may be any texts, and whose values may be options; None to find identifiers alone.

    Raises:
        ConfigError: One is, for any task; the error shows the safe ways.
        TaskError: One is for this task, or the task lacks a key.
    """
    task = task_data or {}
    for template, given in _scripts(command, command if task_data is None else filled(command, task)):
        for key in (found[2] for found in _FIELD.finditer(template) if found[2]):
            if _is_field(key, task):
                raise (ConfigError if task_data is None else TaskError)(
                    f"program has {{{key}}} in a script or an option of an interpreter, {shown(given)}, which would "
                    f"run the text of a task: make it an argument, as in ['my-agent', '{{{key}}}'] or ['sh', '-c', "
                    f"'my-agent \"$1\"', 'sh', '{{{key}}}'], put '--' before the name of a file, or read task.json "
                    f"in the script; {{{{{key}}}}} writes braces"
                )


def filled(command: Sequence[str], task_data: Mapping[str, Any]) -> list[str]:
    """Replace each ``{key}`` by the task's value, and ``{{key}}`` by ``{key}``; other braces stay.

    >>> filled(["{question}", "{{question}} {print $1}"], {"question": "see {answer}", "answer": "42"})
    ['see {answer}', '{question} {print $1}']

    Raises:
        TaskError: The task has no such key.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if not _is_field(name, task_data):
            return found[0]
        if found[1]:
            return f"{{{name}}}"
        if name not in task_data:
            known = did_you_mean(name, task_data)
            raise TaskError(f"the command names {{{name}}}, which the task lacks{known}; {{{{{name}}}}} writes braces")
        given = task_data[name]
        return given if isinstance(given, str) else json.dumps(given)

    return [_FIELD.sub(value, argument) for argument in command]
