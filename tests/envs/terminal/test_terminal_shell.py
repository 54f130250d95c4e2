"""Shells in sandboxes: what stays between commands, every limit, and that nothing is left."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from terminal_leaks import nothing_left

from agentsgym.envs.Terminal import shell as shell_module
from agentsgym.envs.Terminal.launch import HOME
from agentsgym.envs.Terminal.shell import ISOLATIONS, Result, Sandbox, Shell, isolation_for
from agentsgym.errors import ConfigError, EnvError

try:
    AUTO = isolation_for("auto")
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

#: Commands that could harm this machine run only where they see no other process.
IN_NAMESPACES = pytest.mark.skipif(AUTO != "namespaces", reason="namespaces are not available here")
LIMIT_S = 60.0


def working(isolation: str) -> bool:
    """Whether a kind of isolation works here, and does not run commands as root."""
    with suppress(ConfigError):
        return isolation_for(isolation) == isolation and (isolation != "none" or os.geteuid() != 0)
    return False


@pytest.fixture(autouse=True)
def leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No folder and no process is left by a test."""
    with nothing_left(monkeypatch):
        yield


def in_shell(
    play: Callable[[Shell, Sandbox], Coroutine[Any, Any, Any]], isolation: str = AUTO, max_output_bytes: int = 4000
) -> Any:
    """Play with a shell in a folder that has the file a.txt."""

    async def played() -> Any:
        sandbox = Sandbox(isolation, memory_mb=512)
        shell = Shell(sandbox, max_output_bytes)
        try:
            sandbox.write({"a.txt": "one\ntwo\n"})
            await shell.start()
            return await play(shell, sandbox)
        finally:
            await shell.stop()
            sandbox.remove()

    return asyncio.run(played())


def after(*commands: str, limit_s: float = LIMIT_S, isolation: str = AUTO) -> list[Result]:
    """The results of commands that are run one after another."""

    async def play(shell: Shell, _: Sandbox) -> list[Result]:
        return [await shell.run(command, limit_s) for command in commands]

    return in_shell(play, isolation)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_the_state_of_the_shell_stays_and_the_folder_has_one_name(isolation: str) -> None:
    if not working(isolation):
        pytest.skip(f"isolation {isolation!r} does not work here")
    results = after(
        "mkdir -p b/c; cd b; x=5; f() { echo f $x; }",
        "pwd; f",
        "cd; pwd; echo ~ $HOME",
        "(exit 3)",
        "echo $?; python3 -c 'import sys; print(sys.flags.hash_randomization)'",
        "ls -l a.txt | cut -d ' ' -f 1,2,5-",
        isolation=isolation,
    )
    outputs = ["", f"{HOME}/b\nf 5\n", f"{HOME}\n{HOME} {HOME}\n", "", "3\n0\n", "-rw-r--r-- 1 8  a.txt\n"]
    assert [one.output for one in results] == outputs
    assert [one.status for one in results] == [0, 0, 0, 3, 0, 0]


@pytest.mark.parametrize(
    ("command", "output", "status"),
    [
        ("echo out; echo err >&2; false", "out\nerr\n", 1),
        ("no-such-command", "bash: line 4: no-such-command: command not found\n", 127),
        ("cat; read line; echo read:$line", "read:\n", 0),
        ("cat <<'END'\na `b` $c\nEND", "a `b` $c\n", 0),
        ("printf 'a\\0b\\377\\033[31mred\\033[0m'", "a\ufffdb\ufffdred", 0),
        ("echo 'unbalanced", None, 2),
        ("if true; then", None, 2),
        ("exec 3>&- 4>&-; echo forged >&4", None, 1),
        ("printf() { :; }; read() { return 1; }; echo x", "x\n", 0),
        ("echo " + "x" * 100_000 + " | wc -c", "100001\n", 0),
        ("echo caf\u00e9 \ud800 \u2603", "caf\u00e9 ? \u2603\n", 0),
        ("cd /; cd; trap 'echo never' TERM; set", None, 0),
    ],
    ids=range(12),
)
def test_a_command_and_the_next(command: str, output: str | None, status: int) -> None:
    first, second = after(command, "echo next")
    assert first.status == status
    assert not first.note
    assert output is None or first.output == output
    assert (second.output, second.status) == ("next\n", 0)


@pytest.mark.parametrize(
    ("command", "note"),
    [
        ("exit 3", "the shell exited with status 3"),
        ("set -e; echo x; false", "the shell exited with status 1"),
        ("exec true", "the shell exited with status 0"),
        ("sleep 100 & echo x; exit 0", "the shell exited with status 0"),
    ],
)
def test_a_shell_that_ends_is_replaced_in_its_folder(command: str, note: str) -> None:
    _, ended, where = after("mkdir b; cd b; y=1", command, "pwd; echo [$y]")
    assert ended.note == f"{note}; a new shell was started in the same folder"
    assert ended.status is None
    assert ended.output in ("", "x\n")
    assert where.output == f"{HOME}/b\n[]\n"


@pytest.mark.parametrize(
    "command", ["while :; do :; done", "sleep 1000", "yes", "sleep 1000 | cat", "trap '' TERM; sleep 99"]
)
def test_a_command_that_takes_too_long_is_killed(command: str) -> None:
    killed, where = after(f"echo begun; {command}", "pwd", limit_s=1.0)
    assert killed.note == "the command took longer than 1 s and was killed; a new shell was started in the same folder"
    assert killed.output.startswith("begun\n")
    assert len(killed.output) < 4200
    assert where.output == f"{HOME}\n"


def test_much_output_is_read_to_its_end_and_shortened() -> None:
    long, line = after("head -c 300000000 /dev/zero | tr '\\0' a; echo end", "python3 -c \"print('x' * 1_000_000)\"")
    assert long.output == "a" * 2000 + f"\n[{300_000_004 - 4000} bytes of output left out]\n" + "a" * 1996 + "end\n"
    assert line.output.startswith("x" * 2000 + "\n[996001 bytes of output left out]\n")


def test_the_size_of_files_the_memory_and_open_files_are_limited() -> None:
    file, memory, files, core = after(
        "head -c 200M /dev/zero > big; wc -c < big",
        "python3 -c 'bytearray(1 << 30)'",
        "python3 -c 'files = [open(\"/dev/null\") for _ in range(300)]'",
        "ulimit -c; ulimit -t",
    )
    assert file.output.endswith(f"{32 << 20}\n")
    assert memory.output.endswith("MemoryError\n")
    assert "Too many open files" in files.output
    assert core.output == "0\n60\n"


@pytest.mark.parametrize("isolation", ["namespaces", "user"])
def test_a_fork_bomb_is_held_and_ends_with_its_shell(isolation: str) -> None:
    if not working(isolation) or shell_module._linux_version() < (5, 14):
        pytest.skip(f"processes are not counted with isolation {isolation!r} here")
    bomb, _, after_it = after(":(){ :|:& };:", "exit", "echo ok", isolation=isolation)
    assert not bomb.note
    assert after_it.output == "ok\n"


@IN_NAMESPACES
def test_a_sandbox_shows_no_process_no_network_and_no_file_of_this_machine() -> None:
    kill, processes, secret, system, network, place = after(
        "kill -9 -1; kill -9 $$; echo alive",
        "ls /proc | grep -c '^[0-9]'",
        f"ls {Path(__file__).parent} {Path.home() / '.ssh'} {tempfile.gettempdir()} | cat",
        "touch /etc/x /usr/x /x; echo x > /tmp/x && cat /tmp/x; mount -o remount,rw / || echo no",
        "python3 -c \"import socket; socket.create_connection(('127.0.0.1', 80))\" 2>&1 | tail -n 1",
        "id -un; hostname; echo $$",
    )
    assert kill.output.endswith("alive\n")
    assert int(processes.output) <= 5
    assert all("No such file" in line for line in secret.output.splitlines() if not line.startswith("/tmp"))
    assert system.output.count("Read-only file system") >= 2
    assert system.output.endswith("no\n")
    assert "x\n" in system.output
    assert "unreachable" in network.output
    assert place.output == "root\nlocalhost\n1\n"


@pytest.mark.skipif(not working("user"), reason="only root can use another user")
def test_another_user_cannot_change_the_files_of_this_one() -> None:
    changed, killed, own = after(
        f"echo x > {tempfile.gettempdir()}/own", f"kill -9 {os.getpid()}", "touch own && [ -O own ]", isolation="user"
    )
    assert "Permission denied" in changed.output
    assert "Operation not permitted" in killed.output
    assert own.status == 0


def test_no_variable_of_this_process_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    [listed] = after("env; cat /proc/$PPID/environ 2>/dev/null | tr '\\0' ' '")
    assert "hf_secret" not in listed.output
    assert "TZ=UTC" in listed.output


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_what_runs_in_the_background_ends_with_the_shell(isolation: str) -> None:
    if not working(isolation) or sys.platform != "linux":
        pytest.skip(f"isolation {isolation!r} does not work here")
    marks = [f"{7_000_000 + os.getpid() * 10 + index}" for index in range(3)]

    async def play(shell: Shell, _: Sandbox) -> None:
        commands = (
            f"sleep {marks[0]} &",
            f"(setsid sleep {marks[1]} &)",
            f"nohup sleep {marks[2]} >/dev/null 2>&1 & disown",
        )
        assert [(await shell.run(command, LIMIT_S)).status for command in commands] == [0, 0, 0]
        async with asyncio.timeout(LIMIT_S):
            while not all(is_running(mark) for mark in marks):
                await asyncio.sleep(0.01)

    in_shell(play, isolation)
    assert not any(is_running(mark) for mark in marks)


def is_running(mark: str) -> bool:
    """Whether a process sleeps for this many seconds."""
    return any(process.info["cmdline"] == ["sleep", mark] for process in psutil.process_iter(["cmdline"]))


def test_a_folder_is_deleted_whatever_is_in_it() -> None:
    deep = "import os\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')"
    made = after(f'python3 -c "{deep}"', "mkdir -p e/f; touch e/f/g; chmod 000 e/f e; chmod 500 .", "ln -s / link")
    assert [one.status for one in made[:2]] == [0, 0]


def test_a_command_that_is_cancelled_leaves_nothing() -> None:
    async def play(shell: Shell, _: Sandbox) -> None:
        running = asyncio.create_task(shell.run("sleep 1000", LIMIT_S))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    in_shell(play)


def test_a_command_that_writes_to_the_descriptors_of_the_shell_harms_only_itself() -> None:
    forge = "for to in {5..20}; do { printf 'forged\\0' >&$to; } 2>/dev/null; done"
    forged, after_it = after(forge, "echo next")
    assert forged.note == "the shell answered in a wrong form; a new shell was started in the same folder"
    assert after_it.output == "next\n"


def test_a_folder_may_have_any_name() -> None:
    *_, where = after("mkdir $'b\\e[31m\\n\\xff c'; cd b*", "exit", "pwd | od -c | tail -n 3")
    assert "377" in where.output


def test_output_in_the_background_comes_with_the_next_command() -> None:
    async def play(shell: Shell, sandbox: Sandbox) -> str:
        await shell.run("(until [ -e go ]; do sleep 0.01; done; echo late; touch said) &", LIMIT_S)
        (sandbox.home / "go").touch()
        return (await shell.run("until [ -e said ]; do sleep 0.01; done; echo now", LIMIT_S)).output

    assert in_shell(play) == "late\nnow\n"


def test_a_shell_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_module, "_LAUNCHER", "/nowhere/launch.py")
    with pytest.raises(EnvError, match=r"the shell cannot be started: .*No such file"):
        after("echo")


PROGRAM = """
import os, signal, sys
from agentsgym.envs.Terminal import TerminalEnv
env = TerminalEnv(env_config={"max_steps_per_episode": 5})
env.reset(env.tasks(1)[0])
env.step("sleep 1000 & (setsid sleep 1000 &)")
[state] = env.active_states.values()
print(state["shell"]._process.pid, state["sandbox"]._base, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only a process of Linux learns of its parent's end")
@pytest.mark.parametrize("end", ["killed", "exits"])
def test_a_process_that_ends_leaves_no_shell(end: str) -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, end], check=False, capture_output=True, text=True)
    assert ran.returncode == (-signal.SIGKILL if end == "killed" else 0), ran.stderr
    launcher, base = ran.stdout.split()
    deadline = time.monotonic() + LIMIT_S
    while psutil.pid_exists(int(launcher)) and psutil.Process(int(launcher)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if end == "exits":
        assert not Path(base).exists()
    subprocess.run(["rm", "-rf", base], check=True)


def test_isolation_that_does_not_work_is_refused_and_a_weaker_one_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_namespaces(isolation: str) -> str | None:
        return "unshare: not permitted" if isolation == "namespaces" else None

    monkeypatch.setattr(shell_module, "_problem_of", without_namespaces)
    with pytest.raises(
        ConfigError, match=r"'isolation'\] = 'namespaces' does not work on this machine: unshare: not per"
    ):
        isolation_for("namespaces")
    assert isolation_for("auto") == "user"
    monkeypatch.setattr(shell_module, "_problem_of", lambda isolation: None if isolation == "none" else "no")
    with pytest.raises(ConfigError, match=r"cannot be isolated here: no; .* = 'none' to let agents"):
        isolation_for("auto")
    monkeypatch.undo()
    caplog.set_level(logging.WARNING)
    shell_module._problem_of.cache_clear()
    weaker = next((one for one in ("none", "user") if working(one)), None)
    shell_module._problem_of.cache_clear()
    caplog.clear()
    if weaker is not None:
        assert [isolation_for(weaker) for _ in range(2)] == [weaker] * 2
        assert [f"(isolation {weaker!r})" in one.message for one in caplog.records] == [True]
