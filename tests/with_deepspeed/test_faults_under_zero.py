"""Runs on two ranks under ZeRO survive what runs under DDP do: kills, signals, and NaN at one rank alone."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exits_run import broken
from signaled import TURN, at_rank_1, checkpoints, training, while_rank_0_waits
from test_zero import write_config
from zero_run import gathered

from agentsgym.errors import AgentsGymError, ConfigError
from agentsgym.training.lifecycle.whole import problem_with
from agentsgym.training.trainer import GRPOEnvTrainer
from benchmarks.fault_scenarios.runs import Run, tell, train, trainer_of

NUM_STEPS = 4  # the third of them in a second pass
ON_CPU = {"use_cpu": False, "bf16": False, "max_steps": NUM_STEPS}
EACH_STEP = {"save_steps": 1}
Start = Callable[..., Run]


@pytest.fixture(params=[2, 3], scope="module")
def stage(request: pytest.FixtureRequest) -> int:
    """The stage of ZeRO."""
    return request.param


@pytest.fixture(scope="module")
def start(stage: int, tmp_path_factory: pytest.TempPathFactory) -> Iterable[Start]:
    """Starts two ranks under ZeRO; they are forked from this process, whose environment says so meanwhile."""
    config = write_config(tmp_path_factory.mktemp("config"), stage)
    told = {
        "DS_ACCELERATOR": "cpu",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config),
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        yield lambda folder, function, num_ranks=2: Run(folder, num_ranks, function)


@pytest.fixture(scope="module")
def straight(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What an uninterrupted run came to."""
    run = start(tmp_path_factory.mktemp("straight") / "run", training(run=train_zero))
    assert run.wait()
    assert run.result()["step"] == NUM_STEPS
    return run.result()


def whole_weights(trainer: GRPOEnvTrainer) -> list[torch.Tensor]:
    """Collective: the weights of all ranks."""
    weights: list[torch.Tensor] = []
    for parameter in trainer.model.parameters():
        with gathered(parameter):
            weights.append(parameter.detach().clone())
    return weights


def train_zero(folder: Path, **changes: Any) -> None:
    """Train as the scenarios of faults do, under DeepSpeed."""
    train(folder, weights_of=whole_weights, **{**ON_CPU, **changes})


def kill_rank_1(rank: int, turn: int) -> None:
    """The last rank is killed in its rollouts."""
    if rank == 1 and turn == TURN:
        os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(folder: Path, **changes: Any) -> None:
    """Train, and kill the last rank in the middle of its second checkpoint."""
    save, is_last = GRPOEnvTrainer.save_model, os.environ["RANK"] == "1"

    def dying(self: GRPOEnvTrainer, *args: Any, **kwargs: Any) -> None:
        if is_last and self.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, *args, **kwargs)

    GRPOEnvTrainer.save_model = dying
    train_zero(folder, **changes)


def goes_on_as(straight: Any, start: Start, folder: Path) -> None:
    """Check that a run goes on from its newest checkpoint, which is whole, to what an uninterrupted one came to."""
    assert checkpoints(folder)
    assert problem_with(folder / checkpoints(folder)[-1]) is None
    again = start(folder, training(run=train_zero))
    assert again.wait()
    assert again.result() == straight


@pytest.mark.parametrize(
    "run",
    [training(kill_rank_1, train_zero, **EACH_STEP), partial(train_and_die, **EACH_STEP)],
    ids=["in rollouts", "in a save"],
)
def test_a_killed_rank_leaves_the_last_checkpoint_whole(run: Any, start: Start, straight: Any, tmp_path: Path) -> None:
    first = start(tmp_path / "run", run)
    first.wait(timeout_s=60)  # the other rank may wait for the killed one; launchers end it
    assert first.statuses[first.pids[1]] == -signal.SIGKILL
    assert len(checkpoints(tmp_path / "run")) in range(1, NUM_STEPS)
    goes_on_as(straight, start, tmp_path / "run")


@pytest.mark.parametrize("act", [at_rank_1, while_rank_0_waits])
def test_a_signal_at_one_rank_ends_both_and_both_go_on_exactly(
    act: Any, start: Start, straight: Any, tmp_path: Path
) -> None:
    first = start(tmp_path / "run", training(act, train_zero))
    assert first.wait()
    assert [*first.statuses.values()] == [143, 143], first.result()
    assert len(checkpoints(tmp_path / "run")) == 1
    goes_on_as(straight, start, tmp_path / "run")


def test_a_signal_at_all_ranks_ends_both_and_both_go_on_exactly(start: Start, straight: Any, tmp_path: Path) -> None:
    def at_each_rank(rank: int, turn: int) -> None:
        if turn == TURN:
            signal.raise_signal(signal.SIGTERM)

    first = start(tmp_path / "run", training(at_each_rank, train_zero))
    assert first.wait()
    assert [*first.statuses.values()] == [143, 143], first.result()
    goes_on_as(straight, start, tmp_path / "run")


def nan_loss(loss: torch.Tensor) -> torch.Tensor:
    """A loss that is NaN."""
    return loss * math.nan


def nan_gradient(loss: torch.Tensor) -> torch.Tensor:
    """The same loss, whose gradients are NaN."""
    loss.register_hook(lambda gradient: gradient * math.nan)
    return loss


def train_broken(folder: Path, break_loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Train with a loss that one rank breaks after the first step, and tell what is raised."""
    trainer = trainer_of(folder, **{**ON_CPU, **EACH_STEP})
    tell(folder, broken(trainer, lambda loss: break_loss(loss) if trainer.state.global_step else loss))


@pytest.mark.parametrize(
    ("break_loss", "problem"),
    [
        (nan_loss, "step 2, rank 1: the loss is nan; the step is not taken"),
        (nan_gradient, "step 2: the gradients hold NaN or infinity"),
    ],
    ids=["loss", "gradient"],
)
def test_a_number_that_one_rank_meets_stops_all_of_them(
    break_loss: Any, problem: str, start: Start, straight: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    first = start(folder, partial(train_broken, break_loss=break_loss))
    assert first.wait()
    assert first.result().startswith(f"NonFiniteError: {problem}"), first.result()
    assert checkpoints(folder) == ["checkpoint-1"]
    goes_on_as(straight, start, folder)


def test_another_number_of_ranks_is_refused(start: Start, tmp_path: Path) -> None:
    def refused(folder: Path) -> None:
        kind = ConfigError if os.environ["RANK"] == "0" else AgentsGymError  # which reads the folder
        with pytest.raises(kind, match=r"was saved by 2 ranks under DeepSpeed.* and this run has 4"):
            train_zero(folder)
        tell(folder, "refused")

    folder = tmp_path / "run"
    assert start(folder, training(run=train_zero, save_steps=1, max_steps=1)).wait()
    wider = start(folder, refused, num_ranks=4)
    assert wider.wait()
    assert wider.result() == "refused", wider.result()
