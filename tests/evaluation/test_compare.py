"""Comparing runs: tasks are paired, the interval is the exact bootstrap's, and the tasks that changed come first."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentsgym import ConfigError, RolloutStore, StopReason, Trajectory
from agentsgym.evaluation.compare import PairedDifference, compare


def rollout(task: Mapping[str, Any], won: bool | None, reward: float | None = None, **fields: Any) -> Trajectory:
    values: dict[str, Any] = {
        "token_ids": [],
        "turns": [],
        "messages": [],
        "final_reward": float(bool(won)) if reward is None else reward,
        "stop_reason": StopReason.DONE,
        "info": {} if won is None else {"success": won},
        "task_data": task,
    }
    return Trajectory(**values | fields)


def run_of(wins: Mapping[int, Sequence[bool]]) -> list[Trajectory]:
    return [rollout({"seed": seed}, won) for seed, games in wins.items() for won in games]


def exact_bounds(changes: Sequence[float], confidence: float) -> tuple[float, float]:
    """The quantiles of the mean over every one of the n ** n equally likely draws."""
    means = Counter(sum(drawn) for drawn in itertools.product(changes, repeat=len(changes)))
    values = np.repeat(list(means), list(means.values())) / len(changes)
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


@pytest.mark.parametrize("confidence", [0.5, 0.9])
def test_the_interval_is_that_of_every_draw(confidence: float) -> None:
    rewards = {1: (0.0, 1.3), 2: (2.0, 1.6), 3: (0.5, 0.6), 4: (1.0, 4.1), 5: (3.0, 1.1), 6: (0.0, 0.77)}
    runs = [[rollout({"seed": seed}, None, pair[k]) for seed, pair in rewards.items()] for k in (0, 1)]
    found = compare(*runs, confidence=confidence).reward
    changes = [b - a for a, b in rewards.values()]
    assert found is not None
    assert found.difference == pytest.approx(np.mean(changes))
    assert (found.low, found.high) == pytest.approx(exact_bounds(changes, confidence), abs=0.03)


def test_each_task_counts_once_whatever_its_number_of_rollouts() -> None:
    a = run_of({1: [True, False, False, False], 2: [True], 9: [True]})
    b = run_of({2: [False, True], 1: [True], 3: [False], 4: [True]})
    found = compare(a, b)
    assert found.win_rate is not None
    assert (found.win_rate.a, found.win_rate.b) == (0.625, 0.75)
    assert found.win_rate.difference == 0.125
    assert (found.num_only_a, found.num_only_b) == (1, 2)
    changes = [(task.task_data["seed"], task.num_a, task.num_b, task.change) for task in found.tasks]
    assert changes == [(1, 4, 1, 0.75), (2, 1, 2, -0.5)]


def test_the_tasks_that_changed_come_first_and_lost_ones_before_won_ones() -> None:
    a = run_of({1: [True], 2: [False], 3: [True], 4: [True, False], 5: [True]})
    b = run_of({1: [True], 2: [True], 3: [False], 4: [False, False], 5: [False]})
    found = compare(a, b)
    assert [task.task_data["seed"] for task in found.tasks] == [3, 5, 2, 4, 1]
    assert [task.task_data["seed"] for task in found.changed] == [3, 5, 2, 4]
    assert found.as_dict()["num_changed"] == 4


def test_swapping_the_runs_turns_the_signs() -> None:
    a = run_of({seed: [seed % 2 == 0] for seed in range(9)})
    b = run_of({seed: [seed % 3 == 0] for seed in range(9)})
    one, other = compare(a, b).win_rate, compare(b, a).win_rate
    assert one is not None
    assert other is not None
    assert one.low is not None
    assert one.high is not None
    assert (other.difference, other.low, other.high) == pytest.approx((-one.difference, -one.high, -one.low), abs=0.12)


def test_where_resampling_sees_no_spread_the_interval_is_no_point() -> None:
    equal = compare(run_of({1: [True], 2: [True]}), run_of({1: [True], 2: [True]})).win_rate
    reach = 1 - 0.025**0.5
    assert equal == PairedDifference(a=1.0, b=1.0, difference=0.0, low=-reach, high=reach)
    better = compare(run_of({1: [False], 2: [False]}), run_of({1: [True], 2: [True]})).win_rate
    assert better is not None
    assert (better.low, better.high) == pytest.approx((1 - 2 * reach, 1.0))
    alone = compare(run_of({1: [True]}), run_of({1: [False]})).win_rate
    assert alone == PairedDifference(a=1.0, b=0.0, difference=-1.0, low=None, high=None)


def test_a_reward_that_changed_alike_in_every_task_has_no_interval() -> None:
    def earned(reward: float) -> list[Trajectory]:
        return [rollout({"seed": seed}, None, reward * 3 + seed / 3) for seed in range(5)]

    found = compare(earned(0.1), earned(0.2)).reward  # but for rounding
    assert found is not None
    assert found.difference == pytest.approx(0.3)
    assert (found.low, found.high) == (None, None)
    assert compare(earned(0.1), earned(0.1)).reward == replace(found, b=found.a, difference=0.0)
    spread = compare(earned(0.1), [*earned(0.2)[1:], rollout({"seed": 0}, None, 9.0)]).reward
    assert spread is not None
    assert spread.low is not None
    assert spread.high is not None
    assert spread.low < spread.difference < spread.high


def test_failed_rollouts_are_counted_and_left_out() -> None:
    failed = rollout({"seed": 2}, None, 0.0, stop_reason=StopReason.FAILED, error="no")
    found = compare([*run_of({1: [True]}), failed], run_of({1: [True], 2: [True]}))
    assert (found.num_failed_a, found.num_failed_b, found.num_only_b, len(found.tasks)) == (1, 0, 1, 1)


def test_stores_are_paired_by_environment_its_own_keys_and_task(tmp_path: Path) -> None:
    def stored(name: str, won: bool, **columns: Any) -> None:
        with RolloutStore.writer(tmp_path / name) as writer:
            writer.add(rollout({"a": 1, "seed": 1}, won), **columns)

    stored("a", False, env_class_path="one", env_config={"size": 3, "max_steps_per_episode": 5})
    stored("a", False, env_class_path="two", env_config={"size": 3})
    stored("b", True, env_class_path="one", env_config={"max_steps_per_episode": 9, "size": 3})
    stored("b", True, env_class_path="one", env_config={"size": 4})
    stores = RolloutStore(tmp_path / "a"), RolloutStore(tmp_path / "b")
    found = compare(*stores)
    assert [(task.env, task.change) for task in found.tasks] == [("one", 1.0)]
    assert (found.num_only_a, found.num_only_b) == (1, 1)
    assert compare(*(store.records() for store in stores)) == found
    assert found.tasks[0].task_data == {"a": 1, "seed": 1}


def test_runs_without_a_shared_task_or_without_tasks(tmp_path: Path) -> None:
    found = compare(run_of({1: [True]}), run_of({2: [True]}))
    assert (found.win_rate, found.reward, list(found.tasks)) == (None, None, [])
    with pytest.raises(ConfigError, match="was stored without task_data"):
        compare([rollout({}, True)], [])
    with RolloutStore.writer(tmp_path) as writer:
        writer.add(rollout({}, True))
    with pytest.raises(ConfigError, match="was stored without task_data"):
        compare(RolloutStore(tmp_path), RolloutStore(tmp_path))
    with pytest.raises(ConfigError, match="confidence"):
        compare([], [], confidence=1.0)
