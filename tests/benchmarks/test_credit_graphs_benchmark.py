"""The candidates that credit a task's shared graph: on a graph that is small enough to work out by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from agentsgym.credit.advantages import ScoredRollout, gigpo, grpo, mt_grpo, return_to_go, rloo
from benchmarks.credit_graphs import (
    ARMS,
    best_values,
    direction_of,
    g2po,
    graph_values,
    graphgpo,
    hgpo,
    mean_values,
    nodes_of,
    pgpo,
    ratios,
)
from benchmarks.credit_report import Run, keep
from benchmarks.credit_scorecard import limit, pair_cells
from benchmarks.credit_tables import learn, transitions


def walk(states: str, reward: float, group: int = 0) -> ScoredRollout:
    """A rollout through states named by letters, rewarded at the end."""
    rewards = [0.0] * (len(states) - 1) + [reward]
    return ScoredRollout(turn_rewards=rewards, final_reward=reward, group=group, state_keys=[*states])


# s -> a -> win; s -> b -> a -> lost; s -> b -> b -> lost
WALKS = [walk("sa", 1.0), walk("sba", 0.0), walk("sbb", 0.0)]


def values_of(function: Any, discount: float) -> dict[str, Any]:
    found = function(WALKS, nodes_of(WALKS), discount)
    return {name: pytest.approx(found[0, None, name], abs=1e-12) for name in "sab"}


def test_the_mean_return_of_the_visits() -> None:
    assert values_of(mean_values, 0.5) == {"s": 0.5 / 3, "a": 0.5, "b": 0.0}


def test_the_graph_carries_a_win_back_to_states_whose_own_rollouts_lost() -> None:
    a = 0.5
    b = 0.5 * a / (3 - 0.5)  # of three turns in b one leads to a, one back to b, one ends
    assert values_of(graph_values, 0.5) == {"s": 0.5 * (a + 2 * b) / 3, "a": a, "b": b}


def test_the_best_walk_takes_the_shortest_way_to_the_win() -> None:
    assert values_of(best_values, 0.5) == {"s": 0.5, "a": 1.0, "b": 0.5}


def test_td_errors_say_what_a_turn_changed() -> None:
    found = g2po(WALKS, discount=0.5, scale="none", outcome=False)
    errors = np.array([0.5 * 0.5 - 0.5 / 3, 1 - 0.5, -0.5 / 3, 0.5 * 0.5, -0.5, -0.5 / 3, 0.0, 0.0])
    assert np.concatenate(found) == pytest.approx(errors - errors.mean())


def test_with_lambda_1_and_no_discount_each_turn_is_its_return_minus_the_value() -> None:
    found = np.concatenate(g2po(WALKS, scale="none", gae_lambda=1.0, outcome=False))
    differences = np.array([1 - 1 / 3, 1 - 1 / 2, -1 / 3, 0.0, -1 / 2, -1 / 3, 0.0, 0.0])
    assert found == pytest.approx(differences - differences.mean())


def test_distances_are_to_the_nearest_win() -> None:
    outcomes = grpo(WALKS, scale="none")
    found = graphgpo(WALKS, scale="none", compare="task")
    shortened = np.array([1, 1, 0, 1, -2, 0, 0, -1])  # s and b are 2 from the win, a 1, and a loss 3
    assert np.concatenate(found) - np.concatenate(outcomes) == pytest.approx(shortened - shortened.mean())


def test_potentials_are_the_mean_outcome_of_the_rollouts_that_came_by() -> None:
    found = np.concatenate(pgpo(WALKS, scale="none")) - np.concatenate(grpo(WALKS, scale="none"))
    raised = np.array([1 / 2 - 1 / 3, 1 / 2, -1 / 3, 1 / 2, -1 / 2, -1 / 3, 0.0, 0.0])
    assert found == pytest.approx(raised - raised.mean())


def test_a_hierarchy_of_one_level_is_gigpo() -> None:
    for scale in ("none", "group"):
        assert np.concatenate(hgpo(WALKS, discount=0.9, scale=scale, depth=0)) == pytest.approx(
            np.concatenate(gigpo(WALKS, discount=0.9, scale=scale))
        )


def test_the_unbiased_form_of_mt_grpo_is_gigpo_over_turn_indices_and_mt_grpo_is_grpo_where_only_wins_count() -> None:
    batch = [walk("0", 1.0), walk("012", 0.0), walk("01", 0.5), walk("0123", 2.0)]
    form = np.concatenate(rloo(batch, scale="none")) + 0.5 * np.concatenate(return_to_go(batch, scale="none"))
    known = gigpo(batch, scale="none", baseline="others", step_weight=0.5)
    assert np.concatenate(known) == pytest.approx(form)
    assert mt_grpo(batch) == grpo(batch)


@pytest.mark.parametrize(
    ("arm", "cosine"), [("gigpo", 1.000), ("g2po", 0.999), ("g2po_graph", 0.999), ("graphgpo", 0.415)]
)
def test_larger_groups_remove_the_bias_of_td_errors_but_not_that_of_distances(arm: str, cosine: float) -> None:
    assert limit(direction_of(arm, ARMS[arm], "none")).cosine == pytest.approx(cosine, abs=5e-4)


def test_td_errors_vary_less_than_the_returns_of_gigpo_and_point_no_worse_when_scaled() -> None:
    rows = [pair_cells(direction_of(arm, ARMS[arm], "group")) for arm in ("gigpo", "g2po")]
    assert rows == [["0.799", "6.6"], ["0.846", "4.1"]]


@pytest.mark.parametrize("arm", ARMS)
def test_groups_without_a_win_teach_nothing_and_change_no_other_group(arm: str) -> None:
    estimator: Any = ARMS[arm].estimator
    if isinstance(estimator, str):
        return
    estimate = partial(estimator, discount=0.95, scale="group")
    lost = [walk("sab", 0.0, group=1), walk("sb", 0.0, group=1)]
    both = estimate([*WALKS, *lost])
    assert np.concatenate(both[:3]) == pytest.approx(np.concatenate(estimate(WALKS)))
    assert np.concatenate(both[3:]) == pytest.approx(0.0)


def test_tables_learn_maps_whose_goal_can_be_reached() -> None:
    assert transitions("fetch", 3, np.random.default_rng(0)).shape == (18, 4)
    estimate = partial(g2po, discount=0.95, scale="group")
    wins, _ = learn("lake", estimate, 0, size=3, num_generations=30, learning_rate=2.0)
    assert wins[0] < 0.4
    assert wins[-1] > 0.8


def test_ratios_are_of_medians_over_the_seeds_that_both_arms_have(tmp_path: Any) -> None:
    for arm, needed in (("gigpo", 8), ("g2po", 4)):
        for seed in range(3):
            scores = [0.0] * needed + [1.0] * (10 - needed)
            keep(
                Run(
                    game="lake",
                    arm=arm,
                    seed=seed,
                    batch_size=256,
                    random_score=0.0,
                    optimal_score=1.0,
                    scores=scores,
                    final_score=1.0,
                    final_win_rate=1.0,
                    num_evaluated=1,
                    cpu_s=0.0,
                ),
                tmp_path / "runs.jsonl",
            )
    table = ratios(tmp_path / "runs.jsonl")
    assert f"| `g2po` | 3 | 3 | {4.8 * 256:,.0f} | {4.8 / 8.8:.2f} [{4.8 / 8.8:.2f}, {4.8 / 8.8:.2f}] |" in table
