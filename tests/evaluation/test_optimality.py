"""Where a reward lies between random and optimal play, and evaluations of rewards that have names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from guess_game import Quiet
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import ConfigError, RandomAgent, StopReason, Trajectory, Turn, audit, evaluate
from agentsgym.envs import TextArenaEnv
from agentsgym.envs.spec import Anchors
from agentsgym.envs.TextArena.references import reference_for
from agentsgym.evaluation import Estimate
from agentsgym.reports.frames import rollouts_frame
from agentsgym.statistics.metrics import fraction_of_optimal, summarize
from agentsgym.statistics.optimality import anchors_of_task, fraction_with_interval

NUMBERS = st.floats(-10, 10)


class Coin(Quiet):
    """Pays the number that the agent answers."""

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        return state, float(action), True, {}


def game(task: int, reward: float, *, failed: bool = False, **info: float) -> Trajectory:
    return Trajectory(
        token_ids=[],
        turns=[Turn(start=0, stop=0, reward=reward)],
        messages=[],
        final_reward=reward,
        stop_reason=StopReason.FAILED if failed else StopReason.DONE,
        task_index=task,
        info=info,
    )


def fraction(*games: Trajectory) -> Estimate | None:
    return summarize(games).fraction_of_optimal


@given(NUMBERS, NUMBERS, st.lists(NUMBERS, min_size=1, max_size=8))
def test_equal_anchors_give_the_fraction_of_the_mean_reward(one: float, other: float, rewards: list[float]) -> None:
    random, optimal = sorted((one, other))
    games = [game(i, reward, random_reward=random, optimal_reward=optimal) for i, reward in enumerate(rewards)]
    found = fraction(*games)
    if optimal - random < 1e-6:
        return
    assert found is not None
    expected = fraction_of_optimal(sum(rewards) / len(rewards), random=random, optimal=optimal)
    assert found.mean == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert found.low <= found.mean <= found.high


def test_tasks_in_which_more_can_be_won_weigh_more() -> None:
    found = fraction(
        game(0, 1.0, random_reward=0.0, optimal_reward=1.0),
        game(1, 0.0, random_reward=0.0, optimal_reward=3.0),
        game(2, 5.0, random_reward=5.0, optimal_reward=5.0),  # here random play is optimal
    )
    assert found is not None
    assert found.mean == pytest.approx(1 / 4)


def test_rollouts_that_failed_or_have_no_anchors_are_left_out() -> None:
    placed = game(0, 1.0, random_reward=0.0, optimal_reward=2.0)
    found = fraction(placed, game(1, 9.0), game(2, 0.0, failed=True, random_reward=0.0, optimal_reward=2.0))
    assert found == Estimate(mean=0.5, low=0.5, high=0.5)
    assert fraction(game(0, 1.0)) is None
    assert fraction(game(0, 1.0, random_reward=1.0, optimal_reward=1.0)) is None


def test_a_game_that_rewards_each_role_has_no_place_on_one_scale() -> None:
    one = game(0, 9.0, random_reward=0.0, optimal_reward=2.0)
    both = dataclasses.replace(one, final_rewards={0: 9.0, 1: -9.0})
    assert fraction(both) is None
    assert fraction(both, game(1, 1.0, random_reward=0.0, optimal_reward=2.0)) == Estimate(mean=0.5, low=0.5, high=0.5)


def test_self_play_is_not_placed_by_a_scale_for_one_seat() -> None:
    reference = reference_for("TicTacToe-v0")
    env = TextArenaEnv(None, {"game": "TicTacToe-v0", "opponent": "self"})
    found = evaluate(env, reference.random_player(), [{"seed": seed} for seed in range(4)], references=reference)
    assert set(found.by_role) == {0, 1}
    assert found.fraction_of_optimal is None


def test_the_interval_holds_the_truth_about_as_often_as_it_promises() -> None:
    generator = np.random.default_rng(0)
    held = 0
    for seed in range(100):
        rewards = generator.random(60) < 0.7
        sums = np.stack([rewards, np.full(60, 0.2), np.ones(60)], axis=1)
        found = fraction_with_interval(sums, confidence=0.9, seed=seed)
        assert found is not None
        held += found.low <= (0.7 - 0.2) / 0.8 <= found.high
    assert 80 <= held <= 98


def test_evaluate_takes_one_scale_for_all_tasks_or_one_for_each() -> None:
    env, tasks = Coin(), [{"seed": 0, "worth": 1.0}, {"seed": 1, "worth": 3.0}]

    def scale(task: Mapping[str, Any]) -> Anchors:
        return Anchors(random=0.0, optimal=task["worth"])

    ones = RandomAgent(["1"])
    of_all = evaluate(env, ones, tasks, references=Anchors(random=0.5, optimal=2.5))
    of_each = evaluate(env, ones, tasks, references=scale)
    assert of_all.fraction_of_optimal == Estimate(mean=0.25, low=0.25, high=0.25)
    assert of_each.as_dict()["fraction_of_optimal"] == 0.5
    assert evaluate(env, ones, tasks).as_dict()["fraction_of_optimal"] is None
    assert evaluate(env, ones, tasks, references=lambda _: None).fraction_of_optimal is None


def test_the_scale_of_a_trial_is_that_of_its_episodes_together() -> None:
    env = Coin(None, {"episodes_per_trial": 3, "free_shots": 1, "keep_history": True})
    found = evaluate(env, RandomAgent(["1"]), [{"seed": 0}], references=Anchors(random=0.5, optimal=1.5))
    assert found.fraction_of_optimal == Estimate(mean=0.5, low=0.5, high=0.5)


@pytest.mark.parametrize("wrong", [0.5, (0, 1), {"random": 0, "optimal": 1}, lambda task: 1.0])
def test_references_that_are_none_are_refused_before_anything_is_played(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"references must be Anchors\(random=…, optimal=…\) or a function"):
        evaluate(Coin(), RandomAgent(["what is no number"]), [{"seed": 0}], references=wrong)


@pytest.mark.parametrize(("random", "optimal"), [(1.0, 0.5), (0.0, math.inf), (math.nan, 1.0), ("0", 1.0)])
def test_anchors_are_numbers_in_order(random: Any, optimal: Any) -> None:
    with pytest.raises(ConfigError, match=r"anchors must be finite|optimal must be at least random"):
        Anchors(random=random, optimal=optimal)


def test_anchors_of_several_episodes_are_their_sums() -> None:
    given_anchors = Anchors(random=-1.0, optimal=2.0)
    assert anchors_of_task(given_anchors, {}, 3) == Anchors(random=-3.0, optimal=6.0)


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
