"""Measure ``PolicyAgent`` with fewer places than episodes: refilled as episodes end, in waves, and all at once.

A small random model, episodes of lognormal length, 8 tokens a turn. *Waves* play as many episodes as there are places
to their ends before the next ones begin; *refilled* is ``rollout(…, max_concurrent=places)``, in which an episode that
ends makes room for another; *all at once* has a place for each. CPU seconds on one thread, the ways taking turns,
medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from agentsgym import MultistepEnv, PolicyAgent
from benchmarks.rollout_transformers import ANSWER_TOKENS, SMALL, make_policy


class LongOrShort(MultistepEnv):
    """Lasts as many turns as its task specifies."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "left": task_data["turns"]}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return "What do you do now, and why? There is a door to the north."

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        return {**state, "left": state["left"] - 1}, 0.0, state["left"] == 1, {}


def make_tasks(num_episodes: int) -> list[dict[str, Any]]:
    """Episodes of 6 turns in the median, 24 at most."""
    draw = random.Random(0)
    return [
        {"turns": max(1, min(24, round(6 * draw.lognormvariate(0.0, 0.7)))), "seed": i} for i in range(num_episodes)
    ]


def measure(num_episodes: int, places: int, num_repeats: int) -> dict[str, Any]:
    """The seconds of each way, and the ratio of waves to refilling."""
    policy = make_policy(SMALL)
    env = LongOrShort(policy.tokenizer, {"max_steps_per_episode": 24})
    agent = PolicyAgent(policy.model, policy.tokenizer, max_turn_tokens=ANSWER_TOKENS)
    tasks = make_tasks(num_episodes)
    waves = [tasks[start : start + places] for start in range(0, num_episodes, places)]
    ways: dict[str, Any] = {
        "waves": lambda: [env.rollout(wave, agent) for wave in waves],
        "refilled": lambda: env.rollout(tasks, agent, max_concurrent=places),
        "all_at_once": lambda: env.rollout(tasks, agent),
    }
    env.rollout(tasks[:4], agent)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_repeats):
        for name, play in ways.items():
            began = time.process_time()
            play()
            seconds[name].append(time.process_time() - began)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "episodes": num_episodes,
        "places": places,
        "turns": sum(task["turns"] for task in tasks),
        **{f"{name}_s": round(value, 2) for name, value in medians.items()},
        "waves_over_refilled": round(medians["waves"] / medians["refilled"], 2),
        "all_at_once_over_refilled": round(medians["all_at_once"] / medians["refilled"], 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print one JSON object for each number of places."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--places", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for places in options.places:
        print(json.dumps(measure(options.episodes, places, options.repeats)), flush=True)


if __name__ == "__main__":
    main()
