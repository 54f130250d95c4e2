"""Play episodes without end, one in ten of which breaks, in every way there is: time and memory stay flat."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import resource
import statistics
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from agentsgym import Action, Agent, AsyncAgent, EnvThreadPool, MultistepEnv, Trajectory, TurnRequest
from agentsgym.envs.play import play
from agentsgym.failures import FailureLog
from agentsgym.rollouts.scheduler import Pool
from agentsgym.tiny import tiny_tokenizer
from fault_scenarios.outcome import Outcome

NUM_EPISODES, QUICK_EPISODES = 100_000, 5_000
ROUND = 250  # episodes of one rollout; a thousand are played in all four ways
NUM_TURNS = 3
BREAKS_EVERY = 10
HOOKS = (
    *("_initialize_episode", "_format_prompt", "_state_key", "_role", "_potential", "_step_episode", "_final_reward"),
    *("_calculate_rewards", "_close_episode", "agent"),
)
MAX_GROWTH = 1.1  # of memory and of time, from the first quarter to the last
WARM_UP = 2  # thousands that are played before anything is measured


class Foreign(BaseException):
    """Somebody's own."""


def exhaust_the_stack() -> NoReturn:
    """Call oneself until Python stops it."""
    exhaust_the_stack()


ERRORS: tuple[type[BaseException] | None, ...] = (
    *(OSError, SystemExit, asyncio.CancelledError, GeneratorExit, StopIteration, MemoryError, Foreign),
    None,  # a RecursionError
)
FAULTS = [(hook, index) for hook in HOOKS for index in range(len(ERRORS))]


def break_here(hook: str, fault: Sequence[Any]) -> None:
    """Raise the error that the task specifies, if it is meant for this hook."""
    if fault and fault[0] == hook:
        number: int = fault[1]
        error = ERRORS[number]
        if error is None:
            exhaust_the_stack()
        raise error


class SoakEnv(MultistepEnv):
    """A few short turns; a task is ``{"fault": [hook, number of the error]}``, or an empty list."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        break_here("_initialize_episode", task_data["fault"])
        return {"done": False, "fault": task_data["fault"], "turn": 0}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        break_here("_format_prompt", state["fault"])
        return f"agent {state['fault'][1]}" if state["fault"][:1] == ["agent"] else "go on"

    def _state_key(self, state: dict[str, Any]) -> int:
        break_here("_state_key", state["fault"])
        return state["turn"]

    def _role(self, state: dict[str, Any]) -> None:
        break_here("_role", state["fault"])

    def _potential(self, state: dict[str, Any]) -> float:
        break_here("_potential", state["fault"])
        return 0.0

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        break_here("_step_episode", state["fault"])
        turn = state["turn"] + 1
        return {**state, "turn": turn}, 1.0, turn == NUM_TURNS, {"success": True, "fault": state["fault"]}

    def _final_reward(self, state: dict[str, Any], turn_rewards: list[float]) -> float:
        break_here("_final_reward", state["fault"])
        return sum(turn_rewards)

    def _calculate_rewards(self, trajectory: Trajectory) -> list[float]:
        break_here("_calculate_rewards", trajectory.info["fault"])
        return super()._calculate_rewards(trajectory)

    def _close_episode(self, session_id: str, state: dict[str, Any]) -> None:
        break_here("_close_episode", state["fault"])


class SoakAgent(Agent):
    """Answers at once, and raises if the prompt requests it."""

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        """Answer every request."""
        return [self.answer(request) for request in requests]

    def answer(self, request: TurnRequest) -> Action:
        """Answer one request."""
        word, _, number = request.messages[-1]["content"].partition(" ")
        if word == "agent":
            break_here("agent", ("agent", int(number)))
        return Action(text="on")


class AsyncSoakAgent(AsyncAgent):
    """The same, with a coroutine a turn."""

    async def aact(self, request: TurnRequest) -> Action:
        """Answer one request."""
        await asyncio.sleep(0)
        return SoakAgent().answer(request)


class _Counting(logging.Handler):
    """Counts what is logged of failures."""

    def __init__(self) -> None:
        super().__init__()
        self.num_records = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one."""
        self.num_records += 1


def run(*, quick: bool) -> Iterator[Outcome]:
    """Play them all, and compare the last quarter with the first."""
    num_episodes = QUICK_EPISODES if quick else NUM_EPISODES
    start = time.monotonic()
    env = SoakEnv(tiny_tokenizer(["go on agent on", *map(str, range(10))]))
    seconds, megabytes = list[float](), list[float]()
    num_wrong = 0
    with _counted_log() as handler, FailureLog(logging.getLogger("agentsgym.soak")) as log, EnvThreadPool(2) as threads:
        ways: list[tuple[Agent, Pool | None]] = [
            *((SoakAgent(), None), (AsyncSoakAgent(), None), (SoakAgent(), threads), (AsyncSoakAgent(), threads))
        ]
        for thousand in range(-WARM_UP, num_episodes // (ROUND * len(ways))):
            faults = itertools.cycle(FAULTS)  # the same in each thousand, played in other ways
            turn = thousand % len(ways)
            began = time.process_time()
            for agent, pool in ways[turn:] + ways[:turn]:
                given = [next(faults) if index % BREAKS_EVERY == 0 else () for index in range(ROUND)]
                num_wrong += _play(env, given, agent, pool, log)
            seconds.append(time.process_time() - began)
            gc.collect()
            megabytes.append(_resident_mb())
        num_logged = handler.num_records
    yield _outcome(num_episodes, num_wrong, num_logged, seconds, megabytes, time.monotonic() - start)


def _outcome(
    num_episodes: int, num_wrong: int, num_logged: int, seconds: list[float], megabytes: list[float], elapsed_s: float
) -> Outcome:
    seconds, megabytes = seconds[WARM_UP:], megabytes[WARM_UP:]
    size = max(1, len(seconds) // 4)
    time_of = [statistics.median(part) for part in (seconds[:size], seconds[-size:])]
    memory_of = [statistics.median(part) for part in (megabytes[:size], megabytes[-size:])]
    # The same hook and error is one kind in a thread and in a coroutine; closing has its own kinds.
    is_flat = memory_of[1] <= memory_of[0] * MAX_GROWTH and time_of[1] <= time_of[0] * MAX_GROWTH
    return Outcome(
        scenario=f"{num_episodes:,} episodes, one in {BREAKS_EVERY} broken, in {len(FAULTS)} ways",
        asked=f"each fault fails its own episode; time and memory at most {MAX_GROWTH - 1:.0%} up; a kind logged once",
        seen=f"{num_wrong} wrong results; CPU seconds a thousand {time_of[0]:.2f} → {time_of[1]:.2f}, resident MB "
        f"{memory_of[0]:.1f} → {memory_of[1]:.1f} (medians of the first and the last quarter); {num_logged} log lines",
        passed=num_wrong == 0 and is_flat and num_logged <= len(FAULTS),
        seconds=elapsed_s,
    )


def _play(env: SoakEnv, faults: Sequence[Any], agent: Agent, pool: Pool | None, log: FailureLog) -> int:
    """Play one rollout; returns how many episodes ended otherwise than their tasks specify."""
    trials = env.trials([{"fault": [*fault], "seed": 0} for fault in faults])
    trajectories = play(trials, agent, log=log, pool=pool)
    return sum(not _is_as_told(one, fault) for one, fault in zip(trajectories, faults, strict=True))


def _is_as_told(trajectory: Trajectory, fault: Sequence[Any]) -> bool:
    hook = fault[0] if fault else ""
    if hook in {"", "_close_episode"}:
        is_whole = trajectory.final_reward == NUM_TURNS and not trajectory.failed
        return is_whole and trajectory.num_close_errors == (hook == "_close_episode")
    return trajectory.failed


@contextlib.contextmanager
def _counted_log() -> Generator[_Counting]:
    logger, handler = logging.getLogger("agentsgym"), _Counting()
    was_propagating, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate = was_propagating


def _resident_mb() -> float:
    """Memory of this process now; or its peak if the system does not report that."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
