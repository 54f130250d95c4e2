"""Find the tasks to play: from a file, from the environment, or bare seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentsgym.cli.console import UsageError, usage_errors
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.envs.datasets.default_tasks import tasks_of

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv


def read_tasks(path: Path) -> list[Any]:
    """Read tasks or dataset rows from a file: a JSON list, or one JSON object per line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tasks: {path} cannot be read: {error}") from error
    if text.lstrip().startswith("["):
        try:
            return cast("list[Any]", json.loads(text))
        except ValueError as error:
            raise UsageError(f"--tasks: {path} is not a valid JSON list: {error}") from error
    tasks: list[Any] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                tasks.append(json.loads(line))
            except ValueError as error:
                raise UsageError(f"--tasks: line {number} of {path} is not valid JSON: {error}") from error
    return tasks


def tasks_for(
    env: MultistepEnv, *, path: Path | None, split: str, options: Mapping[str, Any], most: int, seed: int = 0
) -> list[Any]:
    """Return up to ``most`` tasks to play: those in a file, or those of a split of the environment's dataset.

    If the environment has no dataset, the tasks are seeds drawn from ``seed``.
    """
    if split not in {"train", "eval"}:
        raise UsageError(f"--split must be train or eval, got {split!r}")
    if path is not None:
        if options:
            raise UsageError("--tasks cannot be combined with --dataset, which sets options of ENV's built-in tasks")
        tasks = read_tasks(path)[:most]
    else:
        with usage_errors():
            tasks = tasks_of(env, split, options, most, seed=seed)
    if not tasks:
        raise UsageError(f"--tasks: {path} contains no tasks" if path else "the environment's dataset is empty")
    with usage_errors():
        for index, task in enumerate(tasks_of_rows(env, tasks, "tasks")):
            env.check_task(task, f"tasks[{index}]")
    return tasks
