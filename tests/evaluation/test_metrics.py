"""Estimates against closed forms, maj@k against drawing every choice, and intervals that hold what they promise."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.reports.html import evaluation_html
from agentsgym.statistics.intervals import share_estimate
from agentsgym.statistics.metrics import (
    Estimate,
    Evaluation,
    bootstrap_intervals,
    fraction_of_optimal,
    pass_at_k,
    summarize,
)
from agentsgym.statistics.passing import maj_at_k, winning_chances
from agentsgym.types import StopReason, Trajectory, Turn


def game(
    task: int, *, won: bool | None = None, reward: float = 0.0, num_turns: int = 1, stop: StopReason = StopReason.DONE
) -> Trajectory:
    return Trajectory(
        token_ids=[],
        turns=[Turn(start=0, stop=0, reward=reward / num_turns)] * num_turns,
        messages=[],
        final_reward=reward,
        stop_reason=stop,
        task_index=task,
        info={} if won is None else {"success": won},
    )


def games(wins: Sequence[bool]) -> list[Trajectory]:
    return [game(task, won=won) for task, won in enumerate(wins)]


def win_rate(evaluation: Evaluation) -> Estimate:
    assert evaluation.win_rate is not None
    return evaluation.win_rate


def width(estimate: Estimate) -> float:
    return estimate.high - estimate.low


def binomial_quantile(n: int, p: float, level: float) -> int:
    total = 0.0
    for wins in range(n + 1):
        total += math.comb(n, wins) * p**wins * (1 - p) ** (n - wins)
        if total >= level:
            return wins
    raise AssertionError


@pytest.mark.parametrize(("num_won", "num_tasks"), [(30, 50), (12, 80), (199, 400)])
def test_one_game_a_task_gives_the_binomial_quantiles(num_won: int, num_tasks: int) -> None:
    # Resampling 0/1 values draws Binomial(n, p) wins exactly; one win to spare for the simulation.
    estimate = win_rate(summarize(games([task < num_won for task in range(num_tasks)])))
    p = num_won / num_tasks
    assert estimate.mean == p
    assert abs(estimate.low * num_tasks - binomial_quantile(num_tasks, p, 0.025)) <= 1.001
    assert abs(estimate.high * num_tasks - binomial_quantile(num_tasks, p, 0.975)) <= 1.001


def test_two_tasks_give_the_three_means_there_are() -> None:
    # Means 0, 5, 10 with probabilities 1/4, 1/2, 1/4.
    values = [[0.0], [10.0]]
    assert bootstrap_intervals(values, [0, 1], confidence=0.95).tolist() == [[0.0], [10.0]]
    assert bootstrap_intervals(values, [0, 1], confidence=0.40).tolist() == [[5.0], [5.0]]


def test_a_drawn_task_brings_all_its_games() -> None:
    # Task 0 has one game worth 0, task 1 three worth 4: the means are 0, 3 (not 2) and 4.
    values, clusters = [[0.0], [4.0], [4.0], [4.0]], ["a", "b", "b", "b"]
    assert bootstrap_intervals(values, clusters, confidence=0.40).tolist() == [[3.0], [3.0]]
    assert bootstrap_intervals(values, clusters, confidence=0.95).tolist() == [[0.0], [4.0]]


def test_repeats_that_agree_are_no_news() -> None:
    wins = [task % 3 == 0 for task in range(60)]
    once = summarize(games(wins))
    repeated = [one for one in games(wins) for _ in range(8)]
    by_task = summarize(repeated)
    by_game = summarize(repeated, clusters=range(len(repeated)))
    assert win_rate(by_task) == win_rate(once)
    assert by_task.num_episodes == 480
    assert width(win_rate(by_game)) == pytest.approx(width(win_rate(by_task)) / 8**0.5, rel=0.1)


def test_clusters_can_be_given() -> None:
    rows = games([task % 2 == 0 for task in range(40)])
    secrets = ["even" if task % 2 == 0 else "odd" for task in range(40)]
    estimate = win_rate(summarize(rows, clusters=secrets))
    assert (estimate.low, estimate.high) == (0.0, 1.0)


def test_the_interval_covers_the_truth_about_as_often_as_it_states() -> None:
    # Tasks differ in difficulty, so the four games of a task go together; the truth is the mean difficulty, 0.5.
    generator = np.random.default_rng(11)
    num_runs, num_tasks = 300, 40
    covered_by_task = covered_by_game = 0
    for run in range(num_runs):
        difficulty = generator.beta(0.5, 0.5, size=num_tasks)
        wins = (generator.random((num_tasks, 4)) < difficulty[:, None]).reshape(-1, 1)
        for_tasks = bootstrap_intervals(wins, np.repeat(range(num_tasks), 4).tolist(), num_resamples=400, seed=run)
        for_games = bootstrap_intervals(wins, range(4 * num_tasks), num_resamples=400, seed=run)
        covered_by_task += bool(for_tasks[0, 0] <= 0.5 <= for_tasks[1, 0])
        covered_by_game += bool(for_games[0, 0] <= 0.5 <= for_games[1, 0])
    assert 0.90 <= covered_by_task / num_runs <= 0.98
    assert covered_by_game / num_runs < 0.85


@pytest.mark.parametrize("num_tasks", [1, 10, 512])
def test_a_clean_sweep_still_has_an_interval(num_tasks: int) -> None:
    reach = 0.025 ** (1 / num_tasks)  # won n of n: the p at which that happens with probability 2.5 %
    won, lost = (win_rate(summarize(games([outcome] * num_tasks))) for outcome in (True, False))
    assert (won.mean, won.low, won.high) == (1.0, pytest.approx(reach), 1.0)
    assert (lost.mean, lost.low, lost.high) == (0.0, 0.0, pytest.approx(1 - reach))


def test_a_single_task_is_judged_by_its_games() -> None:
    wins = [index % 2 == 0 for index in range(50)]
    one_task = summarize([game(0, won=won) for won in wins])
    assert win_rate(one_task) == win_rate(summarize(games(wins)))


def test_failed_rollouts_are_counted_and_left_out() -> None:
    played = [game(0, won=True, reward=2.0, num_turns=4), game(1, won=False, reward=1.0, num_turns=8)]
    broken = [game(0, reward=-50.0, num_turns=1, stop=StopReason.FAILED), game(2, stop=StopReason.FAILED)]
    evaluation = summarize([broken[0], *played, broken[1]])
    assert (evaluation.num_episodes, evaluation.num_failed) == (2, 2)
    assert evaluation.stop_reasons == {StopReason.DONE: 2, StopReason.FAILED: 2}
    clean = summarize(played)
    assert (evaluation.win_rate, evaluation.reward, evaluation.turns) == (clean.win_rate, clean.reward, clean.turns)
    assert len(evaluation.trajectories) == 4


def test_nothing_is_minus_zero() -> None:
    reward = summarize([game(0, reward=-0.0), game(1, reward=-0.0)]).reward
    assert str(reward) == "Estimate(mean=0.0, low=0.0, high=0.0)"


def test_nothing_is_estimated_from_failures_alone() -> None:
    evaluation = summarize([game(0, stop=StopReason.FAILED)])
    assert (evaluation.win_rate, evaluation.reward, evaluation.turns, evaluation.num_episodes) == (None, None, None, 0)
    assert evaluation.as_dict()["win_rate_interval"] is None


def test_without_a_notion_of_winning_there_is_no_win_rate() -> None:
    evaluation = summarize([game(0, reward=1.0), game(1, reward=2.0)])
    assert evaluation.win_rate is None
    assert evaluation.reward is not None
    assert evaluation.reward.mean == 1.5


def test_a_silent_game_beside_games_that_report_is_not_won() -> None:
    evaluation = summarize([game(0, won=True), game(1, stop=StopReason.MAX_TURNS), game(2, won=False), game(3)])
    assert win_rate(evaluation).mean == 0.25


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.floats(-100, 100)), min_size=1, max_size=30),
    st.floats(0.01, 0.99),
)
def test_every_interval_holds_its_mean_and_stays_within_the_values(
    rows: list[tuple[int, bool, float]], confidence: float
) -> None:
    evaluation = summarize([game(task, won=won, reward=reward) for task, won, reward in rows], confidence=confidence)
    rewards = [reward for _, _, reward in rows]
    assert evaluation.reward is not None
    slack = 1e-9
    assert evaluation.reward.low <= evaluation.reward.mean <= evaluation.reward.high
    assert min(rewards) - slack <= evaluation.reward.low <= evaluation.reward.high <= max(rewards) + slack
    assert 0 <= win_rate(evaluation).low <= win_rate(evaluation).mean <= win_rate(evaluation).high <= 1


def test_equal_seeds_give_equal_numbers_and_confidence_widens() -> None:
    rows = [game(task, won=task % 3 == 0, reward=task**1.5) for task in range(40)]
    assert summarize(rows, seed=5) == summarize(rows, seed=5)
    assert summarize(rows, seed=5).reward != summarize(rows, seed=6).reward
    assert width(win_rate(summarize(rows, confidence=0.99))) > width(win_rate(summarize(rows, confidence=0.5)))


def test_blocks_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    values, clusters = [[float(index % 7)] for index in range(30)], [index // 3 for index in range(30)]
    whole = bootstrap_intervals(values, clusters, num_resamples=1000)
    monkeypatch.setattr("agentsgym.statistics.intervals._ENTRIES_PER_BLOCK", 64)
    assert bootstrap_intervals(values, clusters, num_resamples=1000).tolist() == whole.tolist()


def test_the_dictionary_is_plain_json() -> None:
    evaluation = summarize([game(task, won=task < 3, reward=float(task), num_turns=task + 1) for task in range(4)])
    numbers = json.loads(json.dumps(evaluation.as_dict(), allow_nan=False))
    assert numbers["win_rate"] == 0.75
    assert numbers["mean_reward"] == 1.5
    assert numbers["mean_turns"] == 2.5
    assert numbers["num_episodes"] == 4
    assert numbers["stop_reasons"] == {"done": 4}
    assert numbers["win_rate_interval"] == [win_rate(evaluation).low, win_rate(evaluation).high]


@pytest.mark.parametrize(("num_rollouts", "num_won", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 4), (7, 1, 5)])
def test_pass_at_k_is_the_share_of_subsets_with_a_win(num_rollouts: int, num_won: int, k: int) -> None:
    outcomes = [index < num_won for index in range(num_rollouts)]
    subsets = list(combinations(outcomes, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k([game(0, won=won) for won in outcomes], k) == pytest.approx(expected)


def test_pass_at_k_averages_over_tasks_and_ignores_failures() -> None:
    rows = [game(0, won=True), game(0, won=False), game(1, won=False), game(1, won=False)]
    assert pass_at_k([*rows, game(1, won=True, stop=StopReason.FAILED)], 1) == 0.25
    with pytest.raises(ValueError, match=r"any task \(2\), got 3"):
        pass_at_k(rows, 3)
    with pytest.raises(ValueError, match=r"any task \(0\), got 1"):
        pass_at_k([game(0, stop=StopReason.FAILED)], 1)


@given(st.floats(-10, 10), st.floats(0.1, 10))
def test_random_play_is_zero_and_optimal_play_is_one(low: float, reach: float) -> None:
    assert fraction_of_optimal(low, random=low, optimal=low + reach) == 0
    assert fraction_of_optimal(low + reach, random=low, optimal=low + reach) == 1


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="at least one trajectory, got none"):
        summarize([])
    with pytest.raises(ValueError, match="one entry per trajectory, got 1 for 2"):
        summarize(games([True, False]), clusters=[0])
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1, got 95"):
        summarize(games([True, False]), confidence=95)


def seated(task: int, x: float, o: float) -> Trajectory:
    turns = [Turn(start=0, stop=0, reward=reward, role=role) for role, reward in (("X", x), ("O", o), ("X", 0.0))]
    return Trajectory(
        token_ids=[],
        turns=turns,
        messages=[],
        final_reward=x,
        final_rewards={"X": x, "O": o},
        stop_reason=StopReason.DONE,
        task_index=task,
    )


def test_roles_are_distinguished_where_there_are_several() -> None:
    evaluation = summarize([seated(0, 1.0, -1.0), seated(1, -1.0, 1.0), seated(2, 1.0, -1.0), seated(3, 0.0, 0.0)])
    x, o = evaluation.by_role["X"], evaluation.by_role["O"]
    assert (win_rate(x).mean, win_rate(o).mean) == (0.5, 0.25)
    assert x.reward is not None
    assert x.turns is not None
    assert (x.reward.mean, x.turns.mean, x.num_episodes) == (0.25, 2.0, 4)
    assert x.reward.low < 0.25 < x.reward.high
    numbers = json.loads(json.dumps(evaluation.as_dict()))
    assert numbers["by_role"]["O"]["mean_reward"] == -0.25
    assert "by_environment" not in numbers


def test_a_role_without_recorded_rewards_is_left_out_of_the_roles_alone() -> None:
    evaluation = summarize([replace(seated(0, 1.0, -1.0), final_rewards={"X": 1.0}), seated(1, -1.0, 1.0)])
    assert {role: one.num_episodes for role, one in evaluation.by_role.items()} == {"X": 2, "O": 1}
    assert evaluation.by_role["O"].reward == Estimate(mean=1.0, low=1.0, high=1.0)
    assert evaluation.num_episodes == 2
    assert "as O" in evaluation_html(evaluation)


def test_a_seat_of_ones_own_is_won_as_the_environment_reports() -> None:
    def as_seat(role: str, won: bool) -> Trajectory:
        turns = [Turn(start=0, stop=0, reward=0.0, role=role)]
        return replace(game(0, won=won), turns=turns, final_rewards={"X": 0.0, "O": 0.5})

    evaluation = summarize([as_seat("X", True), as_seat("O", False)])
    assert [win_rate(evaluation.by_role[role]).mean for role in "XO"] == [1.0, 0.0]


def test_roles_that_share_one_reward_are_not_distinguished() -> None:
    assert summarize([replace(seated(0, 1.0, -1.0), final_rewards={})]).by_role == {}
    assert summarize(games([True, False])).by_role == {}


def test_environments_are_distinguished_where_there_are_several() -> None:
    played = [game(0, won=True), game(1, won=False), game(2, won=True)]
    evaluation = summarize(played, environments=["maze", "duel", "maze"])
    assert list(evaluation.by_environment) == ["duel", "maze"]
    assert win_rate(evaluation.by_environment["maze"]).mean == 1.0
    assert evaluation.by_environment["maze"].trajectories == [played[0], played[2]]
    assert summarize(played, environments=["maze"] * 3).by_environment == {}
    with pytest.raises(ValueError, match="environments must have one entry per trajectory, got 2 for 3"):
        summarize(played, environments=["maze", "duel"])


def test_each_number_of_info_is_estimated_from_the_rollouts_that_have_it() -> None:
    infos = [{"calls": 2, "polite": True}, {"calls": 4}, {"calls": 6, "polite": np.False_}, {"calls": 8, "other": "x"}]
    played = [replace(game(task, reward=info["calls"]), info=info) for task, info in enumerate(infos)]
    broken = replace(game(9, stop=StopReason.FAILED), info={"calls": 1_000})
    evaluation = summarize([*played, broken], seed=3)
    assert evaluation.metrics.keys() == {"calls", "polite"}
    assert evaluation.metrics["calls"] == evaluation.reward  # the same numbers of the same rollouts
    assert evaluation.metrics["polite"] == summarize([game(0, reward=1.0), game(2, reward=0.0)], seed=3).reward
    numbers = evaluation.as_dict()
    assert (numbers["info/calls"], numbers["info/polite"]) == (5.0, 0.5)
    assert numbers["info/calls_interval"] == [evaluation.metrics["calls"].low, evaluation.metrics["calls"].high]
    assert "info/calls 5 [" in repr(evaluation)


def test_repeats_of_a_task_are_one_cluster_to_the_numbers_of_info_too() -> None:
    played = [replace(game(task, reward=float(task)), info={"own": task}) for task in (0, 0, 0, 1, 2, 2)]
    evaluation = summarize(played)
    assert evaluation.metrics == {"own": evaluation.reward}
    assert summarize([game(0)]).metrics == {}


@pytest.mark.parametrize(
    "value", ["3", None, math.nan, math.inf, 10**400, [1], np.ones(1), 1j, {"a": 1}], ids=lambda value: str(value)[:8]
)
def test_what_is_no_finite_number_is_no_metric(value: object) -> None:
    assert replace(game(0), info={"value": value}).metrics == {}


def test_numbers_of_any_kind_are_metrics_and_keys_that_mean_something_are_not() -> None:
    info = {"a": 1, "b": np.int64(2), "c": np.float32(0.5), "d": np.True_, "e": False, "success": True, "invalid": True}
    read = {"random_reward": 1.0, "optimal_reward": 2.0, "answer": 3, "action": 4, "truncated": False}
    assert replace(game(0), info=info | read).metrics == {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0, "e": 0.0}


def rollout(answer: Any, success: bool, task_index: int = 0, *, failed: bool = False) -> Trajectory:
    return Trajectory(
        token_ids=(),
        turns=(),
        messages=(),
        final_reward=float(success),
        stop_reason=StopReason.FAILED if failed else StopReason.DONE,
        task_index=task_index,
        info={"success": success} if answer is None else {"success": success, "answer": answer},
    )


def drawn(votes: list[str | None], k: int, right: str) -> float:
    """The definition: over all choices of k, the chance that a most frequent answer, taken at random, is right."""
    chances: list[float] = []
    for chosen in itertools.combinations(votes, k):
        counts = Counter(vote for vote in chosen if vote is not None)
        best = [vote for vote, count in counts.items() if count == max(counts.values())]
        chances.append(best.count(right) / len(best) if best else 0.0)
    return sum(chances) / len(chances)


@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8), st.data())
def test_it_is_the_mean_over_all_choices(votes: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(votes)))
    rollouts = [rollout(vote, vote == "a") for vote in votes]
    if any(vote is not None for vote in votes):
        assert maj_at_k(rollouts, k) == pytest.approx(drawn(votes, k, "a"))


def test_tasks_are_averaged_and_failed_rollouts_left_out() -> None:
    rollouts = [
        *(rollout(answer, answer == "7") for answer in ("7", "7", "8")),
        *(rollout(answer, answer == "7", 1) for answer in ("8", "8", "7")),
        rollout("7", True, 1, failed=True),
    ]
    assert maj_at_k(rollouts, 3) == 0.5


def test_answers_that_are_lists_vote_too() -> None:
    assert maj_at_k([rollout([1, 2], True), rollout([1, 2], True), rollout([3], False)], 3) == 1.0


def test_chances_are_of_a_whole_for_many_rollouts() -> None:
    assert sum(winning_chances([200, 190, 60, 50, 12], 101)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("answers", "k", "problem"),
    [("ab", 0, r"any task \(2\), got 0"), ("ab", 3, r"any task \(2\), got 3"), ([None], 1, "which no rollout has")],
)
def test_there_must_be_answers_of_enough_rollouts(answers: Sequence[Any], k: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        maj_at_k([rollout(answer, True) for answer in answers], k)


def test_the_interval_of_a_share_holds_it_and_narrows_with_the_number_of_clusters() -> None:
    few, many = (share_estimate([1.0, 1.0, 1.0, 1.0, 0.0] * num, range(5 * num)) for num in (8, 128))
    assert few.low < few.mean == many.mean == 0.8 < few.high
    assert (many.high - many.low) / (few.high - few.low) == pytest.approx(0.25, abs=0.05)
    assert share_estimate([1.0] * 20, range(20)).low == pytest.approx(0.025 ** (1 / 20))
