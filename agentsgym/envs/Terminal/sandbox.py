"""The folder and the limits of one episode, and how its processes are isolated on this machine."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentsgym.envs.Terminal.launch import HOME
from agentsgym.errors import ConfigError
from agentsgym.processes import ProcessGroup

logger = logging.getLogger(__name__)

#: The kinds of isolation, the strongest first.
ISOLATIONS = ("namespaces", "user", "none")
_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/nix")
_PYTHON_PREFIX, _PYTHON = os.path.realpath(sys.base_prefix), Path(os.path.realpath(sys.executable))
_PATH = os.pathsep.join((str(_PYTHON.parent), "/usr/local/bin", "/usr/bin", "/bin"))
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
    __slots__ = (
        "__weakref__",
        "_base",
        "_changes_owner",
        "_finalizer",
        "_owner",
        "_settings",
        "home",
        "isolation",
        "shown_home",
    )

    def __init__(self, isolation: str, memory_mb: int) -> None:
        self.isolation = isolation
        base = self._base = Path(tempfile.mkdtemp(prefix="agentsgym-terminal-")).resolve()
        self.home = base / "home"
        self.home.mkdir()
        (base / "root").mkdir()
        self.shown_home = HOME if isolation == "namespaces" else str(self.home)
        self._finalizer = weakref.finalize(self, _remove, base, os.getpid())
        self._owner = _FIRST_USER + next(_users) % _NUM_USERS
        is_alone = isolation == "user" or (os.geteuid() == 0 and isolation == "namespaces")
        limits = {"RLIMIT_CPU": 60, "RLIMIT_FSIZE": 32 << 20, "RLIMIT_NOFILE": 256, "RLIMIT_CORE": 0}
        limits["RLIMIT_AS"] = memory_mb << 20
        if is_alone or (isolation == "namespaces" and _linux_version() >= _WITH_PROCESS_COUNTS):
            limits["RLIMIT_NPROC"] = 128  # otherwise, all processes of this user are counted
        self._changes_owner = is_alone
        self._settings: dict[str, Any] = {
            "isolation": isolation,
            "user": self._owner,
            "home": str(self.home),
            "root": str(base / "root"),
            "shown": [*_SYSTEM_FOLDERS, _PYTHON_PREFIX],
            "limits": limits,
            "environment": self._environment(),
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
                os.chown(path, self._owner, self._owner)

    def remove(self) -> None:
        """Delete the folder, whatever permissions its parts were given."""
        self._finalizer()

    def masked(self, text: str) -> str:
        """Replace the folder's path on this machine, and its owner in listings, by constant names."""
        if self.isolation == "user":
            text = text.replace(f"{self._owner} {self._owner}", "agent agent")
        return text.replace(str(self.home), HOME).replace(str(self._base), str(Path(HOME).parent))

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": _PATH,
            "HOME": self.shown_home,
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
