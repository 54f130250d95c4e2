"""What an estimator may return, and the error where it returns anything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from games import settings
from test_guard_rails import rollout

from agentsgym.credit.assignment import AdvantageAssigner, advantage_metrics
from agentsgym.credit.roles import split_roles
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import ConfigError


def unsure(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[float]]:
    """An estimator that does not know what the last turn is worth."""
    return [[*([0.0] * (len(one.turn_rewards) - 1)), math.nan] for one in rollouts]


def brief(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[float]]:
    """An estimator that looks at first turns alone."""
    return [[0.0] for _ in rollouts]


def silent(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> None:
    """An estimator that forgets to return what it found."""


def wordy(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[str]]:
    """An estimator that names what it thinks."""
    return [["good"] * len(one.turn_rewards) for one in rollouts]


def empty(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[list[None]]]:
    """An estimator that has a list for the tokens, and nothing in it."""
    return [[[None]] * len(one.turn_rewards) for one in rollouts]


def whole(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[float]:
    """An estimator that gives a number for a whole rollout."""
    return [one.final_reward for one in rollouts]


def test_an_estimator_that_returns_nothing_is_named(tmp_path: Path) -> None:
    assigner = AdvantageAssigner(settings(tmp_path, advantage_estimator=silent))
    scored = [ScoredRollout.from_trajectory(rollout([0.5, 1.0]), group=0)]
    with pytest.raises(ConfigError, match=r"'silent' must return one list of numbers for each of 1 rollouts, got None"):
        assigner.turn_advantages(scored, is_training=True)


def of_tensors(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[Any]]:
    """An estimator that computes with torch, one turn whole and one token by token."""
    return [[torch.tensor(one.final_reward), [torch.tensor(0.5)] * one.token_counts[1]] for one in rollouts]


def test_numbers_of_other_types_are_taken_for_what_they_are(tmp_path: Path) -> None:
    assigner = AdvantageAssigner(settings(tmp_path, advantage_estimator=of_tensors))
    scored = [ScoredRollout.from_trajectory(rollout([0.5, 1.0]), group=0)]
    numbers = assigner.turn_advantages(scored, is_training=True)
    assert numbers == [[1.5, [0.5, 0.5]]]
    assert advantage_metrics(scored, numbers, split_roles(scored))["advantage/turn_01"] == 0.5


def long_winded(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[list[float]]]:
    """An estimator that has more numbers than the turns have tokens."""
    return [[[0.0] * 3] * len(one.turn_rewards) for one in rollouts]


def at_once(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[Any]]:
    """An estimator that gives a tensor in place of a list."""
    return [[torch.zeros(2)] * len(one.turn_rewards) for one in rollouts]


def huge(rollouts: Sequence[ScoredRollout], *, discount: float, scale: str) -> list[list[int]]:
    """An estimator that knows no bounds."""
    return [[10**400] * len(one.turn_rewards) for one in rollouts]


@pytest.mark.parametrize(
    ("estimator", "given"),
    [
        (long_winded, r"\[2, 2\] tokens.*\[0\.0, 0\.0, 0\.0\]"),
        (at_once, "tensor"),
        (huge, "1000"),
        (unsure, "nan"),
        (brief, r"\[0.0\]"),
        (wordy, "'good'"),
        (empty, r"\[\[None\]"),
        (whole, r"got 1\.5"),
    ],
)
def test_numbers_that_are_none_are_named(estimator: Any, given: str, tmp_path: Path) -> None:
    assigner = AdvantageAssigner(settings(tmp_path, advantage_estimator=estimator))
    scored = [ScoredRollout.from_trajectory(rollout([0.5, 1.0]), group=0)]
    with pytest.raises(ConfigError, match=rf"'{estimator.__name__}' must return one finite number.*rollout 0.*{given}"):
        assigner.turn_advantages(scored, is_training=True)
