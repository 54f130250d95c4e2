"""Measure the rollout store: what keeping a rollout costs beside playing it, bytes a token, and opening 1 GB of them.

Two loops are played with and without a store, taking turns: a scripted agent that answers at once (the loop of
``rollout_overhead.py``, where nothing else takes any time), and the embedded policy, sampled on this processor. Every
rollout is written to the disk, by the writer's thread, before the clock stops; advantages are one number a turn.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rollout_overhead import Game, Policy, Script, make_script

from agentsgym import PolicyAgent, RolloutStore, Trajectory, tiny_policy
from agentsgym.credit.rewards import scatter_to_tokens
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.store.parts import part_name

CORE = ("token_ids", "agent_token_mask", "logprobs", "advantages")


class Plan(NamedTuple):
    """How much is measured."""

    num_repeats: int
    num_scripted: int
    num_sampled: int
    num_turns: int
    megabytes: int


FULL = Plan(num_repeats=7, num_scripted=1024, num_sampled=256, num_turns=16, megabytes=1000)
QUICK = Plan(num_repeats=1, num_scripted=16, num_sampled=4, num_turns=3, megabytes=5)
Play = Callable[[Callable[[Trajectory], None]], object]


def scripted(script: Script, plan: Plan, on_finish: Callable[[Trajectory], None]) -> object:
    """Play with an agent that answers at once."""
    game = Game(script, plan.num_turns)
    return game.rollout([{"seed": 0}], Policy(script), plan.num_scripted, on_finish=on_finish, max_concurrent=64)


def sampled(env: TwentyQuestionsEnv, agent: PolicyAgent, plan: Plan, on_finish: Callable[[Trajectory], None]) -> object:
    """Play with the embedded policy."""
    tasks = [{"solution": "dog", "seed": 0}]
    return env.rollout(tasks, agent, plan.num_sampled, on_finish=on_finish, max_concurrent=64)


def advantages_of(trajectory: Trajectory) -> list[float]:
    """One number a turn on its tokens, as an estimator gives them."""
    draw = random.Random(len(trajectory.token_ids))
    return scatter_to_tokens(trajectory, [draw.gauss(0, 1) for _ in trajectory.turns])


def seconds(play: Play, folder: Path | None) -> tuple[float, float]:
    """Wall and processor time of one run, with a store if there is a folder."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    with RolloutStore.writer(folder) if folder is not None else nullcontext() as writer:

        def keep(trajectory: Trajectory) -> None:
            if writer is not None:
                writer.add(trajectory)

        play(keep)
    return time.perf_counter() - wall, time.process_time() - cpu


def measure_cost(play: Play, num_repeats: int) -> dict[str, float]:
    """What a store adds to a loop; ratios are medians over neighboring runs, which noise hits alike."""
    rounds: list[tuple[float, float, float]] = []
    for _ in range(num_repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            (bare_wall, bare_cpu), (wall, cpu) = seconds(play, None), seconds(play, Path(folder))
            num_rollouts = len(RolloutStore(folder))
        rounds.append((wall / bare_wall - 1, cpu / bare_cpu - 1, bare_wall / num_rollouts))
    wall_ratio, cpu_ratio, bare = (statistics.median(values) for values in zip(*rounds[1:], strict=True))
    return {
        "bare_ms_a_rollout": round(1000 * bare, 3),
        "added_wall_percent": round(100 * wall_ratio, 2),
        "added_cpu_percent": round(100 * cpu_ratio, 2),
    }


def measure_size(play: Play) -> dict[str, Any]:
    """Bytes on disk a token, by column, and what the rest of a rollout takes."""
    with tempfile.TemporaryDirectory() as folder:
        with RolloutStore.writer(folder) as writer:
            play(lambda one: writer.add(one, advantages=advantages_of(one)))
        num_tokens = sum(len(one.token_ids) for one in RolloutStore(folder))
        sizes: dict[str, int] = {}
        for file in Path(folder).glob("*.parquet"):
            metadata = footer(file)
            for group in range(metadata.num_row_groups):
                for index in range(metadata.num_columns):
                    column: Any = metadata.row_group(group).column(index)
                    name: str = column.path_in_schema.partition(".")[0]
                    sizes[name] = sizes.get(name, 0) + column.total_compressed_size
        whole = sum(file.stat().st_size for file in Path(folder).glob("*.parquet"))
    core = {name: round(sizes[name] / num_tokens, 3) for name in CORE}
    return {
        "num_tokens": num_tokens,
        "bytes_a_token": round(sum(core.values()), 3),
        **{f"{name}_bytes_a_token": size for name, size in core.items()},
        "everything_bytes_a_token": round(whole / num_tokens, 3),
    }


def footer(file: Path) -> Any:
    """The metadata of a parquet file; pyarrow has no types."""
    parquet: Any = importlib.import_module("pyarrow.parquet")
    return parquet.read_metadata(file)


def measure_opening(play: Play, megabytes: int) -> dict[str, float]:
    """Open a store of this size, made of copies of one part, and read a rollout in its middle."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RolloutStore.writer(folder) as writer:
            play(writer.add)
        parts = sorted(folder.glob("*.parquet"))
        size = sum(part.stat().st_size for part in parts)
        for copy in range(1, -(-megabytes * 10**6 // size)):
            for part in parts:
                num_rollouts = int(part.stem.rpartition("-")[2])
                shutil.copyfile(part, part.with_name(f"{part_name('c0b1', copy, num_rollouts)}.parquet"))
        start = time.perf_counter()
        store = RolloutStore(folder)
        opened = time.perf_counter()
        store[len(store) // 2]
        read = time.perf_counter()
        files = [*folder.glob("*.parquet")]
        return {
            "megabytes": round(sum(file.stat().st_size for file in files) / 1e6),
            "num_parts": len(files),
            "num_rollouts": len(store),
            "open_s": round(opened - start, 3),
            "read_one_ms": round(1000 * (read - opened), 1),
        }


def measure(plan: Plan) -> dict[str, Any]:
    """Everything, as one JSON object."""
    script = make_script(plan.num_turns)
    config = {"max_steps_per_episode": plan.num_turns, "system_prompt": ""}
    model, tokenizer = tiny_policy(TwentyQuestionsEnv(env_config=config))
    env = TwentyQuestionsEnv(tokenizer, config)
    plays: dict[str, Play] = {
        "scripted": partial(scripted, script, plan),
        "embedded_policy": partial(sampled, env, PolicyAgent(model, tokenizer, max_turn_tokens=32), plan),
    }
    return {
        "num_repeats": plan.num_repeats,
        "cost": {name: measure_cost(play, plan.num_repeats) for name, play in plays.items()},
        "size": {name: measure_size(play) for name, play in plays.items()},
        "opening": measure_opening(plays["embedded_policy"], plan.megabytes),
    }


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rollouts: seconds, and no figure to trust")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = measure(QUICK if options.quick else FULL)
    if options.json:
        print(json.dumps(result))
        return
    for name, row in result["cost"].items():
        print(
            f"{name}: a rollout takes {row['bare_ms_a_rollout']} ms; storing adds {row['added_wall_percent']} % to the "
            f"wall time, {row['added_cpu_percent']} % to the processor time"
        )
    for name, row in result["size"].items():
        print(
            f"{name}: {row['bytes_a_token']} bytes a token for ids, mask, log-probabilities and advantages; "
            f"{row['everything_bytes_a_token']} with everything else"
        )
    opening = result["opening"]
    print(
        f"opening: {opening['megabytes']} MB in {opening['num_parts']} parts in {opening['open_s']} s, "
        f"one rollout in {opening['read_one_ms']} ms"
    )


if __name__ == "__main__":
    main()
