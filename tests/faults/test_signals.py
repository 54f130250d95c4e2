"""Signals in training: a checkpoint is kept, the run goes on exactly, and the status names what happened."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from games import history, policy, settings, tasks
from number_games import GuessNumber
from transformers import TrainerCallback

from agentsgym import ConfigError, EnvThreadPool, GRPOEnvTrainer, Preempted
from agentsgym.training.lifecycle import signals
from agentsgym.training.lifecycle.preemption import CyclePace

SCHEDULES: dict[str, dict[str, Any]] = {
    "in step": {},
    "two iterations": {"num_iterations": 2},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "two generations a step": {"gradient_accumulation_steps": 2},
    "with a memory": {"advantage_estimator": "rae", "scale_rewards": "none", "gradient_accumulation_steps": 2},
    "with a value head": {"advantage_estimator": "turn_gae", "value_head": "shared", "gradient_accumulation_steps": 2},
    "four steps a generation": {"per_device_train_batch_size": 4, "steps_per_generation": 4},
}
PLACES = [
    ("on_turn", 60),  # in the rollouts
    ("on_step_end", 1),
    ("on_step_begin", 2),
    ("on_save", 1),
    ("on_pre_optimizer_step", 2),
    ("on_epoch_end", 1),
    ("on_turn", 1),
    ("on_substep_end", 2),
]
CLOCKS = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss"}


class DrawingGame(GuessNumber):
    """A game that draws from the global generators too, and calls ``on_turn`` at every turn."""

    on_turn: Callable[[], None] = staticmethod(lambda: None)

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        random.random(), np.random.rand(), torch.rand(1)
        type(self).on_turn()
        return super()._step_episode(session_id, state, action)


class Signaling(TrainerCallback):
    """Sends signals to this process when something happens for the n-th time in a run."""

    def __init__(self, event: str, number: int, *signums: int) -> None:
        self.left, self.signums = number, signums or (signal.SIGTERM,)
        setattr(self, event, self._send)

    def _send(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            for signum in self.signums:
                signal.raise_signal(signum)


def after_turns(num_turns: int, act: Callable[[], Any]) -> Callable[[], None]:
    """Act at one turn of a run."""
    left = [num_turns]

    def on_turn() -> None:
        left[0] -= 1
        if left[0] == 0:
            act()

    return on_turn


@pytest.fixture(autouse=True)
def quiet_game(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrawingGame, "on_turn", staticmethod(lambda: None))


@pytest.fixture
def on_turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    return lambda function: monkeypatch.setattr(DrawingGame, "on_turn", staticmethod(function))


def nothing() -> None:
    pass


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


def trainer_of(folder: Path, *callbacks: TrainerCallback, weights: int = 0, **changes: Any) -> GRPOEnvTrainer:
    values = {"max_steps": 8, "save_strategy": "steps", "save_steps": 8, "lr_scheduler_type": "linear", **changes}
    model, tokenizer = policy(weights)
    return GRPOEnvTrainer(
        model,
        DrawingGame(tokenizer),
        settings(folder, **values),
        train_dataset=tasks(6),
        eval_dataset=tasks(2),
        callbacks=[*callbacks],
    )


def finished(folder: Path, **changes: Any) -> GRPOEnvTrainer:
    """Train to the end, from the newest checkpoint where there is one."""
    trainer = trainer_of(folder, **changes)
    trainer.train(resume_from_checkpoint="auto")
    return trainer


def ended(trainer: GRPOEnvTrainer, **options: Any) -> Preempted | None:
    """Train; returns what a signal made of it."""
    try:
        trainer.train(**options)
    except Preempted as preempted:
        return preempted
    return None


def assert_same_run(one: GRPOEnvTrainer, other: GRPOEnvTrainer) -> None:
    assert history(one) == history(other)
    first, second = one.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., GRPOEnvTrainer]:
    """Uninterrupted runs, each played once."""
    runs: dict[str, GRPOEnvTrainer] = {}

    def run(**changes: Any) -> GRPOEnvTrainer:
        key = repr(sorted(changes.items()))
        if key not in runs:
            runs[key] = finished(tmp_path_factory.mktemp("straight"), **changes)
        return runs[key]

    return run


@pytest.mark.parametrize("grace_s", [0.0, 30.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_is_signaled_anywhere_goes_on_exactly(
    schedule: str, grace_s: float, straight: Any, on_turn: Any, tmp_path: Path
) -> None:
    """One run is signaled at one place after the other, and resumed each time."""
    changes, num_signals = {"max_steps": 12, **SCHEDULES[schedule]}, 0
    for event, number in PLACES:
        trainer = trainer_of(tmp_path, Signaling(event, number), preemption_grace_s=grace_s, **changes)
        on_turn(after_turns(number, terminate) if event == "on_turn" else nothing)
        preempted = ended(trainer, resume_from_checkpoint="auto")
        if preempted is not None:
            num_signals += 1
            newest = f"checkpoint-{saved_steps(tmp_path)[-1]}" if saved_steps(tmp_path) else None
            assert preempted.code == 143
            assert preempted.checkpoint == (newest and tmp_path / newest)
        if trainer.state.global_step == 12:
            break
    else:
        on_turn(nothing)
        trainer = finished(tmp_path, **changes)
    assert num_signals >= 2
    assert_same_run(trainer, straight(**changes))


@pytest.mark.parametrize("eval_steps", [1, 2])
def test_an_evaluation_is_broken_off_and_left_out(eval_steps: int, straight: Any, on_turn: Any, tmp_path: Path) -> None:
    """Where the cycle is not at its end, it is finished first."""
    changes = {"num_iterations": 2, "eval_strategy": "steps", "eval_steps": eval_steps}
    expected = straight(**changes)
    trainer = trainer_of(tmp_path, **changes)
    on_turn(lambda: terminate() if trainer.state.global_step and not trainer.model.training else None)
    was_evaluating: list[bool] = []
    evaluation_loop = trainer.evaluation_loop

    def looped(*args: Any, **kwargs: Any) -> Any:
        was_evaluating.append(True)
        on_turn(after_turns(2, terminate))
        return evaluation_loop(*args, **kwargs)

    trainer.evaluation_loop = looped  # type: ignore[method-assign]
    with pytest.raises(Preempted) as caught:
        trainer.train()
    assert was_evaluating
    assert caught.value.checkpoint == tmp_path / "checkpoint-2"
    assert len(history(trainer, "eval_loss")) == (1 if eval_steps == 1 else 0)
    on_turn(nothing)
    assert_same_run(finished(tmp_path, **changes), expected)


def test_ctrl_c_is_a_keyboard_interrupt_that_has_saved(on_turn: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    on_turn(after_turns(70, lambda: signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train()
    assert isinstance(caught.value, Preempted)
    assert (caught.value.code, caught.value.signum) == (130, signal.SIGINT)
    assert caught.value.checkpoint is not None
    assert (caught.value.checkpoint / "trainer_state.json").is_file()


def test_a_hangup_saves_as_sigterm_does_unless_it_is_ignored(on_turn: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "ended")
    on_turn(after_turns(70, lambda: signal.raise_signal(signal.SIGHUP)))
    preempted = ended(trainer)
    assert preempted is not None
    assert (preempted.code, preempted.signum) == (129, signal.SIGHUP)
    assert preempted.checkpoint is not None
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        ignoring = trainer_of(tmp_path / "ignored", max_steps=2)
        on_turn(after_turns(5, lambda: signal.raise_signal(signal.SIGHUP)))
        assert ended(ignoring) is None
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ignoring.state.global_step == 2


def test_a_second_signal_ends_at_once_and_copies_of_the_first_do_not(
    on_turn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for repeat_s, kind in ((60.0, Preempted), (0.0, KeyboardInterrupt)):
        monkeypatch.setattr(signals, "REPEAT_S", repeat_s)
        trainer = trainer_of(tmp_path / str(repeat_s))
        on_turn(after_turns(70, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)]))
        with pytest.raises(kind) as caught:
            trainer.train()
        assert isinstance(caught.value, Preempted) == bool(repeat_s)
        assert bool(saved_steps(tmp_path / str(repeat_s))) == bool(repeat_s)


def test_handlers_are_put_back_and_ones_own_is_left_alone(on_turn: Any, tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, _: seen.append(signum))
    try:
        trainer = trainer_of(tmp_path, max_steps=2)
        on_turn(after_turns(5, terminate))
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    assert trainer.state.global_step == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_training_on_another_thread_watches_no_signal(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=2)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 2


def test_outside_of_training_ctrl_c_is_what_it_was(on_turn: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.train()
    on_turn(after_turns(2, lambda: signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.evaluate()
    assert not isinstance(caught.value, Preempted)


@pytest.mark.parametrize(("changes", "step", "message"), [
    ({"save_strategy": "no"}, 3, "save_strategy is 'no'"),
    ({}, 0, "no checkpoint to resume from"),
])  # fmt: skip
def test_without_a_checkpoint_the_policy_is_kept_as_it_is(
    changes: dict[str, Any], step: int, message: str, on_turn: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a first cycle there is nothing to be kept, and ``save_strategy="no"`` means that there is no place for it."""
    trainer = trainer_of(tmp_path, **changes)
    turn = lambda: terminate() if trainer.state.global_step == step else None  # noqa: E731
    on_turn(turn)
    with caplog.at_level(logging.WARNING), pytest.raises(Preempted) as caught:
        trainer.train()
    assert caught.value.checkpoint is None
    assert saved_steps(tmp_path) == []
    assert trainer.state.global_step == step
    assert message in caplog.text
    on_turn(nothing)
    assert trainer.evaluate()["eval_num_episodes"] == 8


def test_a_run_that_saves_models_alone_is_preempted_with_all_its_state(
    straight: Any, on_turn: Any, tmp_path: Path
) -> None:
    changes = {"save_only_model": True, "save_steps": 1}
    trainer = trainer_of(tmp_path, **changes)
    on_turn(after_turns(60, terminate))
    preempted = ended(trainer)
    assert preempted is not None
    assert preempted.checkpoint is not None
    on_turn(nothing)
    assert_same_run(finished(tmp_path, **changes), straight())


@pytest.mark.parametrize("env_pool", [None, "threads"])
def test_an_environment_that_hangs_does_not_hold_the_run(env_pool: str | None, on_turn: Any, tmp_path: Path) -> None:
    """In threads it is left behind; on this thread a signal ends its wait, which then goes on for its time."""
    trainer = trainer_of(
        tmp_path, env_pool=env_pool, env_pool_kwargs=env_pool and {"num_workers": 4}, preemption_grace_s=1.0
    )
    pid = os.getpid()

    def hang() -> None:
        threading.Timer(0.2, os.kill, (pid, signal.SIGTERM)).start()
        released.wait(60 if env_pool else 0.5)

    released = threading.Event()
    on_turn(after_turns(70, hang))
    began = time.monotonic()
    with pytest.raises(Preempted) as caught:
        trainer.train()
    assert time.monotonic() - began < 30
    released.set()
    assert caught.value.checkpoint is not None


class EndedPool(EnvThreadPool):
    """A pool whose workers are ended by a signal that its owner gets too, when its fourth run begins."""

    num_runs = 0

    def begin_run(self, port: Any) -> Any:
        self.num_runs += 1
        if self.num_runs == 4:
            terminate()
            raise ConfigError("a process ended before it began to work")
        return super().begin_run(port)


def test_what_the_signal_does_to_a_pool_is_no_error(straight: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    with EndedPool(2) as pool:
        trainer.generator._pool = pool
        preempted = ended(trainer)
    assert preempted is not None
    assert preempted.checkpoint == tmp_path / "checkpoint-3"
    assert_same_run(finished(tmp_path), straight())


def test_a_signal_that_comes_after_everything_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does what it does outside of training, as nobody looks any more."""
    trainer = trainer_of(tmp_path, max_steps=1)
    agree = trainer._preemption._should_stop

    def then_signal(**options: Any) -> bool:
        agreed = agree(**options)
        if trainer.state.global_step == 1 and not trainer._preemption.is_stopping and "only_if_urgent" not in options:
            signal.raise_signal(signal.SIGINT)
        return agreed

    monkeypatch.setattr(trainer._preemption, "_should_stop", then_signal)
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train()
    assert not isinstance(caught.value, Preempted)


def test_the_rest_of_a_cycle_is_expected_to_take_as_long_as_it_took() -> None:
    now = [0.0]
    pace = CyclePace(clock=lambda: now[0])

    def pass_s(seconds: float) -> None:
        now[0] += seconds

    assert pace.remaining_s(save_s=3.0) is None
    pace.step_begins(is_first=True)
    with pace.rollouts(is_training=True):
        pass_s(10.0)
    pass_s(2.0)
    pace.step_ends(is_last=False)
    pass_s(100.0)  # an evaluation
    pace.step_begins(is_first=False)
    pass_s(4.0)
    pace.step_ends(is_last=True)
    pace.step_begins(is_first=True)
    assert pace.remaining_s(save_s=3.0) == 19.0
    with pace.rollouts(is_training=True):
        pass_s(4.0)
        assert pace.remaining_s(save_s=3.0) == 15.0
        pass_s(40.0)
        assert pace.remaining_s(save_s=3.0) == 9.0
    pass_s(1.0)
    assert pace.remaining_s(save_s=3.0) == 8.0
    pace.step_ends(is_last=True)
    pace.evaluated()
    pass_s(0.5)
    pace.saved()
    pace.step_begins(is_first=True)
    assert pace.remaining_s(save_s=3.0) == 45.5


def test_what_is_printed_to_a_terminal_that_is_gone_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write finds out before the signal arrives, or without one."""
    terminal, own_end = os.openpty()
    with os.fdopen(own_end, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        with signals.SignalWatch().watching():
            print("before")
            os.close(terminal)
            print("after", flush=True)
        with pytest.raises(OSError, match=r"\[Errno 5\]"):
            print("outside", flush=True)
        monkeypatch.undo()
        with Path(os.devnull).open("w") as nowhere:  # what is left in the buffer is written at the end
            os.dup2(nowhere.fileno(), own_end)
