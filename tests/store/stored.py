"""Trajectories to store, and a run in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentsgym import RolloutStore, StopReason, Trajectory, Turn

ROOT = Path(__file__).parents[2]


def rollout(index: int, num_tokens: int = 4, **fields: Any) -> Trajectory:
    """A rollout that is known by its ``task_index``."""
    values: dict[str, Any] = {
        "token_ids": [*range(index, index + num_tokens)],
        "turns": [Turn(start=1, stop=num_tokens, reward=float(index))],
        "messages": [{"role": "user", "content": f"task {index}"}],
        "final_reward": float(index),
        "stop_reason": StopReason.DONE,
        "logprobs": [0.0, *[-0.5] * (num_tokens - 1)],
        "task_index": index,
        "task_data": {"seed": index},
    }
    return Trajectory(**values | fields)


def stored(path: Path, indices: Sequence[int], **columns: Any) -> RolloutStore:
    """Write rollouts as one part, and open the store."""
    with RolloutStore.writer(path, **columns) as writer:
        for index in indices:
            writer.add(rollout(index))
    return RolloutStore(path)


def add_one(path: str) -> None:
    """Add a rollout, and leave its writing to the end of the process."""
    RolloutStore.writer(path, flush_seconds=60.0).add(rollout(7))


def indices_of(store: RolloutStore) -> list[int]:
    return [one.task_index for one in store]


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program that can import this module."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"},
    )
