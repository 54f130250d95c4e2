"""Checkpoints are whole or not there, and a run resumes from the newest whole one."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from disks import no_room
from games import GuessNumber, policy, settings, trainer_of, weights
from transformers import TrainerCallback

from agentsgym import CheckpointError, ConfigError, GRPOEnvTrainer
from agentsgym.training.lifecycle import checkpoint_files
from agentsgym.training.lifecycle.checkpoint_files import MANIFEST, UNFINISHED, problem_with, write_manifest

SAVING = {"save_strategy": "steps", "save_steps": 1}
FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json"]


def six_tasks() -> Dataset:
    """Three steps a pass."""
    return Dataset.from_list([{"task_data": {"seed": seed, "secret": seed}} for seed in range(6)])


def run(folder: Path, resume: Any = None, **changes: Any) -> GRPOEnvTrainer:
    trainer = trainer_of(folder, **{"dataset": six_tasks(), "max_steps": 3, **SAVING, **changes})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_equal(one: GRPOEnvTrainer, other: GRPOEnvTrainer) -> None:
    first, second = weights(one), weights(other)
    assert all(torch.equal(first[name], second[name]) for name in first)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps, with a checkpoint at each."""
    folder = tmp_path_factory.mktemp("finished")
    run(folder)
    return folder


@pytest.mark.parametrize("damage", [Path.unlink, truncate], ids=["missing", "cut"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_what_is_missing(
    name: str, damage: Callable[[Path], None], finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished / "checkpoint-2", tmp_path / "checkpoint-2")
    damage(tmp_path / "checkpoint-2" / name)
    trainer = trainer_of(tmp_path, dataset=six_tasks(), max_steps=3)
    with pytest.raises(ConfigError, match=rf"cannot resume from .*checkpoint-2: {name} (is missing|has .* bytes)"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_checkpoint_without_the_list_of_its_files_is_not_resumed(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(finished / "checkpoint-2", folder)
    assert problem_with(folder) is None
    (folder / MANIFEST).unlink()
    assert problem_with(folder) == f"{MANIFEST} is missing"


def test_the_newest_whole_checkpoint_is_resumed_and_the_damaged_ones_are_named(
    finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight = run(tmp_path / "straight", save_strategy="no", max_steps=4)
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "checkpoint-3" / "trainer_state.json").unlink()
    truncate(folder / "checkpoint-2" / "optimizer.pt")
    with caplog.at_level(logging.WARNING):
        resumed = run(folder, True, max_steps=4)
    assert "skipped checkpoint-3: trainer_state.json is missing" in caplog.text
    assert "skipped checkpoint-2: optimizer.pt has" in caplog.text
    assert_equal(resumed, straight)


@pytest.mark.parametrize(("before", "after"), [("adamw_torch_fused", "sgd"), ("sgd", "adamw_torch")])
def test_another_optimizer_than_the_checkpoints_is_refused(before: str, after: str, tmp_path: Path) -> None:
    run(tmp_path, max_steps=1, optim=before)
    with pytest.raises(ConfigError, match=rf"checkpoint-1 contains .* of optim='{before}', which '{after}' cannot"):
        run(tmp_path, True, max_steps=2, optim=after)


def test_a_run_may_resume_with_an_optimizer_that_keeps_the_same_state(tmp_path: Path) -> None:
    run(tmp_path, max_steps=1, optim="adamw_torch_fused")
    assert run(tmp_path, True, max_steps=2, optim="adamw_torch").state.global_step == 2


def test_without_a_whole_checkpoint_a_run_begins_only_where_that_is_requested(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "scheduler.pt").unlink()
    for resume in (True, "auto"):  # what is there would be rotated away
        with pytest.raises(ConfigError, match=r"no checkpoint .*checkpoint-2: scheduler.pt is missing .move them away"):
            run(tmp_path, resume)
    with pytest.raises(ConfigError, match=r"no checkpoint to resume from .*'auto' would start"):
        run(tmp_path / "empty", True)
    assert run(tmp_path / "empty", "auto").state.global_step == 3
    with pytest.raises(ConfigError, match="is not a folder"):
        run(tmp_path, str(tmp_path / "checkpoint-17"))


@pytest.mark.parametrize("room", [30_000, 70_000], ids=["weights", "optimizer"])
def test_a_full_disk_stops_the_run_and_costs_no_checkpoint(room: int, tmp_path: Path) -> None:
    class Full(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                limit.enter_context(no_room(room))

    straight = run(tmp_path / "straight", save_strategy="no")
    folder = tmp_path / "run"
    trainer = trainer_of(folder, dataset=six_tasks(), max_steps=3, callbacks=[Full()], **SAVING)
    with contextlib.ExitStack() as limit, pytest.raises(CheckpointError, match=r"checkpoint-2 could not be written"):
        trainer.train()
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"checkpoint-1"}
    assert_equal(run(folder, True), straight)


def test_a_kill_between_the_two_renames_loses_nothing(finished: Path, tmp_path: Path) -> None:
    """A checkpoint that replaces another is whole before that one is moved away."""
    straight = run(tmp_path / "straight", save_strategy="no")
    folder = tmp_path / "run"
    shutil.copytree(finished / "checkpoint-2", folder / UNFINISHED / "checkpoint-2")
    shutil.copytree(finished / "checkpoint-2", folder / UNFINISHED / "replaced")
    assert_equal(run(folder, True), straight)


def test_what_a_kill_left_of_a_checkpoint_is_not_resumed_and_is_cleared_away(finished: Path, tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", save_strategy="no")
    folder = tmp_path / "run"
    shutil.copytree(finished / "checkpoint-1", folder / "checkpoint-1")
    shutil.copytree(finished / "checkpoint-2", folder / UNFINISHED / "checkpoint-2")
    (folder / UNFINISHED / "checkpoint-2" / MANIFEST).unlink()
    assert_equal(run(folder, True), straight)
    assert not (folder / UNFINISHED).exists()


def test_a_run_in_the_folder_of_another_replaces_its_checkpoints(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    again = run(folder, seed=7)
    assert not (folder / UNFINISHED).exists()
    assert_equal(run(folder, str(folder / "checkpoint-2"), seed=7), again)


def test_older_checkpoints_are_deleted_and_the_best_is_named_by_where_it_is(tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": six_tasks(), "num_generations_eval": 4}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "learning_rate": 1e-5}
    trainer = run(tmp_path, save_total_limit=1, max_steps=4, **changes, **best)
    kept = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{trainer.state.best_global_step}")
    assert f"checkpoint-{trainer.state.best_global_step}" in kept
    assert len(kept) <= 2
    for name in kept:
        state = json.loads((tmp_path / name / "trainer_state.json").read_text())
        assert UNFINISHED not in str(state["best_model_checkpoint"])


def test_a_checkpoint_is_pushed_once_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[tuple[str, bool]] = []
    trainer = run(tmp_path, max_steps=1)

    def push(self: Any, folder: str) -> None:
        pushed.append((folder, (Path(folder) / MANIFEST).is_file()))

    monkeypatch.setattr(GRPOEnvTrainer, "_push_from_checkpoint", push)
    trainer.args.push_to_hub = True
    trainer._save_checkpoint(trainer.model, None)
    assert pushed == [(str(tmp_path / "checkpoint-1"), True)]


def test_a_finished_run_that_is_started_again_does_nothing(finished: Path, tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", save_strategy="no")
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = {path: path.stat().st_mtime for path in folder.rglob("*") if path.name != "README.md"}
    for _ in range(3):
        again = trainer_of(folder, dataset=six_tasks(), max_steps=3, weights=1, agent=Unwilling(), **SAVING)
        assert again.train(resume_from_checkpoint=True).global_step == 3
        assert_equal(again, straight)
    assert {path: path.stat().st_mtime for path in folder.rglob("*") if path.name != "README.md"} == before
    assert run(folder, True, max_steps=4).state.global_step == 4  # and it may be made longer


class Unwilling:
    """Must not be called."""

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        raise AssertionError("a finished run has nothing to play")


def test_a_finished_run_may_end_inside_a_cycle(tmp_path: Path) -> None:
    """Its last checkpoint is no boundary: started again it does nothing, made longer it goes on from the last one."""
    changes = {"num_iterations": 2, "save_steps": 2}
    run(tmp_path, **changes)
    assert run(tmp_path, True, **changes).state.global_step == 3
    longer = run(tmp_path, True, **changes, max_steps=6)
    assert longer.state.global_step == 6
    assert_equal(longer, run(tmp_path / "straight", **changes, max_steps=6))


@pytest.mark.parametrize("step", range(1, 9))
def test_three_passes_are_resumed_exactly_from_every_checkpoint(step: int, passes: Path, tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", str(passes / "checkpoint-9"), max_steps=9)
    resumed = run(tmp_path, str(passes / f"checkpoint-{step}"), max_steps=9)
    assert_equal(resumed, straight)
    assert [log["loss"] for log in resumed.state.log_history if "loss" in log][step:] == [
        log["loss"] for log in straight.state.log_history if "loss" in log
    ][step:]


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three passes, with a checkpoint at each step."""
    folder = tmp_path_factory.mktemp("passes")
    run(folder, max_steps=9)
    return folder


def test_a_reference_that_moves_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    model, tokenizer = policy()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    def trained(folder: str, resume: str | None = None) -> GRPOEnvTrainer:
        moving = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
        args = settings(tmp_path / folder, max_steps=4, **SAVING, **moving)
        trainer = GRPOEnvTrainer(str(tmp_path / "model"), GuessNumber(tokenizer), args, train_dataset=six_tasks())
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    straight = trained("straight")
    resumed = trained("resumed", str(tmp_path / "straight" / "checkpoint-2"))
    assert_equal(resumed, straight)
    kl = [[log["kl"] for log in one.state.log_history if "kl" in log] for one in (straight, resumed)]
    assert kl[0] == kl[1]
    assert kl[0][-1] > 0
    damaged = tmp_path / "straight" / "checkpoint-3" / "reference.safetensors"
    damaged.unlink()
    with pytest.raises(ConfigError, match=r"reference.safetensors is missing"):
        trained("damaged", str(damaged.parent))


def test_a_model_alone_is_no_checkpoint_to_resume_from(tmp_path: Path) -> None:
    run(tmp_path, save_only_model=True)
    with pytest.raises(ConfigError, match="it was saved with save_only_model=True"):
        run(tmp_path, str(tmp_path / "checkpoint-2"))
    with pytest.raises(ConfigError, match="it contains the model but not the state of the run"):
        run(tmp_path, "auto", save_only_model=True, max_steps=4)
    finished = trainer_of(tmp_path, dataset=six_tasks(), max_steps=3, weights=1, agent=Unwilling(), **SAVING)
    assert (
        finished.train(resume_from_checkpoint="auto").global_step == 3
    )  # of a run that is over nothing else is needed


@pytest.mark.parametrize("name", FILES)
def test_bytes_that_were_lost_are_seen_where_the_size_is_kept(
    name: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(finished / "checkpoint-2", folder)
    (folder / name).write_bytes(bytes((folder / name).stat().st_size))
    assert problem_with(folder) == f"{name} is damaged: its checksum does not match"
    monkeypatch.setattr(checkpoint_files, "_MAX_CHECKED", 0)  # as if all files were large
    write_manifest(folder)
    is_checked = name != "config.json"  # which resuming does not read
    assert str(problem_with(folder)).startswith(f"{name} is damaged") is is_checked


def test_a_later_pass_over_a_stream_is_refused(tmp_path: Path) -> None:
    rows = [{"task_data": {"seed": seed}} for seed in range(6)]
    stream = IterableDataset.from_generator(partial(iter, rows))
    straight = run(tmp_path, dataset=stream, max_steps=6)
    assert_equal(run(tmp_path / "resumed", str(tmp_path / "checkpoint-2"), dataset=stream, max_steps=6), straight)
    with pytest.raises(ConfigError, match="checkpoint-4 was saved in epoch 2 of an iterable dataset"):
        run(tmp_path / "refused", str(tmp_path / "checkpoint-4"), dataset=stream, max_steps=6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_generations": 2}, r"num_generations=4 but this run has 2"),
        ({"seed": 1}, r"seed=42 but this run has 1"),
        ({"per_device_train_batch_size": 4}, r"generation_batch_size=8 but this run has 4"),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 1}, r"rollouts_per_step=8 but this run has 24"),
        ({"dataset": Dataset.from_list([{"task_data": {}}] * 8)}, r"num_rows=6 but this run has 8"),
    ],
)
def test_a_run_that_would_play_other_tasks_is_refused(
    changes: dict[str, Any], sentence: str, finished: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run(tmp_path, str(finished / "checkpoint-2"), **changes)


def test_other_settings_that_have_changed_are_named(
    finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"learning_rate": 0.005, "logging_steps": 2, "output_dir": str(tmp_path)}
    with caplog.at_level(logging.WARNING):
        run(tmp_path, str(finished / "checkpoint-2"), **changes)
    [warning] = [
        record.getMessage() for record in caplog.records if "settings of the resumed run" in record.getMessage()
    ]
    assert warning.endswith("checkpoint-2: learning_rate=0.005 (was 0.01)")
