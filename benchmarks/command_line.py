"""Measure the command line: how long ``agentsgym --help`` takes, and how fast ``agentsgym eval`` plays.

The games are 256 of Twenty Questions by the embedded policy, as ``eval`` plays them (rollouts, progress, estimates with
their intervals) and as the trainer plays a generation batch of the same tasks, taking turns, in CPU seconds. Both draw
their own games, so what is compared is CPU time per sampled token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer, PolicyAgent, tiny_policy
from agentsgym.cli.agent_runs import Plan, passes, run_agent
from agentsgym.cli.players import Player
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES
from agentsgym.training.generation.generator import Phase
from agentsgym.types import Trajectory

MAX_TURN_TOKENS = 12
CONFIG = {
    "objects": list(DEMO_OBJECTS),
    "properties": list(DEMO_PROPERTIES),
    "max_steps_per_episode": 7,
    "system_prompt": "",
    "error_allowance": 7,  # or the invalid answers of an untrained policy would shorten its games
}
Play = Callable[[int], Sequence[Trajectory]]


def help_seconds(num_runs: int) -> dict[str, float]:
    """Medians over fresh processes, the first of which fills caches: of ``--help``, and of an interpreter alone."""

    def seconds(command: list[str]) -> float:
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    commands = {
        "help_s": [sys.executable, "-m", "agentsgym.cli.app", "--help"],
        "interpreter_s": [sys.executable, "-c", "pass"],
    }
    return {
        name: round(statistics.median([seconds(command) for _ in range(num_runs + 1)][1:]), 3)
        for name, command in commands.items()
    }


def players(num_games: int, folder: str) -> dict[str, Play]:
    """What plays a batch of games: the command's own code, and the trainer's."""
    model, tokenizer = tiny_policy(TwentyQuestionsEnv(env_config=CONFIG))
    env = TwentyQuestionsEnv(tokenizer, CONFIG)
    rows = env.get_train_dataset(size=num_games, split="all")
    args = GRPOEnvConfig(
        output_dir=folder,
        per_device_train_batch_size=num_games,
        num_generations=2,
        max_turn_tokens=MAX_TURN_TOKENS,
        use_cpu=True,
        report_to="none",
    )
    trainer = GRPOEnvTrainer(model, env, args, train_dataset=rows)
    inputs = cast("list[dict[str, Any]]", list(rows))

    def evaluated(index: int) -> Sequence[Trajectory]:
        agent = PolicyAgent(model, tokenizer, seed=index, max_turn_tokens=MAX_TURN_TOKENS)
        games = run_agent(Player(label="policy", env=env, agent=agent), Plan(tasks=inputs, seed=index))
        assert games.evaluation is not None
        passes(games.evaluation, index)
        return games.evaluation.trajectories

    def trained(index: int) -> Sequence[Trajectory]:
        return trainer.generator.generate(
            inputs, Phase(kind="train", index=index, step=index, num_rollouts=1)
        ).trajectories

    return {"eval": evaluated, "trainer": trained}


def measure(num_games: int, num_repeats: int) -> dict[str, Any]:
    """Play in turns, and give microseconds of CPU time per sampled token, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        ways = players(num_games, folder)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for index in range(num_repeats + 1):
            for name, play in ways.items():
                start = time.process_time()
                trajectories = play(index)
                seconds = time.process_time() - start
                num_tokens = sum(sum(one.agent_token_mask) for one in trajectories)
                if index:  # the first warms up
                    times[name].append(1e6 * seconds / num_tokens)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "num_games": num_games,
        "num_repeats": num_repeats,
        **{f"{name}_us_per_token": round(value, 1) for name, value in medians.items()},
        "eval_over_trainer": round(medians["eval"] / medians["trainer"], 3),
    }


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="few games, once: for a test")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {**help_seconds(1 if options.quick else 7), **(measure(8, 1) if options.quick else measure(256, 5))}
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
