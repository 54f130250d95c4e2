"""Run environments in worker processes, each session in one of them."""

from __future__ import annotations

import hashlib
import pickle
import threading
from types import TracebackType
from typing import Any, Self

from agentsgym.errors import AgentError, ConfigError, EnvError, EpisodeError
from agentsgym.rollouts.interfaces import (
    Executor,
    Finished,
    Input,
    PlayableTrial,
    Raised,
    SchedulerPort,
    check_num_workers,
)
from agentsgym.rollouts.wire import (
    DeserializationFailure,
    Reply,
    RequestDelta,
    RequestMirror,
    StartTrial,
    TrialEnd,
    WireInput,
    WorkBatch,
    WorkItem,
    dump_trial,
    to_wire,
)
from agentsgym.rollouts.worker_handle import WorkerHandle
from agentsgym.types import Action

_MAX_REPLAYS = 3  # of one trial, after workers that died


class EnvProcessPool:
    """Advances trials in processes: for environments that compute, or that may hang or crash.

    A session lives in one process from its start to its end; the agent answers in this one. The environment is sent
    to each process at most once a run, and only if the process does not have it already, so it must be picklable; what
    its hooks change on it in a process stays there. A process that dies, or whose step is given up, is replaced,
    and the other sessions that lived in it are replayed from their recorded actions, which gives the same again because
    environments draw from their sessions' generators alone.

    Processes are spawned, not forked, so that they are safe beside threads and accelerators. As everywhere in
    Python, a script must start them below ``if __name__ == "__main__":``, for each process imports it, and
    an environment that is defined in a notebook cannot be found by them: put it into a module.

    The processes are started when they are first needed and end with :meth:`close` or the ``with`` block; used again
    after that, the pool starts new ones. One rollout uses it at a time.
    """

    def __init__(self, num_workers: int) -> None:
        """Set the number of processes; none is started.

        Args:
            num_workers: How many processes there are.

        Raises:
            ConfigError: ``num_workers`` is no positive int.
        """
        check_num_workers(num_workers)
        self.num_workers = num_workers
        self._workers: list[WorkerHandle] = []
        self._in_use = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes.

        Raises:
            ConfigError: A rollout uses them.
        """
        if self._in_use.locked():
            raise ConfigError("an EnvProcessPool cannot be closed while a rollout uses it")
        for worker in self._workers:
            worker.request_shutdown()
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def begin_run(self, port: SchedulerPort) -> Executor:
        """Make the executor of one run.

        Raises:
            ConfigError: The pool is in use.
        """
        if not self._in_use.acquire(blocking=False):
            raise ConfigError("an EnvProcessPool plays one rollout at a time, and this one is in use: make another")
        executor = _ProcessExecutor(self, port)
        try:
            while len(self._workers) < self.num_workers:
                self._workers.append(WorkerHandle(executor.on_message))
            for worker in [*self._workers]:
                worker.on_message = executor.on_message  # first, so that a death from now on is reported to it
                if worker.is_dead:
                    self.replace(worker, executor)
        except BaseException:
            self._in_use.release()
            raise
        return executor

    def workers(self) -> list[WorkerHandle]:
        """The processes."""
        return self._workers

    def replace(self, worker: WorkerHandle, executor: _ProcessExecutor) -> WorkerHandle:
        """Start a process in place of one that is dead."""
        worker.end()
        place = self._workers.index(worker)
        self._workers[place] = WorkerHandle(executor.on_message)
        return self._workers[place]

    def release(self) -> None:
        """End a run."""
        self._in_use.release()


class _RemoteTrial:
    """A trial that lives in a worker, as the pool sees it.

    Attributes:
        dumped: It, pickled.
        env_name: The environment that it needs.
        worker: Where it lives.
        inputs: What it was given, and has taken.
        in_flight: What it is given now; None at its start.
        is_stepping: Whether the scheduler waits for its next outcome.
        has_requested: Whether it has come to its first request.
        is_replaying: Whether it is played again in a new process.
        error: What it is to end with once it is replayed.
        end: Its result, where it ended while the scheduler did not wait for it.
        num_replays: How often it was started again.
    """

    def __init__(self, trial: PlayableTrial[Any], dumped: bytes, env_name: str, worker: WorkerHandle) -> None:
        self.trial = trial
        self.dumped = dumped
        self.env_name = env_name
        self.worker = worker
        self.mirror = RequestMirror(trial.session_id)
        self.agent_state: Any = None
        self.max_new_tokens: int | None = None
        self.inputs: list[WireInput] = []
        self.in_flight: WireInput | None = None
        self.is_stepping = True
        self.has_requested = self.is_replaying = False
        self.error: EpisodeError | None = None
        self.end: Finished | None = None
        self.num_replays = 0


class _ProcessExecutor:
    """One run's part of a pool."""

    def __init__(self, pool: EnvProcessPool, port: SchedulerPort) -> None:
        self._port = port
        self._pool = pool
        self._trials: dict[int, _RemoteTrial] = {}
        self._envs: dict[int, tuple[str, bytes]] = {}  # by identity: name and pickle

    # What the scheduler calls

    def advance(self, inputs: dict[int, Input]) -> None:
        """Hand each input to the process where its trial lives."""
        for index, given in inputs.items():
            if index in self._trials:
                self._go_on(self._trials[index], index, given)
            else:
                self._start(index)
        inputs.clear()
        for worker in self._pool.workers():
            self._flush(worker)

    def running(self) -> list[tuple[int, float]]:
        """The steps that run, at most one a process."""
        running = [worker.running for worker in self._pool.workers()]
        return [step for step in running if step is not None and step[0] in self._trials]

    def abandon(self, index: int, error: EpisodeError) -> None:
        """Kill the process if the step runs; its end is reported, and the trials that lived in it are replayed."""
        trial = self._trials[index]
        trial.error = error
        running = trial.worker.running
        if running is not None and running[0] == index:
            trial.worker.kill()

    def close(self) -> None:
        """Kill processes that still work, and let the others drop their trials."""
        used = {name for name, _ in self._envs.values()}
        for worker in self._pool.workers():
            worker.on_message = None
            worker.outbox.clear()
            worker.droppable_envs = worker.known_envs - used
            if worker.is_busy:
                worker.kill()
                worker.is_dead = True
            elif worker.trial_indices:
                worker.send(pickle.dumps(WorkBatch({}, set(), [])))
            worker.trial_indices.clear()
        self._pool.release()

    # What processes send

    def on_message(self, worker: WorkerHandle, message: bytes | None) -> None:
        """Post a message; called on the process's reader thread."""
        self._port.post(self._received, worker, message)

    def _received(self, worker: WorkerHandle, message: bytes | None) -> None:
        """Handle a message of a process; None is its end."""
        if worker not in self._pool.workers():
            return
        if message is None:
            self._died(worker)
        else:
            replies, is_last = pickle.loads(message)
            worker.is_busy = not is_last
            for reply in replies:
                self._handle(reply)
            self._flush(worker)

    def _handle(self, reply: Reply) -> None:
        if isinstance(reply, DeserializationFailure):
            raise ConfigError(
                f"what was sent to an EnvProcessPool's process cannot be read there: {reply.reason}; its classes must "
                "be defined in a module that can be imported, not in a notebook"
            )
        trial = self._trials[reply.trial_index]
        if isinstance(reply, RequestDelta):
            self._handle_request(trial, reply)
        else:
            self._handle_end(trial, reply)

    def _handle_request(self, remote: _RemoteTrial, delta: RequestDelta) -> None:
        mirror = remote.mirror
        before = (mirror.messages, mirror.token_ids, remote.max_new_tokens)
        request = mirror.request(delta, remote.agent_state)
        remote.max_new_tokens = delta.max_new_tokens
        if not remote.is_replaying:
            if remote.in_flight is not None:
                remote.inputs.append(remote.in_flight)
        elif remote.has_requested:
            remote.is_replaying = False
            if before != (mirror.messages, mirror.token_ids, remote.max_new_tokens):
                self._fail(remote, delta.trial_index, self._differs(remote))
            if not remote.is_stepping:
                return  # the agent has the request already
            if isinstance(remote.in_flight, EpisodeError) or (remote.in_flight is not None and remote.error is None):
                remote.worker.outbox.append((delta.trial_index, remote.in_flight))
                return
        remote.is_replaying = remote.is_stepping = False
        remote.has_requested, remote.in_flight = True, None
        self._port.stepped(delta.trial_index, request)

    def _handle_end(self, remote: _RemoteTrial, end: TrialEnd) -> None:
        outcome = end.outcome
        if remote.is_replaying and remote.has_requested:
            outcome = Finished(remote.trial.abandon(self._differs(remote)))
        elif isinstance(outcome, str):
            sentence = f"session {remote.mirror.session_id}: its result cannot be sent by its process: {outcome}"
            outcome = Finished(remote.trial.abandon(EnvError(sentence)))
        self._settle(remote, end.trial_index, outcome)

    def _settle(self, remote: _RemoteTrial, index: int, outcome: Finished | Raised) -> None:
        if remote.is_stepping or isinstance(outcome, Raised):
            self._forget(index)
            self._port.stepped(index, outcome)
        else:
            remote.end = outcome

    def _died(self, worker: WorkerHandle) -> None:
        """Replay its trials in a new process, but for the one that it died of."""
        new = self._pool.replace(worker, self)
        if not worker.is_ready and not worker.killed_by_signal:
            raise ConfigError(
                f"an EnvProcessPool's process ended ({worker.how_it_ended()}) before it began to work; what it "
                'wrote says why: a script must start its pool below `if __name__ == "__main__":`'
            )
        culprit = worker.running
        for index in sorted(worker.trial_indices):
            self._replay(index, new, worker.how_it_ended(), is_culprit=culprit is not None and culprit[0] == index)
        self._flush(new)

    def _replay(self, index: int, worker: WorkerHandle, ended: str, *, is_culprit: bool) -> None:
        remote = self._trials[index]
        had_failed = remote.is_replaying and (is_culprit or remote.error is not None)
        died = EnvError(
            f"session {remote.mirror.session_id}, turn {len(remote.inputs)}: its environment's process died ({ended})"
        )
        if is_culprit:
            self._fail(remote, index, died)
        remote.num_replays += 1
        remote.worker = worker
        worker.trial_indices.add(index)
        if had_failed or remote.num_replays > _MAX_REPLAYS or (remote.error is not None and not remote.has_requested):
            self._settle(remote, index, Finished(remote.trial.abandon(remote.error or died)))
        else:
            remote.is_replaying = True
            self._hand_over(remote, index)

    # Trials

    def _start(self, index: int) -> None:
        trial = self._port.trials[index]
        name, _ = self._env(trial.env)
        try:
            dumped = dump_trial(trial, name)
        except Exception as error:  # foreign values in the task
            raise _unpicklable(trial, error) from error
        worker = min(self._pool.workers(), key=lambda worker: len(worker.trial_indices))
        worker.trial_indices.add(index)
        self._trials[index] = _RemoteTrial(trial, dumped, name, worker)
        self._hand_over(self._trials[index], index)

    def _hand_over(self, remote: _RemoteTrial, index: int) -> None:
        remote.worker.outbox.append(StartTrial(index, remote.dumped, [*remote.inputs]))

    def _go_on(self, remote: _RemoteTrial, index: int, given: Input) -> None:
        if remote.end is not None:
            self._forget(index)
            self._port.stepped(index, remote.end)
            return
        if isinstance(given, Action):
            remote.agent_state = given.agent_state
        remote.in_flight, remote.is_stepping = to_wire(given, remote.mirror.session_id), True
        if not remote.is_replaying:
            remote.worker.outbox.append((index, remote.in_flight))

    def _fail(self, remote: _RemoteTrial, index: int, error: EpisodeError) -> None:
        remote.error = error
        self._port.fail_at_next_request(index, error)

    def _forget(self, index: int) -> None:
        self._trials.pop(index).worker.trial_indices.discard(index)

    def _differs(self, remote: _RemoteTrial) -> EnvError:
        return EnvError(
            f"session {remote.mirror.session_id}: its process died, and when it was played again from its "
            f"{len(remote.inputs)} recorded actions it came out differently; an environment must give the same for the "
            "same task, seed and actions"
        )

    # Messages

    def _flush(self, worker: WorkerHandle) -> None:
        if worker.is_busy or not worker.outbox:
            return
        items, worker.outbox = worker.outbox, []
        needed = {self._trials[item[0]].env_name for item in items}
        dropped = worker.droppable_envs - needed
        worker.known_envs -= dropped
        envs = {name: dumped for name, dumped in self._envs.values() if name in needed - worker.known_envs}
        worker.known_envs |= needed
        batch = WorkBatch(envs, dropped, items)
        worker.droppable_envs, worker.is_busy = set(), True
        try:
            message = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
        except Exception:  # noqa: BLE001  # foreign values: what an agent put into its action
            message = pickle.dumps(batch._replace(items=[*map(self._sendable, items)]), pickle.HIGHEST_PROTOCOL)
        worker.send(message)

    def _sendable(self, item: WorkItem) -> WorkItem:
        try:
            pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001  # as above
            remote = self._trials[item[0]]
            sentence = f"session {remote.mirror.session_id}: its action cannot be sent to its process: {error}"
            remote.in_flight = AgentError(sentence)
            return item[0], remote.in_flight
        return item

    def _env(self, env: Any) -> tuple[str, bytes]:
        known = self._envs.get(id(env))
        if known is None:
            try:
                dumped = pickle.dumps(env, pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # foreign code: an environment's attributes
                raise _unpicklable(env, error) from error
            known = self._envs[id(env)] = (hashlib.sha256(dumped).hexdigest(), dumped)
        return known


def _unpicklable(thing: Any, error: Exception) -> ConfigError:
    return ConfigError(
        "an EnvProcessPool sends environments and tasks to its processes, and "
        f"{type(thing).__name__} cannot be pickled: {error}"
    )
