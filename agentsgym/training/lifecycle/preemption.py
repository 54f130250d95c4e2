"""Stop a run on a signal, with a checkpoint from which it can be resumed exactly.

A run can be resumed only at the boundaries between generation cycles. Until the first optimizer step of a cycle
completes, only random generators, counters, the estimator's averages and a curriculum's results have changed since the
last boundary: these are restored, and the cycle's rollouts are discarded. After that step, the cycle must be finished::

    boundary ── rollouts ── first optimizer step ── more steps ── boundary
             └─── can be interrupted ────┘     └─ must be finished ─┘
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from transformers import TrainerCallback

from agentsgym.ranks import RolloutsAbortedError, process_state
from agentsgym.rollouts.scheduler import GRACE_S
from agentsgym.training.lifecycle.resuming import take_generator_states
from agentsgym.training.lifecycle.signals import DEFAULTS, ReceivedSignal, SignalWatch

if TYPE_CHECKING:
    from agentsgym.training._trl import TRLInterface
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.generation.batch import Phase

logger = logging.getLogger(__name__)

_MARGIN: Final = 1.2  # safety factor on the expected time, used where interrupting would lose no optimizer step


class Stateful(Protocol):
    """A part of the trainer with state that persists between generation batches."""

    def state_dict(self) -> Any:
        """Return a copy of the state, as JSON values."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Restore the state from what ``state_dict`` returned."""
        ...


class Preempted(SystemExit):  # not an error: like sys.exit, it ends the program
    """Training was ended by a signal; if not caught, the process exits with 128 + the signal's number.

    That is 143 after SIGTERM, 129 after SIGHUP and 130 after Ctrl-C. After Ctrl-C, it is also a ``KeyboardInterrupt``.

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


class CyclePace:
    """Times rollouts, optimizer steps and checkpoints, and expects the next ones to take as long as the last.

    Evaluations and other work between two steps are not part of a cycle.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Rollouts run inside steps: seconds of rollouts, and of steps without them, in the last complete cycle.
        self._last: tuple[float, float] | None = None
        self._save_s: float | None = None
        self.forget_cycle()

    def forget_cycle(self) -> None:
        """Discard the measurements of an unfinished cycle."""
        self._rollout_s = self._stepped_s = 0.0
        self._rollouts_since: float | None = None
        self._step_since: float | None = None
        self._checkpoint_started_s: float | None = None

    def step_begins(self, *, is_first: bool) -> None:
        """Record the start of an optimizer step; ``is_first``: whether it is the first of a cycle."""
        if is_first:
            self.forget_cycle()
        self._step_since = self._clock()

    def step_ends(self, *, is_last: bool) -> None:
        """Record the end of an optimizer step; ``is_last``: whether it is the last of a cycle."""
        now = self._clock()
        if self._step_since is not None:
            self._stepped_s += now - self._step_since
        self._step_since, self._checkpoint_started_s = None, now
        if is_last:
            self._last = self._rollout_s, self._stepped_s - self._rollout_s

    def evaluated(self) -> None:
        """Record the end of an evaluation, after which a checkpoint may follow."""
        self._checkpoint_started_s = self._clock()

    def saved(self) -> None:
        """Record that a checkpoint was saved."""
        if self._checkpoint_started_s is not None:
            self._save_s, self._checkpoint_started_s = self._clock() - self._checkpoint_started_s, None

    @contextlib.contextmanager
    def rollouts(self, *, is_training: bool) -> Generator[None]:
        """Time the rollouts that run inside the block; rollouts of an evaluation are not counted."""
        if not is_training:
            yield
            return
        self._rollouts_since = self._clock()
        try:
            yield
        finally:
            self._rollout_s += self._clock() - self._rollouts_since
            self._rollouts_since = None

    def remaining_s(self, *, save_s: float) -> float | None:
        """Predict the seconds for the rest of this cycle and a checkpoint; None before a cycle was measured.

        Args:
            save_s: Expected time of a checkpoint, used until one was measured.
        """
        if self._last is None:
            return None
        now = self._clock()
        rollout_s = self._rollout_s + (0.0 if self._rollouts_since is None else now - self._rollouts_since)
        stepped_s = self._stepped_s + (0.0 if self._step_since is None else now - self._step_since)
        last_rollout_s, update_s = self._last
        rest_s = max(0.0, last_rollout_s - rollout_s) + max(0.0, update_s - (stepped_s - rollout_s))
        return rest_s + (save_s if self._save_s is None else self._save_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Boundary:
    """A snapshot, taken before a generation cycle, of the state that changes before its first optimizer step.

    Attributes:
        step: Number of completed optimizer steps.
        restore_generators: Restores the global random generators.
        states: The states of the estimator, the curriculum and the task order, where present.
        num_tokens: Number of tokens seen.
    """

    step: int
    restore_generators: Callable[[], None]
    states: Sequence[Any]
    num_tokens: int


class Preemption(TrainerCallback):
    """Ends a run on a signal: checks for one, agrees with the other ranks on what to finish, saves and stops.

    Attributes:
        pace: The times that the parts of a generation cycle take.
        is_stopping: Whether the run stops after the next checkpoint, which then has the full state, even with
            ``save_only_model=True``.
    """

    def __init__(self, trl: TRLInterface, args: GRPOEnvConfig, parts: Callable[[], Sequence[Stateful]]) -> None:
        """Set up without watching for signals yet.

        Args:
            trl: The interface to the trainer.
            args: The trainer's settings.
            parts: Returns the trainer's stateful parts, always in the same order.
        """
        self.pace = CyclePace()
        self._trl, self._args, self._stateful_parts = trl, args, parts
        self._saves = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
        self._watch = SignalWatch()
        self._begin(None)

    def _begin(self, resumed_from: Path | None) -> None:
        self._boundary: _Boundary | None = None
        self._checkpoint = resumed_from
        self._saved_step: int | None = None  # step of self._checkpoint
        self._is_first_step = False  # whether the next step is the first of an epoch
        self.is_stopping = self._has_announced = False

    def run(self, train: Callable[[], Any], resumed_from: Path | None) -> Any:
        """Train, and stop on a signal. Collective.

        Args:
            train: Runs the training loop.
            resumed_from: The checkpoint from which the run was resumed; None for a new run.

        Raises:
            Preempted: Some rank received a signal, even if it came too late to cut the run short.
        """
        self._begin(resumed_from)
        output: Any = None
        with self._watch.watching():
            try:
                output = train()
            except RolloutsAbortedError:
                boundary = self._boundary
                if boundary is not None and boundary.step == self._trl.global_step:
                    boundary.restore_generators()
                    for part, state in zip(self._stateful_parts(), boundary.states, strict=True):
                        part.load_state_dict(state)
                    self._trl.rewind_to_step_start(boundary.num_tokens)
                self.is_stopping = True
                if self._should_save():
                    self._trl.save_checkpoint()
            is_ended = self._should_stop()  # no rank exits before all have saved: the launcher would kill the others
            agreed = self._watch.notice if is_ended else None
        if agreed is None:
            self._watch.reraise_own_signal()  # one that came after the ranks had agreed
            return output
        kind = PreemptedByUser if agreed.signum == signal.SIGINT else Preempted
        preempted = kind(agreed.signum, self._trl.global_step, self._checkpoint)
        logger.warning("%s", preempted)
        raise preempted

    def interrupt(self, phase: Phase, error: Exception | None = None) -> None:
        """Interrupt a generation batch's rollouts after a signal, if there is no time to finish the cycle.

        Other ranks are not notified: they receive the same signal, or find out when rollouts are exchanged.

        Args:
            phase: Phase of the generation batch.
            error: The error that ended the rollouts, if any; the signal may also have killed a pool's workers.

        Raises:
            RolloutsAbortedError: This rank interrupts its rollouts.
        """
        notice = self._watch.notice
        if notice is None:
            return
        if error is not None:
            logger.warning("rollouts failed after the signal: %s: %.500s", type(error).__name__, error)
            self._announce(notice)
            raise RolloutsAbortedError from error
        has_to_finish = phase.is_training or not self._is_boundary(phase.step)  # an evaluation can always be skipped
        self._announce(notice)
        if not (has_to_finish and self._fits(notice)):
            raise RolloutsAbortedError

    # Events of the training loop

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Treat the run's first step as already saved: a resumed run starts from its checkpoint."""
        self._saved_step = self._trl.global_step
        self.pace.forget_cycle()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the boundary's snapshot here: the data loader starts next and draws from the global generators."""
        self._is_first_step = True
        if self._is_boundary(state.global_step):
            self._keep_boundary()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop if the end of the previous step decided so; otherwise take a snapshot if this is a boundary."""
        if self.is_stopping:
            raise RolloutsAbortedError
        is_boundary = self._is_boundary(state.global_step)
        if is_boundary and not self._is_first_step:
            self._keep_boundary()
        self._is_first_step = False
        self.pace.step_begins(is_first=is_boundary)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Interrupt a cycle's first optimizer step, between micro-batches, if time has run out. Collective."""
        if self._is_boundary(self._trl.global_step) and self._should_stop(only_if_urgent=True):
            raise RolloutsAbortedError

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide whether the run stops here; if so, save, and skip an evaluation that is due. Collective."""
        is_boundary = self._is_boundary(state.global_step)
        self.pace.step_ends(is_last=is_boundary)
        self.is_stopping = self._should_stop(only_if_urgent=not is_boundary)
        if self.is_stopping:
            control.should_evaluate = False
            control.should_save = control.should_save or self._should_save()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Exclude the time of an evaluation from the measured time of the next checkpoint."""
        self.pace.evaluated()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the checkpoint as the one to resume from, unless it contains only the model."""
        self.pace.saved()
        if not self._args.save_only_model or self.is_stopping:
            self._saved_step = self._trl.global_step
            self._checkpoint = Path(self._trl.run_folder()) / f"checkpoint-{self._saved_step}"

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop if the end of the previous step decided so."""
        if self.is_stopping:
            raise RolloutsAbortedError

    def _keep_boundary(self) -> None:
        """Take a snapshot of the state, to be restored if the cycle is interrupted."""
        self._boundary = _Boundary(
            step=self._trl.global_step,
            restore_generators=take_generator_states(self._trl.device),
            states=[part.state_dict() for part in self._stateful_parts()],
            num_tokens=self._trl.num_input_tokens_seen,
        )

    # Decisions

    def _should_save(self) -> bool:
        """Whether this step has no checkpoint yet and one can be saved."""
        step = self._trl.global_step
        return self._saves and self._is_boundary(step) and self._saved_step != step

    def _is_boundary(self, step: int) -> bool:
        return step % self._args.steps_per_cycle == 0

    def _fits(self, notice: ReceivedSignal) -> bool:
        """Whether the rest of the cycle and its checkpoint fit in the rest of the grace period."""
        grace_s = self._args.preemption_grace_s
        if not self._saves:
            return False  # no checkpoint would be saved at the end of the cycle
        if grace_s is None:
            return True
        left_s = notice.at + grace_s - time.monotonic() - (GRACE_S if self._args.env_pool else 0.0)
        expected_s = self.pace.remaining_s(save_s=grace_s / 4)
        if self._is_boundary(self._trl.global_step):
            return expected_s is not None and _MARGIN * expected_s <= left_s
        return left_s >= (grace_s / 4 if expected_s is None else expected_s)  # interrupting would lose steps

    def _should_stop(self, *, only_if_urgent: bool = False) -> bool:
        """Whether any rank received a signal; with ``only_if_urgent``, and cannot finish the cycle. Collective."""
        notice = self._watch.notice  # read once: a later signal is handled by the next call
        has_notice = notice is not None
        is_urgent = notice is not None and not self._fits(notice)
        if process_state().num_processes > 1:
            came = [notice is not None and notice.signum == signum for signum in DEFAULTS]
            flags = torch.tensor([has_notice, is_urgent, *came], dtype=torch.int32)
            total: list[int] = self._trl.sum_over_ranks(flags.to(self._trl.device)).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            has_notice, is_urgent, *came = (number > 0 for number in total)
            if has_notice:
                self._watch.note(next(signum for signum, has_come in zip(DEFAULTS, came, strict=True) if has_come))
        if has_notice and self._watch.notice is not None:
            self._announce(self._watch.notice)
        return is_urgent or (has_notice and not only_if_urgent)

    def _announce(self, notice: ReceivedSignal) -> None:
        """Log once how the run ends."""
        if self._has_announced:
            return
        self._has_announced = True
        logger.warning(
            "%s: stopping training %s; the generation cycle is %s. A second signal ends the process immediately.",
            signal.Signals(notice.signum).name,
            "with a checkpoint" if self._saves else "without a checkpoint, since save_strategy is 'no'",
            "finished first" if self._fits(notice) else "interrupted",
        )
