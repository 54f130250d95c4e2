"""Evaluate an agent: play many episodes and sum them up."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.errors import (
    AgentsGymError,
    ConfigError,
    check_options,
    did_you_mean,
)
from agentsgym.failure_policy import FailurePolicy, as_policy
from agentsgym.fields import is_fraction, or_none, require
from agentsgym.seeding import derive_seed
from agentsgym.statistics.metrics import Evaluation, summarize
from agentsgym.statistics.optimality import References, anchors_of_task

if TYPE_CHECKING:
    from datasets import Dataset

    from agentsgym.store.writer import RolloutWriter
    from agentsgym.types import Trajectory

OnFinish = Callable[["Trajectory"], None]


def evaluate(  # noqa: PLR0913  # keywords, most of them left out
    env: MultistepEnv,
    agent: Any,
    tasks: Iterable[Mapping[str, Any]] | Dataset,
    num_rollouts: int = 1,
    *,
    cluster_by: str | None = None,
    seed: int = 0,
    max_failed_fraction: float | None = None,
    failures: FailurePolicy | None = None,
    on_finish: OnFinish | None = None,
    references: References | None = None,
    store: str | Path | RolloutWriter | None = None,
    resume: bool | Literal["failed"] = False,
    agent_name: str | None = None,
    on_resume: Callable[[Sequence[Trajectory]], None] | None = None,
    progress: bool = False,
    **rollout_options: Any,
) -> Evaluation:
    """Play each task ``num_rollouts`` times and report win rate, reward and turns with 95 % intervals.

    For one environment and its tasks; :func:`agentsgym.evaluate_mixed` takes rows that each name their own.
    Whatever error ends it, the rollouts that were finished until then are the error's ``trajectories``.

    Args:
        env: The environment.
        agent: An :class:`~agentsgym.agents.base.Agent`, or any object with ``get_action(messages, agent_state)``.
        tasks: ``task_data`` dicts, or dataset rows that hold one in their ``task_data`` column.
        num_rollouts: Rollouts of each task.
        cluster_by: The ``task_data`` key whose equal values are one task to the intervals, say ``"solution"``; by
            default each row of ``tasks`` is a task of its own.
        seed: Random seed for the bootstrap and for tasks without one: with an agent that always answers alike,
            equal arguments give equal episodes. An agent's own random generator runs on from one call to the next.
        max_failed_fraction: The fraction of all rollouts that may fail, in [0, 1]; as soon as more have failed, the
            evaluation ends with an error. None for no limit: failed rollouts are counted, the others go on.
        failures: The other choices there are when rollouts fail, and in its place also this one. Task groups that are
            too small are left out of the estimates; see ``Evaluation.num_left_out``.
        on_finish: Called with each rollout as soon as it is finished.
        references: What random and optimal play earn, for ``Evaluation.fraction_of_optimal``: one
            :class:`~agentsgym.envs.anchors.Anchors` for all tasks, or a function of ``task_data`` that
            gives them, or None where they are not known. Left out, they are what the environment says in ``info``.
        store: Keeps every rollout, on disk ten seconds after it is finished at most: the folder of a rollout store, or
            a writer of one, which stays open.
        resume: Do not play again what the store holds of this evaluation: rollouts of the same environment,
            configuration, limits of tokens, tasks, rollout indices and ``agent_name``. With ``"failed"`` those that
            failed are played again. It needs ``agent_name``.
        agent_name: What the store calls the agent; by default the name of its class.
        on_resume: Called once, before anything is played, with the stored rollouts that are not played again.
        progress: Whether to show a progress bar of the rollouts, those that were stored before included.
        **rollout_options: Handed to ``env.rollout``.

    Raises:
        ConfigError: An argument or a row is not valid, some task has no ``cluster_by``, or the agent says that it
            cannot play at all, as one does whose server refuses its key: no other episode is begun then.
        TaskError: There is no task, or some task cannot be played; nothing has been played then.
        TypeError: An argument is unknown.
        StoreError: There can be no store at that place. (Should its disk be full later on, that is logged, once, and
            the evaluation goes on.)
        TooManyFailuresError: More rollouts failed than ``max_failed_fraction`` allows, or no task group is large
            enough.
    """
    _check_order(env, agent, tasks)
    check_options(rollout_options, evaluate, env.rollout, MultistepEnv.rollout, env.trials)
    policy = _policy(failures, max_failed_fraction)
    task_data = [_with_seed(task, seed, index) for index, task in enumerate(tasks_of_rows(env, tasks, "tasks"))]
    keys = [_cluster(task, cluster_by, index) for index, task in enumerate(task_data)]
    anchors = None
    if references is not None:
        num_episodes = _num_summed(env.env_config)
        anchors = [anchors_of_task(references, task, num_episodes) for task in task_data]
    play = partial(env.rollout, task_data, agent, num_rollouts, **rollout_options)
    known: list[Trajectory] = []
    with contextlib.ExitStack() as stack:
        if store is not None or resume:
            from agentsgym.evaluation.stored import StoredEvaluation  # noqa: PLC0415  # pyarrow, a tenth of a second

            stored = stack.enter_context(
                StoredEvaluation(
                    [env] * len(task_data),
                    agent,
                    task_data,
                    rollout_options,
                    store=store,
                    resume=resume,
                    agent_name=agent_name,
                )
            )
            play = stored.playing(play, num_rollouts)
            known = [*stored.known.values()]
            if on_resume is not None:
                on_resume(known)
        if progress:
            on_finish = stack.enter_context(_bar(len(task_data) * num_rollouts, len(known), on_finish))
        everything, trajectories = _played(play, num_rollouts, policy, KeptRollouts(on_finish, known))
    evaluation = summarize(
        trajectories,
        clusters=[keys[one.task_index] for one in trajectories],
        seed=seed,
        anchors=None if anchors is None else [anchors[one.task_index] for one in trajectories],
    )
    return evaluation if len(trajectories) == len(everything) else _of_all(evaluation, everything, keys)


@contextlib.contextmanager
def _bar(total: int, num_known: int, on_finish: OnFinish | None) -> Generator[OnFinish]:
    """Show a progress bar of rollouts; gives what is to be called with each."""
    from tqdm.auto import tqdm  # noqa: PLC0415  # in a notebook it builds widgets

    with tqdm(total=total, initial=num_known, desc="evaluation", unit="rollout") as bar:

        def finished(trajectory: Trajectory) -> None:
            if on_finish is not None:
                on_finish(trajectory)
            bar.update()

        yield finished


def _num_summed(env_config: Mapping[str, Any]) -> int:
    """How many episodes a rollout's final reward is the sum of."""
    return env_config["episodes_per_trial"] - env_config["free_shots"] if env_config["keep_history"] else 1


def _played(
    play: Callable[..., list[Trajectory]], num_rollouts: int, policy: FailurePolicy, kept: KeptRollouts
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Play, and return all rollouts and those that the estimates are made of."""
    options: dict[str, Any] = {}
    if policy != FailurePolicy():
        policy.check_size(num_rollouts)
        # What is left out of the estimates is left out here, where it is still known.
        options["failures"] = replace(policy, min_group_size=0)
    with kept.in_errors():
        everything = play(on_finish=kept.add, **options)
        return everything, policy.without_small_groups(everything)


class KeptRollouts:
    """Keeps rollouts as they are finished.

    Attributes:
        trajectories: The rollouts that are finished, in the order in which they were.
    """

    def __init__(self, on_finish: OnFinish | None, finished_before: Sequence[Trajectory]) -> None:
        self.trajectories = [*finished_before]
        self._on_finish = on_finish

    @contextlib.contextmanager
    def in_errors(self) -> Generator[None]:
        """Hand them to an error that ends the evaluation."""
        try:
            yield
        except AgentsGymError as error:
            error.trajectories = self.trajectories
            raise

    def add(self, trajectory: Trajectory) -> None:
        """Keep one."""
        self.trajectories.append(trajectory)
        if self._on_finish is not None:
            self._on_finish(trajectory)


def _of_all(evaluation: Evaluation, trajectories: Sequence[Trajectory], keys: Sequence[Hashable]) -> Evaluation:
    """Count everything that was played beside the estimates, which leave some of it out."""
    num_failed = sum(trajectory.failed for trajectory in trajectories)
    return replace(
        evaluation,
        num_failed=num_failed,
        num_left_out=len(trajectories) - num_failed - evaluation.num_episodes,
        stop_reasons=dict(sorted(Counter(trajectory.stop_reason for trajectory in trajectories).items())),
        trajectories=trajectories,
        clusters=[keys[trajectory.task_index] for trajectory in trajectories],
    )


def _policy(failures: FailurePolicy | None, max_failed_fraction: float | None) -> FailurePolicy:
    require("max_failed_fraction", max_failed_fraction, or_none(is_fraction), "a number in [0, 1] or None")
    policy = as_policy(failures)
    if max_failed_fraction is None:
        return policy
    if policy.max_failed_fraction is not None:
        raise ConfigError(
            f"max_failed_fraction is set twice: {max_failed_fraction}, and {policy.max_failed_fraction} in failures"
        )
    return replace(policy, max_failed_fraction=max_failed_fraction)


def _check_order(env: Any, agent: Any, tasks: Any) -> None:
    """Raise for arguments that stand in each other's places."""
    if inspect.isclass(env) and issubclass(env, MultistepEnv):
        raise ConfigError(f"evaluate needs an environment, got the class: write {env.__name__}(tokenizer, env_config)")
    if not isinstance(env, MultistepEnv) or _is_tasks(agent) or _plays(tasks):
        given = ", ".join(type(value).__name__ for value in (env, agent, tasks))
        raise ConfigError(f"evaluate takes (env, agent, tasks) in this order, got ({given})")


def _plays(value: Any) -> bool:
    """Whether it is an environment or an agent."""
    return isinstance(value, MultistepEnv) or any(hasattr(value, name) for name in ("get_action", "act", "aact"))


def _is_tasks(value: Any) -> bool:
    return isinstance(value, MultistepEnv) or (isinstance(value, Iterable) and not _plays(value))


def _with_seed(task: dict[str, Any], seed: int, index: int) -> dict[str, Any]:
    if task.get("seed") is not None:
        return task
    return task | {"seed": derive_seed("evaluation", seed, index)}


def _cluster(task: dict[str, Any], cluster_by: str | None, index: int) -> str | int:
    if cluster_by is None:
        return index
    if cluster_by not in task:
        raise ConfigError(f"task {index} has no {cluster_by!r} to cluster by{did_you_mean(cluster_by, task)}")
    return repr(task[cluster_by])  # a value may be a list, and keys must be hashable
