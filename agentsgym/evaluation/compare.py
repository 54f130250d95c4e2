"""Compare two runs on the tasks that both played."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from agentsgym.envs.config import COMMON_FIELDS
from agentsgym.errors import ConfigError
from agentsgym.statistics.intervals import bootstrap_intervals
from agentsgym.store.reader import RolloutStore
from agentsgym.store.records import StoredRollout
from agentsgym.store.values import from_json, to_json
from agentsgym.texts import shown
from agentsgym.types import StopReason, Trajectory

Run = RolloutStore | Iterable[StoredRollout | Trajectory]
_COLUMNS = ("env_class_path", "env_config", "task_data", "success", "final_reward", "stop_reason")
_ROUNDING: Final = 1e-12  # of means, relative to the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The means of two runs over their shared tasks, each task counted once, and their difference.

    Attributes:
        a: Mean of the first run over tasks, of each task's mean over rollouts.
        b: Mean of the second run.
        difference: ``b - a``.
        low: Lower end of the interval of the difference; None for a single task, and for a reward that changed by the
            same amount in all tasks.
        high: Upper end of the interval, likewise.
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
        tasks: Shared tasks, those with the largest change first, lost before won.
        num_only_a: Number of tasks that only the first run has, with a rollout that did not fail.
        num_only_b: Number of tasks that only the second run has.
        num_failed_a: Number of failed rollouts of the first run, which are left out.
        num_failed_b: Number of failed rollouts of the second run, which are left out.
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
    """Pair two runs by task and estimate the improvement of the second.

    A task is the same if environment, ``task_data`` (its seed included) and the environment's own keys of
    ``env_config`` are the same; the keys that all environments have, limits of turns for example, may differ, and so
    may the number of rollouts. Each shared task counts once, with the mean over its rollouts. The intervals are
    percentile bootstraps over the shared tasks' differences
    (:func:`~agentsgym.statistics.intervals.bootstrap_intervals`), which are narrower than those of two unpaired
    runs. If the win rate changed by the same amount in each of the n tasks, resampling sees no spread;
    its interval then allows that a fraction ``1 - (α/2)^(1/n)`` of all tasks, the most that n tasks may never show
    (Clopper & Pearson 1934), changes in any other way. A reward has no known bounds, so if it changed by the same
    amount in every task, its interval is left out.

    Args:
        run_a: First run: a store, records, or trajectories (which do not name their environment).
        run_b: Second run, likewise.
        confidence: Confidence level of the intervals, in (0, 1).
        seed: Random seed of the bootstrap.

    Raises:
        ConfigError: A rollout does not contain its task, or ``confidence`` is not in (0, 1).
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must lie between 0 and 1, got {confidence}")
    played_a, played_b = _by_task(run_a), _by_task(run_b)
    shared = [_shared(key, played_a.tasks[key], played_b.tasks[key]) for key in played_a.tasks if key in played_b.tasks]
    outcomes = [(one.wins_a, one.wins_b) for one in shared if one.wins_a is not None and one.wins_b is not None]
    return Comparison(
        win_rate=_paired(outcomes, confidence, seed, is_rate=True),
        reward=_paired([(one.reward_a, one.reward_b) for one in shared], confidence, seed),
        tasks=sorted(shared, key=_most_changed_first),
        num_only_a=len(played_a.tasks) - len(shared),
        num_only_b=len(played_b.tasks) - len(shared),
        num_failed_a=played_a.num_failed,
        num_failed_b=played_b.num_failed,
        confidence=confidence,
    )


class _Key(NamedTuple):
    """The identity of a task; configuration and task as canonical JSON."""

    env: str | None
    config: str
    task: str


class _Result(NamedTuple):
    success: bool | None
    reward: float


class _Played(NamedTuple):
    tasks: dict[_Key, list[_Result]]
    num_failed: int


def _by_task(run: Run) -> _Played:
    tasks: dict[_Key, list[_Result]] = {}
    num_failed = 0
    configs: dict[str | None, str] = {None: ""}
    for row in _rows(run):
        config = row["env_config"]
        if config not in configs:
            configs[config] = _canonical(config, without=COMMON_FIELDS)
        key = _Key(row["env_class_path"], configs[config], _canonical(row["task_data"]))
        if row["stop_reason"] == StopReason.FAILED:
            num_failed += 1
        else:
            tasks.setdefault(key, []).append(_Result(row["success"], row["final_reward"]))
    return _Played(tasks, num_failed)


def _rows(run: Run) -> Iterable[dict[str, Any]]:
    """Return the compared columns, one dict per rollout."""
    if isinstance(run, RolloutStore):
        rows = run.table(("session_id", *_COLUMNS)).to_pylist()
        for row in rows:
            _check_task(row["session_id"], is_known=row["task_data"] not in {None, "{}"})
        yield from rows
        return
    for one in run:
        record = StoredRollout(trajectory=one) if isinstance(one, Trajectory) else one
        trajectory = record.trajectory
        _check_task(trajectory.session_id, is_known=bool(trajectory.task_data))
        yield {
            "env_class_path": record.env_class_path,
            "env_config": None if record.env_config is None else to_json(dict(record.env_config)),
            "task_data": to_json(dict(trajectory.task_data)),
            "success": trajectory.success,
            "final_reward": trajectory.final_reward,
            "stop_reason": trajectory.stop_reason,
        }


def _check_task(session_id: str, *, is_known: bool) -> None:
    if not is_known:
        raise ConfigError(f"session {shown(session_id)} does not contain its task, which is needed to pair runs")


def _canonical(text: str, without: Iterable[str] = ()) -> str:
    """Write JSON so that equal values are equal texts, whatever the order of keys."""
    value = json.loads(text)
    for key in without:
        value.pop(key, None)
    return json.dumps(value, sort_keys=True)


def _shared(key: _Key, a: Sequence[_Result], b: Sequence[_Result]) -> SharedTask:
    return SharedTask(
        env=key.env,
        task_data=from_json(key.task),
        num_a=len(a),
        num_b=len(b),
        wins_a=_share_of_wins(a),
        wins_b=_share_of_wins(b),
        reward_a=math.fsum(one.reward for one in a) / len(a),
        reward_b=math.fsum(one.reward for one in b) / len(b),
    )


def _share_of_wins(results: Sequence[_Result]) -> float | None:
    """Return the win rate; unknown outcomes count as not won, unless all are unknown."""
    if all(one.success is None for one in results):
        return None
    return sum(bool(one.success) for one in results) / len(results)


def _most_changed_first(task: SharedTask) -> tuple[float, float, float]:
    return -abs(task.change), task.change, -abs(task.reward_b - task.reward_a)


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
        # The quantiles of equal values can be off by a rounding error.
        bounds = [min(float(drawn[0, 0]), difference) + 0.0, max(float(drawn[1, 0]), difference) + 0.0]
    low, high = bounds
    return PairedDifference(a=float(mean_a), b=float(mean_b), difference=difference, low=low, high=high)
