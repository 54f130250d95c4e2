"""Engines in processes of their own: a fault costs the session that it happens to, and no other."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from agentsgym.envs.shared.engines import EngineProcesses, shared_processes
from agentsgym.errors import EnvError

ENGINE = "toy_engine:ToyEngine"
HERE = Path(__file__).parent


@pytest.fixture
def engines() -> Iterator[EngineProcesses]:
    processes = EngineProcesses(ENGINE, step_timeout_s=5.0)
    yield processes
    processes.close()


def test_sessions_share_a_process_and_not_their_game(engines: EngineProcesses) -> None:
    for name in "abc":
        engines.begin(name, {"from": ord(name)})
    pids = {engines.step(name, "1")["pid"] for name in "abc"}
    assert [engines.step(name, "2")["total"] for name in "abc"] == [ord(name) + 3 for name in "abc"]
    assert pids == set(engines.pids)
    assert len(pids) == 1


def test_an_idle_engine_plays_the_next_game(engines: EngineProcesses) -> None:
    assert engines.begin("a", {})["num_games"] == 1
    engines.end("a")
    assert engines.begin("b", {})["num_games"] == 2
    assert engines.begin("c", {})["num_games"] == 1  # the first engine is taken


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("crash", "the engine's process was killed by SIGSEGV while running the command 'crash'"),
        ("exit", "the engine's process exited with code 3 while running the command 'exit'"),
        ("raise", "the engine failed while running the command 'raise': KeyError: 'gone'"),
    ],
)
def test_a_fault_costs_its_own_session(engines: EngineProcesses, command: str, problem: str) -> None:
    for name in "abc":
        engines.begin(name, {"from": 10})
        engines.step(name, "1")
    with pytest.raises(EnvError, match=f"^{problem}$"):
        engines.step("b", command)
    assert [engines.step(name, "2")["total"] for name in "ac"] == [13, 13]
    with pytest.raises(EnvError, match="the session 'b' has no game in the engine"):
        engines.step("b", "1")
    assert engines.begin("b", {})["total"] == 0


def test_a_hang_is_ended(engines: EngineProcesses) -> None:
    impatient = EngineProcesses(ENGINE, step_timeout_s=0.2, start_timeout_s=2.0)
    try:
        for name in "ab":
            impatient.begin(name, {"from": 1})
        [pid] = impatient.pids
        with pytest.raises(EnvError, match=r"was terminated after 0\.2 s while running the command 'hang'"):
            impatient.step("a", "hang")
        assert not psutil.pid_exists(pid)
        assert impatient.step("b", "1")["total"] == 2
    finally:
        impatient.close()


def test_a_game_that_cannot_be_begun(engines: EngineProcesses) -> None:
    engines.begin("a", {})
    with pytest.raises(EnvError, match="the engine failed while starting the game: ValueError: no such game"):
        engines.begin("b", {"fails": True})
    assert engines.step("a", "1")["total"] == 1


@pytest.mark.parametrize("engine", ["no_such_module:Engine", "toy_engine:NoSuchClass"])
def test_an_engine_that_cannot_be_loaded(engine: str) -> None:
    with pytest.raises(EnvError, match=f"the engine {engine} cannot be loaded: (ModuleNotFound|Attribute)Error"):
        EngineProcesses(engine).begin("a", {})


def test_threads_get_processes_of_their_own_and_right_answers() -> None:
    """Random sessions in threads, some of which crash, against sums made here."""
    engines = EngineProcesses(ENGINE, num_processes=2, max_games_per_process=5)
    gate = threading.Barrier(4)

    def play(seed: int) -> bool:
        draws, total, name = random.Random(seed), seed, f"session {seed}"
        if seed < 4:
            gate.wait()  # so that two are busy at once
        engines.begin(name, {"from": seed})
        for _ in range(draws.randrange(1, 12)):
            number = draws.randrange(100)
            total += number
            assert engines.step(name, str(number))["total"] == total
        if seed % 5 == 0:
            with pytest.raises(EnvError, match="SIGSEGV"):
                engines.step(name, "crash")
        engines.end(name)
        return True

    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(play, range(24)))
        assert len(engines.pids) <= 2
    finally:
        engines.close()
    assert engines.pids == []


def test_a_worn_process_is_replaced_once_its_sessions_are_over() -> None:
    engines = EngineProcesses(ENGINE, max_games_per_process=2)
    try:
        first = engines.begin("a", {})["pid"]
        assert engines.begin("b", {})["pid"] == first
        second = engines.begin("c", {})["pid"]
        assert second != first
        engines.end("a")
        assert psutil.pid_exists(first)
        engines.end("b")
        assert not psutil.pid_exists(first)
        assert engines.step("c", "1")["pid"] == second
    finally:
        engines.close()


def test_a_process_takes_no_more_sessions_than_it_may() -> None:
    engines = EngineProcesses(ENGINE, max_sessions_per_process=2)
    try:
        pids = [engines.begin(name, {})["pid"] for name in "abc"]
        assert pids[0] == pids[1] != pids[2]
    finally:
        engines.close()


def test_an_interrupt_leaves_no_answer_for_the_next_request(
    engines: EngineProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.begin("a", {})
    engines.begin("b", {"from": 7})

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("agentsgym.envs.shared.child_process.threading.Timer.cancel", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engines.step("a", "1")
    assert engines.step("b", "1")["total"] == 8


def test_shared_processes_end_with_their_owner() -> None:
    """Whether it ends in order or is killed; and a fork does not take them along."""
    code = f"""
import os, sys, warnings
sys.path.insert(0, {str(HERE)!r})
warnings.simplefilter("ignore")  # of the fork, where threads are
from agentsgym.envs.shared.engines import shared_processes
def engines():
    return shared_processes({ENGINE!r}, step_timeout_s=5.0)
pid = engines().begin("a", {{}})["pid"]
if os.fork() == 0:
    assert engines().begin("a", {{"from": 5}})["pid"] != pid
    assert engines().step("a", "1")["total"] == 6
    sys.exit()
assert os.wait()[1] == 0
assert engines().step("a", "1")["total"] == 1
print(pid, flush=True)
if len(sys.argv) > 1:
    os.kill(os.getpid(), 9)
"""
    for arguments in ([], ["killed"]):
        ran = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        assert ran.stdout.strip(), ran.stderr
        pid = int(ran.stdout)
        psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
        assert not psutil.pid_exists(pid)


def test_a_fork_while_an_engine_works_is_free_of_it() -> None:
    """A thread waits for an answer, and whatever it holds it never lets go of in the fork."""
    code = f"""
import os, sys, threading, time, warnings
sys.path.insert(0, {str(HERE)!r})
warnings.simplefilter("ignore")
from agentsgym.envs.shared.engines import shared_processes
def engines():
    return shared_processes({ENGINE!r}, step_timeout_s=30.0)
engines().begin("a", {{}})
threading.Thread(target=engines().step, args=("a", "hang"), daemon=True).start()
time.sleep(0.3)
if os.fork() == 0:
    print(engines().begin("a", {{"from": 5}})["total"], flush=True)
    engines().close()
    os._exit(0)
os.wait()
os._exit(0)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=25)
    assert ran.stdout == "5\n", ran.stderr


def test_an_exit_in_the_engine_costs_its_own_session(engines: EngineProcesses) -> None:
    engines.begin("a", {})
    pid = engines.begin("b", {})["pid"]
    with pytest.raises(EnvError, match="while running the command 'leave': SystemExit: it cannot be read"):
        engines.step("a", "leave")
    assert engines.step("b", "1")["pid"] == pid


def test_an_answer_longer_than_a_pipe_arrives_whole(engines: EngineProcesses) -> None:
    engines.begin("a", {"padding": "x\n" * 100_000})
    assert len(engines.step("a", "1")["padding"]) == 200_000


def test_shared_processes_are_found_by_their_settings() -> None:
    one = shared_processes(ENGINE, step_timeout_s=5.0, num_processes=1)
    assert shared_processes(ENGINE, num_processes=1, step_timeout_s=5.0) is one
    assert shared_processes(ENGINE, num_processes=2, step_timeout_s=5.0) is not one
    assert os.getpid() not in one.pids
