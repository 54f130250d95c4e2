"""Hand finished rollouts to the hooks of their environments, while other episodes still play.

::

    expect(trials) ─▶ how many rollouts each task group has
    add(rollout) ─▶ hooks of rollouts, at once ─▶ hooks of task groups, with the last rollout of the group ─▶ on_result

The hooks are coroutines on the agents' event loop. All else happens in the threads that call these methods, so that the
code of users which it calls cannot block the loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from agentsgym.envs.boundary import token_rewards
from agentsgym.envs.trial import Trial
from agentsgym.errors import ConfigError, EpisodeError
from agentsgym.event_loop import agents_loop, gathered, run_coroutine
from agentsgym.failures import describe
from agentsgym.fields import require
from agentsgym.types import StopReason, Trajectory

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.25  # between two calls of ``interrupt`` while hooks are awaited

Change = Callable[[Trajectory], Trajectory]
"""Makes the changed rollout, in which the per-token rewards may be out of date."""


class RolloutHook:
    """What an environment does with its finished rollouts: each entry of ``env.judges`` is one.

    Attributes:
        label: What it is, for errors.
        identity: A hash of everything that determines the changes.
        takes_groups: Whether it takes all rollouts of a task at once rather than each by itself.
    """

    label: str = ""
    identity: str = ""
    takes_groups: bool = False

    def check(self, env: Any, agent: Any) -> None:
        """Raise :class:`ConfigError` if the hook cannot be used with an environment or the agent that plays."""

    async def changes(self, env: Any, trajectories: Sequence[Trajectory]) -> Sequence[Change]:
        """Return the change of each rollout; runs on the agents' event loop, and is canceled if the run ends.

        Args:
            env: The environment.
            trajectories: One rollout, or the rollouts of a task that have not failed, (G,).

        Raises:
            EpisodeError: The rollouts fail.
            ConfigError: The run ends.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free the resources of a run, in which this is not awaited any more."""


def hooks_of(env: Any) -> tuple[RolloutHook, ...]:
    """Return the hooks of an environment.

    Raises:
        ConfigError: ``env.judges`` is not a list of judges.
    """
    given: Any = getattr(env, "judges", None)
    if given is None or given == ():
        return ()
    hooks = tuple(cast("Sequence[Any]", given)) if isinstance(given, list | tuple) else (given,)
    are_hooks = all(isinstance(one, RolloutHook) for one in hooks)
    require(f"{type(env).__name__}.judges", given, lambda _: are_hooks, "a list of agentsgym.Judge")
    return hooks


_Changes = Future[list[Sequence[Change]]]  # by hook, and by rollout


@dataclass(slots=True, eq=False, kw_only=True)
class _Member:
    """A finished rollout, and whether it may be played again if it failed."""

    env: Any
    trajectory: Trajectory
    may_retry: bool


class FinishedRollouts:
    """Hands rollouts to the hooks of their environments, and those that went through them to ``on_result``.

    No two threads may call its methods at the same time.
    """

    def __init__(
        self, on_result: Callable[[Trajectory, bool], None], notify: Callable[[], None] = lambda: None
    ) -> None:
        """Set up.

        Args:
            on_result: Called by :meth:`add`, :meth:`take` and :meth:`wait` with each rollout, changed or failed, and
                whether it may be played again if it failed.
            notify: Called on the agents' event loop when :meth:`take` has something to do.
        """
        self._on_result, self._notify = on_result, notify
        self._sizes: Counter[tuple[int, int]] = Counter()  # by group, the rollouts that it waits for
        self._groups: dict[tuple[int, int], list[_Member]] = {}
        self._hooks: dict[int, RolloutHook] = {}
        self._open: dict[_Changes, tuple[Sequence[_Member], bool]] = {}
        self._done: queue.SimpleQueue[_Changes] = queue.SimpleQueue()

    def expect(self, trials: Iterable[Trial], agent: Any) -> None:
        """Announce trials that an agent plays, complete task groups of them.

        Raises:
            ConfigError: A hook cannot be used with its environment or the agent, or takes task groups of one rollout.
        """
        new: Counter[tuple[int, int]] = Counter()
        envs: dict[int, Any] = {}
        for trial in trials:
            envs[id(trial.env)] = trial.env
            new[id(trial.env), trial.task_index] += 1
        for own, env in envs.items():
            hooks = hooks_of(env)
            if not hooks and "judge" in vars(env):
                logger.warning("%s.judge is not called: judges are in its list judges", type(env).__name__)
            for hook in hooks:
                hook.check(env, agent)
                self._hooks[id(hook)] = hook
            sizes = {key: size for key, size in new.items() if key[0] == own}
            for hook in [one for one in hooks if one.takes_groups][:1]:
                if 1 in sizes.values():
                    raise _too_few(hook)
                self._sizes.update(sizes)

    def add(self, env: Any, trajectory: Trajectory, *, may_retry: bool) -> None:
        """Take a finished rollout; a failed one is passed on.

        Args:
            env: Its environment.
            trajectory: The rollout.
            may_retry: Whether it is played again if it failed, or if a hook of rollouts fails it.
        """
        hooks = hooks_of(env)
        alone = [] if trajectory.failed else [hook for hook in hooks if not hook.takes_groups]
        member = _Member(env=env, trajectory=trajectory, may_retry=may_retry)
        if alone:
            self._start(alone, [member])
        elif hooks:
            self._went_through(member)
        else:
            self._on_result(trajectory, may_retry)
        if self._open:
            self.take()

    def take(self) -> None:
        """Handle what the hooks have returned so far; raises what they raised unless it fails rollouts."""
        while self._open:
            try:
                done = self._done.get_nowait()
            except queue.Empty:
                return
            self._handle(done)

    def wait(self, interrupt: Callable[[], None] | None = None) -> None:
        """Wait until no hook is at work, and handle what they returned, as :meth:`take` does.

        Args:
            interrupt: Called a few times per second; may raise.
        """
        while self._open:
            if interrupt is not None:
                interrupt()
            try:
                done = self._done.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            self._handle(done)

    def close(self) -> None:
        """Cancel the hooks at work; if there are none, let them free what they hold."""
        is_idle = not self._open
        for future in [*self._open]:
            future.cancel()
        self._open.clear()
        hooks, self._hooks = [*self._hooks.values()], {}
        for hook in hooks if is_idle else ():  # the call of an agent that blocks cannot be interrupted
            hook.close()

    def _start(self, hooks: Sequence[RolloutHook], members: Sequence[_Member], *, is_group: bool = False) -> None:
        env, trajectories = members[0].env, [one.trajectory for one in members]
        coroutine = gathered(hook.changes(env, trajectories) for hook in hooks)
        future = asyncio.run_coroutine_threadsafe(coroutine, agents_loop())
        self._open[future] = members, is_group
        future.add_done_callback(self._arrived)

    def _arrived(self, future: _Changes) -> None:
        self._done.put(future)
        self._notify()

    def _handle(self, future: _Changes) -> None:
        """Change rollouts as their hooks decided, and hand them on."""
        if future not in self._open:
            return  # it was canceled
        members, is_group = self._open.pop(future)
        for place, member in enumerate(members):
            try:
                changes = [own[place] for own in future.result()]
                member.trajectory = _changed(member.env, member.trajectory, changes)
            except EpisodeError as error:
                member.trajectory = _failed(member.trajectory, error)
            if is_group:
                self._on_result(member.trajectory, False)  # the group is complete, so none of it is played again
            else:
                self._went_through(member)

    def _went_through(self, member: _Member) -> None:
        """Hand on a rollout after the hooks of rollouts; if others take its task group, wait for the whole group."""
        key = id(member.env), member.trajectory.task_index
        if key not in self._sizes or member.trajectory.failed:
            self._on_result(member.trajectory, member.may_retry)
        if key not in self._sizes or (member.trajectory.failed and member.may_retry):
            return
        group = self._groups.setdefault(key, [])
        group.append(member)
        if len(group) < self._sizes[key]:
            return
        del self._groups[key], self._sizes[key]
        members = sorted(
            (one for one in group if not one.trajectory.failed), key=lambda one: one.trajectory.rollout_index
        )
        if members:
            self._start([hook for hook in hooks_of(member.env) if hook.takes_groups], members, is_group=True)


def finished_alone(env: Any, trajectory: Trajectory) -> Trajectory:
    """Return a rollout that is played by itself with the changes of the hooks; unchanged without hooks.

    Raises:
        EpisodeError: A hook failed it.
        ConfigError: A hook takes task groups, or cannot be used.
    """
    hooks = hooks_of(env)
    if not hooks:
        return trajectory
    for hook in hooks:
        if hook.takes_groups:
            raise _too_few(hook)
        hook.check(env, None)
    try:
        found = run_coroutine(gathered(hook.changes(env, [trajectory]) for hook in hooks))
    finally:
        for hook in hooks:
            hook.close()
    return _changed(env, trajectory, [own[0] for own in found])


def _changed(env: Any, trajectory: Trajectory, changes: Sequence[Change]) -> Trajectory:
    changed = trajectory
    for change in changes:
        changed = change(changed)
    return trajectory if changed is trajectory else replace(changed, per_token_rewards=token_rewards(env, changed))


def _too_few(hook: RolloutHook) -> ConfigError:
    return ConfigError(
        f"{hook.label} compares the rollouts of a task, so num_rollouts (in training num_generations) must be at least "
        "2, got 1"
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
