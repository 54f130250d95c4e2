"""Check a task before any episode of it starts, so that what cannot be played stops nothing midway."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

from agentsgym.envs.dataset_rows import TaskData, check_task_keys
from agentsgym.errors import AgentsGymError, TaskError
from agentsgym.interruptions import is_interruption
from agentsgym.texts import sentence_of, shown

_PLAIN = frozenset((str, int, float, bool, type(None)))


def check_task(
    task_data: Any, name: str, task_fields: Collection[str] | None, hook: Callable[[dict[str, Any]], None]
) -> None:
    """Check what every environment asks of a task, then let the environment's own hook check it.

    Args:
        task_data: Foreign data.
        name: What errors call it.
        task_fields: The keys that the environment knows beside ``seed``; None for any.
        hook: ``_check_task``.

    Raises:
        TaskError: It cannot be played, or looking at it raises something.
    """
    try:
        check_task_keys(task_data, name, task_fields)
        _check_plainly(task_data, name)
        hook(task_data)
    except AgentsGymError:
        raise
    except BaseException as error:
        if is_interruption(error):
            raise
        given = f"{type(error).__name__}: {sentence_of(error)}".removesuffix(": ")
        raise TaskError(f"checking {name} with {hook.__qualname__} raised {given}") from error


def _check_plainly(task_data: TaskData, name: str) -> None:
    """Check its seed, and that it can be copied, as it is for every episode."""
    seed = task_data.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise TaskError(f"{name}['seed'] must be an int or None, got {shown(seed)}")
    for key, value in task_data.items():
        if type(value) not in _PLAIN:
            try:
                copy.deepcopy(value)
            except BaseException as error:
                if is_interruption(error):
                    raise
                sentence = f"{type(error).__name__}: {sentence_of(error)}"
                raise TaskError(
                    f"{name}[{shown(key)}] must be something that copy.deepcopy copies, since every episode gets a "
                    f"copy, and it raised {sentence}"
                ) from error
