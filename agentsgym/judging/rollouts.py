"""Judge the rollouts of a run in threads, while other episodes still play.

::

    expect(trials) ─▶ how many rollouts each task group has
    add(rollout) ─▶ judges of turns and of the episode, at once ─▶ judges of the group, with its last rollout ─▶ emit
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

from agentsgym.errors import ConfigError, EpisodeError
from agentsgym.failures import describe
from agentsgym.judging.calls import Run, StoppedError
from agentsgym.judging.judge import Judge, Judgment, judges_of
from agentsgym.judging.scores import with_judgments
from agentsgym.rollouts.agent_calls import finish_agent
from agentsgym.types import StopReason, Trajectory

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.25  # between two calls of ``interrupt`` while judges are waited for

TokenRewards = Callable[[Any, Trajectory], list[float]]
"""(environment, rollout) → per-token rewards, (T,)."""


class JudgedTrial(Protocol):
    """What the judges need to know of a trial."""

    session_id: str
    task_index: int
    env: Any


@dataclass(slots=True, eq=False, kw_only=True)
class _Member:
    """A rollout that is being judged."""

    env: Any
    trajectory: Trajectory
    may_retry: bool
    num_open: int = 0
    judgments: dict[int, Judgment] = field(default_factory=dict[int, Judgment])
    error: EpisodeError | None = None


class Judging:
    """Judges rollouts as they finish.

    All methods may be called from any thread. ``emit`` is called with every rollout, judged or failed, in the thread of
    a judge or in the one that called :meth:`add`, and without a lock, so that it may take its own.
    """

    def __init__(self, emit: Callable[[Trajectory, bool], None], token_rewards: TokenRewards) -> None:
        """Set up without any thread.

        Args:
            emit: Receives each rollout when it is judged, and whether it may be played again if it failed.
            token_rewards: Computes the per-token rewards of a rollout whose rewards have changed.
        """
        self._emit, self._token_rewards = emit, token_rewards
        self._sizes: Counter[tuple[int, int]] = Counter()  # by group, the rollouts that it waits for
        self._groups: dict[tuple[int, int], list[_Member]] = {}
        self._judges: dict[int, tuple[Judge, ...]] = {}
        self._pools: dict[int, tuple[Judge, ThreadPoolExecutor]] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._num_open = 0
        self._outbox: deque[tuple[Trajectory, bool]] = deque()
        self._run = Run()
        self._error: BaseException | None = None

    def expect(self, trials: Iterable[JudgedTrial], agent: Any = None) -> bool:
        """Announce trials that an agent plays, complete task groups of them; return whether any will be judged.

        Raises:
            ConfigError: The judges of an environment are invalid, a task that is ranked has only one rollout, or a
                judge's agent is the agent that plays.
        """
        new: Counter[tuple[int, int]] = Counter()
        for trial in trials:
            judges = self._judges.get(id(trial.env))
            if judges is None:
                judges = self._judges[id(trial.env)] = judges_of(trial.env)
                _check_player(judges, agent)
            if any(judge.scope == "group" for judge in judges):
                new[id(trial.env), trial.task_index] += 1
        if 1 in new.values():
            raise ConfigError(
                "a judge of scope 'group' compares the rollouts of a task, so num_rollouts (in training "
                "num_generations) must be at least 2, got 1"
            )
        with self._lock:
            self._sizes.update(new)
        return any(self._judges.values())

    def add(self, env: Any, trajectory: Trajectory, *, may_retry: bool = False) -> None:
        """Judge a finished rollout; a failed one is passed on.

        Args:
            env: Its environment.
            trajectory: The rollout.
            may_retry: Whether it is played again if it failed, or if a judge of its turns or of the episode fails.
        """
        member = _Member(env=env, trajectory=trajectory, may_retry=may_retry)
        if trajectory.failed:
            with self._lock:
                self._finish_own(member)
            self._flush()
            return
        tasks: list[tuple[Judge, Callable[[Run], Judgment]]] = []
        for judge in self._judges[id(env)]:
            if judge.scope == "episode" and trajectory.turns:
                tasks.append((judge, partial(judge.judge_episode, trajectory)))
            elif judge.scope == "turn":
                free = env.env_config["free_shots"]
                turns = [k for k, turn in enumerate(trajectory.turns) if turn.episode >= free]
                tasks += [(judge, partial(judge.judge_turn, trajectory, k)) for k in turns]
        with self._lock:
            member.num_open = len(tasks)
            if not tasks:
                self._finish_own(member)
            for place, (judge, ask) in enumerate(tasks):
                self._submit(judge, partial(self._judge, [member], place, ask, self._finish_own))
        self._flush()

    def wait(self, interrupt: Callable[[], None] | None = None) -> None:
        """Wait until no judge is at work; ``interrupt`` is called a few times per second, and may raise.

        Raises:
            ConfigError: A judge's agent cannot be used at all, or its scores cannot be added to the rewards.
        """
        while True:
            with self._changed:
                self.check()
                if not self._num_open:
                    return
                self._changed.wait(_POLL_S)
            if interrupt is not None:
                interrupt()

    def check(self) -> None:
        """Raise the error that ended the judging, if any."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop the judges at work, end the threads, and let the judges' agents free what they hold."""
        self._run.stop()
        with self._lock:
            pools, self._pools = [*self._pools.values()], {}
            is_idle = not self._num_open
        for judge, pool in pools:
            pool.shutdown(wait=is_idle, cancel_futures=True)  # a call of a batched agent cannot be interrupted
            if is_idle:
                finish_agent(judge.agent)

    def _submit(self, judge: Judge, work: Callable[[], None]) -> None:
        if self._run.is_stopped:
            return
        if id(judge) not in self._pools:
            pool = ThreadPoolExecutor(judge.max_concurrent, thread_name_prefix=f"agentsgym-{judge.name}")
            self._pools[id(judge)] = judge, pool
        self._num_open += 1
        self._pools[id(judge)][1].submit(self._guarded, work)

    def _flush(self) -> None:
        while True:
            try:
                trajectory, may_retry = self._outbox.popleft()
            except IndexError:
                return
            self._emit(trajectory, may_retry)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._flush()
        except StoppedError:
            pass  # the rollouts are dropped, so nothing is missing
        except BaseException as error:  # noqa: BLE001  # raised by `check` in the thread that waits
            with self._lock:
                self._error = self._error or error
            self._run.stop()
        finally:
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()

    def _judge(
        self,
        members: Sequence[_Member],
        place: int,
        ask: Callable[[Run], Judgment | list[Judgment]],
        finish: Callable[[_Member], None],
    ) -> None:
        """Ask a judge about one rollout, or about the rollouts of a group, and finish those that no judge still has."""
        judgments, error = list[Judgment](), None
        try:
            given = ask(self._run)
            judgments = given if isinstance(given, list) else [given]
        except EpisodeError as failure:
            error = failure
        with self._lock:
            for index, member in enumerate(members):
                if error is None:
                    member.judgments[place] = judgments[index]
                member.error = member.error or error
                member.num_open -= 1
                if not member.num_open:
                    finish(member)

    def _finish_own(self, member: _Member) -> None:
        """Apply the judgments of the turns and the episode; if its task group is to be ranked, wait for the others."""
        self._apply(member)
        key = id(member.env), member.trajectory.task_index
        if key not in self._sizes or member.trajectory.failed:
            self._outbox.append((member.trajectory, member.may_retry))
        if key not in self._sizes or (member.trajectory.failed and member.may_retry):
            return
        group = self._groups.setdefault(key, [])
        group.append(member)
        if len(group) == self._sizes[key]:
            del self._groups[key], self._sizes[key]
            self._judge_groups(sorted(group, key=lambda one: one.trajectory.rollout_index))

    def _judge_groups(self, group: Sequence[_Member]) -> None:
        members = [one for one in group if not one.trajectory.failed]
        if not members:
            return
        judges = [judge for judge in self._judges[id(members[0].env)] if judge.scope == "group"]
        for member in members:
            member.judgments, member.num_open = {}, len(judges)
        for place, judge in enumerate(judges):
            ask = partial(judge.judge_group, [one.trajectory for one in members])
            self._submit(judge, partial(self._judge, members, place, ask, self._finish_ranked))

    def _finish_ranked(self, member: _Member) -> None:
        self._apply(member)
        self._outbox.append((member.trajectory, False))  # the group is complete, so none of it is played again

    def _apply(self, member: _Member) -> None:
        error = member.error
        if error is None:
            judgments = [member.judgments[place] for place in sorted(member.judgments)]
            token_rewards = partial(self._token_rewards, member.env)
            try:
                member.trajectory = with_judgments(member.trajectory, judgments, token_rewards)
            except EpisodeError as failure:  # the environment's `_calculate_rewards` raised
                error = failure
        if error is not None:
            member.trajectory = _failed(member.trajectory, error)


class JudgingInOrder:
    """Judges the rollouts of one thread, which handles the judged ones when it likes, rather than in other threads.

    Attributes:
        trajectories: The judged or failed rollouts so far, by session; the last attempt of each.
        to_retry: The sessions whose last attempt failed and may be repeated.
    """

    def __init__(
        self, token_rewards: TokenRewards, on_judged: Callable[[Trajectory, bool], None] | None = None
    ) -> None:
        """Set up.

        Args:
            token_rewards: See :class:`Judging`.
            on_judged: Called with each judged or failed rollout and whether it is to be retried, on the thread that
                calls :meth:`take`.
        """
        self.trajectories: dict[str, Trajectory] = {}
        self.to_retry: set[str] = set()
        self._done: deque[tuple[Trajectory, bool]] = deque()
        self._on_judged = on_judged
        self.judging = Judging(lambda trajectory, may_retry: self._done.append((trajectory, may_retry)), token_rewards)

    def add(self, env: Any, trajectory: Trajectory, *, may_retry: bool = False) -> None:
        """Judge a finished rollout, and handle what was judged so far: see :meth:`Judging.add`."""
        self.to_retry.discard(trajectory.session_id)  # it may now wait for its task group
        self.judging.add(env, trajectory, may_retry=may_retry)
        self.take()

    def take(self) -> None:
        """Handle what was judged so far."""
        self.judging.check()
        while self._done:
            trajectory, may_retry = self._done.popleft()
            is_retried = trajectory.failed and may_retry
            self.trajectories[trajectory.session_id] = trajectory
            (self.to_retry.add if is_retried else self.to_retry.discard)(trajectory.session_id)
            if self._on_judged is not None:
                self._on_judged(trajectory, is_retried)

    def wait(self, interrupt: Callable[[], None] | None = None) -> None:
        """Wait until no judge is at work, and handle what was judged."""
        self.judging.wait(interrupt)
        self.take()


def _check_player(judges: Iterable[Judge], agent: Any) -> None:
    """Raise :class:`ConfigError` if a judge would use the playing agent, or its model, in a second thread."""
    player = getattr(agent, "inner", agent)
    model = getattr(player, "model", None)
    for judge in judges:
        own = getattr(judge.agent, "inner", judge.agent)
        is_same = own is player and not callable(getattr(player, "aact", None))
        if is_same or (model is not None and not isinstance(model, str) and getattr(own, "model", None) is model):
            whose = "the agent" if is_same else "the model of the agent"
            raise ConfigError(
                f"judge {judge.name!r} has {whose} that plays, a {type(player).__name__}, which cannot answer in two "
                "threads at once: give the judge an agent with a model of its own"
            )


def _failed(trajectory: Trajectory, error: EpisodeError) -> Trajectory:
    where = f"task {trajectory.task_index}, rollout {trajectory.rollout_index}, after its last turn"
    return replace(
        trajectory,
        final_reward=0.0,
        final_rewards={},
        final_components=None,
        per_token_rewards=[0.0] * len(trajectory.token_ids),
        stop_reason=StopReason.FAILED,
        error=describe(error, where),
    )
