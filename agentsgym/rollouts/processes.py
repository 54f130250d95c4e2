"""Processes in which environments are advanced, each session in one of them."""

from __future__ import annotations

import hashlib
import pickle
import threading
from types import TracebackType
from typing import Any, Self

from agentsgym.errors import AgentFault, ConfigError, EnvironmentFault, EpisodeFault
from agentsgym.rollouts.pools import check_num_workers
from agentsgym.rollouts.scheduler import Desk, Episode, Finished, Move, Raised, Stage
from agentsgym.rollouts.worker_process import Worker
from agentsgym.rollouts.workers import (
    Batch,
    End,
    Mirror,
    News,
    Reply,
    Start,
    Unusable,
    WireMove,
    dump_episode,
)
from agentsgym.types import Action

_MAX_REPLAYS = 3  # of one session, in the place of workers that died


class ProcessPool:
    """Advances episodes in processes: for environments that compute, or that may hang or crash.

    A session lives in one process from its start to its end; the agent answers in this one. The environment is sent
    to each process once a run at most, and only if it is not what the process has already, so it must be picklable;
    what its hooks change on it in a process stays there. A process that dies, or whose step is given up, is replaced,
    and the other sessions that lived in it are played again from their recorded actions, which gives what it gave
    before because environments draw from their sessions' generators alone.

    Processes are started afresh, not forked, so that they are safe beside threads and accelerators. As everywhere in
    Python, a script that starts some must do so below ``if __name__ == "__main__":``, for each process imports it, and
    an environment that is defined in a notebook cannot be found by them: put it into a module.

    The processes are started when they are first needed and end with :meth:`close` or the ``with`` block; used again
    after that, the pool starts new ones. One rollout uses it at a time.
    """

    def __init__(self, num_workers: int) -> None:
        """Set the size.

        Args:
            num_workers: How many processes there are.

        Raises:
            ConfigError: It is no positive int.
        """
        check_num_workers(num_workers)
        self.num_workers = num_workers
        self._workers: list[Worker] = []
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
            raise ConfigError("a ProcessPool cannot be closed while a rollout uses it")
        for worker in self._workers:
            worker.say_goodbye()
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def stage(self, desk: Desk) -> Stage:
        """Begin a run.

        Raises:
            ConfigError: The pool is in use.
        """
        if not self._in_use.acquire(blocking=False):
            raise ConfigError("a ProcessPool plays one rollout at a time, and this one is in use: make another")
        stage = _ProcessStage(self, desk)
        try:
            while len(self._workers) < self.num_workers:
                self._workers.append(Worker(stage.heard))
            for worker in [*self._workers]:
                worker.hears = stage.heard  # before asking whether it is dead: it says so to the stage that it finds
                if worker.is_dead:
                    self.replace(worker, stage)
        except BaseException:
            self._in_use.release()
            raise
        return stage

    def workers(self) -> list[Worker]:
        """The processes."""
        return self._workers

    def replace(self, worker: Worker, stage: _ProcessStage) -> Worker:
        """Start a process in the place of one that is dead."""
        worker.end()
        place = self._workers.index(worker)
        self._workers[place] = Worker(stage.heard)
        return self._workers[place]

    def release(self) -> None:
        """End a run."""
        self._in_use.release()


class _Session:
    """What the pool knows of an episode.

    Attributes:
        dumped: It, pickled.
        env_name: The environment that it needs.
        worker: Where it lives.
        moves: What it was given, and has taken.
        in_flight: What it is given now; None at its start.
        is_stepping: Whether an answer is waited for.
        was_asked: Whether it has come to its first request.
        is_replaying: Whether it is played again.
        fault: What it is to end with once it is replayed.
        end: Its result, where it ended while nobody waited for that.
        num_replays: How often it was begun again.
    """

    def __init__(self, episode: Episode[Any], dumped: bytes, env_name: str, worker: Worker) -> None:
        self.episode = episode
        self.dumped = dumped
        self.env_name = env_name
        self.worker = worker
        self.mirror = Mirror(episode.session_id)
        self.agent_state: Any = None
        self.max_new_tokens: int | None = None
        self.moves: list[WireMove] = []
        self.in_flight: WireMove | None = None
        self.is_stepping = True
        self.was_asked = self.is_replaying = False
        self.fault: EpisodeFault | None = None
        self.end: Finished | None = None
        self.num_replays = 0


class _ProcessStage:
    """One run's part of a pool."""

    def __init__(self, pool: ProcessPool, desk: Desk) -> None:
        self.desk = desk
        self._pool = pool
        self._sessions: dict[int, _Session] = {}
        self._envs: dict[int, tuple[str, bytes]] = {}  # by identity: name and pickle

    # What the scheduler calls

    def advance(self, moves: dict[int, Move]) -> None:
        """Hand each move to the process where its session lives."""
        for index, move in moves.items():
            if index in self._sessions:
                self._go_on(self._sessions[index], index, move)
            else:
                self._start(index)
        moves.clear()
        for worker in self._pool.workers():
            self._flush(worker)

    def running(self) -> list[tuple[int, float]]:
        """One step a process at most."""
        running = [worker.running for worker in self._pool.workers()]
        return [step for step in running if step is not None and step[0] in self._sessions]

    def abandon(self, index: int, fault: EpisodeFault) -> None:
        """Kill the process if the step runs; its end is heard of, and what lived in it begins again elsewhere."""
        session = self._sessions[index]
        session.fault = fault
        running = session.worker.running
        if running is not None and running[0] == index:
            session.worker.kill()

    def close(self) -> None:
        """Kill processes that still work, and let the others forget what they have."""
        used = {name for name, _ in self._envs.values()}
        for worker in self._pool.workers():
            worker.hears = None
            worker.outbox.clear()
            worker.forgotten = worker.known - used
            if worker.is_busy:
                worker.kill()
                worker.is_dead = True
            elif worker.indices:
                worker.send(pickle.dumps(Batch({}, set(), [])))
            worker.indices.clear()
        self._pool.release()

    # What processes say

    def heard(self, worker: Worker, message: bytes | None) -> None:
        """Post a message; called on the process's reader thread."""
        self.desk.post(self._received, worker, message)

    def _received(self, worker: Worker, message: bytes | None) -> None:
        """Take a message of a process; None is its end."""
        if worker not in self._pool.workers():
            return
        if message is None:
            self._died(worker)
        else:
            replies, is_last = pickle.loads(message)
            worker.is_busy = not is_last
            for reply in replies:
                self._take(reply)
            self._flush(worker)

    def _take(self, reply: Reply) -> None:
        if isinstance(reply, Unusable):
            raise ConfigError(
                f"what was sent to a ProcessPool's process cannot be read there: {reply.reason}; its classes must be "
                "defined in a module that can be imported, not in a notebook"
            )
        session = self._sessions[reply.place]
        if isinstance(reply, News):
            self._ask(session, reply)
        else:
            self._over(session, reply)

    def _ask(self, session: _Session, news: News) -> None:
        mirror = session.mirror
        before = (mirror.messages, mirror.token_ids, session.max_new_tokens)
        request = mirror.request(news, session.agent_state)
        session.max_new_tokens = news.max_new_tokens
        if not session.is_replaying:
            if session.in_flight is not None:
                session.moves.append(session.in_flight)
        elif session.was_asked:
            session.is_replaying = False
            if before != (mirror.messages, mirror.token_ids, session.max_new_tokens):
                self._doom(session, news.place, self._differs(session))
            if not session.is_stepping:
                return  # the agent is asked already
            if isinstance(session.in_flight, EpisodeFault) or (session.in_flight is not None and session.fault is None):
                session.worker.outbox.append((news.place, session.in_flight))
                return
        session.is_replaying = session.is_stepping = False
        session.was_asked, session.in_flight = True, None
        self.desk.stepped(news.place, request)

    def _over(self, session: _Session, end: End) -> None:
        outcome = end.outcome
        if session.is_replaying and session.was_asked:
            outcome = Finished(session.episode.abandon(self._differs(session)))
        elif isinstance(outcome, str):
            sentence = f"session {session.mirror.session_id}: its result cannot be sent by its process: {outcome}"
            outcome = Finished(session.episode.abandon(EnvironmentFault(sentence)))
        self._settle(session, end.place, outcome)

    def _settle(self, session: _Session, index: int, outcome: Finished | Raised) -> None:
        if session.is_stepping or isinstance(outcome, Raised):
            self._forget(index)
            self.desk.stepped(index, outcome)
        else:
            session.end = outcome

    def _died(self, worker: Worker) -> None:
        """Begin its sessions again in a new process, but for the one that it died of."""
        new = self._pool.replace(worker, self)
        if not worker.is_ready and not worker.was_shot:
            raise ConfigError(
                f"a ProcessPool's process ended ({worker.how_it_ended()}) before it began to work; what it "
                'wrote says why: a script must start its pool below `if __name__ == "__main__":`'
            )
        culprit = worker.running
        for index in sorted(worker.indices):
            self._begin_again(index, new, worker.how_it_ended(), is_culprit=culprit is not None and culprit[0] == index)
        self._flush(new)

    def _begin_again(self, index: int, worker: Worker, ended: str, *, is_culprit: bool) -> None:
        session = self._sessions[index]
        was_doomed = session.is_replaying and (is_culprit or session.fault is not None)
        died = EnvironmentFault(
            f"session {session.mirror.session_id}, turn {len(session.moves)}: its environment's process died ({ended})"
        )
        if is_culprit:
            self._doom(session, index, died)
        session.num_replays += 1
        session.worker = worker
        worker.indices.add(index)
        if was_doomed or session.num_replays > _MAX_REPLAYS or (session.fault is not None and not session.was_asked):
            self._settle(session, index, Finished(session.episode.abandon(session.fault or died)))
        else:
            session.is_replaying = True
            self._hand_over(session, index)

    # Sessions

    def _start(self, index: int) -> None:
        episode = self.desk.episodes[index]
        name, _ = self._env(episode.env)
        try:
            dumped = dump_episode(episode, episode.env, name)
        except Exception as error:  # foreign values in the task
            raise _unpicklable(episode, error) from error
        worker = min(self._pool.workers(), key=lambda worker: len(worker.indices))
        worker.indices.add(index)
        self._sessions[index] = _Session(episode, dumped, name, worker)
        self._hand_over(self._sessions[index], index)

    def _hand_over(self, session: _Session, index: int) -> None:
        session.worker.outbox.append(Start(index, session.dumped, [*session.moves]))

    def _go_on(self, session: _Session, index: int, move: Move) -> None:
        if session.end is not None:
            self._forget(index)
            self.desk.stepped(index, session.end)
            return
        if isinstance(move, Action):
            session.agent_state = move.agent_state
        session.in_flight, session.is_stepping = _wire(move, session.mirror.session_id), True
        if not session.is_replaying:
            session.worker.outbox.append((index, session.in_flight))

    def _doom(self, session: _Session, index: int, fault: EpisodeFault) -> None:
        session.fault = fault
        self.desk.condemn(index, fault)

    def _forget(self, index: int) -> None:
        self._sessions.pop(index).worker.indices.discard(index)

    def _differs(self, session: _Session) -> EnvironmentFault:
        return EnvironmentFault(
            f"session {session.mirror.session_id}: the process that it lived in died, and played again from its "
            f"{len(session.moves)} recorded actions it is not what it was; an environment must give the same for the "
            "same task, seed and actions"
        )

    # Messages

    def _flush(self, worker: Worker) -> None:
        if worker.is_busy or not worker.outbox:
            return
        items, worker.outbox = worker.outbox, []
        needed = {self._sessions[item[0]].env_name for item in items}
        forgotten = worker.forgotten - needed
        worker.known -= forgotten
        shared = {name: dumped for name, dumped in self._envs.values() if name in needed - worker.known}
        worker.known |= needed
        batch = Batch(shared, forgotten, items)
        worker.forgotten, worker.is_busy = set(), True
        try:
            message = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
        except Exception:  # noqa: BLE001  # foreign values: what an agent put into its action
            message = pickle.dumps(batch._replace(items=[*map(self._sendable, items)]), pickle.HIGHEST_PROTOCOL)
        worker.send(message)

    def _sendable(self, item: Start | tuple[int, WireMove]) -> Start | tuple[int, WireMove]:
        try:
            pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001  # as above
            session = self._sessions[item[0]]
            sentence = f"session {session.mirror.session_id}: its action cannot be sent to its process: {error}"
            session.in_flight = AgentFault(sentence)
            return item[0], session.in_flight
        return item

    def _env(self, env: Any) -> tuple[str, bytes]:
        known = self._envs.get(id(env))
        if known is None:
            try:
                dumped = pickle.dumps(env, pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # foreign code: a game's attributes
                raise _unpicklable(env, error) from error
            known = self._envs[id(env)] = (hashlib.sha256(dumped).hexdigest(), dumped)
        return known


def _wire(move: Any, session_id: str) -> WireMove:
    if isinstance(move, Action):
        return move.text, move.token_ids, move.logprobs, move.finish_reason
    if isinstance(move, EpisodeFault):
        return move
    return AgentFault(f"session {session_id}: an agent must answer with an Action, got {move!r}")


def _unpicklable(thing: Any, error: Exception) -> ConfigError:
    return ConfigError(
        f"a ProcessPool sends environments and tasks to its processes, and {type(thing).__name__} cannot be pickled: "
        f"{error}"
    )
