"""Evaluate an agent: play many episodes and sum them up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.rows import tasks_of_rows
from agentsgym.errors import (
    AgentsGymError,
    ConfigError,
    TooManyFailuresError,
    check_options,
    did_you_mean,
)
from agentsgym.evaluation.metrics import Evaluation, summarize
from agentsgym.fields import is_fraction, or_none, require
from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from datasets import Dataset

    from agentsgym.types import Trajectory

OnFinish = Callable[["Trajectory"], None]


def evaluate(  # noqa: PLR0913  # keywords, most of them left out
    env: MultistepEnv,
    agent: Any,
    tasks: Iterable[Mapping[str, Any]] | Dataset,
    num_rollouts: int = 1,
    *,
    cluster_by: str | None = None,
    seed: int = 0,
    max_failed_fraction: float | None = None,
    on_finish: OnFinish | None = None,
    **rollout_options: Any,
) -> Evaluation:
    """Play each task ``num_rollouts`` times and report win rate, reward and turns with 95 % intervals.

    Args:
        env: The environment.
        agent: An :class:`~agentsgym.agents.base.Agent`, or any object with ``get_action(messages, agent_state)``.
        tasks: ``task_data`` dicts, or dataset rows that hold one in their ``task_data`` column.
        num_rollouts: Rollouts of each task.
        cluster_by: The ``task_data`` key whose equal values are one task to the intervals, say ``"solution"``; by
            default each row of ``tasks`` is a task of its own.
        seed: Of the bootstrap, and of the tasks that come without a seed: with an agent that always answers alike,
            equal arguments give equal episodes. An agent's own random generator runs on from one call to the next.
        max_failed_fraction: The fraction of all rollouts that may fail, in [0, 1]; as soon as more have failed, the
            evaluation ends with an error. None for no limit: failed rollouts are counted, the others go on.
        on_finish: Called with each rollout as soon as it is finished.
        **rollout_options: Handed to ``env.rollout``.

    Raises:
        ConfigError: An argument or a row is not valid, some task has no ``cluster_by``, or the agent says that it
            cannot play at all, as one does whose server refuses its key: no other episode is begun then.
        TaskError: There is no task, or some task cannot be played; nothing has been played then.
        TypeError: An argument is unknown.
        TooManyFailuresError: More rollouts failed than ``max_failed_fraction`` allows.

        Whatever of these ends it, the rollouts finished until then are the error's ``trajectories``.
    """
    _check_order(env, agent, tasks)
    check_options(rollout_options, evaluate, env.rollout, MultistepEnv.rollout, env.trials)
    require("max_failed_fraction", max_failed_fraction, or_none(is_fraction), "a number in [0, 1] or None")
    rows = tasks_of_rows(env, tasks, "tasks")
    task_data = [_with_seed(task, seed, index) for index, task in enumerate(rows)]
    keys = [_cluster(task, cluster_by, index) for index, task in enumerate(task_data)]
    finished = _Finished(on_finish, max_failed_fraction, len(task_data), num_rollouts)
    try:
        trajectories = env.rollout(task_data, agent, num_rollouts, on_finish=finished.add, **rollout_options)
    except AgentsGymError as error:
        error.trajectories = finished.trajectories
        raise
    return summarize(trajectories, clusters=[keys[trajectory.task_index] for trajectory in trajectories], seed=seed)


class _Finished:
    """Keeps the rollouts that are finished, and ends the run when more have failed than may.

    Attributes:
        trajectories: They, in the order in which they were finished.
    """

    def __init__(
        self, on_finish: OnFinish | None, max_failed_fraction: float | None, num_tasks: int, num_rollouts: int
    ) -> None:
        self.trajectories: list[Trajectory] = []
        self._on_finish = on_finish
        self._max_failed_fraction = max_failed_fraction
        self._num_tasks, self._num_rollouts = num_tasks, num_rollouts
        self._failed: list[Trajectory] = []

    def add(self, trajectory: Trajectory) -> None:
        """Keep one."""
        self.trajectories.append(trajectory)
        if self._on_finish is not None:
            self._on_finish(trajectory)
        if trajectory.failed:
            self._failed.append(trajectory)
            self._check()

    def _check(self) -> None:
        limit, num_rollouts = self._max_failed_fraction, self._num_tasks * self._num_rollouts
        if limit is not None and len(self._failed) > limit * num_rollouts:
            raise TooManyFailuresError(
                f"{len(self._failed)} of {num_rollouts} rollouts failed, more than max_failed_fraction = {limit} "
                f"allows; the first failed so:\n{self._failed[0].error}"
            )


def _check_order(env: Any, agent: Any, tasks: Any) -> None:
    """Raise for arguments that stand in each other's places."""
    if inspect.isclass(env) and issubclass(env, MultistepEnv):
        raise ConfigError(f"evaluate needs an environment, got the class: write {env.__name__}(tokenizer, env_config)")
    if not isinstance(env, MultistepEnv) or _is_tasks(agent) or _plays(tasks):
        given = ", ".join(type(value).__name__ for value in (env, agent, tasks))
        raise ConfigError(f"evaluate takes (env, agent, tasks) in this order, got ({given})")


def _plays(value: Any) -> bool:
    """Whether it is an environment or an agent."""
    return isinstance(value, MultistepEnv) or any(hasattr(value, name) for name in ("get_action", "act", "aact"))


def _is_tasks(value: Any) -> bool:
    return isinstance(value, MultistepEnv) or (isinstance(value, Iterable) and not _plays(value))


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
