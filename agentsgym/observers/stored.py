"""Keep the rollouts of a training run in a store, each rank its own files."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

from accelerate import PartialState

from agentsgym.credit.rewards import scatter_to_tokens
from agentsgym.credit.settings import CreditSettings
from agentsgym.envs.datasets.stored_columns import stored_columns
from agentsgym.errors import StoreError
from agentsgym.ranks import DeferredError, all_gather_objects
from agentsgym.store.reader import RolloutStore
from agentsgym.training.observing import BatchObserver, ObservedBatch

if TYPE_CHECKING:
    import torch

    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.envs.datasets.environments import Environments
    from agentsgym.store.writer import RolloutWriter
    from agentsgym.training.config import GRPOEnvConfig

_SOURCES = {"train": "training", "eval": "evaluation"}


def new_run_name() -> str:
    """Make a name for a run."""
    return f"training-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"


class TrainingStore(BatchObserver):
    """Writes the rollouts of a run to a store.

    Attributes:
        run: What the run is called there; the first rank's counts. Empty for a new name.
    """

    def __init__(
        self,
        folder: Path,
        args: GRPOEnvConfig,
        environments: Environments,
        estimator: BoundEstimator,
    ) -> None:
        """Open nothing yet: that is done on all ranks together.

        Args:
            folder: The store's.
            args: The settings.
            environments: The environments of the rows.
            estimator: What makes the advantages.
        """
        self._folder, self._args, self._environments, self._estimator = folder, args, environments, estimator
        self._writer: RolloutWriter | None = None
        self.run = ""
        self._tokenizer: str | None = None

    def on_batch(self, observed: ObservedBatch) -> None:
        """Collective: hand this rank's rollouts to the store, which writes them meanwhile.

        A disk that takes nothing is logged once, and the rollouts are kept until it does.

        Raises:
            StoreError: There can be no store at that place, on some rank; it is raised on all of them.
        """
        error = DeferredError()
        if self._writer is None:
            self._open(error)
        with error.capturing():
            self._add(observed)
        all_gather_objects((), error.first)

    def flush(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            with contextlib.suppress(StoreError):  # logged where it happened; the writer tries again at its end
                self._writer.flush()

    def close(self) -> None:
        """Write what is left, and end the writer's thread."""
        if self._writer is not None:
            self._writer.close(strict=False)

    def _open(self, error: DeferredError) -> None:
        """Collective: make this rank's writer, and agree on the name of the run."""
        with error.capturing():
            self._writer = RolloutStore.writer(self._folder, agent="policy")
            self._tokenizer = self._writer.keep_tokenizer(self._environments.tokenizer)
        self.run = all_gather_objects([self.run or new_run_name()], error.first)[0]

    def _add(self, observed: ObservedBatch) -> None:
        writer, batch, phase = cast("RolloutWriter", self._writer), observed.batch, observed.phase
        advantages, logprobs = observed.advantages, observed.logprobs
        model_logprobs, entropies = (_by_token(observed, one) for one in (logprobs.model, logprobs.entropies))
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
                extra={"is_trained": advantages.included[i], "rank": PartialState().process_index, "credit": credit},
            )
        writer.flush(wait=False)


def _by_token(observed: ObservedBatch, logprobs: torch.Tensor | None) -> list[list[float] | None]:
    """Lay numbers of tokens, (B, L), on the tokens of each rollout, (T,): NaN where an agent token has none."""
    trajectories = observed.batch.trajectories
    if logprobs is None:
        return [None] * len(trajectories)
    own = logprobs.float().masked_fill(observed.mask == 0, math.nan)
    nested = observed.tokens.by_turn(own, [len(one.turns) for one in trajectories])
    return [
        scatter_to_tokens(trajectory, [numbers or math.nan for numbers in own])
        for trajectory, own in zip(trajectories, nested, strict=True)
    ]
