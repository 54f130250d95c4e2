"""Task groups of one reward, replaced by other tasks until the generation batch is full or patience is at an end."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from games import TextAgent, has_moved, history, logged, tasks, trainer_of
from test_selection import IMPOSSIBLE
from test_trl_interface import prepared

from agentsgym import AgentsGymError, ConfigError, GRPOEnvTrainer
from agentsgym.credit.assignment import uninformative_task_groups
from agentsgym.training.generation import generator
from agentsgym.training.generation.batch import GenerationBatch

RESAMPLE: dict[str, Any] = {"zero_variance_groups": "resample"}


def mixed(num_tasks: int = 12, num_possible: int = 6) -> Dataset:
    """Tasks of which the first can be solved, so that their rollouts have unlike rewards."""
    secrets = [seed % 6 if seed < num_possible else IMPOSSIBLE for seed in range(num_tasks)]
    return Dataset.from_list([{"task_data": {"seed": seed, "secret": secret}} for seed, secret in enumerate(secrets)])


def rows_of(dataset: Dataset, *indices: int) -> list[dict[str, Any]]:
    return [dataset[index] for index in indices for _ in range(4)]


def generated(trainer: GRPOEnvTrainer, rows: list[dict[str, Any]]) -> GenerationBatch:
    """The next generation batch of a trainer."""
    return trainer.generator.generate(rows, trainer._phase())


def uninformative(trainer: GRPOEnvTrainer, batch: GenerationBatch) -> set[int]:
    assert [rollout.scored.group for rollout in batch.rollouts] == [i // 4 for i in range(len(batch.rollouts))]
    return uninformative_task_groups(batch.scored, trainer.args)


def rounds(trainer: GRPOEnvTrainer) -> list[int]:
    """How many rollouts are played at once, from now on."""
    counts: list[int] = []
    play = trainer.generator._play

    def counted(rows: Any, *args: Any) -> Any:
        counts.append(len(rows))
        return play(rows, *args)

    trainer.generator._play = counted  # type: ignore[method-assign]
    return counts


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is resampled until no group is left to replace."""
    monkeypatch.setattr(generator, "MAX_RESAMPLES", 20)


@pytest.mark.usefixtures("patient")
def test_a_group_of_one_reward_is_replaced_and_the_others_are_left_as_they_are(tmp_path: Path) -> None:
    dataset = mixed()
    rows = rows_of(dataset, 11, 0)
    kept, trainer = (prepared(tmp_path, dataset=dataset, **changes) for changes in ({}, RESAMPLE))
    counts = rounds(trainer)
    before, batch = generated(kept, rows), generated(trainer, rows)
    assert uninformative(trainer, before) == {0}
    assert uninformative(trainer, batch) == set()
    assert counts == [8] + [4] * (len(counts) - 1)
    assert len(batch.replaced) == 4 * (len(counts) - 1) >= 4
    assert [row.final_reward for row in batch.replaced[:4]] == [row.final_reward for row in before.rollouts[:4]]
    for one, other in zip(batch.trajectories[4:], before.trajectories[4:], strict=True):
        assert list(one.token_ids) == list(other.token_ids)
    tasks_played = [row["task_data"]["seed"] for row in batch.dataset_rows]
    assert len(set(tasks_played[:4])) == 1
    assert tasks_played[0] != 11
    assert tasks_played[4:] == [0] * 4


@pytest.mark.usefixtures("patient")
def test_what_was_drawn_is_what_is_trained_on(tmp_path: Path) -> None:
    dataset = mixed()
    trainer = prepared(tmp_path, dataset=dataset, **RESAMPLE)
    batch = trainer._generate_and_score_completions(rows_of(dataset, 11, 0))
    metrics = trainer._metrics["train"]
    assert batch["agent_token_mask"].any(1).all()
    assert metrics["groups/kept"] == [1.0]
    assert metrics["groups/resampled"][0] >= 0.5
    assert metrics["frac_reward_zero_std"] == [0.0]


def test_a_batch_without_such_groups_is_played_once(tmp_path: Path) -> None:
    dataset = mixed()
    trainer = prepared(tmp_path, dataset=dataset, **RESAMPLE)
    counts = rounds(trainer)
    trainer._generate_and_score_completions(rows_of(dataset, 0, 1))
    assert counts == [8]
    assert trainer._metrics["train"]["groups/resampled"] == [0.0]


def test_a_batch_is_resampled_three_times_and_what_is_left_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = tasks(4, secret=IMPOSSIBLE)
    trainer = prepared(tmp_path, dataset=dataset, **RESAMPLE)
    counts = rounds(trainer)
    with caplog.at_level(logging.WARNING):
        batch = trainer._generate_and_score_completions(rows_of(dataset, 0, 1))
    assert counts == [8] * (1 + 3)
    assert not batch["agent_token_mask"].any()
    assert batch["num_items_in_batch"] == 0
    assert trainer._metrics["train"]["groups/kept"] == [0.0]
    assert trainer._metrics["train"]["groups/resampled"] == [3]
    assert "no rollout of the generation batch is left" in caplog.text


@pytest.mark.usefixtures("patient")
def test_a_group_that_failed_as_a_whole_is_replaced_too(tmp_path: Path) -> None:
    dataset = Dataset.from_list([{"task_data": {"seed": seed, "cannot_start": seed == 3}} for seed in range(4)])
    trainer = prepared(tmp_path, dataset=dataset, **RESAMPLE)
    batch = generated(trainer, rows_of(dataset, 3, 0))
    assert all(rollout.failed for rollout in batch.replaced[:4])
    assert not any(rollout.failed for rollout in batch.rollouts)


def test_a_failure_among_few_replacements_is_one_among_all_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four rollouts that replace others fails, which is a quarter of them and an eighth of what was played."""
    monkeypatch.setattr(generator, "MAX_RESAMPLES", 1)
    dataset = tasks(2, secret=IMPOSSIBLE)
    trainer = prepared(tmp_path, dataset=dataset, agent=Breaking(), **RESAMPLE)
    for limit, is_enough in ((0.2, True), (0.05, False)):
        trainer.args.max_failed_fraction = limit
        trainer.agent.num_calls = 0  # type: ignore[attr-defined]
        if is_enough:
            batch = generated(trainer, rows_of(dataset, 0, 0))
            assert sum(rollout.failed for rollout in batch.rollouts) == 1
        else:
            with pytest.raises(AgentsGymError, match="1 of 16 rollouts failed"):
                generated(trainer, rows_of(dataset, 0, 0))


class Breaking(TextAgent):
    """Breaks once, when it has played the first eight games of four turns."""

    num_calls = 0

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        self.num_calls += 1
        if self.num_calls == 33:
            raise RuntimeError("out of ideas")
        return super().get_action(messages, agent_state)


def test_equal_seeds_draw_equal_tasks_and_others_do_not(tmp_path: Path) -> None:
    dataset = mixed(60, 30)
    drawn: list[list[int]] = []
    for seed in (3, 3, 4):
        trainer = prepared(tmp_path, dataset=dataset, seed=seed, **RESAMPLE)
        batches = [generated(trainer, rows_of(dataset, 58, 59)) for _ in range(3)]
        drawn.append([row["task_data"]["seed"] for batch in batches for row in batch.dataset_rows])
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({tuple(drawn[0][start : start + 8]) for start in (0, 8, 16)}) == 3  # each generation draws its own


@pytest.mark.parametrize("layout", ["trajectory", "turn"])
def test_two_runs_are_equal_and_so_is_a_resumed_one(layout: str, tmp_path: Path) -> None:
    changes = {"dataset": mixed(20, 8), "max_steps": 4, "layout": layout, **RESAMPLE}
    first = trainer_of(tmp_path / "first", save_strategy="steps", save_steps=2, **changes)
    first.train()
    second = trainer_of(tmp_path / "second", **changes)
    second.train()
    resumed = trainer_of(tmp_path / "resumed", weights=1, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert history(first) == history(second)
    assert history(resumed)[2:] == history(second)[2:]
    assert sum(logged(first, "groups/resampled")) > 0
    assert has_moved(first)
    assert all(map(torch.equal, resumed.model.parameters(), second.model.parameters()))


def test_an_evaluation_replaces_nothing(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, dataset=mixed(), eval_dataset=tasks(2, secret=IMPOSSIBLE), **RESAMPLE)
    counts = rounds(trainer)
    assert trainer.evaluate()["eval_num_episodes"] == 8
    assert counts == [8]


def test_a_stream_is_refused(tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(partial(iter, list(tasks(4))))
    with pytest.raises(ConfigError, match=r"zero_variance_groups='resample' draws replacement tasks.*IterableDataset"):
        trainer_of(tmp_path, dataset=stream, **RESAMPLE)
    trainer_of(tmp_path, dataset=stream)
