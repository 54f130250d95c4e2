"""The messages between a process pool and its worker processes.

A trial's state cannot leave the process in which it began, so a trial stays there: the pool sends actions, and the
process returns what is new in the conversation. The pool keeps a copy of each conversation.
"""

from __future__ import annotations

import io
import pickle
import signal
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

from agentsgym.errors import AgentError, EpisodeError
from agentsgym.rollouts.interfaces import PlayableTrial
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
