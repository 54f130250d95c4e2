"""Batches of scored rollouts that the tests of estimators share, and references that only loop."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from agentsgym.credit.advantages import Scale, ScoredRollout

Batch = list[ScoredRollout]
Numbers = list[list[float]]
Entry = tuple[float, int, Hashable]  # value, whose it is, what it is compared within

SCALES: tuple[Scale, ...] = ("none", "group", "batch")


def rollout(  # noqa: PLR0913  # keywords, most of them left out
    rewards: Sequence[float],
    *,
    group: int = 0,
    final: float | None = None,
    keys: Iterable[Hashable] | None = None,
    roles: Iterable[Hashable] = (),
    environment: Hashable = None,
    failed: bool = False,
    final_rewards: Mapping[Hashable, float] | None = None,
) -> ScoredRollout:
    return ScoredRollout(
        turn_rewards=rewards,
        final_reward=sum(rewards) if final is None else final,
        group=group,
        state_keys=[None] * len(rewards) if keys is None else list(keys),
        roles=list(roles),
        environment=environment,
        failed=failed,
        final_rewards=final_rewards or {},
    )


def valued(rewards: Sequence[float], values: Sequence[Sequence[float]], **fields: Any) -> ScoredRollout:
    """A rollout of which a head has predicted a value at each token."""
    return replace(rollout(rewards), values=values, **fields)


# Few groups, games, roles, states and reward levels, so that everything that can coincide does.
QUARTERS = [n / 4 for n in range(-8, 9)]
# A rollout has one role here: `test_credit_roles` has those of several.
turns = st.sampled_from([*product(QUARTERS, [None, "a", "b"], [-1.0, 0.0, 0.5])])  # one draw a turn is fast
frames = st.sampled_from([*product(QUARTERS, range(3), [0, 1], ["failed", "dropped", *["counts"] * 4])])


def _scored(turns: list[tuple[float, Hashable, float]], frame: tuple[float, int, int, str]) -> ScoredRollout:
    final, group, role, status = frame
    return ScoredRollout(
        turn_rewards=[earned for earned, _, _ in turns],
        final_reward=final,
        group=group,
        state_keys=[key for _, key, _ in turns],
        failed=status == "failed",
        dropped=status == "dropped",
        environment=("chess", "go", "go")[group],
        roles=[role] * len(turns),
        potentials=[potential for _, _, potential in turns],
    )


scored_rollouts = st.builds(_scored, st.lists(turns, max_size=4), frames)
batches = st.lists(scored_rollouts, max_size=7)
scales = st.sampled_from(SCALES)
discounts = st.sampled_from([0.0, 0.5, 1.0])


def compared_by_loops(entries: list[Entry], *, others: bool, scale: Scale) -> list[float]:
    """One number each: the value minus the mean of its group, or of the others' in it."""
    differences = []
    for value, owner, group in entries:
        peers = [v for v, _, g in entries if g == group]
        others_values = [v for v, o, g in entries if g == group and o != owner]
        spread = np.std(peers, ddof=1) + 1e-4 if len(peers) > 1 else 1.0
        if not others:
            difference = value - np.mean(peers)
        elif others_values:
            difference = value - np.mean(others_values)
        else:
            difference = 0.0 if scale == "group" else value
        differences.append(difference / spread if scale == "group" else difference)
    if scale == "batch" and differences:
        spread = np.sqrt(np.sum(np.square(differences)) / max(len(differences) - 1, 1))
        differences = [difference / (spread + 1e-4) for difference in differences]
    return differences


def held_against_by_loops(
    entries: list[Entry], baseline_of: Callable[[Hashable], float], *, scale: Scale
) -> list[float]:
    """One number each: the value minus a baseline that comes from elsewhere."""
    result = []
    for value, _, group in entries:
        peers = [v - baseline_of(g) for v, _, g in entries if scale == "batch" or g == group]
        spread = np.sqrt(np.sum(np.square(peers)) / max(len(peers) - 1, 1)) + 1e-4
        difference = value - baseline_of(group)
        result.append(difference if scale == "none" else difference / spread)
    return result


def returns_of(
    rollouts: Batch, group_of: Callable[[ScoredRollout, int], Hashable], *, discount: float
) -> tuple[list[Entry], list[tuple[int, int]]]:
    """The return of each turn that counts and has a group, and its place (rollout, turn)."""
    entries, places = [], []
    for i, one in enumerate(rollouts):
        for k in range(len(one.turn_rewards)):
            if not one.failed and not one.dropped and group_of(one, k) is not None:
                future = sum(earned * discount**j for j, earned in enumerate(one.turn_rewards[k:]))
                entries.append((future, i, group_of(one, k)))
                places.append((i, k))
    return entries, places


def placed(rollouts: Batch, places: Iterable[tuple[int, int]], numbers: Iterable[float]) -> Numbers:
    result = [[0.0] * len(one.turn_rewards) for one in rollouts]
    for (i, k), number in zip(places, numbers, strict=True):
        result[i][k] = number
    return result


def final_rewards_by_loops(rollouts: Batch, *, others: bool, scale: Scale) -> Numbers:
    live = [i for i, one in enumerate(rollouts) if not one.failed and not one.dropped]
    entries: list[Entry] = [(rollouts[i].final_reward, i, rollouts[i].group) for i in live]
    result = [[0.0] * len(one.turn_rewards) for one in rollouts]
    for i, number in zip(live, compared_by_loops(entries, others=others, scale=scale), strict=True):
        result[i] = [number] * len(rollouts[i].turn_rewards)
    return result


def returns_by_loops(
    rollouts: Batch, group_of: Callable[[ScoredRollout, int], Hashable], *, discount: float, others: bool, scale: Scale
) -> Numbers:
    entries, places = returns_of(rollouts, group_of, discount=discount)
    return placed(rollouts, places, compared_by_loops(entries, others=others, scale=scale))


def assert_close(result: Numbers, expected: Numbers) -> None:
    assert len(result) == len(expected)
    for row, expected_row in zip(result, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-9, abs=1e-9)
