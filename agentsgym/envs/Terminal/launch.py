"""Run a program under the supervisor, in new namespaces if requested; run as a script with the standard library."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[3]))  # the interpreter is isolated

from agentsgym.supervisor import IS_LINUX, control, libc, supervise

#: The working folder's path in its namespace, and in all output.
HOME = "/home/agent"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": "/tmp"}
# Constants of <sched.h>, <sys/mount.h> and <sys/prctl.h>.
_NEW_USER, _NEW_OTHERS = 0x10000000, 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_NO_SUID, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 2, 4096, 16384, 1 << 18, 2
_DROP_BOUND, _NO_NEW_PRIVILEGES = 24, 38
_SET_MOUNT_ATTRIBUTES, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}


def _checked(result: int, call: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    values = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None)
    _checked(libc().mount(*values), f"mount {target}")


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
    _checked(libc().unshare(_NEW_USER | other_namespaces), "unshare")
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
    _checked(libc().syscall(_SET_MOUNT_ATTRIBUTES, *arguments), "mount_setattr")
    _mount("tmpfs", f"{root}/tmp", "tmpfs", _NO_SUID, "size=64m,mode=1777")
    _mount(home, root + HOME, "", _BIND)


def _enter(settings: dict[str, Any], *, is_root: bool) -> None:
    """Isolate this process, which becomes the program."""
    if settings["isolation"] == "namespaces":
        root = settings["root"]
        _mount("proc", f"{root}/proc", "proc", _NO_SUID)
        os.chdir(root)
        _checked(libc().syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
        _checked(libc().umount2(b".", _DETACH), "umount2")
    isolation, user = settings["isolation"], settings["user"]
    if is_root and isolation != "none":
        os.setgroups([])
        if isolation == "namespaces":
            _enter_user_namespace(user, user, 0)
        else:
            os.setgid(user)
            os.setuid(user)
    if IS_LINUX:
        for capability in range(64):
            control(_DROP_BOUND, capability)
        control(_NO_NEW_PRIVILEGES, 1)
    os.umask(0o022)
    os.chdir(HOME if settings["isolation"] == "namespaces" else settings["home"])
    if settings["has_channels"]:  # commands are read from 3 and answered on 4; programs read nothing
        for source, target in ((0, 3), (1, 4), (2, 1)):
            os.dup2(source, target)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def main() -> int:
    """Run the program that the arguments name, and return its exit status."""
    settings, program = json.loads(sys.argv[1]), sys.argv[2:]
    is_root = os.geteuid() == 0
    if settings["isolation"] == "namespaces":
        if is_root:
            _checked(libc().unshare(_NEW_OTHERS), "unshare")
        else:
            _enter_user_namespace(os.getuid(), os.getgid(), _NEW_OTHERS)
        libc().sethostname(b"localhost", 9)
        _build_root(settings["root"], settings["home"], settings["shown"])
    return supervise(program, settings, partial(_enter, settings, is_root=is_root))


if __name__ == "__main__":
    sys.exit(main())
