"""Start, replace and end the processes of a pool, assign trials to them, and find those that cause deaths."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentsgym.errors import EnvError, EpisodeError
from agentsgym.interruptions import attempt
from agentsgym.rollouts.scheduler import Finished, PlayableTrial, Raised
from agentsgym.rollouts.workers.handle import WorkerHandle, resident_mb
from agentsgym.rollouts.workers.wire import RequestDelta, TrialEnd, WireInput
from agentsgym.texts import sentence_of
from agentsgym.types import Message, TurnRequest

_PROOFS_OF_A_KILL = 2  # deaths that count as proof, for signals that may also be external (e.g. out of memory)


class RemoteTrial:
    """A trial that lives in a worker.

    Attributes:
        index: Index of the trial in the run.
        trial: The trial.
        dumped: The pickled trial, with a name in place of its environment.
        env_name: The name of that environment.
        worker: The trial's process; None while it waits for one.
        agent_state: State to return to the agent.
        inputs: Inputs that the trial has processed.
        in_flight: The current input; None at the start.
        is_stepping: Whether the scheduler waits for the next outcome.
        has_requested: Whether the trial has reached its first request.
        is_replaying: Whether the trial is being replayed in a new process.
        error: Error that ends the trial after its replay.
        end: The result, if the trial ended while the scheduler did not wait for it.
        max_residents: Maximum number of trials in its process, including this one. It shrinks with every death that
            the trial may have caused.
        is_suspect: Whether it was being stepped when a process died: it then runs alone, in a fresh process, until it
            is past that turn.
        bystanders: Other trials of the process that died, which may be the cause if this one is cleared.
    """

    def __init__(self, index: int, trial: PlayableTrial[Any], dumped: bytes, env_name: str, max_residents: int) -> None:
        self.index = index
        self.trial = trial
        self.env_name = env_name
        self.worker: WorkerHandle | None = None
        self.agent_state: Any = None
        self.inputs: list[WireInput] = []
        self.in_flight: WireInput | None = None
        self.is_stepping = True
        self.has_requested = self.is_replaying = False
        self.error: EpisodeError | None = None
        self.end: Finished | None = None
        self.max_residents = max_residents
        self.is_suspect = False
        self.bystanders: list[RemoteTrial] = []
        self.dumped = dumped
        self._messages: list[Message] = []  # this and the next three are from the latest request
        self._token_ids: list[int] = []
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._max_new_tokens: int | None = None
        self._num_deaths_alone = 0  # at this turn

    def leave(self) -> None:
        """Remove the trial from its process."""
        if self.worker is not None:
            self.worker.residents.discard(self.index)
            self.worker = None

    def next_request(self, delta: RequestDelta) -> tuple[TurnRequest, bool]:
        """Apply a difference sent by a process; return the request, and whether a replay changed the last request.

        Extended lists remain the same objects.
        """
        before = (self._messages, self._token_ids, self._max_new_tokens)
        if delta.num_messages == 0:
            self._messages = []
        if delta.num_tokens == 0:
            self._token_ids = []
        self._messages += delta.messages
        self._token_ids += delta.token_ids
        self._max_new_tokens = delta.max_new_tokens
        self._tools = self._tools if delta.tools is None else delta.tools
        request = TurnRequest(
            session_id=self.trial.session_id,
            messages=self._messages,
            token_ids=self._token_ids,
            agent_state=self.agent_state if delta.has_state else None,
            max_new_tokens=delta.max_new_tokens,
            tools=self._tools,
        )
        return request, self.is_replaying and before != (self._messages, self._token_ids, self._max_new_tokens)

    def outcome(self, end: TrialEnd) -> Finished | Raised:
        """Unpickle the outcome of the trial."""
        if isinstance(end.outcome, str):
            return self.failed(f"its process could not send the result: {end.outcome}")
        outcome = attempt(pickle.loads, end.outcome)  # the objects that an environment put into its info
        if isinstance(outcome, BaseException):
            return self.failed(f"its result could not be unpickled: {type(outcome).__name__}: {sentence_of(outcome)}")
        return outcome

    def failed(self, sentence: str) -> Finished:
        """Make the result of a trial that cannot continue."""
        return Finished(self.trial.abandon(EnvError(f"session {self.trial.session_id}: {sentence}")))

    def replay_error(self) -> EnvError:
        """Make the error for a trial whose replay differs."""
        return EnvError(
            f"session {self.trial.session_id}: its process died, and replaying its {len(self.inputs)} recorded "
            "actions gave a different episode; an environment must be deterministic given task, seed and actions"
        )

    # Suspicion

    def clear_suspicion(self) -> None:
        """Clear the trial, which has progressed: another trial caused the death of their process."""
        self._num_deaths_alone = 0
        if self.is_suspect:
            self.is_suspect = False
            for one in (self, *self.bystanders):
                one.max_residents = max(1, one.max_residents // 2)
            self.bystanders = []

    def record_lone_death(self, worker: WorkerHandle) -> bool:
        """Count a death of a process in which the trial was alone; return whether it is proven to be the cause."""
        self._num_deaths_alone += 1
        return self._num_deaths_alone >= (_PROOFS_OF_A_KILL if worker.may_have_external_cause else 1)


def place(
    waiting: list[RemoteTrial], workers: Sequence[WorkerHandle], trials: Mapping[int, RemoteTrial]
) -> Iterator[tuple[RemoteTrial, WorkerHandle]]:
    """Assign a worker with room to each waiting trial, if there is one; the caller of this iterator starts the trial.

    The number of trials in a process is limited by the ``max_residents`` of each. Suspects come first, each in an empty
    process; if there is none, the process with the fewest trials is reserved for the suspect and gets no others.

    Args:
        waiting: The trials that wait for a worker; afterwards, the trials that still wait.
        workers: The processes.
        trials: All live trials of the run by index.
    """
    waiting.sort(key=lambda trial: 0 if trial.is_suspect else trial.max_residents)
    candidates = [worker for worker in workers if not (worker.is_draining or worker.is_killed or worker.is_dead)]
    still_waiting: list[RemoteTrial] = []
    for trial in waiting:
        candidates.sort(key=lambda worker: len(worker.residents))
        worker = next((one for one in candidates if len(one.residents) < _room(one, trial, trials)), None)
        if worker is None:
            still_waiting.append(trial)
        else:
            yield trial, worker
        if worker is None or trial.is_suspect:
            del candidates[:1]  # the one with the fewest trials is reserved for this trial, or occupied by it alone
    waiting[:] = still_waiting


def _room(worker: WorkerHandle, trial: RemoteTrial, trials: Mapping[int, RemoteTrial]) -> int:
    """The maximum number of trials in a process, including this one."""
    everyone = [trial, *(trials[index] for index in worker.residents)]
    return min(1 if one.is_suspect else one.max_residents for one in everyone)


OnMessage = Callable[[WorkerHandle, bytes | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """The limits of a pool's processes; None for no limit.

    Attributes:
        max_sessions: Maximum number of concurrent sessions in a process.
        max_memory_mb: Maximum memory of a process in megabytes.
        recycle_after_episodes: Number of finished sessions after which a process is replaced.
        recycle_above_mb: Memory in megabytes above which a process is replaced once it has no sessions left.
    """

    max_sessions: int | None = None
    max_memory_mb: float | None = None
    recycle_after_episodes: int | None = None
    recycle_above_mb: float | None = None

    def is_worn(self, worker: WorkerHandle) -> bool:
        """Whether a process should be replaced, now that one of its sessions is over."""
        if self.recycle_after_episodes is not None and worker.num_ended >= self.recycle_after_episodes:
            return True
        if self.recycle_above_mb is None:
            return False
        return (resident_mb(worker.process.pid) or 0.0) > self.recycle_above_mb


class WorkerSet:
    """The processes of a pool.

    Attributes:
        size: Number of workers.
        handles: The current workers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.handles: list[WorkerHandle] = []

    def start(self, on_message: OnMessage) -> None:
        """Start missing processes, and replace those that are dead or draining."""
        while len(self.handles) < self.size:
            self.handles.append(WorkerHandle(on_message))
        for worker in [*self.handles]:
            worker.on_message = on_message  # set first, so that a later death is reported
            if worker.is_dead or worker.is_draining:
                self.replace(worker, on_message)

    def replace(self, worker: WorkerHandle, on_message: OnMessage) -> WorkerHandle:
        """Replace a process that is dead, or idle and no longer needed, with a new one."""
        worker.on_message = None
        worker.request_shutdown()
        index = self.handles.index(worker)
        self.handles[index] = WorkerHandle(on_message)
        return self.handles[index]

    def request_shutdown(self) -> None:
        """Request the shutdown of all processes, without waiting for it."""
        for worker in self.handles:
            worker.on_message = None
            worker.request_shutdown()

    def close(self) -> None:
        """End all processes."""
        self.request_shutdown()
        for worker in self.handles:
            worker.end()
        self.handles.clear()
