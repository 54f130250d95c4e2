"""Evaluate an agent: play many episodes, and estimate win rate, reward and turns."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.errors import AgentsGymError, ConfigError, check_options, did_you_mean
from agentsgym.failures import FailurePolicy, as_policy
from agentsgym.fields import is_fraction, or_none, require
from agentsgym.seeding import derive_seed
from agentsgym.statistics.metrics import Evaluation, summarize
from agentsgym.statistics.optimality import AnchorSource, anchors_of_task

if TYPE_CHECKING:
    from datasets import Dataset

    from agentsgym.statistics.optimality import Anchors
    from agentsgym.store.writer import RolloutWriter
    from agentsgym.types import Trajectory

OnFinish = Callable[["Trajectory"], None]


def evaluate(  # noqa: PLR0913  # keywords, most of them usually omitted
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
    references: AnchorSource | None = None,
    store: str | Path | RolloutWriter | None = None,
    resume: bool | Literal["failed"] = False,
    agent_name: str | None = None,
    on_resume: Callable[[Sequence[Trajectory]], None] | None = None,
    progress: bool = False,
    **rollout_options: Any,
) -> Evaluation:
    """Play each task ``num_rollouts`` times, and report win rate, reward and turns with 95% confidence intervals.

    To evaluate on rows of several environments, use :func:`agentsgym.evaluate_mixed`. If an error ends the evaluation,
    the rollouts finished so far are in the error's ``trajectories``.

    Args:
        env: The environment.
        agent: An :class:`~agentsgym.agents.base.Agent`, or any object with ``get_action(messages, agent_state)``.
        tasks: ``task_data`` dicts, or dataset rows with a ``task_data`` column.
        num_rollouts: The number of rollouts per task.
        cluster_by: A ``task_data`` key, such as ``"solution"``: tasks with the same value of it count as one task in
            the confidence intervals. By default, each row of ``tasks`` is a task.
        seed: Random seed of the bootstrap and of tasks without one. With a deterministic agent, equal arguments give
            equal episodes; an agent's random generator is not reset between calls.
        max_failed_fraction: The fraction of failed rollouts, in [0, 1], above which the evaluation stops with an error;
            None for no limit.
        failures: The policy for failed rollouts, which may also set this limit. Task groups that are too small are
            excluded from the estimates; see ``Evaluation.num_left_out``.
        on_finish: A callback for each finished rollout.
        references: The rewards of random and optimal play, for ``Evaluation.fraction_of_optimal``: one
            :class:`~agentsgym.envs.spec.Anchors` for all tasks, or a function from ``task_data`` to them, or to
            None if they are unknown. By default, they are read from the environment's ``info``.
        store: The folder of a rollout store, or a writer, which is left open. Every rollout is on disk within ten
            seconds of its end.
        resume: Whether to skip rollouts of this evaluation that are already stored: those with the same environment,
            configuration, token limits, task, rollout index and ``agent_name``, which is then required. With
            ``"failed"``, failed rollouts are played again.
        agent_name: The agent's name in the store; by default its class name.
        on_resume: A callback for the stored rollouts that are skipped, called once, before play starts.
        progress: Whether to show a progress bar, which includes the skipped rollouts.
        **rollout_options: Further options of ``env.rollout``.

    Raises:
        ConfigError: An argument or a row is invalid, a task lacks the key ``cluster_by``, or the agent cannot play at
            all, for example because a server rejects its key; no further episodes are then started.
        TaskError: There are no tasks, or a task is invalid; nothing has been played.
        TypeError: An argument is unknown.
        StoreError: The store cannot be created. (A disk that fills up later is logged once, and the evaluation
            continues.)
        TooManyFailuresError: More rollouts failed than ``max_failed_fraction`` allows, or no task group is large
            enough.
    """
    _check_order(env, agent, tasks)
    check_options(rollout_options, evaluate, env.rollout, MultistepEnv.rollout, env.trials)
    policy = _failure_policy(failures, max_failed_fraction)
    task_data = [
        task if task.get("seed") is not None else task | {"seed": derive_seed("evaluation", seed, index)}
        for index, task in enumerate(tasks_of_rows(env, tasks, "tasks"))
    ]
    keys = [_cluster_key(task, cluster_by, index) for index, task in enumerate(task_data)]
    anchors = None if references is None else _anchors(references, task_data, env.env_config)
    play = partial(env.rollout, task_data, agent, num_rollouts, **rollout_options)
    known: list[Trajectory] = []
    with contextlib.ExitStack() as stack:
        if store is not None or resume or agent_name is not None:
            from agentsgym.evaluation.stored import StoredEvaluation  # noqa: PLC0415  # importing pyarrow takes 0.1 s

            given: dict[str, Any] = {"store": store, "resume": resume, "agent_name": agent_name}
            envs = [env] * len(task_data)
            stored = stack.enter_context(StoredEvaluation(envs, agent, task_data, rollout_options, **given))
            play = stored.playing(play, num_rollouts)
            known = [*stored.known.values()]
            if on_resume is not None:
                on_resume(known)
        shown = episodes_bar("evaluation", len(task_data) * num_rollouts, "rollout", num_known=len(known))
        bar = stack.enter_context(shown) if progress else None
        if policy != FailurePolicy():
            policy.check_size(num_rollouts)
            # Small groups are removed below, where their rollouts are still counted.
            play = partial(play, failures=replace(policy, min_group_size=0))
        with kept_in_errors(known, on_finish, bar) as keep:
            everything = play(on_finish=keep)
            trajectories = policy.without_small_groups(everything)
    evaluations = [
        summarize(
            some,
            clusters=[keys[one.task_index] for one in some],
            seed=seed,
            anchors=None if anchors is None else [anchors[one.task_index] for one in some],
        )
        for some in ([trajectories, everything] if len(trajectories) < len(everything) else [everything])
    ]
    return with_counts_of(evaluations[0], evaluations[-1])


@contextlib.contextmanager
def episodes_bar(
    label: str, num_episodes: int, unit: str = "episode", *, num_known: int = 0, is_shown: bool = True
) -> Generator[OnFinish]:
    """Show a progress bar over episodes, some of which may be known already; yields a callback for ``on_finish``."""
    from tqdm.auto import tqdm  # noqa: PLC0415  # imported only when needed; it builds widgets in notebooks

    with tqdm(total=num_episodes, initial=num_known, desc=label, unit=unit, disable=not is_shown) as bar:
        yield lambda _: cast("None", bar.update())


@contextlib.contextmanager
def kept_in_errors(finished_before: Sequence[Trajectory], *callbacks: OnFinish | None) -> Generator[OnFinish]:
    """Attach all finished rollouts to an error that ends the evaluation; yields a callback for each of them."""
    trajectories = [*finished_before]

    def keep(trajectory: Trajectory) -> None:
        trajectories.append(trajectory)
        for callback in callbacks:
            if callback is not None:
                callback(trajectory)

    try:
        yield keep
    except AgentsGymError as error:
        error.trajectories = trajectories
        raise


def with_counts_of(kept: Evaluation | None, whole: Evaluation) -> Evaluation:
    """Replace the counts of an evaluation (None if no rollouts were kept) with the counts over all rollouts."""
    if kept is None:  # all its task groups were excluded
        none: dict[str, Any] = {"win_rate": None, "reward": None, "turns": None, "num_episodes": 0, "by_role": {}}
        return replace(whole, **none, num_left_out=whole.num_episodes)
    counts = {name: getattr(whole, name) for name in ("num_failed", "stop_reasons", "trajectories", "clusters")}
    return replace(kept, **counts, num_left_out=whole.num_episodes - kept.num_episodes)


def _failure_policy(failures: FailurePolicy | None, max_failed_fraction: float | None) -> FailurePolicy:
    require("max_failed_fraction", max_failed_fraction, or_none(is_fraction), "a number in [0, 1] or None")
    policy = as_policy(failures)
    if max_failed_fraction is None:
        return policy
    if policy.max_failed_fraction is not None:
        raise ConfigError(
            f"max_failed_fraction={max_failed_fraction} conflicts with {policy.max_failed_fraction} in failures: "
            "set only one of them"
        )
    return replace(policy, max_failed_fraction=max_failed_fraction)


def _check_order(env: Any, agent: Any, tasks: Any) -> None:
    """Check that no two arguments were swapped."""
    if inspect.isclass(env) and issubclass(env, MultistepEnv):
        raise ConfigError(
            f"env must be an environment, got the class {env.__name__}: pass {env.__name__}(tokenizer, env_config)"
        )
    given = ", ".join(type(value).__name__ for value in (env, agent, tasks))
    agent_is_tasks = isinstance(agent, MultistepEnv) or (isinstance(agent, Iterable) and not _is_env_or_agent(agent))
    if not isinstance(env, MultistepEnv) or agent_is_tasks or _is_env_or_agent(tasks):
        raise ConfigError(f"the arguments of evaluate must be (env, agent, tasks), in this order; got ({given})")


def _is_env_or_agent(value: Any) -> bool:
    return isinstance(value, MultistepEnv) or any(hasattr(value, name) for name in ("get_action", "act", "aact"))


def _anchors(
    references: AnchorSource, task_data: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[Anchors | None]:
    # A final reward is the sum over the episodes of a trial if they share a history.
    num_episodes = config["episodes_per_trial"] - config["free_shots"] if config["keep_history"] else 1
    return [anchors_of_task(references, task, num_episodes) for task in task_data]


def _cluster_key(task: dict[str, Any], cluster_by: str | None, index: int) -> str | int:
    if cluster_by is None:
        return index
    if cluster_by not in task:
        raise ConfigError(
            f"cluster_by={cluster_by!r} must be a key of every task, but task {index} lacks it"
            f"{did_you_mean(cluster_by, task)}"
        )
    return repr(task[cluster_by])  # a value may be a list, and keys must be hashable
