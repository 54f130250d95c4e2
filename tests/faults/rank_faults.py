"""What two ranks survive, whichever engine they train with: kills, signals, and NaN at one rank alone."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from exits_run import broken
from signaled import TURN, at_rank_1, checkpoints, training, while_rank_0_waits

from agentsgym import CopiedPolicyAgent, GRPOEnvTrainer
from agentsgym.training.lifecycle.checkpoint_files import problem_with
from benchmarks.fault_scenarios.runs import NEWEST, Run, digest, held_weights, tell, trainer_of

NUM_STEPS = 4  # the third of them in a second pass
EACH_STEP = {"save_steps": 1}
Start = Callable[..., Run]


def kill_rank_1(rank: int, turn: int) -> None:
    """The last rank is killed in its rollouts."""
    if rank == 1 and turn == TURN:
        os.kill(os.getpid(), signal.SIGKILL)


def at_each_rank(rank: int, turn: int) -> None:
    """Every rank is signaled in its rollouts."""
    if turn == TURN:
        signal.raise_signal(signal.SIGTERM)


def nan_loss(loss: torch.Tensor) -> torch.Tensor:
    """A loss that is NaN."""
    return loss * math.nan


def nan_gradient(loss: torch.Tensor) -> torch.Tensor:
    """The same loss, whose gradients are NaN."""
    loss.register_hook(lambda gradient: gradient * math.nan)
    return loss


class RankFaults:
    """The cases; a test class of an engine is made of them, and names how its ranks train.

    Attributes:
        changes: Settings.
        is_exact: Whether a run that goes on comes to what an uninterrupted one came to, to the bit.
        of_gradient: How what is raised for gradients that are NaN on the second rank begins.
    """

    changes: ClassVar[Mapping[str, Any]] = {}
    is_exact: ClassVar[bool] = True
    of_gradient: ClassVar[str] = "step 2, rank 0: the gradient of"

    @classmethod
    def environment(cls, folder: Path) -> Mapping[str, str]:
        """What a launcher would pass to the ranks."""
        return {}

    @classmethod
    def trainer(cls, folder: Path, **changes: Any) -> GRPOEnvTrainer:
        """What a rank trains with."""
        return trainer_of(folder, **{"max_steps": NUM_STEPS, **cls.changes, **changes})

    @classmethod
    def weights(cls, trainer: GRPOEnvTrainer) -> list[torch.Tensor]:
        """Collective: all weights, on each rank."""
        return held_weights(trainer)

    @classmethod
    def train(cls, folder: Path, **changes: Any) -> None:
        """Train to the end, from the newest whole checkpoint."""
        trainer = cls.trainer(folder, **changes)
        trainer.train(resume_from_checkpoint=NEWEST)
        order: Any = getattr(trainer.generator, "order", None)
        result = {"weights": digest(cls.weights(trainer)), "step": trainer.state.global_step}
        tell(folder, result | {"order": None if order is None else order.state_dict()})

    @classmethod
    def train_and_die(cls, folder: Path) -> None:
        """Train, and kill the last rank in the middle of its second checkpoint."""
        save, is_last = GRPOEnvTrainer.save_model, os.environ["RANK"] == "1"

        def dying(trainer: GRPOEnvTrainer, *args: Any, **kwargs: Any) -> None:
            if is_last and trainer.state.global_step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            save(trainer, *args, **kwargs)

        GRPOEnvTrainer.save_model = dying
        cls.train(folder, **EACH_STEP)

    @classmethod
    def train_broken(cls, folder: Path, break_loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Train with a loss that one rank breaks after the first step, and report what is raised."""
        trainer = cls.trainer(folder, **EACH_STEP)
        tell(folder, broken(trainer, lambda loss: break_loss(loss) if trainer.state.global_step else loss))

    @pytest.fixture(scope="class")
    @classmethod
    def start(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterable[Start]:
        """Starts two ranks; they are forked from this process, whose environment names what a launcher would."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in cls.environment(tmp_path_factory.mktemp("config")).items():
                patch.setenv(name, value)
            yield lambda folder, function, num_ranks=2: Run(folder, num_ranks, function)

    @pytest.fixture(scope="class")
    @classmethod
    def straight(cls, start: Start, tmp_path_factory: pytest.TempPathFactory) -> Any:
        """What an uninterrupted run came to."""
        run = start(tmp_path_factory.mktemp("straight") / "run", training(run=cls.train))
        assert run.wait()
        assert run.result().get("step") == NUM_STEPS, run.result()
        return run.result()

    @classmethod
    def goes_on(cls, straight: Any, start: Start, folder: Path) -> None:
        """Check that a run goes on from its newest checkpoint, which is whole, to what an uninterrupted one came to."""
        assert checkpoints(folder)
        assert problem_with(folder / checkpoints(folder)[-1]) is None
        again = start(folder, training(run=cls.train))
        assert again.wait()
        result = again.result()
        assert result.get("step") == NUM_STEPS, result  # alike on both ranks
        assert result["order"] in (None, {"low": 2 * NUM_STEPS, "above": []})  # every task group was trained on once
        assert not cls.is_exact or result == straight

    @pytest.mark.parametrize("place", ["rollouts", "save"])
    def test_a_killed_rank_leaves_the_last_checkpoint_whole(
        self, place: str, start: Start, straight: Any, tmp_path: Path
    ) -> None:
        run = training(kill_rank_1, self.train, **EACH_STEP) if place == "rollouts" else self.train_and_die
        first = start(tmp_path / "run", run)
        first.wait(timeout_s=60)  # the other rank may wait for the killed one; launchers end it
        assert first.statuses[first.pids[1]] == -signal.SIGKILL, first.result()
        assert len(checkpoints(tmp_path / "run")) in range(1, NUM_STEPS)
        self.goes_on(straight, start, tmp_path / "run")

    @pytest.mark.parametrize("act", [at_rank_1, while_rank_0_waits, at_each_rank])
    def test_a_signal_ends_both_ranks_and_both_go_on(
        self, act: Any, start: Start, straight: Any, tmp_path: Path
    ) -> None:
        first = start(tmp_path / "run", training(act, self.train))
        assert first.wait()
        assert [*first.statuses.values()] == [143, 143], first.result()
        assert len(checkpoints(tmp_path / "run")) == 1
        self.goes_on(straight, start, tmp_path / "run")

    @pytest.mark.parametrize("break_loss", [nan_loss, nan_gradient])
    def test_a_number_that_one_rank_meets_stops_both(
        self, break_loss: Any, start: Start, straight: Any, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        first = start(folder, partial(self.train_broken, break_loss=break_loss))
        assert first.wait()
        of_loss = "step 2, rank 1: the loss is nan; the step was skipped"
        problem = of_loss if break_loss is nan_loss else self.of_gradient
        assert first.result().startswith(f"NonFiniteError: {problem}"), first.result()
        assert checkpoints(folder) == ["checkpoint-1"]
        self.goes_on(straight, start, folder)


class Ahead(RankFaults):
    """The same where a copy of the weights samples while the policy is trained."""

    is_exact = False

    @classmethod
    def trainer(cls, folder: Path, **changes: Any) -> GRPOEnvTrainer:
        def copied(model: Any, tokenizer: Any) -> CopiedPolicyAgent:
            return CopiedPolicyAgent(model, tokenizer, max_turn_tokens=4)

        return super().trainer(folder, agent_of=copied, max_staleness=1, **changes)
