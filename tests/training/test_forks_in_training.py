"""Rollouts that are forked while training: what is chosen, played, trained on and counted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from games import GuessNumber, logged, trainer_of
from hypothesis import given
from hypothesis import strategies as st
from judged import Ranked

from agentsgym import RolloutStore
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.tree import tree
from agentsgym.errors import ConfigError, EnvError
from agentsgym.training.fork_settings import ForkSettings
from agentsgym.training.generation.forking import Candidate, candidates, draw
from agentsgym.training.observing import BatchObserver, ObservedBatch
from agentsgym.types import StopReason, Trajectory, Turn

FORKED: dict[str, Any] = {
    "layout": "turn",
    "advantage_estimator": "tree",
    "scale_rewards": "none",
    "fork_budget": 40,
    "fork_kwargs": {"width": 2},
}
ROWS = [{"task_data": {"seed": seed}} for seed in (0, 0, 0, 0, 1, 1, 1, 1)]


class Keeping(BatchObserver):
    """Keeps the batches that are trained on."""

    def __init__(self) -> None:
        self.batches: list[ObservedBatch] = []

    def on_batch(self, observed: ObservedBatch) -> None:
        self.batches.append(observed)


def generated(folder: Path, **changes: Any) -> tuple[ObservedBatch, dict[str, Any]]:
    """One generation batch, and the columns of its loss."""
    with trainer_of(folder, **{**FORKED, **changes}) as trainer:
        trainer.model.train()
        keeping = Keeping()
        trainer.observers.append(keeping)
        columns = trainer._generate_and_score_completions(ROWS)
    [seen] = keeping.batches
    return seen, columns


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[ObservedBatch, dict[str, Any]]:
    return generated(tmp_path_factory.mktemp("forks"))


def test_forks_repeat_the_turns_before_them_and_differ_after(played: Any) -> None:
    batch = played[0].batch
    assert len(batch.trajectories) == 8
    assert batch.forks.trajectories
    assert len({tuple(one.token_ids) for one in batch.forks.trajectories}) > len(batch.forks.trajectories) / 2
    for fork, parent in zip(batch.forks.trajectories, batch.forks.parents, strict=True):
        whole, turn = batch.trajectories[parent], fork.info["fork"]["turn"]
        assert fork.info["fork"] == {"rollout": whole.rollout_index, "turn": turn}
        assert fork.task_index == whole.task_index
        assert fork.rollout_index >= 4
        start = whole.turns[turn].start
        assert [*fork.token_ids[:start]] == [*whole.token_ids[:start]]
        assert [*fork.logprobs[:start]] == [*whole.logprobs[:start]]
    names = [(one.task_index, one.rollout_index) for one in batch.trained]
    assert len({*names}) == len(names)


def test_each_turn_is_trained_once_with_the_advantage_of_the_tree(played: Any) -> None:
    seen, columns = played
    batch, forks = seen.batch, seen.batch.forks
    owners = [[one.rollout_index] * len(one.turns) for one in batch.trajectories]
    for fork, parent in zip(forks.trajectories, forks.parents, strict=True):
        turn, own = fork.info["fork"]["turn"], len(fork.turns)
        owners.append([batch.trajectories[parent].rollout_index] * turn + [fork.rollout_index] * (own - turn))
    scored = [
        ScoredRollout(
            turn_rewards=one.turn_rewards,
            final_reward=one.final_reward,
            group=one.task_index,
            state_keys=[None] * len(one.turns),
            owners=own,
        )
        for one, own in zip(batch.trained, owners, strict=True)
    ]
    expected = tree(scored, scale="none")
    trained: Counter[tuple[int, int]] = Counter()
    for place, row in enumerate(seen.tokens.rows):
        for k, turn in row.turns:
            own = columns["advantages"][place][columns["turn_index"][place] == k]
            assert len(own) == turn.stop - turn.start
            assert torch.allclose(own, torch.tensor(expected[row.rollout][k]), atol=1e-5)
            trained[row.rollout, k] += 1
    own_turns = [(i, k) for i, own in enumerate(owners) for k in range(len(own)) if own[k] == own[-1]]
    assert trained == Counter(own_turns)
    assert columns["num_items_in_batch"] == columns["agent_token_mask"].sum()


def test_the_bill_is_in_tokens(played: Any) -> None:
    batch = played[0].batch
    forks = batch.forks
    sampled = prefilled = 0
    prompts: dict[tuple[int, int], int] = {}
    for fork, parent in zip(forks.trajectories, forks.parents, strict=True):
        turn = fork.info["fork"]["turn"]
        own = fork.turns[turn:]
        prompts[parent, turn] = own[0].start
        sampled += sum(one.stop - one.start for one in own)
        prefilled += sum(one.start - before.stop for before, one in pairwise(own))
    metrics = forks.metrics()
    assert metrics["forks/number"] == len(forks.trajectories) == batch.metrics["forks/number"]
    assert metrics["forks/sampled_tokens"] == sampled
    assert metrics["forks/prefilled_tokens"] == prefilled + sum(prompts.values())
    assert metrics["forks/trained_tokens"] == sum(one.turns[-1].stop for one in forks.trajectories)
    assert metrics["forks/failed"] == 0


def test_metrics_of_rollouts_do_not_count_forks(tmp_path: Path) -> None:
    with trainer_of(tmp_path, **FORKED, max_steps=2) as trainer, trainer_of(tmp_path) as plain:
        trainer.train()
        plain.train()
    assert logged(trainer, "reward")[0] == logged(plain, "reward")[0]
    assert logged(trainer, "turns/mean")[0] == logged(plain, "turns/mean")[0]
    assert all(value > 0 for value in [*logged(trainer, "forks/number"), *logged(trainer, "grad_norm")])


def test_forks_are_stored_with_where_they_branched(tmp_path: Path) -> None:
    with trainer_of(tmp_path / "run", **FORKED, max_steps=1, store_rollouts=str(tmp_path / "store")) as trainer:
        trainer.train()
        [number] = logged(trainer, "forks/number")
    stored = [*RolloutStore(tmp_path / "store").records()]
    forks = [one for one in stored if "fork" in one.trajectory.info]
    assert len(stored) == 8 + len(forks) == 8 + number
    for one in forks:
        shared = one.trajectory.turns[one.trajectory.info["fork"]["turn"]].start
        assert not any(one.advantages[:shared])


def test_the_same_seed_forks_the_same_turns(tmp_path: Path) -> None:
    runs = [generated(tmp_path, seed=seed)[0].batch.forks for seed in (3, 3, 4)]
    first, second, other = ([[*one.token_ids] for one in forks.trajectories] for forks in runs)
    assert first == second != other


class Moody(GuessNumber):
    """Says something else once it has been played eight times."""

    started: ClassVar = [0]

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        self.started[0] += 1
        return super()._initialize_episode(session_id, task_data) | {"is_late": self.started[0] > len(ROWS)}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return "Lower." if state["is_late"] else super()._format_prompt(state, step)


def test_a_world_that_does_not_replay_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="Moody does not replay a recorded rollout, so it cannot be forked: the"):
        generated(tmp_path, env_class=Moody)


def test_a_failed_fork_costs_no_other(tmp_path: Path) -> None:
    rows = [{"task_data": {"seed": seed, "fears": "six"}} for seed in (0, 0, 0, 0, 1, 1, 1, 1)]
    with trainer_of(tmp_path, **FORKED, max_failed_fraction=1.0) as trainer:
        trainer.model.train()
        batches = [trainer.generator.generate(rows, trainer._phase()) for _ in range(4)]
    forks = [one for batch in batches for one in batch.forks.trajectories]
    failed = [one for one in forks if one.failed]
    assert 0 < len(failed) < len(forks)
    assert all(len(one.turns) >= one.info["fork"]["turn"] for one in failed)
    assert any(batch.metrics["forks/failed"] > 0 for batch in batches)


def test_task_groups_that_are_divided_are_refused(tmp_path: Path) -> None:
    with trainer_of(tmp_path, **FORKED) as trainer:
        trainer.model.train()
        with pytest.raises(ConfigError, match=r"forks need complete task groups .* of num_generations \(4\)"):
            trainer.generator.generate(ROWS[:6], trainer._phase())


def test_trials_without_history_are_refused(tmp_path: Path) -> None:
    config = {"episodes_per_trial": 2, "keep_history": False}
    with pytest.raises(ConfigError, match="a fork of a trial of several episodes requires"):
        trainer_of(tmp_path, **FORKED, env_config=config)


def test_judges_of_whole_task_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compares whole rollouts, not forks: set fork_budget=0"):
        trainer_of(tmp_path, **FORKED, env_class=Ranked)


def rollout(lengths: list[int], group: int, reward: float, keys: list[Any]) -> tuple[Trajectory, ScoredRollout]:
    """A rollout with turns of so many tokens, behind an observation of a token each."""
    turns: list[Turn] = []
    for length in lengths:
        start = (turns[-1].stop if turns else 0) + 1
        turns.append(Turn(start=start, stop=start + length, reward=0.0))
    num_tokens = turns[-1].stop
    trajectory = Trajectory(
        token_ids=[0] * num_tokens,
        turns=turns,
        messages=[],
        final_reward=reward,
        stop_reason=StopReason.DONE,
        logprobs=[-1.0 if token % 2 else -0.5 for token in range(num_tokens)],
    )
    rewards = [0.0] * (len(lengths) - 1) + [reward]
    return trajectory, ScoredRollout(turn_rewards=rewards, final_reward=reward, group=group, state_keys=keys)


lengths = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(
    st.lists(st.tuples(lengths, st.integers(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=6),
    st.integers(1, 100),
    st.integers(1, 3),
    st.sampled_from(["uniform", "entropy", "value"]),
)
def test_chosen_turns_keep_to_the_budget_and_leave_first_turns_out(
    drawn: list[tuple[list[int], int, float]], budget: int, width: int, at: str
) -> None:
    batch = [rollout(own, group, reward, [None] * len(own)) for own, group, reward in drawn]
    trajectories, scored = [one for one, _ in batch], [one for _, one in batch]

    def choose(budget: int) -> list[tuple[int, int]]:
        forked = ForkSettings(budget=budget, at=at, width=width)
        num_groups = len({one.group for one in scored})
        return [
            (one.rollout, one.turn) for one in draw(candidates(trajectories, scored, forked), forked, num_groups, 1)
        ]

    chosen = choose(budget)
    assert chosen == sorted({*chosen})
    assert all(k > 0 for _, k in chosen)
    cost = sum(width * sum(drawn[i][0][k:]) for i, k in chosen)
    assert cost <= budget * len({one.group for one in scored})
    if at == "uniform":
        assert len(choose(10**6)) == sum(len(own) - 1 for own, *_ in drawn)


def counts(batch: list[tuple[Trajectory, ScoredRollout]], at: str) -> Counter[tuple[int, int]]:
    trajectories, scored = [one for one, _ in batch], [one for _, one in batch]
    settings = ForkSettings(budget=2, at=at, width=1)
    found = candidates(trajectories, scored, settings)
    return Counter((one.rollout, one.turn) for seed in range(400) for one in draw(found, settings, 1, seed))


def test_value_forks_where_returns_differ_in_the_same_state() -> None:
    batch = [rollout([1, 1, 1], 0, reward, ["start", key, None]) for reward, key in ((0, "a"), (1, "a"), (1, "b"))]
    chosen = counts([*batch, rollout([1, 1], 0, 1, ["start", "b"])], "value")
    assert {place for place in chosen if place[1] == 1} == {(0, 1), (1, 1)}  # the returns of "b" are equal


def test_entropy_forks_where_turns_are_surprising() -> None:
    surprising = rollout([1, 1, 1], 0, 0.0, [None] * 3)
    trajectory, scored = surprising
    logprobs = [0.0] * 3 + [-3.0] + [0.0, -1.0]
    assert [turn.start for turn in trajectory.turns] == [1, 3, 5]
    object.__setattr__(trajectory, "logprobs", logprobs)
    chosen = counts([(trajectory, scored)] * 2, "entropy")
    first, second = (sum(chosen[i, k] for i in range(2)) for k in (1, 2))
    assert first > second > 0


def test_value_forks_nothing_where_all_returns_are_equal() -> None:
    batch = [rollout([1, 1, 1], 0, 1.0, [None] * 3) for _ in range(2)]
    assert not counts(batch, "value")
    assert {*counts(batch, "uniform")} == {(i, k) for i in range(2) for k in (1, 2)}


def test_rollouts_of_several_roles_are_refused() -> None:
    trajectory, scored = rollout([1, 1], 0, 1.0, [None] * 2)
    seats = replace(scored, roles=["X", "O"], final_rewards={"X": 1.0, "O": -1.0})
    with pytest.raises(ConfigError, match="several roles cannot be forked in training"):
        candidates([trajectory], [seats], ForkSettings(budget=2))


def test_turns_are_drawn_by_weight() -> None:
    found = [Candidate(rollout=i, turn=1, weight=weight, cost=1) for i, weight in enumerate((1.0, 3.0))]
    drawn = Counter(draw(found, ForkSettings(budget=1, width=1), 1, seed)[0].rollout for seed in range(4000))
    assert drawn[1] / 4000 == pytest.approx(0.75, abs=0.03)


def test_stored_info_of_forks_is_json(played: Any) -> None:
    assert all(json.loads(json.dumps(one.info["fork"])) for one in played[0].batch.forks.trajectories)
