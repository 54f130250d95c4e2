"""Find the tasks that are played: of a file, the environment's own, or seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentsgym.cli.console import UsageError, usage
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.envs.datasets.own_tasks import tasks_of

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv

Task = dict[str, Any]
SPLITS = ("train", "eval")


def read_tasks(path: Path) -> list[Any]:
    """Read tasks or dataset rows from a file: a JSON list, or one JSON object a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tasks: {path} cannot be read: {error}") from error
    try:
        if text.lstrip().startswith("["):
            return cast("list[Any]", json.loads(text))
        return [_line(number, line, path) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    except ValueError as error:
        raise UsageError(f"--tasks: {path} is no JSON list: {error}") from error


def tasks_for(
    env: MultistepEnv,
    *,
    path: Path | None,
    split: str,
    options: Mapping[str, Any],
    most: int,
    seed: int = 0,
) -> list[Any]:
    """Find the tasks to be played, at most so many.

    Args:
        env: The environment.
        path: A file of tasks; None for the environment's own.
        split: Which of its own: ``"train"`` or ``"eval"``.
        options: Of its dataset.
        most: How many at most.
        seed: Of the tasks that are nothing but a seed, which an environment without tasks of its own is given.

    Raises:
        UsageError: There are none, or the environment's dataset cannot be made with these options.
    """
    if split not in SPLITS:
        raise UsageError(f"--split is train or eval, got {split!r}")
    if path is not None:
        if options:
            raise UsageError("--dataset is for ENV's own tasks, and --tasks gives others")
        tasks = read_tasks(path)[:most]
    else:
        with usage():
            tasks = tasks_of(env, split, options, most, seed=seed)
    if not tasks:
        raise UsageError(f"there is no task to play in {path}" if path else "the environment's dataset is empty")
    with usage():
        for index, task in enumerate(tasks_of_rows(env, tasks, "tasks")):
            env.check_task(task, f"tasks[{index}]")
    return tasks


def _line(number: int, line: str, path: Path) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UsageError(f"--tasks: line {number} of {path} is no JSON: {error}") from error
