"""The messages between a process pool and its worker processes.

A trial's state cannot leave the process in which it began, so a trial stays there: the pool sends actions, and the
process returns what is new in the conversation. The pool keeps a copy of each conversation.

Messages are verified before they are unpickled. A worker runs the user's code, which can write to any of its file
descriptors, read from them or close them. Each frame therefore has a digest of its number, its length and its content
that only the two ends can compute::

    magic (4) | number (8) | length (8) | digest of the payload (16) | digest of these fields (16) | payload

Stray bytes, missing bytes and broken frames raise :class:`BrokenChannelError` and are never unpickled. This protects
against accidents. It is not a sandbox: the code in a worker is trusted like the code in the pool's process.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import io
import pickle
import secrets
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

from agentsgym.errors import AgentError, EpisodeError
from agentsgym.rollouts.scheduler import PlayableTrial
from agentsgym.texts import shown
from agentsgym.types import Action, FinishReason, Message, ToolCall

NO_TRIAL = -1
IS_WAITING = -2
READY = b"ready"
LOADED = b"loaded"  # the environments of a batch are loaded; its items are processed next
CLOSED = b"closed"  # the reply to CLOSE
CLOSE = b"close"  # the run was aborted: the process must close all live trials
SHUTDOWN = b""
# Makes a process close its episodes and exit. Not SIGTERM, with which the interpreter ends even processes that hang.
KILL_SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR1", None)

INTERRUPTED = 128 + (KILL_SIGNAL or 0)  # the exit code of a process that received KILL_SIGNAL


class WireAction(NamedTuple):
    """An action without the agent's state, which never leaves the agent's process; see :class:`Action`."""

    text: str
    token_ids: Sequence[int] | None
    logprobs: Sequence[float] | None
    finish_reason: FinishReason
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str | None = None
    policy_version: int | None = None

    def action(self) -> Action:
        """Rebuild the action; any state except None works, since the pool restores the real one."""
        return Action(**self._asdict(), agent_state=True)


WireInput = WireAction | EpisodeError
_parts_of = attrgetter(*WireAction._fields)


class StartTrial(NamedTuple):
    """A request to start a trial.

    Attributes:
        trial_index: Its index in the run.
        trial: The trial, pickled with :func:`dump_trial`.
        inputs: Inputs to replay, if its previous process died.
    """

    trial_index: int
    trial: bytes
    inputs: list[WireInput]


WorkItem = StartTrial | tuple[int, WireInput]  # a plain pair is an input for a trial that is already running


class WorkBatch(NamedTuple):
    """A message from the pool to a worker.

    Attributes:
        envs: Pickled environments, by name.
        dropped_envs: Names of environments that are no longer needed.
        items: Work items, in order.
    """

    envs: dict[str, bytes]
    dropped_envs: set[str]
    items: list[WorkItem]


class RequestDelta(NamedTuple):
    """A trial's request, as the difference from its previous one.

    Attributes:
        trial_index: Its index in the run.
        num_messages: How many messages of the previous request are kept: all, or 0 if the list was replaced.
        messages: The messages that follow them.
        num_tokens: Like ``num_messages``, for the token ids.
        token_ids: The token ids that follow them.
        max_new_tokens: The turn's token budget.
        has_state: Whether the agent receives the state of its last action; the state never leaves the agent's process.
        tools: The schemas of the environment's tools; None if unchanged since the previous request.
    """

    trial_index: int
    num_messages: int
    messages: Sequence[Message]
    num_tokens: int
    token_ids: Sequence[int]
    max_new_tokens: int | None
    has_state: bool
    tools: Sequence[Mapping[str, Any]] | None = None


class TrialEnd(NamedTuple):
    """The end of a trial.

    Attributes:
        trial_index: Its index in the run.
        outcome: Its result or exception, pickled separately, so that a value that cannot be unpickled fails only this
            trial; or, as text, the reason why it cannot be sent.
    """

    trial_index: int
    outcome: bytes | str


class DeserializationFailure(NamedTuple):
    """The reason why the worker could not unpickle a message.

    Attributes:
        reason: The exception.
        trial_index: The trial in the message; None if an environment could not be unpickled.
    """

    reason: str
    trial_index: int | None = None


Reply = RequestDelta | TrialEnd | DeserializationFailure


def load_replies(message: bytes) -> tuple[list[Reply], bool]:
    """Unpickle a worker's message: its replies, and whether they are the last of a batch.

    Raises:
        BaseException: Whatever unpickling raises, or TypeError if the message is not in this form.
    """
    given: Any = pickle.loads(message)
    if not (isinstance(given, tuple) and len(cast("tuple[Any, ...]", given)) == 2):
        raise TypeError("the message is not a pair")
    dumped, is_last = cast("tuple[Any, Any]", given)
    if not isinstance(dumped, list) or not isinstance(is_last, bool):
        raise TypeError("the message does not contain replies")
    replies = [pickle.loads(one) for one in cast("list[Any]", dumped)]
    if not all(isinstance(one, Reply) for one in replies):
        raise TypeError("the message does not contain replies")
    return replies, is_last


def to_wire(given: Any, session_id: str) -> WireInput:
    """Convert an agent's answer to an input: an action without the agent's state, or an error, also for other types."""
    if isinstance(given, Action):
        return WireAction(*_parts_of(given))
    if isinstance(given, EpisodeError):
        return given
    return AgentError(f"session {session_id}: an agent must return an Action, got {shown(given)}")


class _TrialPickler(pickle.Pickler):
    """Writes a name in place of the environment."""

    def __init__(self, buffer: io.BytesIO, env: Any, name: str) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._env = env
        self._name = name

    def persistent_id(self, obj: Any) -> str | None:
        return self._name if obj is self._env and obj is not None else None


class _TrialUnpickler(pickle.Unpickler):
    """Replaces the name with the environment of that name."""

    def __init__(self, buffer: io.BytesIO, envs: Mapping[str, Any]) -> None:
        super().__init__(buffer)
        self._envs = envs

    def persistent_load(self, pid: str) -> Any:
        return self._envs[pid]


def dump_trial(trial: PlayableTrial[Any], env_name: str) -> bytes:
    """Pickle a trial with a name in place of its environment."""
    buffer = io.BytesIO()
    _TrialPickler(buffer, trial.env, env_name).dump(trial)
    return buffer.getvalue()


def load_trial(dumped: bytes, envs: Mapping[str, Any]) -> PlayableTrial[Any]:
    """Unpickle a trial, with the environment that its name refers to."""
    return _TrialUnpickler(io.BytesIO(dumped), envs).load()


_MAGIC = b"\xa7gym"
_PREFIX = struct.Struct(">4sQQ16s")
_DIGEST_SIZE = 16
_HEADER_SIZE = _PREFIX.size + _DIGEST_SIZE
_JOINED_SIZE = 1 << 16  # payloads up to this size are copied, to send the frame in one call


class BrokenChannelError(Exception):
    """The received bytes are not a valid frame, or the next frame is overdue."""


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self.connection = connection
        self._key = key
        self._num_sent = self._num_received = 0

    def send(self, payload: bytes) -> None:
        """Send one message.

        Raises:
            OSError: The connection is gone, or the other end has not read for too long.
        """
        prefix = _PREFIX.pack(_MAGIC, self._num_sent, len(payload), self._digest(payload))
        header = prefix + self._digest(prefix)
        self._num_sent += 1
        if len(payload) <= _JOINED_SIZE:
            self.connection.sendall(header + payload)
        else:
            self.connection.sendall(header)
            self.connection.sendall(payload)

    def receive(self, on_silence: Callable[[], None] | None = None) -> bytes:
        """Wait for the next message.

        Args:
            on_silence: Called whenever nothing has arrived within the time set by :meth:`limit_waits`; an exception
                from it ends the wait.

        Raises:
            EOFError: The other end is gone.
            OSError: This end is closed.
            BrokenChannelError: The received bytes are not a message.
        """
        header = self._read(_HEADER_SIZE, on_silence)
        prefix, digest = header[: _PREFIX.size], header[_PREFIX.size :]
        _, number, length, payload_digest = _PREFIX.unpack(prefix)
        if not hmac.compare_digest(digest, self._digest(prefix)) or number != self._num_received:
            raise BrokenChannelError(f"its pipe carried bytes that are not a message: {header[:16]!r}")
        payload = self._read(length, on_silence)
        if not hmac.compare_digest(payload_digest, self._digest(payload)):
            raise BrokenChannelError("a message in its pipe was mixed with other bytes")
        self._num_received += 1
        return payload

    def limit_waits(self, receiving_s: int, sending_s: int) -> None:
        """Set time limits (not on Windows), after which ``receive`` calls ``on_silence`` and ``send`` raises."""
        if sys.platform != "win32":
            for option, seconds in ((socket.SO_RCVTIMEO, receiving_s), (socket.SO_SNDTIMEO, sending_s)):
                self.connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))

    def num_unread(self) -> int:
        """Count the sent bytes that the other end has not read yet; 0 if the system cannot report it."""
        try:
            import fcntl  # noqa: PLC0415  # not on Windows
            import termios  # noqa: PLC0415

            return int.from_bytes(fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except (ImportError, OSError):
            return 0

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def _read(self, size: int, on_silence: Callable[[], None] | None) -> bytes:
        data = bytearray()
        while len(data) < size:  # usually all of it arrives in one part
            try:
                part = self.connection.recv(min(size - len(data), 1 << 20))
            except OSError as error:
                if error.errno not in {errno.EAGAIN, errno.EWOULDBLOCK} or on_silence is None:
                    raise
                on_silence()
                continue
            if len(part) == size:
                return part
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=_DIGEST_SIZE, key=self._key).digest()


def make_pipe() -> tuple[socket.socket, socket.socket, bytes]:
    """Make two connected sockets, and the key for the channels over them."""
    ours, theirs = socket.socketpair()
    return ours, theirs, secrets.token_bytes(16)
