"""End a run on a signal, with a checkpoint from which it can be resumed exactly.

A run resumes at the boundaries of its generation cycle alone. Until the first optimizer step of a cycle is done, only
random generators, counts, the estimator's averages and the results of a curriculum have left the boundary before it:
these are put back, and the rollouts are lost. After that step the cycle must be finished::

    boundary ── rollouts ── first optimizer step ── more steps ── boundary
             └──── can be broken off ────┘     └─ must be finished ─┘
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback

from agentsgym.ranks import RolloutsAbortedError
from agentsgym.rollouts.interfaces import GRACE_S
from agentsgym.training.lifecycle.pace import CyclePace
from agentsgym.training.lifecycle.resuming import take_generator_states
from agentsgym.training.lifecycle.signals import DEFAULTS, Notice, SignalWatch

if TYPE_CHECKING:
    from agentsgym.training._trl import TRLSeam
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.generation.batch import Phase

logger = logging.getLogger(__name__)

_MARGIN: Final = 1.2  # an expectation times this must fit, where breaking off loses no optimizer step


class Memory(Protocol):
    """State that a part of the trainer keeps between generation batches."""

    def state_dict(self) -> Any:
        """Return a copy of it, as JSON values."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Restore a copy from ``state_dict``."""
        ...


class Preempted(SystemExit):  # not an error: it ends a program as sys.exit does
    """Training was ended by a signal; uncaught, it ends the process with status 128 + its number.

    That is 143 after SIGTERM, 129 after SIGHUP and 130 after Ctrl-C. After Ctrl-C it is a ``KeyboardInterrupt`` too.

    Attributes:
        signum: The signal: ``signal.SIGTERM``, ``signal.SIGHUP`` or ``signal.SIGINT``.
        checkpoint: The newest checkpoint of the run, to resume from; None if there is none.
    """

    def __init__(self, signum: int, step: int, checkpoint: Path | None) -> None:
        where = f"resume from {checkpoint}" if checkpoint else "there is no checkpoint to resume from"
        super().__init__(f"training was ended by {signal.Signals(signum).name} at step {step}: {where}")
        self.signum, self.checkpoint = signum, checkpoint
        self.code = 128 + signum


class PreemptedByUser(Preempted, KeyboardInterrupt):
    """Training was ended by Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Boundary:
    """The state before a generation cycle that the cycle changes before its first optimizer step.

    Attributes:
        step: Optimizer steps that were done.
        restore_generators: Sets the global random generators back.
        memories: The states of estimator, curriculum and task order, as far as they exist.
        num_tokens: Tokens seen.
    """

    step: int
    restore_generators: Callable[[], None]
    memories: Sequence[Any]
    num_tokens: int


class Preemption(TrainerCallback):
    """Ends a run on a signal: checks for one, decides with the other ranks what still fits, saves and leaves.

    Attributes:
        pace: How long the parts of a generation cycle take.
        is_leaving: Whether the run ends with the next checkpoint, which then has all its state whatever the settings.
    """

    def __init__(self, seam: TRLSeam, args: GRPOEnvConfig, memories: Callable[[], Sequence[Memory]]) -> None:
        """Set up; signals are not noted yet.

        Args:
            seam: The trainer.
            args: Its settings.
            memories: Returns the states that it keeps between generation batches, always in the same order.
        """
        self.pace = CyclePace()
        self._seam, self._args, self._memories = seam, args, memories
        self._saves = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
        self._watch = SignalWatch()
        self._begin(None)

    def _begin(self, resumed_from: Path | None) -> None:
        self._boundary: _Boundary | None = None
        self._checkpoint = resumed_from
        self._saved_step: int | None = None  # the step of that checkpoint
        self._is_first_step = False  # of an epoch
        self.is_leaving = self._has_announced = False

    def run(self, train: Callable[[], Any], resumed_from: Path | None) -> Any:
        """Collective: train, and end on a signal.

        Args:
            train: Trains.
            resumed_from: The checkpoint that the run was resumed from; None for none.

        Raises:
            Preempted: A signal came at some rank, also where it came too late to keep anything from being done.
        """
        self._begin(resumed_from)
        output: Any = None
        with self._watch.watching():
            try:
                output = train()
            except RolloutsAbortedError:
                boundary = self._boundary
                if boundary is not None and boundary.step == self._seam.global_step:
                    boundary.restore_generators()
                    for memory, before in zip(self._memories(), boundary.memories, strict=True):
                        memory.load_state_dict(before)
                    self._seam.return_to_step_begin(boundary.num_tokens)
                self.is_leaving = True
                if self._should_save():
                    self._seam.save_checkpoint()
            is_ended = self._agree()  # no rank ends before the others have saved: a launcher would end them
            agreed = self._watch.notice if is_ended else None
        if agreed is None:
            self._watch.repeat_own()  # it came after the ranks had agreed
            return output
        kind = PreemptedByUser if agreed.signum == signal.SIGINT else Preempted
        left = kind(agreed.signum, self._seam.global_step, self._checkpoint)
        logger.warning("%s", left)
        raise left

    def interrupt(self, phase: Phase, error: Exception | None = None) -> None:
        """Break off the rollouts of a generation batch if a signal has come and the cycle no longer fits.

        Other ranks are not notified: they receive the same signal, or learn of it when rollouts are exchanged.

        Args:
            phase: Phase of the generation batch.
            error: The error that ended the rollouts, if any: the signal may have ended workers of a pool too.

        Raises:
            RolloutsAbortedError: This rank breaks them off.
        """
        notice = self._watch.notice
        if notice is None:
            return
        if error is not None:
            logger.warning("the rollouts ended with the signal: %s: %.500s", type(error).__name__, error)
            self._announce(notice)
            raise RolloutsAbortedError from error
        has_to_finish = phase.is_training or not self._is_boundary(phase.step)  # an evaluation can always be left out
        self._announce(notice)
        if not (has_to_finish and self._fits(notice)):
            raise RolloutsAbortedError

    # Events of the training loop

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the checkpoint from which the run continues is that of its first step."""
        self._saved_step = self._seam.global_step
        self.pace.forget_cycle()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the boundary: the data loader, which starts after this, draws from the global generators."""
        self._is_first_step = True
        if self._is_boundary(state.global_step):
            self._keep_boundary()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave if that was decided when the last step ended; otherwise keep the boundary, if this is one."""
        if self.is_leaving:
            raise RolloutsAbortedError
        is_boundary = self._is_boundary(state.global_step)
        if is_boundary and not self._is_first_step:
            self._keep_boundary()
        self._is_first_step = False
        self.pace.step_begins(is_first=is_boundary)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collective: between micro-batches, break off a cycle's first optimizer step if the cycle no longer fits."""
        if self._is_boundary(self._seam.global_step) and self._agree(only_if_urgent=True):
            raise RolloutsAbortedError

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collective: decide whether the run ends here, and if so save, and skip an evaluation that is due."""
        is_boundary = self._is_boundary(state.global_step)
        self.pace.step_ends(is_last=is_boundary)
        self.is_leaving = self._agree(only_if_urgent=not is_boundary)
        if self.is_leaving:
            control.should_evaluate = False
            control.should_save = control.should_save or self._should_save()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Separate the time of an evaluation from that of a checkpoint."""
        self.pace.evaluated()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the checkpoint, unless it cannot be resumed."""
        self.pace.saved()
        if not self._args.save_only_model or self.is_leaving:
            self._saved_step = self._seam.global_step
            self._checkpoint = Path(self._seam.run_folder()) / f"checkpoint-{self._saved_step}"

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave if that was decided when the last step ended."""
        if self.is_leaving:
            raise RolloutsAbortedError

    def _keep_boundary(self) -> None:
        """Keep the state to be restored if the cycle is broken off."""
        self._boundary = _Boundary(
            step=self._seam.global_step,
            restore_generators=take_generator_states(self._seam.device),
            memories=[memory.state_dict() for memory in self._memories()],
            num_tokens=self._seam.num_input_tokens_seen,
        )

    # Decisions

    def _should_save(self) -> bool:
        """Whether a checkpoint of this step can be saved and does not exist yet."""
        step = self._seam.global_step
        return self._saves and self._is_boundary(step) and self._saved_step != step

    def _is_boundary(self, step: int) -> bool:
        return step % self._args.steps_per_cycle == 0

    def _fits(self, notice: Notice) -> bool:
        """Whether the rest of the cycle, and the checkpoint at its end, fit what is left of the grace period."""
        grace_s = self._args.preemption_grace_s
        if not self._saves:
            return False  # there is nothing to finish the cycle for
        if grace_s is None:
            return True
        left_s = notice.at + grace_s - time.monotonic() - (GRACE_S if self._args.env_pool else 0.0)
        expected_s = self.pace.rest_s(save_s=grace_s / 4)
        if self._is_boundary(self._seam.global_step):
            return expected_s is not None and _MARGIN * expected_s <= left_s
        return left_s >= (grace_s / 4 if expected_s is None else expected_s)  # breaking off loses steps

    def _agree(self, *, only_if_urgent: bool = False) -> bool:
        """Collective: whether any rank has a signal, and for ``only_if_urgent`` whether the cycle does not fit."""
        notice = self._watch.notice  # read once: later signals count at the next call
        has_notice = notice is not None
        is_urgent = notice is not None and not self._fits(notice)
        if self._seam.num_ranks > 1:
            came = [notice is not None and notice.signum == signum for signum in DEFAULTS]
            flags = torch.tensor([has_notice, is_urgent, *came], dtype=torch.int32)
            total: Any = reduce(flags.to(self._seam.device), reduction="sum")
            has_notice, is_urgent, *came = (number > 0 for number in total.tolist())
            if has_notice:
                self._watch.note(next(signum for signum, has_come in zip(DEFAULTS, came, strict=True) if has_come))
        if has_notice and self._watch.notice is not None:
            self._announce(self._watch.notice)
        return is_urgent or (has_notice and not only_if_urgent)

    def _announce(self, notice: Notice) -> None:
        """Log once what happens now."""
        if self._has_announced:
            return
        self._has_announced = True
        logger.warning(
            "%s: training ends %s; work in progress is %s. A second signal ends the process immediately.",
            signal.Signals(notice.signum).name,
            "with a checkpoint" if self._saves else "without a checkpoint, as save_strategy is 'no'",
            "finished first" if self._fits(notice) else "broken off",
        )
