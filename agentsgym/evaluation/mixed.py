"""Evaluate an agent on rows of several environments in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from agentsgym.agents.base import as_agent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import DatasetRow
from agentsgym.envs.datasets.environments import Environments
from agentsgym.envs.datasets.mix import LABEL_COLUMN
from agentsgym.envs.play import play as play_all
from agentsgym.errors import ConfigError, TaskError, check_options
from agentsgym.evaluation.run import kept_in_errors, with_counts_of
from agentsgym.failures import FailurePolicy, as_policy
from agentsgym.fields import is_int, require
from agentsgym.rollouts.driver import drive
from agentsgym.seeding import derive_seed
from agentsgym.statistics.metrics import Evaluation, summarize
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from agentsgym.envs.trial import Trial
    from agentsgym.store.writer import RolloutWriter
    from agentsgym.types import Trajectory

_LIMITS = ("max_turn_tokens", "max_completion_length")


def evaluate_mixed(  # noqa: PLR0913  # keywords, most of them usually omitted
    agent: Any,
    rows: Iterable[DatasetRow] | Dataset,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_rollouts: int = 1,
    *,
    seed: int = 0,
    failures: FailurePolicy | None = None,
    on_finish: Callable[[Trajectory], None] | None = None,
    store: str | Path | RolloutWriter | None = None,
    resume: bool | Literal["failed"] = False,
    agent_name: str | None = None,
    on_resume: Callable[[Sequence[Trajectory]], None] | None = None,
    **options: Any,
) -> Evaluation:
    """Play rows of several environments, and report estimates for each environment and overall.

    To evaluate on one environment, use :func:`agentsgym.evaluate`. If an error ends the evaluation, the
    rollouts finished so far are in the error's ``trajectories``.

    Args:
        agent: An :class:`~agentsgym.agents.base.Agent`, or any object with ``get_action(messages, agent_state)``.
        rows: Dataset rows, for example from :func:`agentsgym.mix`; the column ``environment`` names the environment.
        tokenizer: The policy's tokenizer; None for agents that exchange only text.
        num_rollouts: The number of rollouts per row.
        seed: Random seed of the bootstrap and of tasks without one.
        failures: The policy for failed rollouts; by default they are counted, and the evaluation continues.
        on_finish: A callback for each finished rollout.
        store: The folder or writer of a rollout store. This and the next three arguments are the same as in
            :func:`agentsgym.evaluate`.
        resume: Whether to skip stored rollouts.
        agent_name: The agent's name in the store.
        on_resume: A callback for the skipped rollouts.
        **options: ``max_turn_tokens`` and ``max_completion_length``, and the options of
            :func:`~agentsgym.rollouts.driver.drive`: ``max_concurrent``, ``pool``, ``turn_timeout_s`` and
            ``episode_timeout_s``.

    Returns:
        The estimates over all rollouts, in which rewards are not rescaled, and the estimates of each environment in
        ``by_environment`` if there are several. The overall ``fraction_of_optimal`` is None unless every environment
        has one. A trajectory's ``task_index`` is the index of its row.

    Raises:
        ConfigError: ``rows`` is empty, or the environment of a row cannot be built.
        TaskError: A task is invalid; nothing has been played.
        TypeError: An option is unknown.
        StoreError: The store cannot be created.
        TooManyFailuresError: More rollouts failed than ``failures`` allows.
    """
    check_options(options, evaluate_mixed, drive, MultistepEnv.trials)
    require("num_rollouts", num_rollouts, is_int(1), "a positive int")
    actor, policy = as_agent(agent), as_policy(failures)
    policy.check_size(num_rollouts)
    limits = {name: options.pop(name) for name in _LIMITS if name in options}
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"rows must be a list or dataset of rows, got {shown(cast('object', rows))}")
    environments, listed = Environments(None, cast("Any", tokenizer)), [*cast("Iterable[Any]", rows)]
    trials = _trials_of(listed, environments, num_rollouts, seed, limits)
    play = partial(play_all, trials, actor, policy, **options)
    known: list[Trajectory] = []
    with contextlib.ExitStack() as stack:
        if store is not None or resume or agent_name is not None:
            from agentsgym.evaluation.stored import StoredEvaluation  # noqa: PLC0415  # importing pyarrow takes 0.1 s

            settings: dict[str, Any] = {"store": store, "resume": resume, "agent_name": agent_name}
            envs, tasks = zip(*((one.env, one.task_data) for one in trials[::num_rollouts]), strict=True)
            stored = stack.enter_context(StoredEvaluation(envs, agent, tasks, limits, **settings))
            stored.look_up(num_rollouts)
            play = partial(stored.play_missing, trials, policy, **options)
            known = [*stored.known.values()]
            if on_resume is not None:
                on_resume(known)
        with kept_in_errors(known, on_finish) as keep:
            everything = play(on_finish=keep)
            counted = policy.without_small_groups(everything)
    evaluation, whole = (
        summarize(some, seed=seed, environments=[label_of(listed[one.task_index]) for one in some])
        for some in (counted, everything)
    )
    parts = {
        name: with_counts_of(evaluation.by_environment.get(name), part) for name, part in whole.by_environment.items()
    }
    total = replace(with_counts_of(evaluation, whole), by_environment=parts)
    if any(part.fraction_of_optimal is None for part in parts.values()):
        return replace(total, fraction_of_optimal=None)  # it would cover only some of the environments
    return total


def pooled(parts: Mapping[str, Evaluation], *, seed: int = 0) -> Evaluation:
    """Combine evaluations of single environments into one, as :func:`evaluate_mixed` would return it.

    Use it to compare agents that each play one environment with a policy that plays all of them.

    Args:
        parts: The evaluations, which must contain their rollouts, by the name of the environment.
        seed: Random seed of the bootstrap.

    Returns:
        The estimates over all rollouts, with consecutive task indices, and the estimates of each environment in
        ``by_environment``.
    """
    trajectories: list[Trajectory] = []
    labels: list[str] = []
    clusters: list[Hashable] = []
    first = 0
    for name, part in parts.items():
        own = part.trajectories
        clusters += [(name, key) for key in part.clusters or [one.task_index for one in own]]
        trajectories += [replace(one, task_index=first + one.task_index) for one in own]
        labels += [name] * len(own)
        first += 1 + max((one.task_index for one in own), default=-1)
    if not trajectories:
        raise ConfigError(f"parts must contain at least one rollout, got none in {len(parts)} evaluations")
    return summarize(trajectories, clusters=clusters, environments=labels, seed=seed)


def label_of(row: DatasetRow) -> str:
    """Return the display name of a row's environment: the column ``environment``, or else the class name.

    >>> label_of({"env_class_path": "my_games.chess.Chess"})
    'Chess'
    """
    label = row.get(LABEL_COLUMN)
    return label if isinstance(label, str) and label else str(row.get("env_class_path")).rpartition(".")[2]


def _trials_of(
    rows: Iterable[Any], environments: Environments, num_rollouts: int, seed: int, limits: Mapping[str, Any]
) -> list[Trial]:
    """Create the trials of all rows, in row order, without starting them.

    Raises:
        ConfigError: ``rows`` is empty, or the environment of a row cannot be built.
        TaskError: A task is invalid.
    """
    trials: list[Trial] = []
    for index, row in enumerate(rows):
        places = [(index, rollout) for rollout in range(num_rollouts)]
        seeds = [derive_seed("evaluation", seed, index)] * num_rollouts
        if not isinstance(row, Mapping) or not isinstance(cast("DatasetRow", row).get("task_data"), Mapping):
            given = shown(cast("object", row))
            raise ConfigError(f"row {index}: a row must be a dict with a 'task_data' (a dict), got {given}")
        try:
            own = [cast("DatasetRow", row)] * num_rollouts
            trials += environments.trials(own, seeds, places=places, **limits)
        except (ConfigError, TaskError) as error:
            raise type(error)(f"row {index}: {error}") from error
    if not trials:
        raise ConfigError("rows must contain at least one row, got none")
    return trials
