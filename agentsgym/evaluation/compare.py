"""Compare two runs on the tasks that both contain."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from agentsgym.envs.config import COMMON_FIELDS
from agentsgym.errors import ConfigError
from agentsgym.fields import require
from agentsgym.statistics.intervals import bootstrap_intervals
from agentsgym.store.reader import RolloutStore
from agentsgym.store.records import StoredRollout
from agentsgym.store.runs import check_one_run
from agentsgym.store.values import from_json, to_json
from agentsgym.texts import shown
from agentsgym.types import StopReason, Trajectory

Run = RolloutStore | Iterable[StoredRollout | Trajectory]
_COLUMNS = ("session_id", "env_class_path", "env_config", "task_data", "success", "final_reward", "stop_reason")
_ROUNDING: Final = 1e-12  # rounding error of means, relative to the largest value


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The means of two runs over their shared tasks, each task counted once, and their difference.

    Attributes:
        a: Mean of the first run: the mean over tasks of each task's mean over rollouts.
        b: Mean of the second run.
        difference: ``b - a``.
        low: Lower end of the difference's confidence interval; None for a single task, and for a reward that changed
            by the same amount in all tasks.
        high: Upper end of the interval; None in the same cases.
    """

    a: float
    b: float
    difference: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTask:
    """The results of two runs on one task.

    Attributes:
        env: Class path of the environment; None if unknown.
        task_data: The task.
        num_a: Number of the first run's rollouts that did not fail.
        num_b: Number of the second run's rollouts that did not fail.
        wins_a: Win rate of the first run; None if unknown.
        wins_b: Win rate of the second run; None if unknown.
        reward_a: Mean final reward of the first run.
        reward_b: Mean final reward of the second run.
    """

    env: str | None
    task_data: Mapping[str, Any]
    num_a: int
    num_b: int
    wins_a: float | None
    wins_b: float | None
    reward_a: float
    reward_b: float

    @property
    def change(self) -> float:
        """The change of the win rate, in [-1, 1]; 0.0 if it is unknown for a run."""
        return 0.0 if self.wins_a is None or self.wins_b is None else self.wins_b - self.wins_a

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        task = json.loads(to_json(dict(self.task_data)))
        return {**asdict(self), "task_data": task, "change": self.change}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs, paired by task.

    Attributes:
        win_rate: Win rates over the shared tasks with known outcomes; None if there are none.
        reward: Mean rewards over all shared tasks; None if there are none.
        tasks: Shared tasks, sorted by decreasing change of the win rate, losses before gains.
        num_only_a: Number of tasks that only the first run contains, in rollouts that did not fail.
        num_only_b: Number of tasks that only the second run contains, in rollouts that did not fail.
        num_failed_a: Number of failed rollouts in the first run, which are excluded.
        num_failed_b: Number of failed rollouts in the second run, which are excluded.
        confidence: Confidence level of the intervals.
    """

    win_rate: PairedDifference | None
    reward: PairedDifference | None
    tasks: Sequence[SharedTask]
    num_only_a: int
    num_only_b: int
    num_failed_a: int
    num_failed_b: int
    confidence: float = 0.95

    @property
    def changed(self) -> list[SharedTask]:
        """The shared tasks whose win rate changed, in the order of ``tasks``."""
        return [task for task in self.tasks if task.change]

    def __repr__(self) -> str:
        return f"<Comparison over {len(self.tasks)} shared tasks, {len(self.changed)} of them changed>"

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        estimates = {"win_rate": self.win_rate, "reward": self.reward}
        counts = ("confidence", "num_only_a", "num_only_b", "num_failed_a", "num_failed_b")
        return {
            **{name: None if value is None else asdict(value) for name, value in estimates.items()},
            **{name: getattr(self, name) for name in counts},
            "num_shared": len(self.tasks),
            "num_changed": len(self.changed),
            "tasks": [task.as_dict() for task in self.tasks],
        }


def compare(run_a: Run, run_b: Run, *, confidence: float = 0.95, seed: int = 0) -> Comparison:
    """Pair two runs by task, and estimate the improvement of the second over the first.

    Two tasks are the same if the environment, ``task_data`` (including the seed) and the environment-specific keys of
    ``env_config`` are equal; keys that all environments have, such as turn limits, and the number of rollouts may
    differ. Each shared task counts once, with the mean over its rollouts. The intervals are percentile bootstraps of
    the shared tasks' differences (:func:`~agentsgym.statistics.intervals.bootstrap_intervals`), which are narrower than
    the intervals of two unpaired runs. If the win rate changed by the same amount in each of the n tasks, resampling
    shows no spread; the interval then allows for any other change in a fraction ``1 - (α/2)^(1/n)`` of all tasks, the
    largest fraction that n tasks may fail to reveal (Clopper & Pearson 1934). A reward has no known bounds, so its
    interval is None in this case.

    Args:
        run_a: First run: a store, records, or trajectories (which do not name their environment).
        run_b: Second run, in any of these forms.
        confidence: Confidence level of the intervals, in (0, 1).
        seed: Random seed of the bootstrap.

    Raises:
        ConfigError: A rollout was stored without its task, a store has several runs, or ``confidence`` is not in
            (0, 1).
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must be in (0, 1), got {confidence}")
    (tasks_a, num_failed_a), (tasks_b, num_failed_b) = _by_task(run_a), _by_task(run_b)
    shared = [
        SharedTask(
            env=env,
            task_data=from_json(task),
            num_a=len(a),
            num_b=len(b),
            wins_a=_win_rate(a),
            wins_b=_win_rate(b),
            reward_a=math.fsum(reward for _, reward in a) / len(a),
            reward_b=math.fsum(reward for _, reward in b) / len(b),
        )
        for (env, _, task), a, b in ((key, tasks_a[key], tasks_b[key]) for key in tasks_a if key in tasks_b)
    ]
    outcomes = [(one.wins_a, one.wins_b) for one in shared if one.wins_a is not None and one.wins_b is not None]
    return Comparison(
        win_rate=_paired(outcomes, confidence, seed, is_rate=True),
        reward=_paired([(one.reward_a, one.reward_b) for one in shared], confidence, seed),
        tasks=sorted(shared, key=lambda task: (-abs(task.change), task.change, -abs(task.reward_b - task.reward_a))),
        num_only_a=len(tasks_a) - len(shared),
        num_only_b=len(tasks_b) - len(shared),
        num_failed_a=num_failed_a,
        num_failed_b=num_failed_b,
        confidence=confidence,
    )


#: Class path, and configuration and task as canonical JSON.
_Key = tuple[str | None, str, str]
#: Success and final reward of each rollout that did not fail.
_Results = list[tuple[bool | None, float]]


def _by_task(run: Run) -> tuple[dict[_Key, _Results], int]:
    """Return the results of each task, and the number of failed rollouts."""
    tasks: dict[_Key, _Results] = {}
    num_failed = 0
    configs: dict[str | None, str] = {None: ""}
    for row in _rows(run):
        for name, missing in (("task_data", {None, "{}"}), ("final_reward", {None})):
            if row[name] in missing:
                raise ConfigError(
                    f"the rollout of session {shown(row['session_id'])} was stored without {name}, so it cannot be "
                    "compared with the other run"
                )
        config = row["env_config"]
        if config not in configs:
            configs[config] = _canonical(config, without=COMMON_FIELDS)
        if row["stop_reason"] == StopReason.FAILED:
            num_failed += 1
        else:
            key = row["env_class_path"], configs[config], _canonical(row["task_data"])
            tasks.setdefault(key, []).append((row["success"], row["final_reward"]))
    return tasks, num_failed


def _rows(run: Run) -> Iterable[dict[str, Any]]:
    """Return the compared columns, one dict per rollout."""
    if isinstance(run, RolloutStore):
        check_one_run(run.table(["run"]), "the rollouts to compare are")
        yield from run.table(_COLUMNS).to_pylist()
        return
    if isinstance(run, str | Path) or not isinstance(run, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            "compare needs two stores, or lists of records or trajectories, such as RolloutStore('runs/a') or "
            f"evaluation.trajectories; got {shown(run)}"
        )
    for one in run:
        record = StoredRollout(trajectory=one) if isinstance(one, Trajectory) else one
        trajectory = record.trajectory
        yield {
            "session_id": trajectory.session_id,
            "env_class_path": record.env_class_path,
            "env_config": None if record.env_config is None else to_json(dict(record.env_config)),
            "task_data": to_json(dict(trajectory.task_data)),
            "success": trajectory.success,
            "final_reward": trajectory.final_reward,
            "stop_reason": trajectory.stop_reason,
        }


def _canonical(text: str, without: Iterable[str] = ()) -> str:
    """Normalize JSON text so that equal values have equal texts, regardless of the order of keys."""
    require("a stored task_data or env_config", from_json(text), lambda value: isinstance(value, dict), "a dict")
    value = json.loads(text)
    for key in without:
        value.pop(key, None)
    return json.dumps(value, sort_keys=True)


def _win_rate(results: _Results) -> float | None:
    """Return the win rate, in which unknown outcomes count as losses; None if all are unknown."""
    if all(success is None for success, _ in results):
        return None
    return sum(bool(success) for success, _ in results) / len(results)


def _paired(
    pairs: Sequence[tuple[float, float]], confidence: float, seed: int, *, is_rate: bool = False
) -> PairedDifference | None:
    """Estimate the mean difference of pairs (a, b), one per task; None if there are no pairs."""
    if not pairs:
        return None
    values = np.asarray(pairs, dtype=np.float64)  # (C, 2)
    changes = values[:, 1] - values[:, 0]  # (C,)
    mean_a, mean_b = values.mean(axis=0)
    difference, num_tasks = float(changes.mean()) + 0.0, len(changes)
    bounds: list[float | None]
    is_alike = bool(np.ptp(changes) <= _ROUNDING * np.abs(values).max())
    if num_tasks == 1 or (is_alike and not is_rate):
        bounds = [None, None]
    elif is_alike:
        unseen = 1 - ((1 - confidence) / 2) ** (1 / num_tasks)
        bounds = [difference * (1 - unseen) + sign * unseen for sign in (-1, 1)]
    else:
        drawn = bootstrap_intervals(changes[:, None], range(num_tasks), confidence=confidence, seed=seed)
        # Quantiles of equal values may have a rounding error.
        bounds = [min(float(drawn[0, 0]), difference) + 0.0, max(float(drawn[1, 0]), difference) + 0.0]
    low, high = bounds
    return PairedDifference(a=float(mean_a), b=float(mean_b), difference=difference, low=low, high=high)
