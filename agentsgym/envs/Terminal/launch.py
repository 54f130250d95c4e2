"""Start a program with limits and, if requested, in new namespaces; run as a script with the standard library.

The process that runs this script stays: it waits for the program, and kills what the program has left behind before it
exits, and when it receives SIGTERM, as it does when the process that started it ends. In a new PID namespace, the
program is process 1, so the kernel kills everything with it. Otherwise, Linux hands orphans to this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

#: The working folder's path in its namespace, and in all output.
HOME = "/home/agent"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": "/tmp"}
# Constants of <sched.h>, <sys/mount.h> and <sys/prctl.h>.
_NEW_USER, _NEW_OTHERS = 0x10000000, 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_NO_SUID, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 2, 4096, 16384, 1 << 18, 2
_DEATH_SIGNAL, _DROP_BOUND, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 24, 36, 38
_SET_MOUNT_ATTRIBUTES, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_IS_LINUX = sys.platform == "linux"


def _checked(result: int, call: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _control(option: int, value: int) -> int:
    return _libc().prctl(option, *(ctypes.c_ulong(argument) for argument in (value, 0, 0, 0)))


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    values = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None)
    _checked(_libc().mount(*values), f"mount {target}")


def _enter_user_namespace(user: int, group: int, other_namespaces: int) -> None:
    """Become user 0 of a new user namespace, which is ``user`` outside of it; a child that stays outside maps it."""
    read_end, write_end = os.pipe()
    process = os.getpid()
    helper = os.fork()
    if helper == 0:
        os.close(write_end)
        if not os.read(read_end, 1):
            os._exit(1)  # the namespace could not be created
        for name, value in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/{process}/{name}").write_text(value, encoding="ascii")
        os._exit(0)
    os.close(read_end)
    _checked(_libc().unshare(_NEW_USER | other_namespaces), "unshare")
    os.write(write_end, b"1")
    os.close(write_end)
    if os.waitpid(helper, 0)[1]:
        raise OSError("the user namespace cannot be mapped")
    os.setgid(0)
    os.setuid(0)


def _place(root: str, path: str) -> None:
    """Show a file or folder of this machine, or the same symbolic link, under the new root."""
    target = Path(root + path)
    if target.exists() or not os.path.lexists(path):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if Path(path).is_symlink():
        target.symlink_to(Path(path).readlink())
        return
    if Path(path).is_dir():
        target.mkdir()
    else:
        target.touch()
    _mount(path, str(target), "", _BIND | _RECURSIVE)


def _build_root(root: str, home: str, shown: list[str]) -> None:
    """Mount a new root that has only the given paths, read-only, and a writable working folder and ``/tmp``."""
    _mount("", "/", "", _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NO_SUID, "size=1m,mode=755")
    for path in shown:
        _place(root, path)
    for name in _DEVICES:
        _place(root, f"/dev/{name}")
    for name, link in _DEVICE_LINKS.items():
        Path(f"{root}/dev/{name}").symlink_to(link)
    for path in ("/proc", "/tmp", HOME):
        Path(root + path).mkdir(parents=True, exist_ok=True)
    read_only = (ctypes.c_uint64 * 4)(1 | _NO_SUID, 0, 0, 0)  # struct mount_attr
    arguments = (-1, root.encode(), 0x8000, ctypes.byref(read_only), ctypes.c_size_t(32))
    _checked(_libc().syscall(_SET_MOUNT_ATTRIBUTES, *arguments), "mount_setattr")
    _mount("tmpfs", f"{root}/tmp", "tmpfs", _NO_SUID, "size=64m,mode=1777")
    _mount(home, root + HOME, "", _BIND)


def _change_root(root: str) -> None:
    _mount("proc", f"{root}/proc", "proc", _NO_SUID)
    os.chdir(root)
    _checked(_libc().syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _checked(_libc().umount2(b".", _DETACH), "umount2")


def _drop_privileges(settings: dict[str, Any], *, is_root: bool) -> None:
    isolation, user = settings["isolation"], settings["user"]
    if is_root and isolation != "none":
        os.setgroups([])
        if isolation == "namespaces":
            _enter_user_namespace(user, user, 0)
        else:
            os.setgid(user)
            os.setuid(user)
    if _IS_LINUX:
        for capability in range(64):
            _control(_DROP_BOUND, capability)
        _control(_NO_NEW_PRIVILEGES, 1)
        _control(_DEATH_SIGNAL, signal.SIGKILL)


def _limit(limits: dict[str, int]) -> None:
    import resource  # noqa: PLC0415  # Windows has none, and must be able to import this module

    for name, value in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError, OverflowError):  # not known, or too high, here
            resource.setrlimit(getattr(resource, name), (value, value))


def _become(settings: dict[str, Any], program: list[str], *, is_root: bool) -> None:
    """Replace this process by the program."""
    os.setsid()
    if settings["isolation"] == "namespaces":
        _change_root(settings["root"])
    _drop_privileges(settings, is_root=is_root)
    os.umask(0o022)
    os.chdir(HOME if settings["isolation"] == "namespaces" else settings["home"])
    if settings["has_channels"]:  # commands are read from 3 and answered on 4; programs read nothing
        for source, target in ((0, 3), (1, 4), (2, 1)):
            os.dup2(source, target)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _limit(settings["limits"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvpe(program[0], program, settings["environment"])


def _kill(process: int, group: int) -> None:
    """Kill a process with a process group, unless that is the group of this process."""
    with contextlib.suppress(OSError):
        if group != os.getpgid(0):
            os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(process, signal.SIGKILL)


def _kill_orphans() -> None:
    """Kill all descendants: those whose parent is killed become children of this process (on Linux)."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while children.exists():
        for process in map(int, children.read_text(encoding="ascii").split()):
            with contextlib.suppress(OSError):
                _kill(process, os.getpgid(process))
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main() -> int:
    """Run the program that the arguments name, and return its exit status."""
    settings, program = json.loads(sys.argv[1]), sys.argv[2:]
    is_root = os.geteuid() == 0
    if _IS_LINUX:
        _control(_DEATH_SIGNAL, signal.SIGTERM)
        _control(_SUBREAPER, 1)
    if settings["isolation"] == "namespaces":
        if is_root:
            _checked(_libc().unshare(_NEW_OTHERS), "unshare")
        else:
            _enter_user_namespace(os.getuid(), os.getgid(), _NEW_OTHERS)
        _libc().sethostname(b"localhost", 9)
        _build_root(settings["root"], settings["home"], settings["shown"])
    child = 0

    def end(_signal: int, _frame: object) -> None:
        if child:
            _kill(child, child)
        else:
            sys.exit(1)

    signal.signal(signal.SIGTERM, end)
    child = os.fork()
    if child == 0:
        _become(settings, program, is_root=is_root)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    _kill_orphans()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
