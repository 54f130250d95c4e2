"""The isolated folder of an episode, and a bash in it that runs one command after another for a coroutine."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentsgym.envs.Terminal.launch import HOME
from agentsgym.errors import ConfigError, EnvError
from agentsgym.processes import ProcessGroup

logger = logging.getLogger(__name__)

#: The kinds of isolation, the strongest first.
ISOLATIONS = ("namespaces", "user", "none")
_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/nix")
_PYTHON_PREFIX, _PYTHON = os.path.realpath(sys.base_prefix), Path(os.path.realpath(sys.executable))
_PATH = os.pathsep.join((str(_PYTHON.parent), "/usr/local/bin", "/usr/bin", "/bin"))
_ENVIRONMENT = {
    "USER": "agent",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "PAGER": "cat",
    "TIME_STYLE": "+",  # listings without the times of changes
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
_LAUNCHER = str(Path(__file__).with_name("launch.py"))
_MTIME = 1_704_067_200  # 2024-01-01, so that listings are equal in all replays
_FIRST_USER, _NUM_USERS = 60_000, 5_000  # ids that Linux distributions leave unused
_PROBE_S = 60.0
_WITH_PROCESS_COUNTS = (5, 14)  # the first Linux that counts processes by user namespace

_users = itertools.count(os.getpid() * 64)


class Sandbox:
    """One episode's folder, in which programs are started with limits.

    Attributes:
        isolation: One of :data:`ISOLATIONS`.
        home: The working folder's path on this machine.
        shown_home: Its path for the programs in it.
    """

    # Also hides what differs between replays, such as paths, from comparisons of states.
    __slots__ = ("__weakref__", "_base", "_changes_owner", "_finalizer", "_settings", "home", "isolation", "shown_home")

    def __init__(self, isolation: str, memory_mb: int) -> None:
        self.isolation = isolation
        base = self._base = Path(tempfile.mkdtemp(prefix="agentsgym-terminal-")).resolve()
        self.home = base / "home"
        self.home.mkdir()
        (base / "root").mkdir()
        self.shown_home = HOME if isolation == "namespaces" else str(self.home)
        self._finalizer = weakref.finalize(self, _remove, base, os.getpid())
        is_alone = isolation == "user" or (os.geteuid() == 0 and isolation == "namespaces")
        limits = {"RLIMIT_CPU": 60, "RLIMIT_FSIZE": 32 << 20, "RLIMIT_NOFILE": 256, "RLIMIT_CORE": 0}
        limits["RLIMIT_AS"] = memory_mb << 20
        if is_alone or (isolation == "namespaces" and _linux_version() >= _WITH_PROCESS_COUNTS):
            limits["RLIMIT_NPROC"] = 128  # otherwise, all processes of this user are counted
        self._changes_owner = is_alone
        self._settings: dict[str, Any] = {
            "isolation": isolation,
            "user": _FIRST_USER + next(_users) % _NUM_USERS,
            "home": str(self.home),
            "root": str(base / "root"),
            "shown": [*_SYSTEM_FOLDERS, _PYTHON_PREFIX],
            "limits": limits,
            "environment": {"PATH": _PATH, "HOME": self.shown_home, **_ENVIRONMENT},
        }

    def group(self, program: Sequence[str], *, has_channels: bool = False) -> ProcessGroup:
        """Return a program to start in the folder, with or without the descriptors 3 and 4 of a shell."""
        return ProcessGroup(program, script=_LAUNCHER, has_channels=has_channels, **self._settings)

    def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files, with the permissions 0o644 and a constant time of modification."""
        for name, content in files.items():
            path = self.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
            path.chmod(0o644)
        paths = [*self.home.rglob("*"), self.home]
        for path in paths:
            if path.is_dir():
                path.chmod(0o755)
            os.utime(path, (_MTIME, _MTIME))
        if self._changes_owner:
            for path in (*paths, self._base):
                os.chown(path, self._settings["user"], self._settings["user"])

    def remove(self) -> None:
        """Delete the folder, whatever permissions its parts were given."""
        self._finalizer()

    def masked(self, text: str) -> str:
        """Replace the folder's path on this machine, and its owner in listings, by constant names."""
        if self.isolation == "user":
            text = text.replace(f"{self._settings['user']} {self._settings['user']}", "agent agent")
        return text.replace(str(self.home), HOME).replace(str(self._base), str(Path(HOME).parent))


def _remove(base: Path, owner: int) -> None:
    """Delete an episode's folder, unless this is a forked copy of the process that made it."""
    if os.getpid() != owner:
        return
    with suppress(RecursionError):
        shutil.rmtree(base, ignore_errors=True)
    if base.exists():  # it has folders without permissions, or nested deeper than Python can follow
        subprocess.run(["chmod", "-R", "u+rwx", str(base)], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", str(base)], check=False, stderr=subprocess.DEVNULL)
    if base.exists():
        logger.warning("the folder of an episode, %s, cannot be deleted", base)


def _linux_version() -> tuple[int, ...]:
    first_two = os.uname().release.split(".")[:2] if sys.platform == "linux" else ()
    return tuple(int(part) for part in first_two if part.isdecimal())


def isolation_for(wanted: str) -> str:
    """Return the kind of isolation to use: ``wanted``, or for ``"auto"`` the strongest one that works here.

    Raises:
        ConfigError: It does not work on this machine; with ``"auto"``, none of them does.
    """
    for isolation in ("namespaces", "user") if wanted == "auto" else (wanted,):
        problem = _problem_of(isolation)
        if problem is None:
            return isolation
        if wanted != "auto":
            raise ConfigError(f"env_config['isolation'] = {wanted!r} does not work on this machine: {problem}")
    raise ConfigError(
        f"commands of agents cannot be isolated here: {_problem_of('namespaces')}; allow user namespaces, or set "
        "env_config['isolation'] = 'none' to let agents do whatever you can do on this machine"
    )


@functools.cache
def _problem_of(isolation: str) -> str | None:
    """Try a kind of isolation once per process; return what went wrong, or None if it works."""
    if isolation == "user" and os.geteuid() != 0:
        return "only root can start processes as another user"
    sandbox = Sandbox(isolation, memory_mb=1024)
    try:
        sandbox.write({})
        group, null = sandbox.group(["bash", "-c", "cd && python3 -c pass"]), subprocess.DEVNULL
        with group.start(stdin=null, stdout=null, stderr=subprocess.PIPE) as process:
            errors = process.communicate(timeout=_PROBE_S)[1].decode(errors="replace")
        problem = errors.strip().rpartition("\n")[2] if process.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    finally:
        sandbox.remove()
    if problem is None and isolation != "namespaces":
        logger.warning(
            "TerminalEnv runs commands without namespaces (isolation %r): they can use the network and read the files "
            "of this machine; see SECURITY.md",
            isolation,
        )
    return problem


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
