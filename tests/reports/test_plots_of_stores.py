"""The learning curve of a store: what it shows, and the columns that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored import rollout

from agentsgym.errors import ConfigError
from agentsgym.reports.plots import curve_of, learning_curve
from agentsgym.statistics.metrics import summarize
from agentsgym.store.reader import RolloutStore
from agentsgym.store.records import StoredRollout
from agentsgym.types import StopReason, Trajectory, Turn


def played(task: int, rewards: Sequence[float], **fields: Any) -> Trajectory:
    """Two tokens a turn, the second the agent's."""
    turns = [Turn(start=2 * k + 1, stop=2 * k + 2, reward=reward) for k, reward in enumerate(rewards)]
    values: dict[str, Any] = {
        "turns": turns,
        "info": {"success": sum(rewards) > 0},
        "final_reward": sum(rewards),
        "logprobs": [value for k in range(len(rewards)) for value in (0.0, -k - 0.5)],
        "per_token_rewards": [value for reward in rewards for value in (0.0, reward)],
    }
    return rollout(task, 2 * len(rewards), **(values | fields))


ROWS = [
    played(0, [0.0, 1.0]),
    played(0, [0.5], rollout_index=1),
    played(1, [-1.0, 0.0, 0.25]),
    played(2, [1.0], stop_reason=StopReason.FAILED, error="gone", logprobs=None),
]
ADVANTAGES = [[float(index) for index in range(len(one.token_ids))] for one in ROWS]


def kept(path: Path, rows: Sequence[Trajectory], **columns: Any) -> RolloutStore:
    with RolloutStore.writer(path, **columns) as writer:
        for one in rows:
            writer.add(one)
    return RolloutStore(path)


def trained(path: Path) -> RolloutStore:
    with RolloutStore.writer(path, source="training", generation=1) as writer:
        for one, advantages in zip(ROWS, ADVANTAGES, strict=True):
            writer.add(one, advantages=advantages, group=one.task_index)
    return RolloutStore(path)


def test_only_the_columns_that_are_drawn_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = trained(tmp_path / "store")
    read: set[str] = set()
    table = RolloutStore.table

    def noted(self: RolloutStore, columns: Sequence[str] | None = None) -> Any:
        read.update(columns or ["everything"])
        return table(self, columns)

    monkeypatch.setattr(RolloutStore, "table", noted)
    learning_curve(store)
    assert read
    assert not read & {"everything", "token_ids", "messages", "per_token_rewards", "info", "turns", "advantages"}


def test_a_store_of_training_has_a_learning_curve(tmp_path: Path) -> None:
    won, lost = played(0, [1.0]), played(0, [0.0])
    evaluated = [replace(won, task_index=index, task_data={"seed": index}) for index in range(3)] + [lost]
    with RolloutStore.writer(tmp_path) as writer:

        def add(rows: Sequence[Trajectory], **columns: Any) -> None:
            for one in rows:
                writer.add_record(StoredRollout(trajectory=one, **columns))

        add([lost, won], source="evaluation", agent="random", run="x")
        add(evaluated[2:], source="evaluation", agent="before", run="x", step=0)
        add([won, lost, lost, lost], source="training", generation=1, step=0, run="killed")
        add([lost] * 4, source="training", generation=2, step=2, run="killed")
        add([won, won, lost, lost], source="training", generation=2, step=2, run="resumed")
        add([won, won, won, lost, ROWS[3]], source="training", generation=3, step=4, run="resumed")
        add(evaluated, source="evaluation", agent="after", run="x", step=6)
    curve = curve_of(RolloutStore(tmp_path))
    assert curve.points == [(4, 0.25), (8, 0.5), (13, 0.75)]
    assert [(x, estimate.mean) for x, estimate in curve.evaluations] == [(0, 0.5), (13, 0.75)]
    assert curve.evaluations[1][1] == summarize(evaluated).win_rate
    assert {name: estimate.mean for name, estimate in curve.references.items()} == {"random": 0.5}
    [axes] = learning_curve(RolloutStore(tmp_path)).figure.axes
    assert {text.get_text() for text in axes.texts} == {"random 50%", "50%", "75%"}
    with pytest.raises(ConfigError, match="has no learning curve"):
        learning_curve(kept(tmp_path / "played", ROWS))


def test_of_an_evaluation_that_was_made_again_the_later_one_counts(tmp_path: Path) -> None:
    won, lost = played(0, [1.0]), played(0, [0.0])
    with RolloutStore.writer(tmp_path) as writer:
        for run, one in (("first", lost), ("again", won)):
            for agent, step in (("random", None), ("before", 0), ("policy", 0)):
                writer.add(one, source="evaluation", run=run, agent=agent, step=step)
    curve = curve_of(RolloutStore(tmp_path))
    assert [(x, estimate.mean) for x, estimate in curve.evaluations] == [(0, 1.0), (0, 1.0)]  # by both names
    assert {name: estimate.mean for name, estimate in curve.references.items()} == {"random": 1.0}
