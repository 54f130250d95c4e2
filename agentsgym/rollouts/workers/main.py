"""The main loop of a worker process, which advances its trials as the pool's messages request.

The worker exits when the process that owns its pool is gone, even while a step hangs. A thread in it waits until the
owner exits or the connection closes. It then signals the worker to close its episodes, and forces it to exit after
``_CLOSING_S``. A step that holds the GIL blocks that thread too. This case is covered only on Linux: the kernel kills
the worker when its parent, the fork server, exits because the owner did.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from agentsgym.errors import AgentsGymError
from agentsgym.interruptions import Interruption, attempt, is_interruption
from agentsgym.rollouts.scheduler import BATCHING_WINDOW_S, Finished, Raised, TrialGenerator, TrialOutcome, advance
from agentsgym.rollouts.workers.wire import (
    CLOSE,
    CLOSED,
    INTERRUPTED,
    IS_WAITING,
    KILL_SIGNAL,
    LOADED,
    NO_TRIAL,
    READY,
    SHUTDOWN,
    BrokenChannelError,
    Channel,
    DeserializationFailure,
    Reply,
    RequestDelta,
    StartTrial,
    TrialEnd,
    WireAction,
    WireInput,
    WorkBatch,
    WorkItem,
    load_trial,
)
from agentsgym.supervisor import DEATH_SIGNAL, IS_LINUX, control
from agentsgym.texts import sentence_of
from agentsgym.types import Message, TurnRequest


class _Killed(Interruption):
    """Raised in the running code when the pool kills this process, so that every trial closes its episode first."""


class _LiveTrial:
    """A live trial, and how much of its conversation was sent to the pool."""

    def __init__(self, generator: TrialGenerator[Any]) -> None:
        self.generator = generator
        self.messages: Sequence[Message] = ()
        self.token_ids: Sequence[int] = ()
        self.num_messages = 0
        self.num_tokens = 0
        self.tools: Sequence[Mapping[str, Any]] | None = None

    def delta(self, index: int, request: TurnRequest) -> RequestDelta:
        """Make the difference from the previous request."""
        if request.messages is not self.messages:
            self.messages, self.num_messages = request.messages, 0
        if request.token_ids is not self.token_ids:
            self.token_ids, self.num_tokens = request.token_ids, 0
        delta = RequestDelta(
            index,
            self.num_messages,
            request.messages[self.num_messages :],
            self.num_tokens,
            request.token_ids[self.num_tokens :],
            request.max_new_tokens,
            request.agent_state is not None,
            None if request.tools is self.tools else request.tools,
        )
        self.tools = request.tools
        self.num_messages, self.num_tokens = len(request.messages), len(request.token_ids)
        return delta


class _WorkerLoop:
    """The environments and trials of one process.

    Attributes:
        progress: Shared with the pool: the trial that is being advanced, or whose reply is being pickled, and since
            when (:data:`NO_TRIAL`: none; :data:`IS_WAITING`: none, and the process waits for a message).
        is_killed: Whether the pool is killing this process; checked after each step, since a hook may catch everything.
        is_ending: Whether the process is already ending.
    """

    def __init__(self, channel: Channel, progress: Any) -> None:
        self.channel = channel
        self.progress = progress
        self.is_killed = self.is_ending = False
        self.envs: dict[str, Any] = {}
        self.trials: dict[int, _LiveTrial] = {}

    def run(self) -> None:
        """Process the pool's messages until the pool requests the shutdown or is gone."""
        try:
            with suppress(EOFError):
                self.channel.send(READY)
                while True:
                    self._note(IS_WAITING)
                    message = self.channel.receive()
                    self._note(NO_TRIAL)
                    if message == SHUTDOWN:
                        return
                    if message == CLOSE:
                        self.close()
                        self.channel.send(CLOSED)
                    else:
                        self.work(pickle.loads(message))
        finally:
            self.is_ending = True
            self.close()

    def kill(self, *_: Any) -> None:
        """Interrupt the running code; used as a signal handler."""
        if self.is_ending:
            return
        self.is_killed = True
        raise _Killed

    def work(self, batch: WorkBatch) -> None:
        """Process a batch; replies are sent at short intervals, and the last message is marked as such."""
        for name in batch.dropped_envs:
            self.envs.pop(name, None)
        for name, dumped in batch.envs.items():
            env = attempt(pickle.loads, dumped)  # classes define how they are unpickled
            if isinstance(env, BaseException):
                failure = DeserializationFailure(f"{type(env).__name__}: {sentence_of(env)}")
                self._send([_dump_reply(failure)], is_last=True)
                return
            self.envs[name] = env
        if batch.envs:
            self.channel.send(LOADED)
        replies: list[bytes] = []
        sent = time.monotonic()
        for place, item in enumerate(batch.items):
            replies.append(_dump_reply(self._reply(item)))
            self.progress[0] = NO_TRIAL
            is_last = place == len(batch.items) - 1
            now = time.monotonic()
            if is_last or now - sent > BATCHING_WINDOW_S:
                self._send(replies, is_last=is_last)
                replies, sent = [], now

    def close(self) -> None:
        """Close every live trial."""
        for trial in self.trials.values():
            trial.generator.close()
        self.trials.clear()

    def _reply(self, item: WorkItem) -> Reply:
        index = item[0]
        if isinstance(item, StartTrial):
            self._note(index)
            trial = attempt(load_trial, item.trial, self.envs)
            if isinstance(trial, BaseException):
                return DeserializationFailure(f"{type(trial).__name__}: {sentence_of(trial)}", index)
            self.trials[index] = _LiveTrial(trial.play())
            outcome = self._step(index, None)
            for given in item.inputs:
                if isinstance(outcome, TurnRequest):
                    outcome = self._step(index, given)
        else:
            outcome = self._step(index, item[1])
        if isinstance(outcome, TurnRequest):
            return self.trials[index].delta(index, outcome)
        del self.trials[index]
        content = outcome if isinstance(outcome, Finished) else Raised(_portable(outcome.error))
        dumped = attempt(pickle.dumps, content, pickle.HIGHEST_PROTOCOL)  # its values come from user code
        is_dumped = not isinstance(dumped, BaseException)
        return TrialEnd(index, dumped if is_dumped else f"{type(dumped).__name__}: {sentence_of(dumped)}")

    def _step(self, index: int, given: WireInput | None) -> TrialOutcome:
        self._note(index)
        outcome = advance(self.trials[index].generator, given.action() if isinstance(given, WireAction) else given)
        if self.is_killed:
            raise _Killed
        return outcome

    def _note(self, what: int) -> None:
        self.progress[1] = time.monotonic()
        self.progress[0] = what

    def _send(self, replies: list[bytes], *, is_last: bool) -> None:
        self.channel.send(pickle.dumps((replies, is_last), pickle.HIGHEST_PROTOCOL))


def serve(connection: socket.socket, key: bytes, progress: Any, owner: int) -> None:
    """Run a worker process.

    Args:
        connection: Connection to the pool.
        key: Key of the channel over it.
        progress: See :class:`_WorkerLoop`.
        owner: Process id of the pool's owner.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the pool's owner handles it
    if hasattr(os, "setsid"):  # not on Windows
        os.setsid()  # so that the pool can kill what user code leaves behind
    loop = _WorkerLoop(Channel(connection, key), progress)
    try:
        if KILL_SIGNAL is not None:
            signal.signal(KILL_SIGNAL, loop.kill)
        exit_with_owner(connection, owner)
        loop.run()
    except _Killed:
        code = INTERRUPTED
    except (OSError, BrokenChannelError):
        code = LOST_CONNECTION  # the user's code wrote to it, read from it or closed it
    except BaseException as error:  # noqa: BLE001  # user code outside any one trial
        print(f"agentsgym: a worker process ends: {type(error).__name__}: {sentence_of(error)}", file=sys.stderr)
        code = 1
    else:
        code = 0
    sys.exit(code)


def _dump_reply(reply: Reply) -> bytes:
    """Pickle a reply while ``progress`` still names its trial, since pickling may crash or hang this process."""
    dumped = attempt(pickle.dumps, reply, pickle.HIGHEST_PROTOCOL)
    if isinstance(dumped, BaseException):
        if isinstance(reply, DeserializationFailure):
            raise dumped
        end = TrialEnd(reply.trial_index, f"{type(dumped).__name__}: {sentence_of(dumped)}")
        dumped = pickle.dumps(end, pickle.HIGHEST_PROTOCOL)
    return dumped


def _portable(error: BaseException) -> BaseException:
    """Copy an error into one that the pool can raise, with the traceback as a note."""
    text = "".join(traceback.format_exception(error))
    try:
        copied = pickle.loads(pickle.dumps(error))
    except BaseException as failure:  # as above
        if is_interruption(failure):
            raise
        copied = AgentsGymError(f"{type(error).__name__}: {sentence_of(error)}")
    copied.add_note(f"It was raised in a worker process:\n{text}")
    return copied


_POLL_S = 1.0
_CLOSING_S = 2.0
LOST_CONNECTION = 70  # exit code if code in the worker broke its connection (EX_SOFTWARE in sysexits.h)


def exit_with_owner(connection: socket.socket, owner: int) -> None:
    """Start watching the owner and the connection."""
    # Close this process's copy of the pipe that keeps the fork server alive, so that only the owner keeps it.
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    pipe = getattr(server, "_forkserver_alive_fd", None)
    if server is not None and isinstance(pipe, int):
        server._forkserver_alive_fd = None  # not needed: a worker is daemonic, so it cannot start processes
        with suppress(OSError):
            os.close(pipe)
    if IS_LINUX:
        with suppress(OSError, AttributeError):
            control(DEATH_SIGNAL, signal.SIGKILL)
    if hasattr(select, "poll"):  # not on Windows
        process: int | None = None
        with suppress(OSError, AttributeError):  # pidfd_open requires Linux 5.3
            process = os.pidfd_open(owner)
        descriptors = (connection.fileno(), process)
        identities = tuple(None if one is None else _identity(one) for one in descriptors)
        threading.Thread(
            target=_watch, args=(owner, descriptors, identities), name="agentsgym-owner-watch", daemon=True
        ).start()


def _watch(owner: int, descriptors: tuple[int, int | None], identities: tuple[object, ...]) -> None:
    """Wait until the owner exits or the connection closes, and exit this process.

    Args:
        owner: Process id of the owner.
        descriptors: File descriptors of the connection and of the owner's process; None for the latter if unknown.
        identities: Device and inode of each descriptor at the start, to detect that it was closed or now refers to
            another file.
    """
    connection, process = descriptors
    while True:
        if _identity(connection) != identities[0]:
            os._exit(LOST_CONNECTION)  # something closed the file descriptors of this process
        is_process_known = process is not None and _identity(process) == identities[1]
        if _is_owner_gone(owner, connection, process if is_process_known else None):
            break
        poll = select.poll()
        poll.register(connection, getattr(select, "POLLRDHUP", 0))  # hang-ups and errors are always reported
        if process is not None:
            poll.register(process, select.POLLIN)
        poll.poll(1000 * _POLL_S)
    if KILL_SIGNAL is not None:
        os.kill(os.getpid(), KILL_SIGNAL)
    time.sleep(_CLOSING_S)
    os._exit(1)


def _is_owner_gone(owner: int, connection: int, process: int | None) -> bool:
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", 0))
    if poll.poll(0):
        return True
    if process is not None:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))
    try:
        os.kill(owner, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino
