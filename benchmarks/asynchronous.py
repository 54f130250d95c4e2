"""Measure training that does not wait for rollouts, beside training that does, on engines that are emulated.

The driver, the threads and the decisions are the library's own; what an engine, an environment and learning take is
that of ``benchmarks/scaling_engine.py``, waited for, so many times faster than it would be::

    lockstep   rounds of all episodes over all GPUs, then learning on all of them
    ahead      some GPUs sample without pause, the others learn; at most ``max_staleness`` updates apart

``python -m benchmarks.asynchronous --tasks tools`` compares the ways; ``--balanced`` takes as long for learning as for
sampling, to see what is left of the time of both; ``--learning`` trains Twenty Questions. Run it on a machine that is
quiet: what the driver itself takes is waited for too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from agentsgym import Action, MultistepEnv, TurnRequest
from agentsgym.agents.base import AsyncAgent
from agentsgym.failures import FailurePolicy
from agentsgym.rollouts.thread_pool import EnvThreadPool
from agentsgym.training.generation.asynchronous import Group, RolloutsAhead
from agentsgym.training.generation.in_flight import GroupsInFlight
from benchmarks.scaling_engine import TASKS, Engine, Episode, Learner, Play, Sampling, Task, continuous, lockstep

GROUP = 8  # rollouts of a task
TICK_S = 0.001


def episode(task: Task, group: int, rollout: int) -> Episode:
    """What is played in a place of a group."""
    return task.episode("ahead", group, rollout)


class PlannedEnv(MultistepEnv):
    """Says the number of its group; its time passes in the agent."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "group": task_data["seed"]}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return str(state["group"])

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> tuple[Any, float, bool, Any]:
        return state, 0.0, action == "last", {}


@dataclass(slots=True)
class _Session:
    """An episode in play."""

    episode: Episode
    place: int
    turn: int = 0
    context: float = 0.0


@dataclass(slots=True)
class EmulatedEngines(AsyncAgent):
    """Answers when the engines would have, and the environment has taken its time.

    Attributes:
        task: The kind of the episodes.
        num_engines: How many engines sample.
        scale: How many times faster time goes.
        engine: What one takes.
    """

    task: Task
    num_engines: int
    scale: float
    engine: Engine = field(default_factory=Engine)
    _engines: list[Sampling] = field(init=False)
    _sessions: dict[str, _Session] = field(default_factory=dict[str, _Session], init=False)
    _answers: dict[int, asyncio.Future[None]] = field(default_factory=dict[int, asyncio.Future[None]], init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, init=False)
    _begun: Counter[str] = field(default_factory=Counter[str], init=False)
    _loop_task: asyncio.Task[None] | None = field(default=None, init=False)
    _began: float = field(default_factory=time.perf_counter, init=False)

    def __post_init__(self) -> None:
        self._engines = [Sampling(self.engine) for _ in range(self.num_engines)]

    async def aact(self, request: TurnRequest) -> Action:
        """Wait as long as the engine and then the environment of this turn would take."""
        session = self._sessions.get(request.session_id) or self._new(request)
        turn = session.episode[session.turn]
        new = self.task.new_tokens(session.turn)
        session.context += new
        await self._sampled(session, new, turn.tokens)
        session.context += turn.tokens
        session.turn += 1
        await asyncio.sleep(turn.env_s / self.scale)
        is_last = session.turn == len(session.episode)
        if is_last:
            del self._sessions[request.session_id]
        return Action(text="last" if is_last else "on", token_ids=[5])

    def _now(self) -> float:
        return (time.perf_counter() - self._began) * self.scale

    def _new(self, request: TurnRequest) -> _Session:
        loads = [len(engine.running) for engine in self._engines]
        place = min(range(len(loads)), key=loads.__getitem__)
        group = request.messages[0]["content"]
        planned = episode(self.task, int(group), self._begun[group])
        self._begun[group] += 1
        session = self._sessions[request.session_id] = _Session(planned, place)
        return session

    async def _sampled(self, session: _Session, new: int, tokens: int) -> None:
        number = next(self._numbers)
        self._advance()
        engine = self._engines[session.place]
        engine.work_until(max(engine.now, self._now()))
        engine.add(number, new, session.context, tokens)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.ensure_future(self._run())
        await answer

    def _advance(self) -> None:
        now = self._now()
        for engine in self._engines:
            while engine.running and engine.next_end() <= now:
                engine.work_until(engine.next_end())
                answer = self._answers.pop(engine.pop())
                if not answer.done():
                    answer.set_result(None)

    async def _run(self) -> None:
        while self._answers:
            self._advance()
            await asyncio.sleep(TICK_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a run is emulated.

    Attributes:
        task: The kind of its episodes.
        size: Groups of a batch.
        scale: How many times faster time goes.
        batches: How many are trained on; the first third is not counted.
    """

    task: Task
    size: int
    scale: float
    batches: int


def ahead(setup: Setup, num_sampling: int, learn_s: float, max_staleness: int) -> dict[str, float]:
    """Seconds of an update, in the emulated time."""
    task, scale, batches = setup.task, setup.scale, setup.batches
    env = PlannedEnv(env_config={"max_steps_per_episode": 1000})  # as long as planned
    agent = EmulatedEngines(task, num_sampling, scale)
    groups = (
        Group(number=number, row_index=0, row={"task_data": {}}, trials=env.trials([{"seed": number}] * GROUP))
        for number in itertools.count()
    )
    in_flight = GroupsInFlight(setup.size, GROUP, max_staleness)
    with EnvThreadPool(1) as pool:
        rollouts = RolloutsAhead(in_flight, groups, agent, policy=FailurePolicy(), pool=pool)
        ends, waits, tokens = list[float](), list[float](), list[float]()
        try:
            for update in range(batches):
                played = rollouts.take(update, lambda: None)
                waits.append(rollouts.waited_s * scale)
                tokens.append(sum(len(one.turns) for _, trajectories in played for one in trajectories))
                time.sleep(learn_s / scale)
                ends.append(time.perf_counter())
        finally:
            rollouts.close()
    warm = batches // 3
    return {
        "step_s": round((ends[-1] - ends[warm - 1]) * scale / (batches - warm), 1),
        "wait_s": round(sum(waits[warm:]) / (batches - warm), 1),
        "turns_a_batch": round(sum(tokens[warm:]) / (batches - warm), 1),
    }


def compare(setup: Setup, name: str, num_gpus: int, staleness: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Lockstep on all GPUs, and each bound of staleness at the better of two splits of them."""
    task, learner, num_episodes = setup.task, Learner(), setup.size * GROUP
    episodes = [task.episode("lockstep", index) for index in range(num_episodes)]
    total_s = sum(map(task.num_tokens, episodes)) * learner.token_s
    shares = [episodes[place::num_gpus] for place in range(num_gpus)]
    base_s = lockstep(task, shares, Engine(), by_rank=False)[-1] + total_s / num_gpus + learner.update_s
    yield {"task": name, "way": "lockstep", "gpus": num_gpus, "episodes": num_episodes, "step_s": round(base_s, 1)}
    for bound in staleness:
        rows: list[dict[str, Any]] = []
        for num_sampling in (num_gpus // 2, num_gpus * 3 // 4):
            learn_s = total_s / (num_gpus - num_sampling) + learner.update_s
            row = ahead(setup, num_sampling, learn_s, bound)
            rows.append(row | {"gpus_sampling": num_sampling, "learn_s": round(learn_s, 1)})
        best = min(rows, key=lambda row: row["step_s"])
        faster = round(base_s / best["step_s"], 2)
        yield {"task": name, "way": f"max_staleness={bound}", **best, "times_faster": faster}


def balanced(setup: Setup, name: str) -> Iterator[dict[str, Any]]:
    """Simulate one GPU that samples next to one that learns, where both take equally long, by two definitions of that.

    A batch that is played alone takes until its longest episode ends. Batches that overlap, with nothing learned, take
    less each. If learning takes as little, nothing that keeps to a bound of 1 gets by with the larger of both: the
    groups of a batch may begin only when the one before the last was learned from, and are played before it, their
    longest episode at least. So two updates take no less than learning and that episode: ``at_least``.
    """
    batches = [
        [episode(setup.task, batch * setup.size + group, i) for group in range(setup.size) for i in range(GROUP)]
        for batch in range(setup.batches)
    ][setup.batches // 3 :]
    batch_s = fmean(played_s(setup.task, batch) for batch in batches)
    yield _of_the_larger(setup, name, "a batch alone", batch_s, 1)
    sampling_s = ahead(setup, 1, 0.0, 1)["step_s"]
    longest = [max(played_s(setup.task, [one]) for one in batch) for batch in batches]
    at_least = (1 + fmean(max(1.0, lasts_s / sampling_s) for lasts_s in longest)) / 2
    yield _of_the_larger(setup, name, "batches that overlap", sampling_s, 1) | {"at_least": round(at_least, 2)}
    yield _of_the_larger(setup, name, "batches that overlap", sampling_s, 2)


def _of_the_larger(setup: Setup, name: str, as_long_as: str, learn_s: float, max_staleness: int) -> dict[str, Any]:
    row = ahead(setup, 1, learn_s, max_staleness)
    settings = {"task": name, "max_staleness": max_staleness, "learning_takes_as_long_as": as_long_as}
    return settings | {"learn_s": round(learn_s, 1), **row, "of_the_larger": round(row["step_s"] / learn_s, 2)}


def played_s(task: Task, episodes: Sequence[Episode]) -> float:
    """Seconds until all of them are played on one engine that has nothing else to do."""
    return continuous(episodes, [None] * len(episodes), Play(task, 1, Engine()))[-1]


def learning(seeds: Sequence[int], staleness: Sequence[int], episodes: int) -> Iterator[dict[str, Any]]:
    """Train the embedded policy at Twenty Questions, each bound from the same imitation."""
    from benchmarks.asynchronous_learning import train  # noqa: PLC0415  # torch and TRL, for this alone

    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            for bound in staleness:
                yield train(Path(folder), seed, bound, episodes)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["tools"])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--per_gpu", type=int, default=64, help="episodes of a batch, for each GPU")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--scale", type=float, default=20.0, help="how many times faster time goes")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--balanced", action="store_true")
    parser.add_argument("--learning", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=10_240)
    options = parser.parse_args(argv)
    num_gpus = 1 if options.balanced else options.gpus
    size = num_gpus * options.per_gpu // GROUP
    setups = {
        name: Setup(task=TASKS[name], size=size, scale=options.scale, batches=options.batches) for name in options.tasks
    }
    rows: Iterator[dict[str, Any]]
    if options.learning:
        rows = learning(options.seeds, [0, *options.staleness], options.episodes)
    elif options.balanced:
        rows = itertools.chain.from_iterable(balanced(setup, name) for name, setup in setups.items())
    else:
        runs = (compare(setup, name, num_gpus, options.staleness) for name, setup in setups.items())
        rows = itertools.chain.from_iterable(runs)
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
