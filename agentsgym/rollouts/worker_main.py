"""What runs in a worker process: the trials that live there, advanced as the pool's messages say."""

from __future__ import annotations

import pickle
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from agentsgym.errors import AgentsGymError
from agentsgym.rollouts.interfaces import BATCHING_WINDOW_S, Finished, Raised, TrialGenerator, TrialOutcome, advance
from agentsgym.rollouts.wire import (
    KILL_SIGNAL,
    NO_TRIAL,
    READY,
    SHUTDOWN,
    DeserializationFailure,
    Reply,
    RequestDelta,
    StartTrial,
    TrialEnd,
    WireInput,
    WorkBatch,
    WorkItem,
    load_trial,
)
from agentsgym.types import Action, Message, TurnRequest


class _Killed(BaseException):
    """The pool kills this process; raised in whatever runs, so that every trial closes its episode on the way out."""


class _LiveTrial:
    """A trial in play, and how much of its conversation the pool knows."""

    def __init__(self, generator: TrialGenerator[Any]) -> None:
        self.generator = generator
        self.messages: Sequence[Message] = ()
        self.token_ids: Sequence[int] = ()
        self.num_messages = 0
        self.num_tokens = 0

    def advance(self, given: WireInput | None) -> TrialOutcome:
        """Let it go on."""
        if not isinstance(given, tuple):
            return advance(self.generator, given)
        text, token_ids, logprobs, finish_reason = given
        return advance(
            self.generator,
            # Any state but None will do: the pool gives back the real one.
            Action(text=text, token_ids=token_ids, logprobs=logprobs, agent_state=True, finish_reason=finish_reason),
        )

    def delta(self, index: int, request: TurnRequest) -> RequestDelta:
        """Make the difference to the last request."""
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
        )
        self.num_messages, self.num_tokens = len(request.messages), len(request.token_ids)
        return delta


class _WorkerLoop:
    """One process's environments and trials.

    Attributes:
        progress: Shared with the pool: which trial is advanced at this moment (:data:`NO_TRIAL`: none), since when.
    """

    def __init__(self, connection: Connection, progress: Any) -> None:
        self.connection = connection
        self.progress = progress
        self.envs: dict[str, Any] = {}
        self.trials: dict[int, _LiveTrial] = {}

    def work(self, batch: WorkBatch) -> None:
        """Do all of it; what is done is sent every few moments, and the last reply is marked as the last."""
        if not batch.items:
            self.close()  # the run was aborted
            return
        try:
            for name in batch.dropped_envs:
                self.envs.pop(name, None)
            for name, dumped in batch.envs.items():
                self.envs[name] = pickle.loads(dumped)
        except Exception as error:  # noqa: BLE001  # foreign code: its classes define how they are unpickled
            self._send([DeserializationFailure(f"{type(error).__name__}: {error}")], is_last=True)
            return
        replies: list[Reply] = []
        sent = time.monotonic()
        for place, item in enumerate(batch.items):
            replies.append(self._reply(item))
            is_last = place == len(batch.items) - 1
            now = time.monotonic()
            if is_last or now - sent > BATCHING_WINDOW_S:
                self._send(replies, is_last=is_last)
                replies, sent = [], now

    def close(self) -> None:
        """Close every trial that is in play."""
        for trial in self.trials.values():
            trial.generator.close()
        self.trials.clear()

    def _reply(self, item: WorkItem) -> Reply:
        index = item[0]
        if isinstance(item, StartTrial):
            try:
                self.trials[index] = _LiveTrial(load_trial(item.trial, self.envs).play())
            except Exception as error:  # noqa: BLE001  # as above
                return DeserializationFailure(f"{type(error).__name__}: {error}")
            outcome = self._step(index, None)
            for given in item.inputs:
                if isinstance(outcome, TurnRequest):
                    outcome = self._step(index, given)
        else:
            outcome = self._step(index, item[1])
        if isinstance(outcome, TurnRequest):
            return self.trials[index].delta(index, outcome)
        del self.trials[index]
        return TrialEnd(index, outcome if isinstance(outcome, Finished) else Raised(_portable(outcome.error)))

    def _step(self, index: int, given: WireInput | None) -> TrialOutcome:
        self.progress[1] = time.monotonic()
        self.progress[0] = index
        outcome = self.trials[index].advance(given)
        self.progress[0] = NO_TRIAL
        if isinstance(outcome, Raised) and isinstance(outcome.error, _Killed):
            raise outcome.error
        return outcome

    def _send(self, replies: list[Reply], *, is_last: bool) -> None:
        try:
            message = pickle.dumps((replies, is_last), pickle.HIGHEST_PROTOCOL)
        except Exception:  # noqa: BLE001  # foreign values: any of an environment's info, state keys or messages
            message = pickle.dumps(([_sendable(reply) for reply in replies], is_last), pickle.HIGHEST_PROTOCOL)
        self.connection.send_bytes(message)


def serve(connection: Connection, progress: Any) -> None:
    """Do what the pool sends until it requests the shutdown, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the pool's owner decides
    loop = _WorkerLoop(connection, progress)
    if KILL_SIGNAL is not None:
        signal.signal(KILL_SIGNAL, _raise_killed)
    try:
        with suppress(EOFError, OSError, _Killed):
            connection.send_bytes(READY)
            while (message := connection.recv_bytes()) != SHUTDOWN:
                loop.work(pickle.loads(message))
    finally:
        if KILL_SIGNAL is not None:
            signal.signal(KILL_SIGNAL, signal.SIG_IGN)  # it is ending
        loop.close()


def _raise_killed(*_: Any) -> None:
    raise _Killed


def _sendable(reply: Reply) -> Reply:
    try:
        pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # as above
        if isinstance(reply, DeserializationFailure):
            raise
        return TrialEnd(reply.trial_index, f"{type(error).__name__}: {error}")
    return reply


def _portable(error: BaseException) -> BaseException:
    """The error as the pool can raise it, with its traceback as a note."""
    text = "".join(traceback.format_exception(error))
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # as above
        copied = AgentsGymError(f"{type(error).__name__}: {error}")
    copied.add_note(f"It was raised in a worker process:\n{text}")
    return copied
