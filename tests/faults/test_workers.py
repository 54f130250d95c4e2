"""Worker processes that die, hang, grow or send what is no message: none but the session that did it is lost."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any

import pytest

from agentsgym import AgentsGymError, ConfigError, EnvProcessPool, EnvThreadPool
from benchmarks.fault_scenarios.breaking import NUM_TURNS, BreakingEnv, GoOn, is_alive, processes_below, wait_until_told

ROOT = Path(__file__).parent.parent.parent


def tasks(*faults: str | None, turn: int = 1) -> list[dict[str, Any]]:
    """One task a fault, that strikes at one turn."""
    return [{"seed": seed, "fault": fault, "turn": turn} for seed, fault in enumerate(faults)]


def records(played: Any) -> list[Any]:
    """What was played, without what states by which session."""
    return [(one.messages, one.turns, one.final_reward, one.stop_reason) for one in played]


class Counting(GoOn):
    """Notes how many it answers at once, and may do something before an answer."""

    def __init__(self, do: Callable[[int], Any] = lambda _: None) -> None:
        self.rounds: list[int] = []
        self.do = do

    def act(self, requests: Any) -> Any:
        self.do(len(self.rounds))
        self.rounds.append(len(requests))
        return super().act(requests)


@pytest.mark.parametrize("fault", ["exit", "crash", "stray", "closed", "hang"])
def test_none_but_those_that_break_their_process_are_lost(fault: str) -> None:
    given = [task for turn in range(3) for task in tasks(None, fault, None, None, None, turn=turn)]
    wanted = BreakingEnv().rollout([{**task, "fault": None} for task in given], GoOn())
    with EnvProcessPool(2) as pool:
        played = BreakingEnv().rollout(given, GoOn(), pool=pool, turn_timeout_s=1 if fault == "hang" else None)
    assert [one.failed for one in played] == [task["fault"] is not None for task in given]
    assert [len(one.turns) for one in played if one.failed] == [0, 1, 2]  # what they played is kept
    whole = [index for index, one in enumerate(played) if not one.failed]
    assert records(played[index] for index in whole) == records(wanted[index] for index in whole)


def test_a_session_is_played_again_as_often_as_others_break_its_process() -> None:
    with EnvProcessPool(1) as pool:
        played = BreakingEnv().rollout(tasks(*["exit"] * 7, None, None, turn=2), GoOn(), pool=pool)
    assert [one.failed for one in played] == [True] * 7 + [False] * 2


def test_one_that_breaks_its_process_from_a_thread_is_distinguished_from_those_that_are_stepped_then() -> None:
    with EnvProcessPool(1) as pool:
        played = BreakingEnv().rollout(
            [*tasks("later", turn=0), *tasks("nap", "nap", "nap", turn=2)], GoOn(), pool=pool
        )
    assert [one.failed for one in played[1:]] == [False] * 3


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_signals_from_outside_convict_nobody_at_once(kind: str) -> None:
    """As of a system that is short of memory, or of a job's scheduler, also of a session that lives alone."""

    def kill(round_: int) -> None:
        if round_ in {1, 3}:
            os.kill(pool.workers()[0].process.pid, getattr(signal, kind))

    with EnvProcessPool(1) as pool:
        for num_tasks in (1, 5):
            played = BreakingEnv().rollout(tasks(*[None] * num_tasks), Counting(kill), pool=pool)
            assert [one.failed for one in played] == [False] * num_tasks


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGTERM"])
def test_a_signal_to_the_process_that_workers_are_forked_from_costs_no_session(kind: str) -> None:
    """Also while workers start, and together with one of them."""

    def signal_all(round_: int) -> None:
        if round_ in {0, 2, 4}:
            for pid in (_forkserver._forkserver_pid, *(worker.process.pid for worker in pool.workers())):  # type: ignore[attr-defined]
                with suppress(ProcessLookupError):
                    os.kill(pid, getattr(signal, kind))

    with EnvProcessPool(2) as pool:
        played = BreakingEnv().rollout(tasks(None, None), Counting(signal_all), pool=pool)
    assert [one.failed for one in played] == [False, False]


def test_processes_that_are_killed_whatever_they_do_end_the_run_with_a_sentence() -> None:
    """Or else each session fails; nothing goes on forever."""
    with EnvProcessPool(2) as pool, killing_all(pool), pytest.raises(AgentsGymError, match="ended one after another"):
        BreakingEnv().rollout(tasks(None, None), GoOn(), pool=pool)


class killing_all:  # noqa: N801  # reads as a function
    """Kills every process of a pool as soon as it starts."""

    def __init__(self, pool: EnvProcessPool) -> None:
        self.pool = pool
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while not self.over.wait(0.002):
            for worker in [*self.pool.workers()]:
                worker.process.kill()

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()


@pytest.mark.parametrize(
    ("fault", "why"),
    [("unreadable", "ValueError"), ("unreadable: exits", "SystemExit"), ("unreadable: cancelled", "CancelledError")],
)
def test_a_result_that_cannot_be_read_costs_its_own_session(fault: str, why: str) -> None:
    with EnvProcessPool(1) as pool:
        poisoned, other = BreakingEnv().rollout(tasks(fault, None), GoOn(), pool=pool)
    assert f"its result could not be unpickled: {why}" in str(poisoned.error)
    assert not other.failed


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("unsendable: crashes", "its environment's process died (signal SIGSEGV)"),
        ("unsendable: exits", "its process could not send the result: SystemExit"),
        ("unsendable: closes", "its process could not send the result: GeneratorExit"),
        ("unsendable: hangs", "the environment took longer than turn_timeout_s = 1"),
    ],
)
@pytest.mark.parametrize("num_others", [0, 3])
def test_a_result_that_breaks_what_pickles_it_costs_its_own_session(fault: str, why: str, num_others: int) -> None:
    given = tasks(fault, *[None] * num_others)
    with EnvProcessPool(1) as pool:
        poisoned, *others = BreakingEnv().rollout(
            given, GoOn(), pool=pool, turn_timeout_s=1 if fault == "unsendable: hangs" else None
        )
    assert why in str(poisoned.error)
    assert not any(one.failed for one in others)


def test_an_aborted_rollouts_episodes_that_hang_while_they_are_closed_do_not_hang_the_next_rollout() -> None:
    def abort(_: int) -> None:
        raise KeyboardInterrupt

    with EnvProcessPool(1) as pool:
        with pytest.raises(KeyboardInterrupt):
            BreakingEnv().rollout(tasks("unclosed", None), Counting(abort), pool=pool)
        played = BreakingEnv().rollout(tasks(None, None), GoOn(), pool=pool)
        assert [one.failed for one in played] == [False, False]
        [worker] = [one.process.pid for one in pool.workers()]
        with pytest.raises(KeyboardInterrupt):
            BreakingEnv().rollout(tasks(None, None), Counting(abort), pool=pool)
        BreakingEnv().rollout(tasks(None), GoOn(), pool=pool)
        assert [one.process.pid for one in pool.workers()] == [worker]


def test_a_process_that_holds_too_much_memory_costs_the_session_that_made_it_grow() -> None:
    with EnvProcessPool(1) as pool:
        BreakingEnv().rollout(tasks(None), GoOn(), pool=pool)
        [worker] = pool.workers()
    limit = round(worker.fresh_mb or 0) + 100  # builds of torch differ by hundreds
    with EnvProcessPool(1, max_memory_mb=limit) as pool:
        played = BreakingEnv().rollout(tasks(None, "grow", None), GoOn(), pool=pool)
    assert [one.failed for one in played] == [False, True, False]
    assert f"MB, more than max_memory_mb = {limit}" in str(played[1].error)


def test_a_memory_limit_below_what_a_process_takes_is_reported() -> None:
    with (
        EnvProcessPool(1, max_memory_mb=1) as pool,
        pytest.raises(ConfigError, match="max_memory_mb must be larger than"),
    ):
        BreakingEnv().rollout(tasks("nap", turn=0), GoOn(), pool=pool)


@pytest.mark.parametrize(
    ("options", "num_processes"), [({"recycle_after_episodes": 2}, 3), ({"recycle_above_mb": 1}, 6)]
)
def test_processes_are_replaced_once_they_are_worn(options: dict[str, Any], num_processes: int) -> None:
    seen: set[int] = set()

    def note(_: int) -> None:
        seen.update(worker.process.pid for worker in pool.workers())

    # one session at a time: with two, the place of the first to end may be taken before the second one has ended
    with EnvProcessPool(1, max_sessions_per_worker=1, **options) as pool:
        played = BreakingEnv().rollout(tasks(*[None] * 6), Counting(note), pool=pool)
    assert not any(one.failed for one in played)
    assert len(seen) == num_processes


def test_no_more_sessions_share_a_process_than_are_allowed() -> None:
    agent = Counting()
    with EnvProcessPool(2, max_sessions_per_worker=3) as pool:
        BreakingEnv().rollout(tasks(*[None] * 13), agent, pool=pool)
    assert agent.rounds == [6] * 2 * NUM_TURNS + [1] * NUM_TURNS


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_sessions_per_worker", 0), ("recycle_after_episodes", 1.5), ("max_memory_mb", 0), ("recycle_above_mb", "1")],
)
def test_impossible_limits_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be a positive .* got {value!r}"):
        EnvProcessPool(2, **{option: value})


OWNER = """
from agentsgym import EnvProcessPool
from benchmarks.fault_scenarios.breaking import BreakingEnv, GoOn

if __name__ == "__main__":
    tasks = [{{"seed": 0, "fault": fault, "turn": 1, "tell": "{reported}"}} for fault in (None, "{fault}")]
    print(len(BreakingEnv().rollout(tasks, GoOn(), pool=EnvProcessPool(2))))
"""


@pytest.mark.parametrize("fault", ["hang", "hold"])
def test_no_process_outlives_a_pools_owner(fault: str, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    reported = tmp_path / "reported"
    script.write_text(OWNER.format(fault=fault, reported=reported))
    with subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)}) as owner:
        wait_until_told(reported, 1, patience_s=60)
        below = processes_below(owner.pid)
        owner.kill()
    assert len(below) >= 4  # fork server, tracker, workers
    ending = time.monotonic() + 30  # 5 on a machine that has nothing else to do
    while any(map(is_alive, below)) and time.monotonic() < ending:
        time.sleep(0.05)
    assert not any(map(is_alive, below))


UNREADABLE = """
import sys
from agentsgym import Action, Agent, EnvProcessPool
from benchmarks.fault_scenarios.breaking import BreakingEnv

class Unreadable(str):
    def __reduce__(self):
        return sys.exit, ("bye",)

class Bad(Agent):
    def act(self, requests):
        return [Action(text=Unreadable("go on")) for _ in requests]

if __name__ == "__main__":
    with EnvProcessPool(1) as pool:
        [played] = BreakingEnv().rollout([{"seed": 0, "fault": None, "turn": 0}], Bad(), pool=pool)
    print(played.error)
"""


def test_a_worker_that_ends_of_what_is_no_trials_reports_it_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(UNREADABLE)
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "its environment's process died (exit code 1)" in run.stdout
    assert set(run.stderr.splitlines()) >= {"agentsgym: a worker process ends: SystemExit: bye"}
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("kind", [EnvProcessPool, EnvThreadPool])
def test_the_workers_of_a_pool_that_was_dropped_end(kind: Any) -> None:
    before = threading.active_count()
    pool = kind(2)
    dropped = weakref.ref(pool)
    played = BreakingEnv().rollout(tasks(None, None), GoOn(), pool=pool)
    assert not any(one.failed for one in played)
    pids = [worker.process.pid for worker in pool.workers()] if kind is EnvProcessPool else []
    del pool
    gc.collect()
    assert dropped() is None
    ending = time.monotonic() + 30
    while (threading.active_count() > before or any(map(is_alive, pids))) and time.monotonic() < ending:
        time.sleep(0.02)
    assert threading.active_count() == before
    assert not any(map(is_alive, pids))
