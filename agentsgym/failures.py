"""Describe failed episodes, log each kind of failure once, and decide what happens to the run and to their groups.

The ``error`` of a failed trajectory is a few lines of text: the place of the failure, a sentence, and the traceback of
the exception from the user's code, which ends with the cause::

    task 1, rollout 0, turn 2 of Guess, at /home/me/guess.py:31
    EnvError: Guess._step_episode raised OSError: gone
    Traceback (most recent call last):
      File "/home/me/guess.py", line 31, in _step_episode
        raise OSError("gone")
    OSError: gone
"""

from __future__ import annotations

import re
import sysconfig
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast, get_args

from agentsgym.errors import ConfigError, EpisodeError, TooManyFailuresError
from agentsgym.fields import Check, is_fraction, is_int, one_of, or_none, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of, shortened, visible

if TYPE_CHECKING:
    import logging

    from agentsgym.types import Trajectory


Failure = TypeVar("Failure", bound=EpisodeError)

_PACKAGE = Path(__file__).parent
# Code that only forwards calls, so no failure originates there. Subfolders, which contain environments, do not count.
_FOLDERS = frozenset(str(_PACKAGE / name) for name in ("envs", "rollouts", "rollouts/workers"))
_FILES = frozenset(str(_PACKAGE / name) for name in ("agents/base.py", "event_loop.py"))
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_AT = ", at "
# Limits of a trajectory's error (10 KB in total) and of a log line (2 KB).
_HEAD_BYTES, _SENTENCE_BYTES, _TRACE_BYTES = 600, 1800, 7000
_HEADLINE_BYTES, _LOG_BYTES = 1300, 1900
_PIECE_BYTES = 1500  # limit of one frame of a traceback, or of the text of one error in it
_MAX_KINDS = 100  # kinds of failures that are logged separately
_OTHER_KINDS = "other kinds of failures"


def failure_of(
    kind: type[Failure], function: str, error: BaseException, hook: Callable[..., Any] | None = None
) -> Failure:
    """Convert an exception raised by the user's code to the error of an episode.

    Args:
        kind: The class of the error: the environment's or the agent's.
        function: Name of the called function, as in ``"Guess._step_episode"``.
        error: The caught exception.
        hook: The function itself; its definition is reported if it cannot be called with the library's arguments.
    """
    failure = kind(f"{function} raised {type(error).__name__}: {sentence_of(error)}".removesuffix(": "))
    try:
        report = traceback.TracebackException.from_exception(error, max_group_width=4, max_group_depth=4)
        code = getattr(hook, "__code__", None)
        files = [frame.filename for frame in report.stack]
        if code is not None and not _is_own(code.co_filename) and all(map(_is_own, files)):  # the hook did not start
            place = f"{code.co_filename}:{code.co_firstlineno}"
            failure.trace, failure.place = _text(report.format_exception_only()), place
        else:
            _leave_out_own_frames(report)
            # The innermost frame in the user's code, rather than in a package that the user's code called.
            user = [
                frame
                for frame in report.stack
                if not frame.filename.startswith(("<frozen ", _STANDARD_LIBRARY))
                and _INSTALLED.isdisjoint(Path(frame.filename).parts)
            ]
            user = user or report.stack[:1]
            place = f"{user[-1].filename}:{user[-1].lineno}" if user else ""
            failure.trace, failure.place = _text(report.format()), place
    except KeyboardInterrupt:
        raise
    except BaseException as other:  # noqa: BLE001  # user code: formatting reads attributes of the error, which may raise
        failure.trace = f"its traceback cannot be formatted: formatting raised {type(other).__name__}"
    return failure


def describe(failure: EpisodeError, where: str) -> str:
    """Format the ``error`` of a failed trajectory.

    Args:
        failure: The error that ended it.
        where: Text that names the task, rollout, turn and environment.
    """
    head = f"{where}{_AT}{failure.place}" if failure.place else where
    sentence = shortened(f"{type(failure).__name__}: {sentence_of(failure, _SENTENCE_BYTES)}", _SENTENCE_BYTES, tail=0)
    trace = [shortened(failure.trace, _TRACE_BYTES)] if failure.trace else []
    return "\n".join([shortened(visible(head), _HEAD_BYTES), sentence, *trace])


def headline(error: str) -> str:
    """Shorten the text of :func:`describe` to one line: the place and the reason of the failure."""
    return shortened(visible(": ".join(error[:_HEADLINE_BYTES].splitlines()[:2])), _HEADLINE_BYTES, tail=0)


def kind_of(error: str) -> str:
    r"""Name the kind of a failure from the text of :func:`describe`; failures with the same cause have the same kind.

    If an exception was raised, the kind is its type, file and line; otherwise the sentence without session ids, numbers
    and values.

    >>> kind_of("task 3, rollout 0, turn 2 of Guess\nEnvError: _final_reward must be a finite number, got nan")
    'EnvError: _final_reward must be a finite number'
    """
    head, _, rest = error.partition("\n")
    sentence = rest.partition("\n")[0]
    place = head.partition(_AT)[2]
    raised = re.search(r" raised (\w+)", sentence)
    if place and raised:
        return f"{raised[1]} at {place}"
    return re.sub(r"[0-9a-f]{32}|\d+", "#", sentence.partition(", got ")[0])


class FailureLog(AbstractContextManager["FailureLog"]):
    """Logs the first failure of each kind when it happens, and the number of further ones at the end.

    >>> import logging
    >>> with FailureLog(logging.getLogger("doc")) as log:
    ...     log.note  # called with each finished rollout
    <bound method FailureLog.note of ...>
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._first: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # episodes are closed in the threads of a pool

    def __exit__(self, *_: object) -> None:
        """Log the counts, even if the run ended with an error."""
        for kind, count in self._counts.items():
            if count > 1:
                alike = "of other kinds, e.g." if kind == _OTHER_KINDS else "of the same kind:"
                self._logger.warning("… and %d more %s %s", count - 1, alike, self._first[kind])

    def note(self, trajectory: Trajectory) -> None:
        """Log the error of a finished rollout, if it failed."""
        if trajectory.error is not None:
            self._count(kind_of(trajectory.error), f"session {trajectory.session_id} failed", trajectory.error)

    def note_close_error(self, session_id: str, error: str) -> None:
        """Log the error of an episode that could not be closed, as formatted by :func:`describe`."""
        trace = "".join(f"\n{rest}" for rest in error.split("\n", 2)[2:])
        self._count(f"closing: {kind_of(error)}", f"session {session_id} could not be closed", error, trace)

    def _count(self, kind: str, event: str, error: str, trace: str = "") -> None:
        with self._lock:
            if kind not in self._counts and len(self._counts) >= _MAX_KINDS:
                kind = _OTHER_KINDS
            self._counts[kind] += 1
            if self._counts[kind] == 1:
                self._first[kind] = headline(error)
                line = f"{event}: {self._first[kind]}{visible(trace)}"
                self._logger.warning("%s", shortened(line, _LOG_BYTES, tail=0.3))


def _text(pieces: Iterable[str]) -> str:
    """Join the parts of a traceback, shortening each part; a long traceback loses its middle parts."""
    head: list[str] = []
    tail: deque[str] = deque()
    missing, num_tail, num_left_out = _TRACE_BYTES // 3, 0, 0
    for piece in pieces:
        text = shortened(visible(shortened(piece, _PIECE_BYTES)), _PIECE_BYTES)
        size = len(text.encode())
        missing -= size
        if missing >= 0:
            head.append(text)
            continue
        tail.append(text)
        num_tail += size
        while num_tail > _TRACE_BYTES // 2:
            num_tail -= len(tail.popleft().encode())
            num_left_out += 1
    note = [f"  … {num_left_out} parts of the traceback are omitted …\n"] if num_left_out else []
    return "".join([*head, *note, *tail]).rstrip("\n")


def _leave_out_own_frames(report: traceback.TracebackException) -> None:
    """Remove the library's frames from an error, its causes, and the members of an exception group."""
    kept = [frame for frame in report.stack if not _is_own(frame.filename)]
    if kept:  # otherwise the bug is in the library, and only its frames show where
        report.stack = traceback.StackSummary.from_list(kept)
    for other in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if other is not None:
            _leave_out_own_frames(other)


def _is_own(filename: str) -> bool:
    return filename in _FILES or str(Path(filename).parent) in _FOLDERS


RetrySeed = Literal["same", "new"]
RETRY_SEEDS: tuple[str, ...] = get_args(RetrySeed)
_CHECKS: dict[str, tuple[Check, str]] = {
    "max_failed_fraction": (or_none(is_fraction), "a number in [0, 1] or None"),
    "max_retries": (is_int(0), "a non-negative int"),
    "retry_seed": (one_of(*RETRY_SEEDS), " or ".join(map(repr, RETRY_SEEDS))),
    "min_group_size": (is_int(0), "a non-negative int"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """Options for the treatment of failed rollouts, which can be combined freely.

    By default, failed rollouts are recorded, the others continue, and all rollouts are returned.

    >>> FailurePolicy.fail_fast()
    FailurePolicy(max_failed_fraction=0.0, max_retries=0, retry_seed='same', min_group_size=0)
    >>> FailurePolicy.retry(2, min_group_size=3)
    FailurePolicy(max_failed_fraction=None, max_retries=2, retry_seed='same', min_group_size=3)

    Attributes:
        max_failed_fraction: The fraction of all rollouts that may fail, in [0, 1]; as soon as more have failed, the run
            ends with a :class:`~agentsgym.errors.TooManyFailuresError`. With 0 the first failure ends the run; with
            None no number of failures does.
        max_retries: Maximum number of times that a failed rollout is replayed from its start, after all other rollouts
            and under the same session id and index. Only the last attempt is returned, and only it can count as failed.
        retry_seed: ``"same"`` retries from the same start; ``"new"`` uses a seed derived from the first seed and the
            number of the attempt. The start may then differ from that of the rest of the group, so that a baseline
            compares different tasks.
        min_group_size: Task groups with fewer rollouts that did not fail are dropped; 0 drops none.
    """

    max_failed_fraction: float | None = None
    max_retries: int = 0
    retry_seed: RetrySeed = "same"
    min_group_size: int = 0

    def __post_init__(self) -> None:
        for name, (valid, expected) in _CHECKS.items():
            require(f"FailurePolicy.{name}", getattr(self, name), valid, expected)

    @classmethod
    def fail_fast(cls) -> Self:
        """End the run at the first failed rollout, with the error of that rollout."""
        return cls(max_failed_fraction=0.0)

    @classmethod
    def retry(cls, max_retries: int, *, retry_seed: RetrySeed = "same", min_group_size: int = 0) -> Self:
        """Retry failed rollouts; those that still fail are kept, unless their group is dropped as too small."""
        return cls(max_retries=max_retries, retry_seed=retry_seed, min_group_size=min_group_size)

    def seed_of_retry(self, seed: int, attempt: int) -> int:
        """Derive the seed of a retry from the seed of the first attempt; the result is deterministic."""
        return seed if self.retry_seed == "same" else derive_seed("retry", seed, attempt)

    def check_size(self, num_rollouts: int) -> None:
        """Raise :class:`ConfigError` if every task group would be too small."""
        if self.min_group_size > num_rollouts:
            raise ConfigError(
                f"FailurePolicy.min_group_size={self.min_group_size} is larger than num_rollouts={num_rollouts}, so "
                f"every task group would be dropped: set it to at most {num_rollouts}"
            )

    def without_small_groups(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Drop the task groups with fewer than ``min_group_size`` rollouts that did not fail.

        Raises:
            TooManyFailuresError: No group is left.
        """
        if not self.min_group_size:
            return trajectories
        sizes = Counter(trajectory.task_index for trajectory in trajectories if not trajectory.failed)
        kept = [trajectory for trajectory in trajectories if sizes[trajectory.task_index] >= self.min_group_size]
        if trajectories and not kept:
            first = next(trajectory for trajectory in trajectories if trajectory.failed)
            raise TooManyFailuresError(
                f"no task has min_group_size = {self.min_group_size} rollouts that did not fail; the first failure:\n"
                f"{first.error}"
            )
        return kept


def as_policy(given: object) -> FailurePolicy:
    """Return the given policy, or the default for None.

    Raises:
        ConfigError: The value is neither a policy nor None.
    """
    require("failures", given, or_none(lambda value: isinstance(value, FailurePolicy)), "a FailurePolicy or None")
    return cast("FailurePolicy | None", given) or FailurePolicy()


class FailureCount:
    """Counts failed rollouts as they finish, and raises when more have failed than allowed.

    Attributes:
        finished: The finished rollouts, failed ones included.
    """

    def __init__(self, policy: FailurePolicy, num_rollouts: int) -> None:
        """Start counting; ``policy`` sets how many of the ``num_rollouts`` rollouts may fail."""
        self.finished: list[Trajectory] = []
        self._limit = policy.max_failed_fraction
        self._num_rollouts = num_rollouts
        self._num_failed = 0
        self._first: str | None = None

    def add(self, trajectory: Trajectory) -> None:
        """Count a finished rollout.

        Raises:
            TooManyFailuresError: More have failed than allowed; the error's ``trajectories`` are the finished ones.
        """
        self.finished.append(trajectory)
        if trajectory.failed:
            self._num_failed += 1
            self._first = self._first or trajectory.error
            if self._limit is not None and self._num_failed > self._limit * self._num_rollouts:
                error = TooManyFailuresError(
                    f"{self._num_failed} of {self._num_rollouts} rollouts failed, more than max_failed_fraction = "
                    f"{self._limit} allows; the first failure:\n{self._first}"
                )
                error.trajectories = self.finished
                raise error
