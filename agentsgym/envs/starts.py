"""Check tasks and starts of episodes: rollouts of a task must start identically, and sessions must not share state."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

from agentsgym.envs.dataset_rows import TaskData, check_task_keys
from agentsgym.errors import AgentsGymError, TaskError
from agentsgym.interruptions import is_interruption
from agentsgym.texts import sentence_of, shown
from agentsgym.types import Message, Trajectory

logger = logging.getLogger(__name__)

_PLAIN = frozenset((str, int, float, bool, type(None)))


def check_task(
    task_data: Any, name: str, task_fields: Collection[str] | None, hook: Callable[[dict[str, Any]], None]
) -> None:
    """Check the requirements of every environment on a task, then call the environment's check.

    Args:
        task_data: The task, unchecked user data.
        name: The task's name in errors.
        task_fields: The valid keys in addition to ``seed``; None for any.
        hook: The environment's ``_check_task``.
    """
    try:
        check_task_keys(task_data, name, task_fields)
        _check_plainly(task_data, name)
        hook(task_data)
    except AgentsGymError:
        raise
    except BaseException as error:
        if is_interruption(error):
            raise
        given = f"{type(error).__name__}: {sentence_of(error)}".removesuffix(": ")
        raise TaskError(f"checking {name} with {hook.__qualname__} raised {given}") from error


def _check_plainly(task_data: TaskData, name: str) -> None:
    """Check a task's seed, and that its values can be copied, as they are for every episode."""
    seed = task_data.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise TaskError(f"{name}['seed'] must be an int or None, got {shown(seed)}")
    for key, value in task_data.items():
        if type(value) not in _PLAIN:
            try:
                copy.deepcopy(value)
            except BaseException as error:
                if is_interruption(error):
                    raise
                sentence = f"{type(error).__name__}: {sentence_of(error)}"
                raise TaskError(
                    f"{name}[{shown(key)}] must support copy.deepcopy, since every episode gets a copy; it "
                    f"raised {sentence}"
                ) from error


class StartChecks:
    """The checks of how an environment's episodes start; each check warns once."""

    def __init__(self) -> None:
        self._last: tuple[str, dict[str, Any]] | None = None
        self._has_shared = self._has_unequal = False

    def check_state(self, session_id: str, state: dict[str, Any]) -> None:
        """Warn if two sessions started from the same dict object, so that they would change each other's state.

        Each start is compared only with the previous one: a single comparison, which finds a state that is stored on
        the environment or in its module.
        """
        last, self._last = self._last, (session_id, state)
        if last is not None and last[1] is state and last[0] != session_id and not self._has_shared:
            self._has_shared = True
            logger.warning(
                "_initialize_episode returned the same dict for the sessions %s and %s, so they change each other's "
                "state: it must return a new dict for each session",
                last[0],
                session_id,
            )

    def forget(self, session_id: str) -> None:
        """Release a session that is over: its state may refer to resources, and may be reused from now on."""
        if self._last is not None and self._last[0] == session_id:
            self._last = None

    def check_rollouts(self, trajectories: Iterable[Trajectory], group_of: Callable[[Trajectory], Hashable]) -> None:
        """Warn if rollouts of one task group started with different prompts."""
        if self._has_unequal:
            return
        prompts: dict[Hashable, Sequence[Message]] = {}
        for trajectory in trajectories:
            if not trajectory.turns:
                continue
            first = trajectory.turns[0]
            # Without keep_history, only the last episode is recorded, and each episode starts differently.
            # A retry may have another seed.
            group = (group_of(trajectory), first.episode, trajectory.num_retries)
            prompt = trajectory.messages[: first.message_index]
            if prompts.setdefault(group, prompt) != prompt:
                self._has_unequal = True
                logger.warning(
                    "rollouts of one task started with different prompts, %s and %s: all draws of an environment must "
                    "come from self.rng(session_id); otherwise, a task group compares rollouts of different problems",
                    shown(prompts[group][-1]["content"]),
                    shown(prompt[-1]["content"]),
                )
                return
