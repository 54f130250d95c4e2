"""``store_rollouts``: every rollout of a run is kept as it was trained on; a disk never stops a run."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, logged, settings, tasks, trainer_of
from transformers import HfArgumentParser

from agentsgym import GRPOEnvConfig, RolloutStore, StoreError
from agentsgym.credit.assignment import AdvantageAssigner
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.settings import CreditSettings
from agentsgym.envs.datasets.environments import class_path
from agentsgym.store import parts


def test_every_rollout_is_kept_as_it_was_trained_on(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, store_rollouts=True, drift_interval=1)
    trainer.train()
    store = RolloutStore(tmp_path / "rollouts")
    assert len(store) == 16
    records = list(store.records())
    assert [(record.generation, record.step, record.policy_version) for record in records] == [
        (1, 0, 0) if index < 8 else (2, 1, 1) for index in range(16)
    ]
    assert [record.group for record in records] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    assert {(record.source, record.env_class_path) for record in records} == {("training", class_path(GuessNumber))}
    assert len({record.run for record in records}) == 1
    for record in records:
        trajectory, mask = record.trajectory, record.trajectory.agent_token_mask
        assert trajectory.seed is not None
        assert record.env_config is not None
        assert record.extra == {
            "is_trained": True,
            "rank": 0,
            "credit": {
                "advantage_estimator": "return_to_go",
                "discount": 1.0,
                "scale_rewards": "group",
                "num_rollouts": 8,
            },
        }
        assert record.tokenizer is not None
        assert record.advantages is not None
        assert record.trainer_logprobs is not None
        assert record.entropies is not None
        assert trajectory.logprobs is not None
        for token, (is_agent, advantage) in enumerate(zip(mask, record.advantages, strict=True)):
            assert is_agent or advantage == record.entropies[token] == 0.0
            assert record.trainer_logprobs[token] == pytest.approx(trajectory.logprobs[token], abs=1e-4)
    for generation in (1, 2):  # what the trainer logged is what is kept
        rewards = [one.final_reward for one in store.filter(generation=generation)]
        assert sum(rewards) / 8 == pytest.approx(logged(trainer, "reward")[generation - 1])
    assert any(any(record.advantages or ()) for record in records)


@pytest.mark.parametrize(
    "changes",
    [
        {"advantage_estimator": "grpo", "dataset": tasks(8, fears="six"), "max_failed_fraction": 1.0},
        {"advantage_estimator": "rloo", "scale_rewards": "none", "env_config": {"turn_credit": "final"}},
        {"advantage_estimator": "gigpo", "estimator_kwargs": {"baseline": "others"}, "discount": 0.9},
        {"estimator_kwargs": {"baseline": "batch"}, "scale_rewards": "batch", "discount": 0.5},
        {"advantage_estimator": "mt_grpo", "env_config": {"turn_credit": "spread_final"}},
        {"advantage_estimator": "reward", "env_config": {"token_credit": "last"}},
        {"truncated_rollouts": "mask", "loss_aggregation": "turn"},
        {"truncated_rollouts": 0.25, "zero_variance_groups": "drop", "loss_aggregation": "constant"},
        {"advantage_estimator": "grpo", "invalid_turns": "mask", "min_group_size": 2},
    ],
    ids="-".join,
)
def test_advantages_can_be_computed_again_from_what_is_kept(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer_of(tmp_path, store_rollouts=True, **changes).train()
    for generation in (1, 2):
        records = [*RolloutStore(tmp_path / "rollouts").filter(generation=generation).records()]
        trajectories = [one.trajectory for one in records]
        scored = [
            ScoredRollout.from_trajectory(
                one.trajectory, group=one.group, turn_credit=(one.env_config or {}).get("turn_credit", "step")
            )
            for one in records
        ]
        assigner = AdvantageAssigner(CreditSettings.from_dict(records[0].extra["credit"]))
        found = assigner.assign(scored, range(8), trajectories, [1] * 8, is_training=True)
        assert found.included == [one.extra["is_trained"] for one in records]
        for one, advantages in zip(records, found.advantages, strict=True):
            assert advantages == pytest.approx([*(one.advantages or ())], abs=1e-12)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, {}),
        ({"truncated_rollouts": "mask"}, {"truncation": "mask"}),
        ({"truncated_rollouts": 0.25}, {"truncation": "penalize", "truncation_penalty": 0.25}),
        ({"truncated_rollouts": "1"}, {"truncation": "penalize"}),  # by one, as a record states that states nothing
        ({"estimator_kwargs": {"potential_weight": 0.5}}, {"potential_weight": 0.5}),
        ({"loss_aggregation": "constant"}, {"loss_aggregation": "constant", "max_completion_length": 100}),
    ],
)
def test_a_record_keeps_the_fields_that_it_has_always_had(
    changes: dict[str, Any], kept: dict[str, Any], tmp_path: Path
) -> None:
    args = settings(tmp_path, **changes)
    own = CreditSettings.of(args, args.estimator())
    written = own.as_dict()
    assert written == {"advantage_estimator": "return_to_go", "discount": 1.0, "scale_rewards": "group", **kept}
    assert CreditSettings.from_dict({**written, "of_a_later_release": 1}) == own
    assert own.estimator() == args.estimator()


def everything_is_one(rollouts: Any, *, discount: float, scale: str) -> list[list[float]]:
    return [[1.0] * len(one.turn_rewards) for one in rollouts]


def test_a_function_of_ones_own_is_kept_by_its_module_and_name(tmp_path: Path) -> None:
    args = settings(tmp_path, advantage_estimator=everything_is_one)
    assert CreditSettings.of(args, args.estimator()).advantage_estimator == f"{__name__}.everything_is_one"


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}])
def test_a_rollout_has_the_numbers_of_its_task_group_and_its_place_in_there(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    trainer = trainer_of(
        tmp_path, store_rollouts=True, **{"max_steps": 1, "eval_dataset": tasks(4), "eval_strategy": "steps"}, **changes
    )
    trainer.train()
    store = RolloutStore(tmp_path / "rollouts")
    for source, num_groups in (("training", 2), ("evaluation", 4)):  # an evaluation of two batches counts on
        records = [*store.filter(source=source).records()]
        places = [(one.group, one.trajectory.task_index, one.trajectory.rollout_index) for one in records]
        assert places == [(group, group, rollout) for group in range(num_groups) for rollout in range(4)]
        seeds = [(one.trajectory.task_index, one.trajectory.seed) for one in records]
        assert len({*seeds}) == num_groups


def test_storing_changes_no_number_of_the_training(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path / "a", weights=1)
    storing = trainer_of(tmp_path / "b", weights=1, store_rollouts=str(tmp_path / "c"))
    plain.train()
    storing.train()
    assert logged(storing, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)
    assert all(record.trainer_logprobs is None for record in RolloutStore(tmp_path / "c").records())


def test_evaluations_are_kept_apart_and_a_turn_layout_is_laid_back_on_tokens(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, store_rollouts=True, layout="turn", drift_interval=1, max_steps=1, eval_dataset=tasks(2)
    )
    trainer.train()
    trainer.evaluate()
    store = RolloutStore(tmp_path / "rollouts")
    assert (len(store.filter(source="training")), len(store.filter(source="evaluation"))) == (8, 8)
    assert {record.generation for record in store.filter(source="evaluation").records()} == {None}
    for record in store.filter(source="training").records():
        assert record.trainer_logprobs is not None
        for is_agent, ours, sampled in zip(
            record.trajectory.agent_token_mask, record.trainer_logprobs, record.trajectory.logprobs or (), strict=True
        ):
            assert math.isnan(ours) or (ours == pytest.approx(sampled, abs=1e-4) and (is_agent or ours == 0.0))


def test_a_full_disk_is_reported_once_and_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = trainer_of(tmp_path, store_rollouts=True, max_steps=3)
    with monkeypatch.context() as disk:
        disk.setattr(parts.os, "fsync", full)
        trainer.train()
    assert trainer.state.global_step == 3
    assert sum("rollouts cannot be written" in record.getMessage() for record in caplog.records) == 1
    trainer.close()  # there is room again
    assert len(RolloutStore(tmp_path / "rollouts")) == 24


def test_a_place_that_can_be_none_is_reported_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trainer = trainer_of(tmp_path, store_rollouts=str(tmp_path / "file"))
    with pytest.raises(StoreError, match="cannot create a rollout store at"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("given", "folder"), [(None, None), (False, None), (True, "out/rollouts"), ("true", "out/rollouts"), ("x", "x")]
)
def test_the_setting_names_a_folder(given: Any, folder: str | None, tmp_path: Path) -> None:
    args = settings(tmp_path, output_dir="out", store_rollouts=given)
    assert args.rollout_folder == (None if folder is None else Path(folder))


def test_a_command_line_can_set_it(tmp_path: Path) -> None:
    [args] = HfArgumentParser(GRPOEnvConfig).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--store_rollouts", "true", "--use_cpu", "true", "--report_to", "none"]
    )
    assert args.rollout_folder == tmp_path / "rollouts"


def test_entropies_are_those_of_the_model_that_is_trained(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, store_rollouts=True, drift_interval=1, max_steps=1, temperature=0.5)
    trainer.train()
    store = RolloutStore(tmp_path / "rollouts")
    trainer = trainer_of(tmp_path / "again", temperature=0.5)  # the weights that the first one began with
    for record in store.records():
        ids = torch.tensor([record.trajectory.token_ids])
        with torch.no_grad():
            logits = trainer.model.eval()(input_ids=ids).logits[0].float() / 0.5
        entropies = torch.distributions.Categorical(logits=logits).entropy().tolist()
        for turn in record.trajectory.turns:
            assert record.entropies is not None
            assert record.entropies[turn.start : turn.stop] == pytest.approx(
                entropies[turn.start - 1 : turn.stop - 1], abs=1e-4
            )
