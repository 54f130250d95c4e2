"""Measure what judges add to a batch of rollouts: 64 episodes of 8 turns, sampled by an emulated engine.

    python benchmarks/judges.py [--num_repeats 3]

The engine waits as long as the one of ``scaling_engine.py`` decodes: a lognormal number of tokens a turn, at the speed
of a 7.6B policy on one GPU. It either answers each episode at its own pace, or all live episodes together, so that all
of them end at the same time, which is the worst case. The judge answers in 0.1 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from scaling_engine import Engine

from agentsgym import Action, Agent, AsyncAgent, Judge, MultistepEnv, TurnRequest
from agentsgym.reports.tables import text_table
from agentsgym.seeding import derive_seed

NUM_EPISODES: Final = 64
GROUP: Final = 8
NUM_TURNS: Final = 8
JUDGE_S: Final = 0.1
MEDIAN_TOKENS: Final = 100
MAX_TOKENS: Final = 400


class Talk(MultistepEnv):
    """Turns without a game."""

    default_config: ClassVar = {"max_steps_per_episode": NUM_TURNS}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"Say something for turn {step}."

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        return state, 0.0, False, {}


def turn_seconds(number: int, turn: int) -> float:
    """The time that the engine takes for one turn of one episode."""
    rng = random.Random(derive_seed("turn", number, turn))
    return min(MAX_TOKENS, MEDIAN_TOKENS * rng.lognormvariate(0, 0.6)) * Engine().step_s


class OwnPace(AsyncAgent):
    """Continuous batching: each episode goes on as soon as its turn is decoded."""

    def __init__(self) -> None:
        self.num_started = 0

    async def aact(self, request: TurnRequest) -> Action:
        """Wait, and answer."""
        if request.agent_state is None:
            self.num_started += 1
        number, turn = request.agent_state or (self.num_started, 0)
        await asyncio.sleep(turn_seconds(number, turn))
        return Action(text=f"Episode {number}, turn {turn}.", agent_state=(number, turn + 1))


class Together(Agent):
    """One call for all live episodes, which takes as long as the longest turn."""

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Wait, and answer."""
        states = [request.agent_state or (number, 0) for number, request in enumerate(requests)]
        time.sleep(max(turn_seconds(*state) for state in states))
        return [Action(text=f"Episode {number}, turn {k}.", agent_state=(number, k + 1)) for number, k in states]


class SlowJudge(AsyncAgent):
    """Answers in 0.1 s."""

    async def aact(self, request: TurnRequest) -> Action:
        """Wait, and answer with the same grade, or the order in which the candidates were shown."""
        await asyncio.sleep(JUDGE_S)
        numbers = re.findall(r"^CANDIDATE (\d+)$", request.messages[-1]["content"], re.MULTILINE)
        grade = [*map(int, numbers)] if numbers else True
        return Action(text=json.dumps({"reason": "So it seems.", "good": grade}))


def seconds(agent: Any, scope: Any = None) -> float:
    """Play one batch and return how long it took."""
    env = Talk()
    if scope is not None:
        env.judges = [Judge(SlowJudge(), rubric={"good": "Is it good?"}, scope=scope)]
    began = time.perf_counter()
    played = env.rollout([{"seed": n} for n in range(NUM_EPISODES // GROUP)], agent, num_rollouts=GROUP)
    took = time.perf_counter() - began
    if any(one.failed for one in played):
        raise SystemExit(str(next(one.error for one in played if one.failed)))
    return took


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_repeats", type=int, default=3, help="Batches of each kind, which take turns.")
    num_repeats: int = parser.parse_args().num_repeats
    rows: list[list[str]] = []
    for label, make in (("each episode at its own pace", OwnPace), ("all episodes together", Together)):
        times = {scope: list[float]() for scope in (None, "episode", "group", "turn")}
        for _ in range(num_repeats):
            for scope, own in times.items():
                own.append(seconds(make(), scope))
        base = statistics.median(times[None])
        for scope, own in times.items():
            took = statistics.median(own)
            added = "" if scope is None else f"{took / base - 1:+.1%}"
            rows.append([label, scope or "none", f"{took:.2f}", added])
    print(text_table(["engine", "judge of each", "seconds", "added"], rows))


if __name__ == "__main__":
    main()
