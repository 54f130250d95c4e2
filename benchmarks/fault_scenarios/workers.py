"""Break worker processes in every way there is, and count the innocent episodes that are lost."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentsgym import EnvProcessPool
from fault_scenarios.breaking import BreakingEnv, GoOn, count_lost, is_alive, processes_below, tasks, wait_until_told
from fault_scenarios.outcome import Outcome

_NUM_WORKERS = 8
_LIMIT_S = 1.0
_NOTICED_AFTER_S = 5.0  # a message that was taken from a worker, which waits for it
_SLACK_S = 60.0
_NUM_OWNERS_WORKERS = 4
_OWNERS_LIMIT_S = 5.0
_PATIENCE_S = 60.0
_FOLDER = Path(__file__).parent.parent


def run(*, quick: bool) -> Iterator[Outcome]:
    """Break workers of pools, then kill the owners of some."""
    num_episodes = 64 if quick else 256
    disable, logging.root.manager.disable = logging.root.manager.disable, logging.WARNING
    try:
        for faults in (["exit", "crash"], ["hang"], ["exit", "crash", "hang", "hold"]):
            for fraction in (0.1, 0.2):
                yield _broken(num_episodes, faults, fraction)
        for faults in (["stray"], ["steal"], ["closed"]):
            yield _broken(num_episodes, faults, 0.1)
        yield _broken(num_episodes, ["grow"], 0.1, max_memory_mb=300)
        yield _broken(num_episodes, ["exit"], 0.1, recycle_after_episodes=4)
    finally:
        logging.root.manager.disable = disable
    for fault in ("hang", "hold"):
        yield _owner_killed(fault, num_times=1 if quick else 10)


def _broken(num_episodes: int, faults: Sequence[str], fraction: float, **options: Any) -> Outcome:
    given = tasks(num_episodes, faults, fraction)
    num_broken = sum(task["fault"] is not None for task in given)
    num_hanging = sum(task["fault"] in {"hang", "hold"} for task in given)
    began = time.monotonic()
    with EnvProcessPool(_NUM_WORKERS, **options) as pool:
        played = BreakingEnv().rollout(given, GoOn(), pool=pool, turn_timeout_s=_LIMIT_S if num_hanging else None)
    seconds = time.monotonic() - began
    num_lost, num_unnoticed = count_lost(given, played)
    num_stealing = sum(task["fault"] == "steal" for task in given)
    limit_s = num_hanging * _LIMIT_S + num_stealing * _NOTICED_AFTER_S + _SLACK_S
    settings = "".join(f", {name} = {value}" for name, value in options.items())
    noticed = "" if num_unnoticed == 0 else f", {num_unnoticed} faults without effect"
    return Outcome(
        scenario=f"{num_episodes} episodes on {_NUM_WORKERS} processes, {num_broken} of them: "
        f"{', '.join(faults)}{settings}",
        asked=f"0 innocents lost, at most {limit_s:.0f} s",
        seen=f"{num_lost} of {num_episodes - num_broken} lost, {seconds:.1f} s{noticed}",
        # What steals bytes may find none to steal.
        passed=num_lost == 0 and seconds <= limit_s and (num_unnoticed == 0 or "steal" in faults),
        seconds=seconds,
    )


_OWNER = """
from fault_scenarios.breaking import BreakingEnv, GoOn
from agentsgym import EnvProcessPool

if __name__ == "__main__":
    tasks = [{{"seed": seed, "fault": "{fault}", "turn": 1, "tell": "{told}"}} for seed in range({num_workers})]
    BreakingEnv().rollout(tasks, GoOn(), pool=EnvProcessPool({num_workers}))
"""


def _owner_killed(fault: str, num_times: int) -> Outcome:
    began = time.monotonic()
    waits = [_seconds_to_end(fault) for _ in range(num_times)]
    kind = " that hold the interpreter's lock" if fault == "hold" else ""
    kills = "1 SIGKILL" if num_times == 1 else f"{num_times} SIGKILLs"
    return Outcome(
        scenario=f"{kills} of a process whose {_NUM_OWNERS_WORKERS} workers hang in steps{kind}",
        asked=f"no process after {_OWNERS_LIMIT_S:.0f} s",
        seen=f"the last one after {max(waits):.1f} s",
        passed=max(waits) <= _OWNERS_LIMIT_S,
        seconds=time.monotonic() - began,
    )


def _seconds_to_end(fault: str) -> float:
    """Kill a pool's owner while its workers hang, and wait for the end of every process that it had started."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "owner.py"
        told = Path(folder) / "told"
        playing = _OWNER.format(fault=fault, told=told, num_workers=_NUM_OWNERS_WORKERS)
        script.write_text(f"import sys\nsys.path.insert(0, {str(_FOLDER)!r})\n{playing}")
        with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL) as owner:
            wait_until_told(told, _NUM_OWNERS_WORKERS, _PATIENCE_S)
            below = processes_below(owner.pid)
            owner.kill()
        killed = time.monotonic()
        while any(map(is_alive, below)) and time.monotonic() - killed < _PATIENCE_S:
            time.sleep(0.02)
        return time.monotonic() - killed
