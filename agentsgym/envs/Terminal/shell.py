"""A bash that lives as long as an episode, and runs one command after another for a coroutine."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass

from agentsgym.envs.Terminal.sandbox import Sandbox
from agentsgym.errors import EnvError
from agentsgym.processes import ProcessGroup

# Control sequences (CSI), strings such as window titles (OSC and others), and the remaining escapes of two characters.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_].*?(?:\x07|\x1b\\)|[ -/]*[0-~])", re.DOTALL)
# The only line of unit tests that differs between runs.
_TEST_TIME = re.compile(r"^(Ran \d+ tests? in )\d+\.\d+s$", re.MULTILINE)
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


# Commands arrive on descriptor 3, each followed by NUL. Descriptor 4 answers with the status and the folder. Commands
# have neither of them, so what a command prints cannot be mistaken for an answer.
_DRIVER = r"""
RANDOM=1; cd -- "$1" 2>/dev/null || cd; set --; _code() { return "$_status"; }
while _status=$?; builtin printf '%s %s\0' "$_status" "${PWD:0:4096}" >&4 && IFS= builtin read -r -d '' -u 3 _command
do _code; eval "$_command" </dev/null 3<&- 4>&-
done
"""
_START_S = 60.0
_CHUNK_BYTES = 1 << 16  # the capacity of a pipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a command did.

    Attributes:
        output: What it printed, shortened.
        status: The exit status; None if the command was killed or ended the shell.
        note: What happened to the shell; empty if nothing did.
    """

    output: str
    status: int | None
    note: str = ""


class Shell:
    """A bash in a sandbox; all methods run on one event loop.

    Attributes:
        folder: The current folder, as the shell names it.
    """

    __slots__ = ("_capture", "_group", "_output", "_process", "_sandbox", "folder")

    def __init__(self, sandbox: Sandbox, max_output_bytes: int) -> None:
        self.folder = sandbox.shown_home
        self._sandbox = sandbox
        self._capture = Capture(max_output_bytes)
        self._group: ProcessGroup | None = None  # ends if this object is collected without having been stopped
        self._process: asyncio.subprocess.Process | None = None
        self._output = -1

    async def start(self) -> None:
        """Start bash in the current folder.

        Raises:
            EnvError: It cannot be started.
        """
        self._output, write_end = os.pipe()
        os.set_blocking(self._output, False)
        self._group = self._sandbox.group(
            ["bash", "--norc", "--noprofile", "-c", _DRIVER, "bash", self.folder], has_channels=True
        )
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await self._group.start_on_loop(cwd="/", env={}, stdin=pipe, stdout=pipe, stderr=write_end)
        except OSError as error:
            raise EnvError(f"the shell cannot be started: {error}") from error
        finally:
            os.close(write_end)
            if self._process is None:
                os.close(self._output)
        asyncio.get_running_loop().add_reader(self._output, self._read)
        try:
            await asyncio.wait_for(self._answer(), _START_S)
        except (EOFError, TimeoutError) as error:
            await self.stop()
            raise EnvError(f"the shell cannot be started: {self._capture.take() or 'it did not answer'}") from error

    async def run(self, command: str, limit_s: float) -> Result:
        """Run a command, and start another shell in the same folder if this one ends or exceeds the time limit.

        Args:
            command: Text for bash, without NUL characters.
            limit_s: The time in seconds after which all processes of the shell are killed.
        """
        if self._process is None or self._process.stdin is None:
            raise EnvError("the shell was not started")
        self._process.stdin.write(command.encode(errors="replace") + b"\0")
        status = None
        try:
            status = await asyncio.wait_for(self._answer(), limit_s)
            note = "" if status is not None else "the shell answered in a wrong form"
        except TimeoutError:
            note = f"the command took longer than {limit_s:g} s and was killed"
        except EOFError:
            code = await self._process.wait()
            note = f"the shell exited with status {code if code >= 0 else 128 - code}"
        if note:
            await self.stop()
            note += "; a new shell was started in the same folder"
        else:
            self._read()
        output = self._sandbox.masked(self._capture.take())
        if note:
            await self.start()
        return Result(output=output, status=status, note=note)

    async def stop(self) -> None:
        """Kill the shell and everything that was started in it, and wait until all processes are gone."""
        if self._process is None or self._group is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._group.end()
        await self._process.wait()
        self._process = self._group = None
        self._read()
        asyncio.get_running_loop().remove_reader(self._output)
        os.close(self._output)

    async def _answer(self) -> int | None:
        """Wait until the shell has finished a command; return the exit status, or None if the answer has no status."""
        if self._process is None or self._process.stdout is None:
            raise EOFError
        try:
            status, _, folder = (await self._process.stdout.readuntil(b"\0"))[:-1].partition(b" ")
            status = int(status)
        except (asyncio.LimitOverrunError, ValueError):  # a command wrote to the shell's own descriptors
            return None
        self.folder = os.fsdecode(folder)
        return status

    def _read(self) -> None:
        """Read what is in the pipe: all that a command has written by the time its status arrives."""
        for _ in range(2):
            try:
                data = os.read(self._output, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not data:
                asyncio.get_running_loop().remove_reader(self._output)
                return
            self._capture.add(data)


class Capture:
    """The output of one command: at most ``limit`` bytes of it are kept, half from its beginning, half from its end."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head, self._tail = bytearray(), bytearray()
        self._num_left_out = 0

    def add(self, data: bytes) -> None:
        """Add the next part of the output."""
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room else data
        surplus = len(self._tail) - self._half
        if surplus > 0:
            self._num_left_out += surplus
            del self._tail[:surplus]

    def take(self) -> str:
        """Return the output so far as text, with a note about what was left out, and start anew."""
        left_out = f"\n[{self._num_left_out} bytes of output left out]\n"
        parts = [self._head, self._tail] if self._num_left_out else [self._head + self._tail]
        text = left_out.join(printable(bytes(part)) for part in parts)
        self._head, self._tail, self._num_left_out = bytearray(), bytearray(), 0
        return text


def printable(data: bytes) -> str:
    r"""Decode output: invalid bytes and control characters become U+FFFD, and escape sequences are removed.

    The time that Python's unit tests report becomes 0.000s, so that an episode can be replayed.

    >>> printable(b"\x1b[31mred\x1b[0m \xff\x00 caf\xc3\xa9")
    'red �� café'
    """
    text = data.decode(errors="replace").replace("\r\n", "\n")
    text = _CONTROLS.sub("\ufffd", _ESCAPES.sub("", text).replace("\r", "\n"))
    return _TEST_TIME.sub(r"\g<1>0.000s", text)
