"""Run trials in the processes of a pool."""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections.abc import Callable
from typing import Any

from agentsgym.errors import AgentError, AgentsGymError, ConfigError, EnvError, EpisodeError
from agentsgym.interruptions import attempt
from agentsgym.rollouts.scheduler import Executor, Finished, Input, Raised, Scheduler
from agentsgym.rollouts.worker_set import RemoteTrial, WorkerLimits, WorkerSet, place
from agentsgym.rollouts.workers.handle import WorkerHandle, resident_mb
from agentsgym.rollouts.workers.wire import (
    CLOSED,
    LOADED,
    DeserializationFailure,
    Reply,
    RequestDelta,
    StartTrial,
    WorkBatch,
    WorkItem,
    dump_trial,
    load_replies,
    to_wire,
)
from agentsgym.texts import sentence_of
from agentsgym.types import Action

_MEASURE_EVERY_S = 0.1
_MAX_FAILED_STARTS = 3  # consecutive, per process
_MAX_DEATHS_WITHOUT_PROGRESS = 8  # per live trial; fewer would prove that every trial is a cause
_HINT = (
    "with an EnvProcessPool, the values of a task must be picklable and their classes defined in a module: put only "
    "the names of other objects in the task, and create the objects in _initialize_episode"
)


class ProcessExecutor(Executor):
    """The executor of one run in a process pool."""

    def __init__(
        self, workers: WorkerSet, limits: WorkerLimits, scheduler: Scheduler[Any], on_close: Callable[[], None]
    ) -> None:
        self._workers = workers
        self._limits = limits
        self._scheduler = scheduler
        self._on_close = on_close
        num_trials = scheduler.num_trials
        self._max_sessions = min(limits.max_sessions or num_trials, max(1, num_trials))
        self.max_live: int | None = self._max_sessions * workers.size
        self._trials: dict[int, RemoteTrial] = {}
        self._waiting: list[RemoteTrial] = []  # for a worker
        self._envs: dict[int, tuple[str, bytes]] = {}  # by identity: name and pickle
        self._num_failed_starts = self._num_deaths_without_progress = 0
        self._is_any_draining = False
        self._over = threading.Event()
        if limits.max_memory_mb is not None:
            threading.Thread(target=self._measure, name="agentsgym-process-memory", daemon=True).start()

    # Methods called by the scheduler

    def advance(self, inputs: dict[int, Input]) -> None:
        """Queue each input for the process of its trial."""
        self._scheduler.expect(inputs)
        for index, given in inputs.items():
            remote = self._trials.get(index)
            if remote is None:
                self._add(index)
            elif remote.end is not None:
                self._forget(remote)
                self._scheduler.on_outcome(index, remote.end)
            else:
                if isinstance(given, Action):
                    remote.agent_state = given.agent_state
                remote.in_flight, remote.is_stepping = to_wire(given, remote.trial.session_id), True
                if remote.worker is not None and not remote.is_replaying:
                    remote.worker.outbox.append((index, remote.in_flight))
        inputs.clear()
        self._place_trials()

    def running(self) -> list[tuple[int, float]]:
        """The trials whose steps are running, at most one per process, and since when."""
        running = [(worker, worker.running) for worker in self._workers.handles]
        return [step for worker, step in running if step is not None and step[0] in worker.residents]

    def abandon(self, index: int, error: EpisodeError) -> None:
        """Kill the process if the step is running in it; its trials are replayed once its end is reported."""
        remote = self._trials[index]
        remote.error = error
        running = None if remote.worker is None else remote.worker.running
        if remote.worker is not None and running is not None and running[0] == index:
            remote.worker.kill()
        elif remote.worker is None and not remote.has_requested:
            self._settle(remote, Finished(remote.trial.abandon(error)))

    def close(self) -> None:
        """Kill processes that are still busy, and make the others close their trials."""
        self._over.set()
        used = {name for name, _ in self._envs.values()}
        for worker in self._workers.handles:
            worker.on_message = None
            worker.outbox.clear()
            worker.droppable_envs = worker.known_envs - used
            if worker.is_busy and not worker.is_closing:
                worker.kill()
                worker.is_dead = True
            elif worker.residents and not worker.is_closing:
                worker.close_trials()
            worker.residents.clear()
        self._on_close()

    # Messages from processes

    def on_message(self, worker: WorkerHandle, message: bytes | None) -> None:
        """Post a message; called on the process's reader thread."""
        self._scheduler.post(self._received, worker, message)

    def _received(self, worker: WorkerHandle, message: bytes | None) -> None:
        """Handle a message from a process; None means that the process ended."""
        if worker not in self._workers.handles:
            return
        if message is None:
            self._died(worker)
        elif message == LOADED:
            for index in worker.residents:
                self._scheduler.start_clock(index)
        elif message != CLOSED and not worker.is_killed:  # otherwise its trials are replayed
            self._read(worker, message)
        self._place_trials()

    def _read(self, worker: WorkerHandle, message: bytes) -> None:
        loaded = attempt(load_replies, message)  # the objects that an environment put into its messages
        if isinstance(loaded, BaseException):
            worker.kill(f"it sent a message that cannot be unpickled: {type(loaded).__name__}: {sentence_of(loaded)}")
            return
        replies, is_last = loaded
        worker.is_busy = not is_last
        for reply in replies:
            self._handle(worker, reply)

    def _handle(self, worker: WorkerHandle, reply: Reply) -> None:
        if isinstance(reply, DeserializationFailure) and reply.trial_index is None:
            raise ConfigError(
                f"a process of an EnvProcessPool could not unpickle an environment: {reply.reason}; its classes must "
                "be defined in a module that can be imported, not in a notebook"
            )
        remote = None if reply.trial_index is None else self._trials.get(reply.trial_index)
        if remote is None or remote.worker is not worker:
            worker.kill("it replied for a session that is not in it")
        elif isinstance(reply, RequestDelta):
            self._handle_request(remote, worker, reply)
        elif isinstance(reply, DeserializationFailure):
            self._settle(remote, remote.failed(f"its process could not unpickle the task: {reply.reason}; {_HINT}"))
        else:
            worker.num_ended += 1
            worker.is_draining = worker.is_draining or self._limits.is_worn(worker)
            self._is_any_draining = self._is_any_draining or worker.is_draining
            had_requested = remote.is_replaying and remote.has_requested
            outcome = Finished(remote.trial.abandon(remote.replay_error())) if had_requested else remote.outcome(reply)
            self._settle(remote, outcome)

    def _handle_request(self, remote: RemoteTrial, worker: WorkerHandle, delta: RequestDelta) -> None:
        request, is_different = remote.next_request(delta)
        if not (remote.is_replaying and remote.has_requested):
            self._note_progress(remote)
            if not remote.is_replaying and remote.in_flight is not None:
                remote.inputs.append(remote.in_flight)
        else:
            remote.is_replaying = False
            if is_different:
                self._fail(remote, remote.replay_error())
            if not remote.is_stepping:
                return  # the agent already has the request
            if isinstance(remote.in_flight, EpisodeError) or (remote.in_flight is not None and remote.error is None):
                worker.outbox.append((remote.index, remote.in_flight))
                return
        remote.is_replaying = remote.is_stepping = False
        remote.has_requested, remote.in_flight = True, None
        self._scheduler.on_outcome(remote.index, request)

    def _settle(self, remote: RemoteTrial, outcome: Finished | Raised) -> None:
        self._note_progress(remote)
        remote.leave()
        if remote.is_stepping or isinstance(outcome, Raised):
            self._forget(remote)
            self._scheduler.on_outcome(remote.index, outcome)
        else:
            remote.end = outcome

    def _note_progress(self, remote: RemoteTrial) -> None:
        self._num_deaths_without_progress = 0
        remote.clear_suspicion()

    # Dead processes

    def _died(self, worker: WorkerHandle) -> None:
        """Replace a dead process and replay its trials, except one that is known to be the cause."""
        residents = [self._trials[index] for index in sorted(worker.residents)]
        culprit = next((one for one in residents if one.index == worker.stepped), None)
        suspect = culprit or (residents[0] if len(residents) == 1 else None)
        self._workers.replace(worker, self.on_message)
        self._num_failed_starts = 0 if worker.is_ready else self._num_failed_starts + 1
        self._num_deaths_without_progress += 1
        if not worker.is_ready and not worker.killed_by_signal:
            raise ConfigError(
                f"an EnvProcessPool's process ended ({worker.how_it_ended()}) before it was ready; its "
                'output shows why (often the script creates the pool outside `if __name__ == "__main__":`)'
            )
        num_failed, num_deaths = self._num_failed_starts, self._num_deaths_without_progress
        num_allowed = _MAX_DEATHS_WITHOUT_PROGRESS * (len(self._trials) + self._workers.size)
        if num_failed > _MAX_FAILED_STARTS * self._workers.size or num_deaths > num_allowed:
            raise AgentsGymError(  # processes die without progress in any session, so no session is at fault
                f"the last {max(num_failed, num_deaths)} processes of an EnvProcessPool ended one after another "
                f"({worker.how_it_ended()}) without progress in any session: check that there is enough memory for "
                f"num_workers = {self._workers.size} of them, and that nothing else kills them"
            )
        if worker.is_ready:
            self._judge(worker, residents, suspect)
        for remote in residents:
            remote.leave()
            cannot_fail_later = not remote.has_requested or (
                remote is suspect and (remote.is_replaying or isinstance(remote.in_flight, EpisodeError))
            )
            if remote.error is not None and cannot_fail_later:
                self._settle(remote, Finished(remote.trial.abandon(remote.error)))
            else:
                remote.is_replaying = True
                self._waiting.append(remote)

    def _judge(self, worker: WorkerHandle, residents: list[RemoteTrial], suspect: RemoteTrial | None) -> None:
        """Decide which trials of a process may have caused its death."""
        alone = residents[0] if len(residents) == 1 else None
        if worker.is_closing:
            pass  # it was still closing trials of the previous run
        elif suspect is None:
            for remote in residents:
                remote.max_residents = max(1, remote.max_residents // 2)
        elif suspect.error is not None:
            pass  # its process was killed because of a timeout, or it is already known to be the cause
        elif alone is not None and len(worker.hosted) == 1 and alone.record_lone_death(worker):
            where = f"session {alone.trial.session_id}, turn {len(alone.inputs)}"
            self._fail(alone, EnvError(f"{where}: its environment's process died ({worker.how_it_ended()})"))
        else:
            suspect.is_suspect = True  # it runs alone next
            suspect.bystanders += [one for one in residents if one is not suspect]

    def _measure(self) -> None:
        """Monitor the memory of the processes, in a separate thread."""
        limit = self._limits.max_memory_mb or 0.0
        while not self._over.wait(_MEASURE_EVERY_S):
            for worker in [*self._workers.handles]:
                used_mb = resident_mb(worker.process.pid)
                if used_mb is not None and used_mb > limit and worker.is_ready and not worker.is_killed:
                    self._scheduler.post(self._kill_for_memory, worker, used_mb)

    def _kill_for_memory(self, worker: WorkerHandle, used_mb: float) -> None:
        limit = self._limits.max_memory_mb or 0.0
        if (worker.fresh_mb or 0.0) > limit:
            raise ConfigError(
                f"max_memory_mb must be larger than the memory of a new process ({worker.fresh_mb:.0f} MB), got {limit}"
            )
        worker.kill(f"it used {used_mb:.0f} MB, more than max_memory_mb = {limit}", immediately=True)

    # Trials

    def _add(self, index: int) -> None:
        trial = self._scheduler.trials[index]
        known = self._envs.get(id(trial.env))
        if known is None:
            dumped = attempt(pickle.dumps, trial.env, pickle.HIGHEST_PROTOCOL)
            if isinstance(dumped, BaseException):
                raise ConfigError(
                    f"an EnvProcessPool sends environments to its processes, but {type(trial.env).__name__} cannot be "
                    f"pickled: {sentence_of(dumped)}"
                ) from dumped
            known = self._envs[id(trial.env)] = (hashlib.sha256(dumped).hexdigest(), dumped)
        name, _ = known
        dumped = attempt(dump_trial, trial, name)
        if isinstance(dumped, BaseException):
            sentence = (
                f"session {trial.session_id}: its task could not be sent to its process: {type(dumped).__name__}: "
                f"{sentence_of(dumped)}; {_HINT}"
            )
            self._scheduler.on_outcome(index, Finished(trial.abandon(EnvError(sentence))))
            return
        remote = self._trials[index] = RemoteTrial(index, trial, dumped, name, self._max_sessions)
        self._waiting.append(remote)

    def _place_trials(self) -> None:
        """Assign waiting trials to processes with room, and send each process its work."""
        if self._waiting or self._is_any_draining:
            self._assign_workers()
        for worker in self._workers.handles:
            if worker.is_busy or worker.is_killed or not worker.outbox:
                continue
            items, worker.outbox = worker.outbox, []
            needed = {self._trials[item[0]].env_name for item in items}
            dropped = worker.droppable_envs - needed
            worker.known_envs -= dropped
            envs = {name: dumped for name, dumped in self._envs.values() if name in needed - worker.known_envs}
            worker.known_envs |= needed
            worker.droppable_envs, worker.is_busy, worker.is_loading = set(), True, bool(envs)
            batch = WorkBatch(envs, dropped, items)
            message = attempt(pickle.dumps, batch, pickle.HIGHEST_PROTOCOL)
            if isinstance(message, BaseException):  # because of a value that an agent put into its action
                message = pickle.dumps(batch._replace(items=[*map(self._sendable, items)]), pickle.HIGHEST_PROTOCOL)
            worker.send(message)

    def _assign_workers(self) -> None:
        for worker in [*self._workers.handles]:
            if worker.is_draining and not (worker.residents or worker.is_busy or worker.is_killed):
                self._workers.replace(worker, self.on_message)
        for remote, found in place(self._waiting, self._workers.handles, self._trials):
            must_be_new = remote.is_suspect and bool(found.hosted)
            worker = self._workers.replace(found, self.on_message) if must_be_new else found
            remote.worker = worker
            worker.residents.add(remote.index)
            worker.host(remote.trial.session_id)
            if remote.has_requested or (remote.env_name in worker.known_envs and not worker.is_loading):
                self._scheduler.start_clock(remote.index)
            else:
                self._scheduler.stop_clock(remote.index)
            worker.outbox.append(StartTrial(remote.index, remote.dumped, [*remote.inputs]))
            if remote.is_stepping:
                self._scheduler.resume(remote.index)
        for remote in self._waiting:
            self._scheduler.postpone(remote.index)
        self._is_any_draining = any(worker.is_draining for worker in self._workers.handles)

    def _fail(self, remote: RemoteTrial, error: EpisodeError) -> None:
        remote.error = error
        self._scheduler.fail_at_next_request(remote.index, error)

    def _forget(self, remote: RemoteTrial) -> None:
        remote.leave()
        del self._trials[remote.index]
        if remote in self._waiting:
            self._waiting.remove(remote)

    def _sendable(self, item: WorkItem) -> WorkItem:
        dumped = attempt(pickle.dumps, item, pickle.HIGHEST_PROTOCOL)
        if not isinstance(dumped, BaseException):
            return item
        remote = self._trials[item[0]]
        sentence = f"its action could not be sent to its process: {sentence_of(dumped)}"
        remote.in_flight = AgentError(f"session {remote.trial.session_id}: {sentence}")
        return item[0], remote.in_flight
