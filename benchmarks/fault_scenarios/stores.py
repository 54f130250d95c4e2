"""Kill evaluations that keep their rollouts in a store, half of the times while a part is written, and resume them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from agentsgym import RolloutStore, Trajectory, evaluate
from agentsgym.testing import chat_tokenizer
from fault_scenarios.breaking import BreakingEnv, GoOn
from fault_scenarios.outcome import Outcome
from fault_scenarios.runs import Run

NUM_TASKS = 60
NUM_ROLLOUTS = 4
ROLLOUTS_A_PART = 5
KILLS_A_RUN = 5
TOKENIZER = chat_tokenizer()  # here, so that the processes that are forked have it


def run(*, quick: bool) -> Iterator[Outcome]:
    """Kill evaluations."""
    num_kills, began = 10 if quick else 200, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        straight = Run(folder / "straight", function=play)
        straight.wait()
        wanted, draws, length_s = straight.result(), random.Random(0), time.monotonic() - began
        num_done = num_in_parts = num_runs = 0
        wrong: list[str] = []
        while num_done < num_kills:
            place = folder / f"run-{num_runs}"
            num_runs += 1
            for _ in range(min(KILLS_A_RUN, num_kills - num_done)):
                num_in_parts += _hit(Run(place, function=play), draws, length_s / 2, is_aimed=num_done % 2 == 0)
                num_done += 1
            last = Run(place, function=play)
            last.wait()
            if last.result() != wanted:
                wrong.append(str(last.result()))
            shutil.rmtree(place)
    yield Outcome(
        scenario=f"{num_kills} SIGKILLs of evaluations with a store, {KILLS_A_RUN} each, resumed",
        asked="no rollout that was flushed is lost, none is there twice, and the evaluation is the uninterrupted one's",
        seen=f"{num_in_parts} hit a part in flight; {num_runs - len(wrong)} of {num_runs} equal{''.join(wrong[:1])}",
        passed=not wrong and wanted.get("times_stored") == [1],
        seconds=time.monotonic() - began,
    )


def play(folder: Path) -> None:
    """Continue the evaluation, and write its result to the folder."""
    logging.disable(logging.WARNING)  # about unfinished parts, which are expected here
    store, told = folder / "rollouts", folder / "flushed"
    env = BreakingEnv(TOKENIZER, {"max_steps_per_episode": 20})
    tasks = [{"seed": index, "fault": None, "turn": 0} for index in range(NUM_TASKS)]
    with RolloutStore.writer(store, flush_every=ROLLOUTS_A_PART, agent="go on") as writer, told.open("a") as flushed:
        finished: list[str] = []

        def note(trajectory: Trajectory) -> None:
            finished.append(trajectory.session_id)
            if len(finished) == 2 * ROLLOUTS_A_PART - 1:  # beside the parts that are written by themselves
                writer.flush()
                flushed.writelines(f"{one}\n" for one in finished)
                flushed.flush()
                finished.clear()

        evaluation = evaluate(
            env, GoOn(), tasks, NUM_ROLLOUTS, max_concurrent=7, store=writer, resume=True, on_finish=note
        )
    anonymous = [dataclasses.replace(one, session_id="") for one in evaluation.trajectories]
    digest = hashlib.sha256(repr(dataclasses.replace(evaluation, trajectories=anonymous)).encode()).hexdigest()
    kept = list(RolloutStore(store))
    times = Counter((one.task_index, one.rollout_index) for one in kept)
    lost = {*told.read_text().splitlines()} - {one.session_id for one in kept}
    result = {
        "evaluation": digest,
        "num_stored": len(times),
        "times_stored": sorted({*times.values()}),
        "lost": len(lost),
    }
    (folder / f"result-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))


def _hit(one: Run, draws: random.Random, length_s: float, *, is_aimed: bool) -> bool:
    """Kill it at a random moment, or a moment after a part has been begun; returns whether one is left unfinished."""
    store = one.folder / "rollouts"
    before = _unfinished(store)
    until = time.monotonic() + draws.uniform(0.02, length_s)
    while time.monotonic() < until and not one.is_over:
        time.sleep(0.0005)
    while is_aimed and _unfinished(store) == before and not one.is_over:
        pass
    one.signal(signal.SIGKILL)
    one.wait(timeout_s=10)
    return _unfinished(store) != before


def _unfinished(store: Path) -> set[str]:
    return {name for name in os.listdir(store) if name.endswith(".unfinished")} if store.is_dir() else set()  # noqa: PTH208  # fast
