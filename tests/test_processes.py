"""Commands that are started as process groups, and everything that ends them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentsgym.processes import ProcessGroup

Start = Callable[..., Any]
LIMIT_S = 60
SLEEP = "import time; print('here', flush=True); time.sleep(600)"
ROOT = Path(__file__).parent.parent


@pytest.fixture
def started() -> Iterator[Start]:
    """Start Python code, and return its group and its process."""
    with ExitStack() as stack:

        def start(code: str, **settings: Any) -> tuple[ProcessGroup, Any]:
            group = ProcessGroup([sys.executable, "-c", code], **settings)
            return group, stack.enter_context(group.start(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE))

        yield start


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_the_exit_code_is_that_of_the_command(started: Start, code: str, returncode: int) -> None:
    _group, process = started(code)
    assert process.wait(LIMIT_S) == returncode


def test_the_id_is_that_of_the_command(started: Start) -> None:
    group, process = started("import os; print(os.getpid(), os.getpgid(0), os.getsid(0))")
    assert process.communicate(timeout=LIMIT_S)[0].split() == [str(group.pid).encode()] * 3


@pytest.mark.parametrize(
    ("handler", "grace_s", "returncode"),
    [
        ("signal.SIG_IGN", 0.0, -signal.SIGKILL),
        ("signal.SIG_IGN", 0.2, -signal.SIGKILL),
        ("lambda *_: sys.exit(5)", LIMIT_S, 5),
    ],
)
def test_a_command_may_end_itself_after_sigterm_or_is_killed(
    started: Start, handler: str, grace_s: float, returncode: int
) -> None:
    group, process = started(f"import signal, sys; signal.signal(15, {handler}); {SLEEP}", grace_s=grace_s)
    assert process.stdout.readline() == b"here\n"
    group.end()
    assert process.wait(LIMIT_S) == returncode


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are handed over on Linux only")
@pytest.mark.parametrize("last", ["", "time.sleep(600)"])
def test_all_descendants_end_before_the_supervisor(started: Start, last: str) -> None:
    code = f"""
import subprocess, time
for more in ({{}}, {{"start_new_session": True}}):
    print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, **more).pid, flush=True)
{last}
"""
    group, process = started(code)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    if last:
        group.end()
    process.wait(LIMIT_S)
    assert not any(map(psutil.pid_exists, pids))


def test_a_command_ends_with_the_object_that_started_it(started: Start) -> None:
    group, process = started(SLEEP)
    assert process.stdout.readline() == b"here\n"
    del group
    assert process.wait(LIMIT_S) == -signal.SIGKILL


@pytest.mark.parametrize("last", ["", "os.kill(os.getpid(), 9)", "time.sleep(600)"])
def test_a_command_ends_with_the_process_that_started_it_although_a_fork_lives_on(last: str) -> None:
    code = f"""
import os, sys, time
from agentsgym.processes import ProcessGroup
group = ProcessGroup(["sleep", "600"])
group.start()
if os.fork() == 0:
    group.end()  # has no effect
    os.close(1)
    time.sleep(600)
print(group.pid, flush=True)
{last}
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    outer = ProcessGroup([sys.executable, "-c", code])
    with outer.start(stdout=subprocess.PIPE, env=environment) as owner:
        pid = int(owner.stdout.readline())
        if last.startswith("time"):
            time.sleep(0.2)
            assert psutil.pid_exists(pid)  # the fork did not end it
            outer.end()
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(LIMIT_S)


def test_limits_and_default_signals_hold_for_the_command(started: Start) -> None:
    code = "import resource, signal; print(resource.getrlimit(resource.RLIMIT_CPU)[0], signal.getsignal(2).__name__)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _group, process = started(code, limits={"RLIMIT_CPU": 7, "RLIMIT_AS": None})
        assert process.communicate(timeout=LIMIT_S)[0] == b"7 default_int_handler\n"
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["no such program", "./missing", "/"])
def test_a_command_that_does_not_exist_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No such file"):
        ProcessGroup([name]).start(cwd=str(tmp_path))


def test_a_command_is_found_in_its_folder_and_run_on_a_loop(tmp_path: Path) -> None:
    (tmp_path / "program").write_text("#!/bin/sh\necho $NAME")
    (tmp_path / "program").chmod(0o755)

    async def run() -> bytes:
        group = ProcessGroup(["./program"])
        process = await group.start_on_loop(cwd=str(tmp_path), env={"NAME": "me"}, stdout=subprocess.PIPE)
        return (await process.communicate())[0]

    assert asyncio.run(run()) == b"me\n"
