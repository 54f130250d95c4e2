"""An environment whose tasks specify how they break their worker, and an agent that keeps playing."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentsgym import Action, Agent, MultistepEnv, Trajectory
from agentsgym.types import TurnRequest

NUM_TURNS = 8
_HELD: list[bytearray] = []


class BreakingEnv(MultistepEnv):
    """A task is ``{"fault": a key of FAULTS or None, "turn": int}``; an innocent one plays ``NUM_TURNS`` turns.

    With ``"tell"``, the path of a file, a byte is written to it when the fault strikes.
    """

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "tell": None, "drawn": 0, "step": 0, **task_data}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"turn {step}: {state['drawn']}"

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        step = state["step"]
        if state["fault"] is not None and step == state["turn"]:
            if state["tell"] is not None:
                with Path(state["tell"]).open("a") as told:
                    told.write(".")
            FAULTS[state["fault"]]()
        drawn = self.rng(session_id).randint(0, 10**9)
        info = {"poison": _Poison(state["fault"])} if state["fault"] in POISONS else {}
        return {**state, "drawn": drawn, "step": step + 1}, drawn / 10**9, step + 1 == NUM_TURNS, info

    def _close_episode(self, session_id: str, state: dict[str, Any]) -> None:
        if state["fault"] == "unclosed":
            time.sleep(100_000)


class GoOn(Agent):
    """Says the same at every turn."""

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        """Answer."""
        return [Action(text="go on") for _ in requests]


class _Poison:
    """Breaks what pickles it, or what unpickles it."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __deepcopy__(self, _: Any) -> _Poison:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return POISONS[self.fault]()


def _raise(error: type[BaseException]) -> Any:
    raise error


def _hang_pickled() -> Any:
    time.sleep(100_000)


POISONS: dict[str, Callable[[], Any]] = {
    "unreadable": lambda: (int, ("no number",)),
    "unreadable: exits": lambda: (sys.exit, ("bye",)),
    "unreadable: cancelled": lambda: (_raise, (asyncio.CancelledError,)),
    "unsendable: crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "unsendable: exits": lambda: _raise(SystemExit),
    "unsendable: closes": lambda: _raise(GeneratorExit),
    "unsendable: hangs": _hang_pickled,
}


def _each_socket(act: Callable[[int], Any]) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # descriptors, not files
        with contextlib.suppress(OSError):
            if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                act(int(name))


def _write_stray() -> None:
    _each_socket(lambda fd: os.write(fd, b"\x00\x00\x01\x00stray bytes"))


def _steal() -> None:
    """Read the next message of the pool, in a separate thread."""

    def read(fd: int) -> None:
        threading.Thread(target=os.read, args=(fd, 7), daemon=True).start()

    _each_socket(read)


def _hold() -> None:
    """Hang in a C function that keeps the interpreter's lock: no thread of this process runs, no handler is called."""
    ctypes.PyDLL(None).sleep(100_000)


def _grow() -> None:
    _HELD.append(bytearray(b"x") * 400_000_000)
    time.sleep(1)


FAULTS: dict[str, Callable[[], Any]] = {
    "exit": lambda: os._exit(3),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": lambda: time.sleep(100_000),
    "hold": _hold,
    "stray": _write_stray,
    "steal": _steal,
    "closed": lambda: os.closerange(3, 256),
    "grow": _grow,
    "later": lambda: threading.Timer(0.1, os._exit, (5,)).start(),
    "unclosed": lambda: None,  # in closing its episode, not in its step
    "nap": lambda: time.sleep(0.3),
    **dict.fromkeys(POISONS, lambda: None),  # in what the session gives, not in its step
}


def tasks(num_tasks: int, faults: Sequence[str], fraction: float) -> list[dict[str, Any]]:
    """Tasks of which a fraction breaks, evenly spread, at different turns and in turn by each of the faults."""
    every = round(1 / fraction)
    return [
        {
            "seed": index,
            "fault": faults[index // every % len(faults)] if index % every == 0 else None,
            "turn": index // every % NUM_TURNS,
        }
        for index in range(num_tasks)
    ]


def wait_until_told(told: Path, num_faults: int, patience_s: float) -> None:
    """Wait until the faults of ``num_faults`` tasks that report to one file have struck.

    Raises:
        TimeoutError: They have not been in time.
    """
    ending = time.monotonic() + patience_s
    while not told.exists() or told.stat().st_size < num_faults:
        if time.monotonic() > ending:
            raise TimeoutError(f"not {num_faults} faults within {patience_s} s")
        time.sleep(0.02)


def count_lost(given: Sequence[dict[str, Any]], played: Sequence[Trajectory]) -> tuple[int, int]:
    """Count the innocents that failed or are not whole, and the culprits that did not fail."""
    innocents = [one for task, one in zip(given, played, strict=True) if task["fault"] is None]
    culprits = [one for task, one in zip(given, played, strict=True) if task["fault"] is not None]
    lost = sum(one.failed or len(one.turns) != NUM_TURNS for one in innocents)
    return lost, sum(not one.failed for one in culprits)


def processes_below(pid: int) -> list[int]:
    """The processes that one has started, and those that they have."""
    parents = {int(stat.parent.name): one for stat in Path("/proc").glob("[0-9]*/stat") if (one := _parent(stat))}
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    return _parent(Path(f"/proc/{pid}/stat")) is not None


def _parent(stat: Path) -> int | None:
    """The parent of a process; None if it has ended."""
    try:
        state, parent = stat.read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)
