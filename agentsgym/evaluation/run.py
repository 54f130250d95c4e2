"""Play many games and sum them up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agentsgym.envs.registry import class_path
from agentsgym.errors import ConfigError, TaskError, did_you_mean
from agentsgym.evaluation.metrics import Evaluation, summarize
from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from datasets import Dataset

    from agentsgym.envs.base import MultistepEnv


def evaluate(
    env: MultistepEnv,
    agent: Any,
    tasks: Iterable[Mapping[str, Any]] | Dataset,
    num_rollouts: int = 1,
    *,
    cluster_by: str | None = None,
    seed: int = 0,
    **rollout_options: Any,
) -> Evaluation:
    """Play ``num_rollouts`` games of each task and report win rate, reward and turns with 95 % intervals.

    Args:
        env: The environment.
        agent: An :class:`~agentsgym.agents.base.Agent`, or any object with ``get_action(messages, agent_state)``.
        tasks: ``task_data`` dicts, or dataset rows that hold one in their ``task_data`` column.
        num_rollouts: Games a task.
        cluster_by: The ``task_data`` key whose equal values are one task to the intervals, say ``"solution"``; by
            default each row of ``tasks`` is a task of its own.
        seed: Of the bootstrap, and of the tasks that come without a seed: with an agent that always answers alike,
            equal arguments give equal games. An agent's own random generator runs on from one call to the next.
        **rollout_options: Handed to ``env.rollout``.

    Raises:
        ConfigError: Some task has no ``cluster_by``, or a row is of another environment.
        TaskError: There is no task, or some task cannot be played; nothing has been played then.
    """
    path = class_path(type(env))
    rows: Iterable[Any] = tasks  # foreign data: checked row by row
    task_data = [_with_seed(_task_data(row, index, path), seed, index) for index, row in enumerate(rows)]
    keys = [_cluster(task, cluster_by, index) for index, task in enumerate(task_data)]
    trajectories = env.rollout(task_data, agent, num_rollouts, **rollout_options)
    return summarize(trajectories, clusters=[keys[trajectory.task_index] for trajectory in trajectories], seed=seed)


def _task_data(row: Any, index: int, path: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise TaskError(f"tasks[{index}] must be a task_data dict or a dataset row, got {row!r}")
    fields: dict[str, Any] = dict(row)  # pyright: ignore[reportUnknownArgumentType]
    if fields.get("env_class_path", path) != path:
        raise ConfigError(f"tasks[{index}] is a row of {fields['env_class_path']!r}, and the environment is {path!r}")
    inner = fields.get("task_data")
    return dict(inner) if isinstance(inner, Mapping) else fields  # pyright: ignore[reportUnknownArgumentType]


def _with_seed(task: dict[str, Any], seed: int, index: int) -> dict[str, Any]:
    if task.get("seed") is not None:
        return task
    return task | {"seed": derive_seed("evaluation", seed, index)}


def _cluster(task: dict[str, Any], cluster_by: str | None, index: int) -> str | int:
    if cluster_by is None:
        return index
    if cluster_by not in task:
        raise ConfigError(f"task {index} has no {cluster_by!r} to cluster by{did_you_mean(cluster_by, task)}")
    return repr(task[cluster_by])  # a value may be a list, and keys must be hashable
