"""Writing of finished rollouts to a store in the background, from any thread."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from agentsgym.errors import ConfigError, StoreError
from agentsgym.fields import is_int, is_positive_number, require
from agentsgym.store.columns import rollouts_to_table
from agentsgym.store.parts import encode, part_name, warn_of_unfinished, write_part
from agentsgym.store.records import StoredRollout, check_columns
from agentsgym.store.stored_tokenizers import keep_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

    from agentsgym.types import Trajectory

logger = logging.getLogger(__name__)

_RETRY_S: Final = 10.0  # between attempts to write to a full disk
_LAST: Final = 0  # the lowest exit priority, since other exit handlers may still add rollouts
_MAX_UNWRITTEN: Final = 1 << 30  # bytes of parts in memory while the disk is full


class RolloutWriter(AbstractContextManager["RolloutWriter"]):
    """Appends rollouts to a store, in parts; created as ``RolloutStore.writer(path)``.

    A rollout is on disk once its part is written, which happens after ``flush_every`` rollouts, ``flush_seconds`` after
    the first of them, by :meth:`flush`, or by :meth:`close`, which is called at the end of a ``with`` block and of the
    process. Parts are written in a separate thread. Any number of writers, in any processes, may share a folder.

    If the disk is full, the error is logged once, and parts stay in memory until a later attempt succeeds (compressed,
    up to 1 GiB, beyond which the oldest are dropped).

    Attributes:
        path: The folder.
        shared: Fields of all rollouts, unless ``add`` overrides them.
    """

    def __init__(self, path: str | Path, *, flush_every: int = 256, flush_seconds: float = 10.0, **shared: Any) -> None:
        """Create the folder if it does not exist.

        Args:
            path: The folder.
            flush_every: A part is written once it has this many rollouts.
            flush_seconds: A part is written this many seconds after its first rollout.
            **shared: Fields of :class:`~agentsgym.store.records.StoredRollout` for all rollouts that are added.

        Raises:
            StoreError: The folder cannot be created.
            ConfigError: A field is unknown, or a setting is invalid.
        """
        require("flush_every", flush_every, is_int(1), "a positive int")
        require("flush_seconds", flush_seconds, is_positive_number, "a positive number of seconds")
        check_columns(shared)
        self.path = Path(path)
        self.shared = shared
        self._flush_every, self._flush_seconds = flush_every, flush_seconds
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise StoreError(f"cannot create a rollout store at {self.path}: a file with this name exists") from error
        except OSError as error:
            raise StoreError(f"cannot create a rollout store at {self.path}: {error}") from error
        warn_of_unfinished(self.path)
        self._begin()

    def _begin(self) -> None:
        """Reset to the state of a new writer in this process."""
        self._process = os.getpid()
        self._id = secrets.token_hex(6)
        self._changed = threading.Condition()
        self._waiting: list[StoredRollout] = []
        self._parts: deque[tuple[int, pa.Buffer]] = deque()  # number of rollouts, content of the file
        self._thread: threading.Thread | None = None
        self._at_end: Finalize | None = None
        self._due: float | None = None  # the time at which the waiting rollouts will be written
        self._is_flush_requested = self._is_closed = self._has_logged_failure = self._has_reported = False
        self._num_begun = self._num_attempted = self._num_parts = 0
        self._error: Exception | None = None  # of the last attempt
        self._bug: Exception | None = None

    def _begin_if_forked(self) -> None:
        """Start over after a fork: unwritten rollouts belong to the parent, which may also have held the lock."""
        if os.getpid() != self._process:
            self._begin()

    def add(self, trajectory: Trajectory, **columns: Any) -> None:
        """Add a finished rollout, which the writing thread will write later.

        Args:
            trajectory: The rollout; it must not be modified afterwards.
            **columns: Fields of :class:`~agentsgym.store.records.StoredRollout`.

        Raises:
            ConfigError: A column is unknown or invalid, or the writer is closed.
        """
        check_columns(columns)
        self.add_record(StoredRollout(trajectory=trajectory, **{**self.shared, **columns}))

    def add_record(self, record: StoredRollout) -> None:
        """Add a rollout with all its columns, such as one from another store."""
        self._begin_if_forked()
        with self._changed:
            if self._is_closed:
                raise ConfigError(f"the writer of {self.path} is closed: create another one")
            self._waiting.append(record)
            if self._due is None:
                self._due = time.monotonic() + self._flush_seconds
            self._start()
            if len(self._waiting) == 1 or len(self._waiting) >= self._flush_every:
                self._changed.notify_all()

    def keep_tokenizer(self, tokenizer: Any) -> str | None:
        """Save a tokenizer in the store, and return its name for the column ``tokenizer``; None if none was saved.

        See :func:`~agentsgym.store.stored_tokenizers.keep_tokenizer`.
        """
        return keep_tokenizer(self.path, tokenizer)

    def flush(self, *, wait: bool = True) -> None:
        """Write everything that has been added so far.

        Args:
            wait: Whether to return only when everything is on disk.
        """
        self._begin_if_forked()
        with self._changed:
            self._is_flush_requested = True
            wanted = self._num_begun + 1  # an attempt in progress may not include the newest rollouts
            self._start()
            self._changed.notify_all()
            if not wait:
                return
            while self._num_attempted < wanted:
                self._changed.wait()
            if self._bug is not None:
                bug, self._bug = self._bug, None
                raise bug
            if self._error is not None:
                number = sum(number for number, _ in self._parts)
                raise StoreError(f"{number} rollouts cannot be written to {self.path}: {self._error}") from self._error

    def close(self, *, strict: bool = True) -> None:
        """Write all remaining rollouts and end the thread; calling this again retries failed writes.

        Args:
            strict: Whether to raise an error if writing fails, rather than log it.

        Raises:
            StoreError: Some rollouts cannot be written; they stay in memory.
        """
        if os.getpid() != self._process:
            return
        with self._changed:
            self._is_closed = True
            if self._thread is None and not self._parts and not self._waiting:
                return
        try:
            self.flush()
        except Exception as error:
            is_known, self._has_reported = self._has_reported, True
            if strict or not isinstance(error, StoreError):
                raise
            if not is_known:
                logger.error("%s", error)  # noqa: TRY400  # no traceback needed
        else:
            self._has_reported = False
            self._cancel_exit()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(strict=error is None)

    def _cancel_exit(self) -> None:
        """Cancel the closing of the writer at the end of the process."""
        if self._at_end is not None:
            self._at_end.cancel()
            self._at_end = None

    def _at_exit(self) -> None:
        with contextlib.suppress(Exception):  # errors have been logged already
            self.close(strict=False)

    # The thread

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._cancel_exit()
            # ``atexit`` handlers do not run in children of multiprocessing.
            self._at_end = Finalize(None, self._at_exit, exitpriority=_LAST)
            self._thread = threading.Thread(target=self._run, name=f"rollouts to {self.path.name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Write due parts until the writer is closed."""
        while True:
            with self._changed:
                while not (
                    self._is_flush_requested
                    or len(self._waiting) >= self._flush_every
                    or (self._due is not None and time.monotonic() >= self._due)
                ):
                    if self._is_closed:
                        self._thread = None
                        return
                    self._changed.wait(None if self._due is None else max(0.0, self._due - time.monotonic()))
                batch, self._waiting, self._due, self._is_flush_requested = self._waiting, [], None, False
                self._num_begun += 1
            parts = self._encoded(batch)
            with self._changed:
                self._parts += parts
            error = self._write()
            with self._changed:
                self._error = error
                if error is not None:
                    self._due = time.monotonic() + max(_RETRY_S, self._flush_seconds)
                self._num_attempted += 1
                self._changed.notify_all()

    def _encoded(self, batch: Sequence[StoredRollout]) -> list[tuple[int, pa.Buffer]]:
        """Encode rollouts as one part, or, if one of them cannot be stored, each of the others as a separate part."""
        if not batch:
            return []
        try:
            return [(len(batch), encode(rollouts_to_table(batch)))]
        except Exception as error:
            if len(batch) > 1:
                return [part for record in batch for part in self._encoded([record])]
            logger.exception(
                "the rollout of session %s cannot be stored and is skipped", batch[0].trajectory.session_id
            )
            self._bug = error
            return []

    def _write(self) -> Exception | None:
        """Write the pending parts, oldest first, and return the error, if any."""
        while self._parts:
            try:
                self._write_part(*self._parts[0])
            except OSError as error:
                if not self._has_logged_failure:
                    self._has_logged_failure = True
                    logger.error(  # noqa: TRY400  # no traceback needed
                        "%s: rollouts cannot be written (%s); they stay in memory, and every flush tries again",
                        self.path,
                        error,
                    )
                with self._changed:
                    while len(self._parts) > 1 and sum(data.size for _, data in self._parts) > _MAX_UNWRITTEN:
                        logger.error(  # noqa: TRY400
                            "%s: %d rollouts are lost, because unwritten rollouts exceeded the memory limit of 1 GiB",
                            self.path,
                            self._parts.popleft()[0],
                        )
                return error
            with self._changed:
                self._parts.popleft()
        if self._has_logged_failure:
            logger.warning("%s: rollouts that could not be written earlier have now been written", self.path)
            self._has_logged_failure = False
        return None

    def _write_part(self, num_rollouts: int, data: pa.Buffer) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        while True:
            self._num_parts += 1
            with contextlib.suppress(FileExistsError):  # another writer has the same id
                write_part(self.path, part_name(self._id, self._num_parts, num_rollouts), data)
                return
