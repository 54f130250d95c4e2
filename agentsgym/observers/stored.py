"""Write the rollouts of a training run to a store, with separate files for each rank."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentsgym.credit.rewards import scatter_to_tokens
from agentsgym.credit.settings import CreditSettings
from agentsgym.envs.datasets.environments import stored_columns
from agentsgym.errors import StoreError
from agentsgym.ranks import DeferredError, all_gather_objects, process_state
from agentsgym.store.reader import RolloutStore
from agentsgym.store.runs import claim, held, new_run_name
from agentsgym.training.observing import BatchObserver, ObservedBatch

if TYPE_CHECKING:
    import torch

    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.envs.datasets.environments import Environments
    from agentsgym.store.writer import RolloutWriter
    from agentsgym.training.config import GRPOEnvConfig

_SOURCES = {"train": "training", "eval": "evaluation"}


class TrainingStore(BatchObserver):
    """An observer that writes the rollouts of a run to a store.

    Attributes:
        run: Name of the run in the store, set by the first rank; empty for a new name, or that of a resumed run.
    """

    def __init__(
        self, folder: Path, args: GRPOEnvConfig, environments: Environments, estimator: BoundEstimator
    ) -> None:
        """Set up; all ranks open the store together, with the first batch."""
        self._folder, self._args, self._environments, self._estimator = folder, args, environments, estimator
        self._writer: RolloutWriter | None = None
        self.run = ""
        self._tokenizer: str | None = None

    @contextlib.contextmanager
    def training(self, step: int | None) -> Generator[None]:
        """Collective: hold the folder on the first rank, and continue the run that it has or begin the only one.

        Raises:
            ConfigError: The store has another training run, or another process trains into it.
        """
        error = DeferredError()
        with contextlib.ExitStack() as stack:
            with error.capturing():
                if process_state().is_main_process:
                    RolloutStore.writer(self._folder).close()  # creates the folder, or raises a sentence
                    stack.enter_context(held(self._folder))
                    is_played_again = None if step is None else functools.partial(_is_played_after, step)
                    self.run = claim(self._folder, self.run, is_played_again)
            all_gather_objects((), error.first)
            yield

    def on_batch(self, observed: ObservedBatch) -> None:
        """Collective: add this rank's rollouts to the store, which writes them in the background.

        If the disk cannot be written, this is logged once, and the rollouts stay in memory until it can be written.

        Raises:
            StoreError: The store cannot be created on some rank; raised on all ranks.
        """
        error = DeferredError()
        if self._writer is None:
            with error.capturing():
                self._writer = RolloutStore.writer(self._folder, agent="policy")
                self._tokenizer = self._writer.keep_tokenizer(self._environments.tokenizer)
            self.run = all_gather_objects([self.run or new_run_name()], error.first)[0]
        batch, phase, advantages = observed.batch, observed.phase, observed.advantages
        with error.capturing():
            writer = self._writer
            model_logprobs = _by_token(observed, observed.logprobs.model)
            entropies = _by_token(observed, observed.logprobs.entropies)
            credit = CreditSettings.of(self._args, self._estimator).as_dict() | {"num_rollouts": len(batch.rollouts)}
            for i, trajectory in enumerate(batch.trajectories):
                env = self._environments.of(batch.dataset_rows[i])
                writer.add(
                    trajectory,
                    run=self.run,
                    source=_SOURCES[phase.kind],
                    **stored_columns(env, trajectory),
                    step=phase.step,
                    generation=phase.index if phase.is_training else None,
                    policy_version=phase.step,
                    group=trajectory.task_index,
                    advantages=list(advantages.advantages[i]),
                    trainer_logprobs=model_logprobs[i],
                    entropies=entropies[i],
                    tokenizer=self._tokenizer,
                    extra={
                        "is_trained": advantages.included[i],
                        "rank": process_state().process_index,
                        "credit": credit,
                    },
                )
            writer.flush(wait=False)
        all_gather_objects((), error.first)

    def flush(self) -> None:
        """Write the remaining rollouts."""
        if self._writer is not None:
            with contextlib.suppress(StoreError):  # already logged; the writer tries again when it is closed
                self._writer.flush()

    def close(self) -> None:
        """Write the remaining rollouts and end the writer's thread."""
        if self._writer is not None:
            self._writer.close(strict=False)


def _is_played_after(step: int, row: Mapping[str, Any]) -> bool:
    """Whether a rollout that the trainer played follows a checkpoint, which follows the evaluation at its own step."""
    return row["group"] is not None and (row["step"], row["source"] == "training") >= (step, step > 0)


def _by_token(observed: ObservedBatch, logprobs: torch.Tensor | None) -> list[list[float] | None]:
    """Distribute numbers of the batch's tokens (B, L) to each rollout's tokens (T,); NaN for tokens without one."""
    trajectories = observed.batch.trajectories
    if logprobs is None:
        return [None] * len(trajectories)
    own = logprobs.float().masked_fill(observed.mask == 0, math.nan)
    nested = observed.tokens.by_turn(own, [len(one.turns) for one in trajectories])
    return [
        scatter_to_tokens(trajectory, [numbers or math.nan for numbers in own])
        for trajectory, own in zip(trajectories, nested, strict=True)
    ]
