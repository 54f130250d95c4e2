"""What an estimator may return, and what it keeps between batches: per game, saved and resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from games import GuessNumber, policy, settings, tasks, trainer_of
from test_guard_rails import rollout
from test_resume import assert_equal_weights, history, trained, unseeded

from agentsgym import ConfigError, GRPOEnvTrainer, ScoredRollout, register
from agentsgym.credit.assignment import AdvantageAssigner, advantage_metrics
from agentsgym.credit.gae import turn_gae
from agentsgym.credit.registry import get_estimator
from agentsgym.credit.roles import split_roles
from agentsgym.training.lifecycle.checkpoint_files import write_manifest
from agentsgym.training.observing import BatchObserver


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
        (long_winded, r"finite number.*rollout 0.*\[2, 2\] tokens.*\[0\.0, 0\.0, 0\.0\]"),
        (at_once, "finite number.*rollout 0.*tensor"),
        (huge, "finite number.*rollout 0.*1000"),
        (unsure, "finite number.*rollout 0.*nan"),
        (brief, r"finite number.*rollout 0.*\[0.0\]"),
        (wordy, "finite number.*rollout 0.*'good'"),
        (empty, r"finite number.*rollout 0.*\[\[None\]"),
        (whole, r"finite number.*rollout 0.*got 1\.5"),
        (silent, "list of numbers for each of 1 rollouts, got None"),
    ],
)
def test_numbers_that_are_none_are_named(estimator: Any, given: str, tmp_path: Path) -> None:
    assigner = AdvantageAssigner(settings(tmp_path, advantage_estimator=estimator))
    scored = [ScoredRollout.from_trajectory(rollout([0.5, 1.0]), group=0)]
    with pytest.raises(ConfigError, match=rf"'{estimator.__name__}' must return one {given}"):
        assigner.turn_advantages(scored, is_training=True)


class Wordy(BatchObserver):
    """A callback whose metrics cannot be logged."""

    metrics = {"mood": "good"}  # type: ignore[assignment]  # noqa: RUF012


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({"advantage_estimator": silent}, {}, "'silent' must return one list of numbers"),
        ({}, {"callbacks": [Wordy()]}, r"Wordy.metrics must be a dict of numbers by name, got \{'mood': 'good'\}"),
    ],
)
def test_what_a_batch_was_given_stops_the_step_before_a_weight_changes(
    changes: Any, options: Any, sentence: str, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, max_steps=1, max_failed_fraction=1.0, **changes, **options)
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    with pytest.raises(ConfigError, match=sentence):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))


REMEMBERING: list[dict[str, Any]] = [
    {"advantage_estimator": "rae", "scale_rewards": "none"},
    {"estimator_kwargs": {"baseline": "role_ema", "decay": 0.5}, "scale_rewards": "none"},
]


@pytest.mark.parametrize("changes", REMEMBERING)
def test_a_resumed_run_remembers(changes: dict[str, Any], tmp_path: Path) -> None:
    straight = trained(tmp_path / "straight", max_steps=4, save_strategy="steps", save_steps=2, **changes)
    resumed = trainer_of(tmp_path / "second", dataset=straight.train_dataset, max_steps=4, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert history(resumed)[2:] == history(straight)[2:]
    assert_equal_weights(resumed, straight)
    assert resumed.estimator.state is not None
    assert straight.estimator.state == resumed.estimator.state


@pytest.mark.parametrize("changes", REMEMBERING)
def test_evaluation_leaves_the_averages_alone(changes: dict[str, Any], tmp_path: Path) -> None:
    alone = trained(tmp_path, max_steps=2, **changes)
    evaluated = trained(
        tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, eval_dataset=tasks(4, secret=0), **changes
    )
    assert evaluated.last_evaluation is not None
    assert alone.estimator.state == evaluated.estimator.state
    assert history(alone) == history(evaluated)


def test_a_second_run_of_a_trainer_begins_anew(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=1, learning_rate=0.0, **REMEMBERING[0])
    first = trainer.estimator.state
    trainer.train()
    assert trainer.estimator.state is not first
    assert trainer.estimator.state == first  # the same games, played by the same policy


def test_what_another_estimator_remembered_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, **REMEMBERING[1])
    folder, rows = tmp_path / "checkpoint-1", unseeded()
    with pytest.raises(ConfigError, match=r"contains the state of 'return_to_go' with.*but this run uses 'rae'"):
        trainer_of(tmp_path, dataset=rows, max_steps=2, **REMEMBERING[0]).train(resume_from_checkpoint=str(folder))
    (folder / "estimator.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot resume from .*checkpoint-1: estimator\.json is missing"):
        trainer_of(tmp_path, dataset=rows, max_steps=2, **REMEMBERING[1]).train(resume_from_checkpoint=str(folder))
    write_manifest(folder)  # as if the file had never been there
    with pytest.raises(ConfigError, match=r"estimator\.json is missing: 'return_to_go' cannot be resumed without"):
        trainer_of(tmp_path, dataset=rows, max_steps=2, **REMEMBERING[1]).train(resume_from_checkpoint=str(folder))


def test_a_run_that_remembers_nothing_requests_nothing(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, advantage_estimator="grpo")
    folder = tmp_path / "checkpoint-1"
    assert not (folder / "estimator.json").exists()
    other = trainer_of(tmp_path, dataset=unseeded(), max_steps=2, estimator_kwargs={"baseline": "others"})
    other.train(resume_from_checkpoint=str(folder))


def test_a_memory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **REMEMBERING[0]}
    trained(tmp_path, **changes)
    folder = tmp_path / "checkpoint-1"
    (folder / "estimator.json").write_text("{")
    write_manifest(folder)  # otherwise its checksum would not match
    trainer = trainer_of(tmp_path, **changes)
    with pytest.raises(ConfigError, match=r"estimator\.json is damaged"):
        trainer.train(resume_from_checkpoint=str(folder))
    with pytest.raises(ConfigError, match="is not a folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_each_game_has_averages_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two configurations of one class are two games."""
    monkeypatch.setattr("agentsgym.envs.dataset_rows._registered", {})
    register(GuessNumber, "tests.GuessNumber")
    rows = [
        {
            "env_class_path": "tests.GuessNumber",
            "env_config": {"max_steps_per_episode": turns},
            "task_data": {"seed": 0},
        }
        for turns in (1, 3)
    ]
    model, tokenizer = policy()
    args = settings(tmp_path, max_steps=1, **REMEMBERING[0])
    trainer = GRPOEnvTrainer(model, None, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    assert trainer.estimator.state is not None
    trainer.save_model(str(tmp_path))
    saved = json.loads((tmp_path / "estimator.json").read_text())
    assert saved["estimator"] == "rae"
    assert len(saved["memory"]["baselines"]) == 2


def test_an_estimator_given_to_two_runs_is_copied(tmp_path: Path) -> None:
    given = get_estimator("rae")
    first, second = (settings(tmp_path, advantage_estimator=given).estimator() for _ in range(2))
    assert first.state is not second.state
    assert first.state is not given.state


def test_values_are_of_the_rewards_that_the_estimator_sees(tmp_path: Path) -> None:
    """Shaping by the setting and shaping by the estimator are the same."""
    shaped = get_estimator("turn_gae", potential_weight=1.0)
    requested = {
        "advantage_estimator": "turn_gae",
        "estimator_kwargs": {"potential_weight": 1.0},
        "value_head": "shared",
    }
    by_setting = settings(tmp_path, **requested).estimator()
    by_estimator = settings(tmp_path, advantage_estimator=shaped, value_head="shared").estimator()
    rollout = ScoredRollout(
        turn_rewards=[1.0, 2.0],
        final_reward=3.0,
        group=0,
        state_keys=[None] * 2,
        potentials=[-1.0, -0.5],
        values=[[0.5], [0.25]],
    )
    targets = by_setting.value_targets([rollout], discount=1.0)
    assert by_estimator.value_targets([rollout], discount=1.0) == targets
    assert targets != get_estimator("turn_gae").value_targets([rollout], discount=1.0)
    assert by_setting == by_estimator
    assert by_estimator.function is turn_gae
    with pytest.raises(ConfigError, match="already applies potential-based shaping"):
        settings(tmp_path, advantage_estimator=shaped, estimator_kwargs={"potential_weight": 1.0}, value_head="shared")
