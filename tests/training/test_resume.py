"""Runs that must be the same: repeated, interrupted, evaluated on the way, accumulated."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from games import RECOMPUTED, GuessNumber, SayBlue, demonstrated, history, policy, settings, tasks, trainer_of, weights
from transformers import TrainerCallback

from agentsgym import ConfigError, GRPOEnvTrainer
from agentsgym.training.lifecycle.checkpoint_files import MANIFEST

LAG = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
SCHEDULES = {
    "in step": {},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "two iterations": {"num_iterations": 2},
    "accumulated, two iterations": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
    },
    "four steps a generation": {"per_device_train_batch_size": 4, "steps_per_generation": 4},
    "imitating": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "demonstrations": demonstrated(batch_size=2),
    },
}


def unseeded(num_tasks: int = 8) -> Dataset:
    """Tasks whose seeds the trainer chooses."""
    return Dataset.from_list([{"task_data": {"number": number}} for number in range(num_tasks)])


def assert_equal_weights(one: GRPOEnvTrainer, other: GRPOEnvTrainer) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def trained(folder: Path, **changes: Any) -> GRPOEnvTrainer:
    trainer = trainer_of(folder, **{"dataset": unseeded(), **changes})
    trainer.train()
    return trainer


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_was_interrupted_goes_on_as_if_nothing_had_happened(schedule: str, tmp_path: Path) -> None:
    changes = {"dataset": unseeded(6), "max_steps": 8, "lr_scheduler_type": "linear", **SCHEDULES[schedule]}
    straight = trained(tmp_path / "straight", **changes)
    saving = {"save_strategy": "steps", "save_steps": 4}
    first = trained(tmp_path / "first", **changes, **saving)
    assert history(first) == history(straight)  # saving changes nothing
    resumed = trainer_of(tmp_path / "second", **changes, weights=1)  # its own weights are not those of the run
    resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-4"))
    assert history(resumed)[4:] == history(straight)[4:]
    assert len(history(resumed)) == 8
    assert any(abs(log["loss"]) > 0 for log in history(resumed)[4:])
    assert_equal_weights(resumed, straight)


class Interruption(TrainerCallback):
    """Stops a run with an exception after some steps, once."""

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = None
            raise KeyboardInterrupt


def test_the_trainer_that_was_interrupted_may_itself_resume(tmp_path: Path) -> None:
    changes = {"dataset": unseeded(6), "max_steps": 8, "num_iterations": 2}
    straight = trained(tmp_path / "straight", **changes)
    saving = {"save_strategy": "steps", "save_steps": 4}
    trainer = trainer_of(tmp_path / "stopped", callbacks=[Interruption(7)], **changes, **saving)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    assert history(trainer) == history(straight)
    assert_equal_weights(trainer, straight)


def add_saved_settings(checkpoint: Path, **settings: Any) -> None:
    """Make a checkpoint look as if it had been saved with settings that this version does not have."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["settings"] |= settings
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def test_a_checkpoint_of_a_run_with_forks_gives_its_weights_but_is_not_resumed(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    first = trained(tmp_path, **saving)
    checkpoint = tmp_path / "checkpoint-2"
    add_saved_settings(checkpoint, fork_budget=40, fork_kwargs={"width": 2}, advantage_estimator="tree")
    resumed = trainer_of(tmp_path, dataset=unseeded(), **saving, max_steps=4)
    for requested in (True, "auto", str(checkpoint)):
        with pytest.raises(ConfigError, match=r"fork_budget=40: start a new run with this .*; leave fork_budget out$"):
            resumed.train(resume_from_checkpoint=requested)
    model, env = str(checkpoint), GuessNumber(policy()[1])
    new = GRPOEnvTrainer(model, env, settings(tmp_path / "new"), train_dataset=unseeded())
    assert_equal_weights(new, first)
    args = torch.load(checkpoint / "training_args.bin", weights_only=False)
    args.fork_budget = 40
    assert pickle.loads(pickle.dumps(args)).to_dict() == args.to_dict()


def test_settings_that_no_longer_exist_do_not_prevent_resuming_if_they_were_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    trained(tmp_path, **saving)
    add_saved_settings(tmp_path / "checkpoint-2", fork_budget=0, fork_kwargs=None)
    trainer_of(tmp_path, dataset=unseeded(), **saving, max_steps=4).train(resume_from_checkpoint=True)
    assert "fork" not in caplog.text


def test_a_checkpoint_inside_a_generation_cycle_is_refused(tmp_path: Path) -> None:
    changes = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 2}
    trained(tmp_path, max_steps=3, **changes)
    resumed = trainer_of(tmp_path, dataset=unseeded(), max_steps=6, **changes)
    with pytest.raises(ConfigError, match=r"resumed only at a multiple of 2 steps.*from step 3"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    resumed.train(resume_from_checkpoint=True)  # passes over it
    assert resumed.state.log_history[2]["epoch"] == resumed.state.log_history[1]["epoch"] + 1 / 8
    assert resumed.state.global_step == 6


def test_other_tasks_and_another_configuration_of_the_environment_are_refused(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    rows = Dataset.from_list([{"task_data": {"number": number % 7}} for number in range(8)])
    for own in ({"dataset": rows}, {"dataset": unseeded(), "env_config": {"max_steps_per_episode": 2}}):
        with pytest.raises(ConfigError, match=r"was saved with tasks=.* would play different tasks"):
            trainer_of(tmp_path, max_steps=4, **own).train(resume_from_checkpoint=True)
    same = trainer_of(tmp_path, max_steps=3, dataset=unseeded())
    assert same.train(resume_from_checkpoint=True).global_step == 3


@pytest.mark.parametrize(
    ("changes", "save_steps", "saved"),
    [
        ({}, 3, [3, 6, 8]),
        ({"num_iterations": 2}, 3, [4, 8]),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 4}, 1, [4, 8]),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, 3, [3, 6, 8]),
        ({"num_iterations": 2}, 0.3, [4, 8]),
    ],
)
def test_checkpoints_are_on_generation_boundaries(
    changes: dict[str, int], save_steps: float, saved: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, max_steps=8, save_strategy="steps", save_steps=save_steps, save_only_model=True, **changes)
    steps = sorted(int(folder.name.partition("-")[2]) for folder in tmp_path.glob("checkpoint-*"))
    assert steps == saved
    assert ("was rounded up to" in caplog.text) == (saved[0] != save_steps)


@pytest.mark.parametrize("steps_per_generation", [1, 3])
def test_steps_that_drift_away_from_generation_batches_are_refused(steps_per_generation: int, tmp_path: Path) -> None:
    changes = {"steps_per_generation": steps_per_generation, "gradient_accumulation_steps": 2}
    dataset = unseeded(6)  # three micro-batches, of two tasks' rollouts each
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=2 must divide.* micro-batches per epoch \(3\)"):
        trained(tmp_path, dataset=dataset, max_steps=3, **changes)
    assert trained(tmp_path, dataset=dataset, max_steps=1, **changes).state.global_step == 1  # within a pass
    assert trained(tmp_path, dataset=unseeded(12), max_steps=3, **changes).state.global_step == 3


def test_the_last_step_of_a_pass_may_be_a_short_one(tmp_path: Path) -> None:
    """Its gradient is that of the rollouts that are left."""
    gradients: dict[int, list[torch.Tensor]] = {}
    for accumulation in (2, 4):

        class Looking(TrainerCallback):
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                model: Any = kwargs["model"]
                given = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
                gradients.setdefault(args.gradient_accumulation_steps, []).append(given.clone())

        trainer = trainer_of(
            tmp_path,
            dataset=unseeded(6),
            callbacks=[Looking()],
            num_train_epochs=1,
            max_steps=-1,
            per_device_train_batch_size=4,
            steps_per_generation=2,
            gradient_accumulation_steps=accumulation,
            learning_rate=0.0,
            max_grad_norm=0.0,
        )
        trainer.train()
    one, two, three = gradients[2]
    torch.testing.assert_close(gradients[4][0], (one + two) / 2)
    torch.testing.assert_close(gradients[4][1], three)


def test_a_share_of_a_run_of_unknown_length_is_no_boundary(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set max_steps"):
        trainer_of(tmp_path, max_steps=-1, num_iterations=2, save_strategy="steps", save_steps=0.3)


def test_equal_seeds_give_equal_runs_and_others_do_not(tmp_path: Path) -> None:
    first, second, other = (trained(tmp_path, seed=seed, **LAG) for seed in (3, 3, 4))
    assert history(first) == history(second)
    assert_equal_weights(first, second)
    assert [log["loss"] for log in history(first)] != [log["loss"] for log in history(other)]


@pytest.mark.parametrize("changes", [{}, {**LAG, "num_iterations": 2}])
def test_evaluation_changes_no_number_of_training(changes: dict[str, Any], tmp_path: Path) -> None:
    plain = trained(tmp_path, max_steps=5, **changes)
    evaluated = trained(
        tmp_path,
        max_steps=5,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        eval_dataset={"seen": unseeded(5), "new": tasks(3)},
        num_generations_eval=2,
        **changes,
    )
    assert sum("eval_seen_win_rate" in log for log in evaluated.state.log_history) == 6
    assert history(evaluated) == history(plain)
    assert_equal_weights(evaluated, plain)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo"])
def test_accumulating_is_the_same_update_as_a_larger_batch(loss_type: str, tmp_path: Path) -> None:
    """Not so for bnpo, which weighs a token by its micro-batch."""
    whole = trained(tmp_path, loss_type=loss_type, max_steps=1, per_device_train_batch_size=8)
    parts = trained(
        tmp_path, loss_type=loss_type, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4
    )
    assert history(whole)[0]["loss"] == pytest.approx(history(parts)[0]["loss"], abs=1e-6)
    assert history(whole)[0]["grad_norm"] == pytest.approx(history(parts)[0]["grad_norm"], rel=1e-4)
    assert history(whole)[0]["reward"] == history(parts)[0]["reward"]


def test_gradient_checkpointing_changes_no_number(tmp_path: Path) -> None:
    plain = trained(tmp_path, num_iterations=2)
    checkpointed = trained(tmp_path, num_iterations=2, **RECOMPUTED)
    for one, other in zip(history(plain), history(checkpointed), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert one["entropy"] == pytest.approx(other["entropy"], abs=1e-5)


def test_a_policy_that_is_rewarded_for_a_word_learns_to_output_it(tmp_path: Path) -> None:
    model, tokenizer = policy()
    trainer = GRPOEnvTrainer(
        model,
        SayBlue(tokenizer),
        settings(tmp_path, max_steps=30, num_generations=8, per_device_train_batch_size=16, max_turn_tokens=2),
        train_dataset=tasks(),
        eval_dataset=tasks(16),
    )
    before = trainer.evaluate()["eval_win_rate"]
    trainer.train()
    after = trainer.evaluate()["eval_win_rate"]
    assert before < 0.2
    assert after > 0.9


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], dict[str, torch.Tensor]]:
    """A run of almost three passes with a checkpoint a step: its folder, logs and weights."""
    folder = tmp_path_factory.mktemp("passes")
    straight = trained(folder, dataset=tasks(6), max_steps=8, save_strategy="steps", save_steps=1)
    return folder, history(straight), weights(straight)


@pytest.mark.parametrize("step", [3, 5, 6])
def test_a_later_pass_over_the_tasks_goes_on_in_its_own_order(step: int, passes: Any, tmp_path: Path) -> None:
    """Six tasks, two a step: a pass is three steps, and each has an order of its own."""
    folder, logs, expected = passes
    resumed = trainer_of(tmp_path, dataset=tasks(6), max_steps=8)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert history(resumed)[step:] == logs[step:]
    torch.testing.assert_close(weights(resumed), expected, rtol=0, atol=0)
