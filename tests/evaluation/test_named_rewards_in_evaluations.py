"""Named rewards in evaluations: means with intervals that add up to the reward, overall and by role."""

from __future__ import annotations

from typing import Any

import pytest

from agentsgym import StopReason, Trajectory, Turn, audit
from agentsgym.reports.frames import rollouts_frame
from agentsgym.statistics.metrics import summarize


def played(task: int, components: dict[str, float] | None, **fields: Any) -> Trajectory:
    reward = sum((components or {}).values())
    turns = [Turn(start=0, stop=0, reward=reward, components=components)]
    values: dict[str, Any] = {"turns": turns, "final_reward": reward, "final_components": components}
    values |= {"token_ids": [], "messages": [], "stop_reason": StopReason.DONE, "task_index": task}
    return Trajectory(**values | fields)


ROLLOUTS = [
    played(0, {"correct": 1.0, "format": 0.5}),
    played(1, {"correct": 0.0, "format": 0.5}),
    played(2, {"format": 0.5}),
    played(3, None, final_reward=3.0),
    played(4, None, final_reward=0.0, stop_reason=StopReason.FAILED, error="broken"),
]


def test_the_means_add_up_to_the_reward() -> None:
    evaluation = summarize(ROLLOUTS)
    assert {name: one.mean for name, one in evaluation.components.items()} == {
        "correct": 0.25,
        "format": 0.375,
        "reward": 0.75,
    }
    assert evaluation.reward is not None
    assert sum(one.mean for one in evaluation.components.values()) == pytest.approx(evaluation.reward.mean)
    correct = evaluation.components["correct"]
    assert 0.0 <= correct.low < 0.25 < correct.high <= 1.0
    numbers = evaluation.as_dict()
    assert numbers["rewards/correct"] == 0.25
    assert numbers["rewards/correct_interval"] == [correct.low, correct.high]
    assert "rewards/correct 0.25 [" in repr(evaluation)


def test_plain_rewards_have_no_components() -> None:
    evaluation = summarize([played(0, None, final_reward=1.0)])
    assert evaluation.components == {}
    assert not any(name.startswith("rewards/") for name in evaluation.as_dict())


def test_each_role_has_its_own_means() -> None:
    turns = [
        Turn(start=0, stop=0, reward=1.0, role="X", role_rewards={"X": 1.0}, components={"won": 1.0}),
        Turn(start=0, stop=0, reward=-0.5, role="O", role_rewards={"O": -0.5}, components={"slow": -0.5}),
    ]
    game = played(0, None, turns=turns, final_reward=1.0, final_components={"won": 1.0})
    game = Trajectory(
        **{name: getattr(game, name) for name in ("token_ids", "turns", "messages", "stop_reason", "final_components")},
        final_reward=1.0,
        final_rewards={"X": 1.0, "O": -0.5},
    )
    assert game.role_components == {"X": {"won": 1.0}, "O": {"slow": -0.5}}
    by_role = summarize([game]).by_role
    assert {role: {name: one.mean for name, one in own.components.items()} for role, own in by_role.items()} == {
        "X": {"won": 1.0},
        "O": {"slow": -0.5},
    }


def test_each_environment_has_its_own_names() -> None:
    evaluation = summarize([*ROLLOUTS[:2], played(5, {"moves": -2.0})], environments=["quiz", "quiz", "maze"])
    names = {name: [*own.components] for name, own in evaluation.by_environment.items()}
    assert names == {"maze": ["moves"], "quiz": ["correct", "format"]}


def test_tables_have_a_column_for_each_name() -> None:
    rows = rollouts_frame(ROLLOUTS)
    assert rows["rewards/format"].tolist()[:3] == [0.5, 0.5, 0.5]
    assert rows["rewards/correct"].isna().tolist() == [False, False, True, True, True]
    assert rollouts_frame(ROLLOUTS[:1], by="turn")["rewards/correct"].tolist() == [1.0]


def test_components_that_do_not_add_up_are_found() -> None:
    turns = [Turn(start=0, stop=0, reward=1.0, components={"a": 0.5})]
    report = audit([played(0, {"a": 1.0}, turns=turns)])
    assert "the components {'a': 0.5} must add up to the reward, 1.0" in str(report)
