"""Evaluate an agent on rows of several environments in one call."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from agentsgym.agents.base import as_agent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import DatasetRow
from agentsgym.envs.datasets.mix import LABEL_COLUMN
from agentsgym.envs.datasets.registry import make
from agentsgym.envs.play import play as play_all
from agentsgym.errors import ConfigError, TaskError, check_options
from agentsgym.evaluation.run import kept_in_errors
from agentsgym.failure_policy import FailurePolicy, as_policy
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


def evaluate_mixed(  # noqa: PLR0913  # keywords, most of them left out
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
    """Play rows that each name their environment, and report estimates for each environment and overall.

    For a single environment and its tasks there is :func:`agentsgym.evaluate`. If an error ends the evaluation, the
    rollouts finished so far are in the error's ``trajectories``.

    Args:
        agent: An :class:`~agentsgym.agents.base.Agent`, or any object with ``get_action(messages, agent_state)``.
        rows: Dataset rows, for example from :func:`agentsgym.mix`; the column ``environment`` names the parts of a mix.
        tokenizer: The policy's tokenizer; None for agents that only read and write text.
        num_rollouts: The number of rollouts per row.
        seed: Random seed of the bootstrap and of tasks without one.
        failures: The policy for failed rollouts; by default they are counted, and the others continue.
        on_finish: A function that is called with each finished rollout.
        store: The folder or writer of a rollout store, as in :func:`~agentsgym.evaluation.run.evaluate`.
        resume: Whether to skip stored rollouts, as there.
        agent_name: The agent's name in the store, as there.
        on_resume: A function that is called with the skipped rollouts, as there.
        **options: ``max_turn_tokens`` and ``max_completion_length``, and the options of
            :func:`~agentsgym.rollouts.driver.drive`: ``max_concurrent``, ``pool``, ``turn_timeout_s`` and
            ``episode_timeout_s``.

    Returns:
        The estimates over all rollouts, without rescaling rewards of different environments, and in ``by_environment``
        those of each environment if there are several. The overall ``fraction_of_optimal`` is None unless every
        environment has one. ``task_index`` of a trajectory is the index of its row.

    Raises:
        ConfigError: There are no rows, or the environment of a row cannot be built.
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
        raise ConfigError(f"rows must be dataset rows of several environments, got {shown(cast('object', rows))}")
    players = _Players(tokenizer, seed, limits)
    players.add_all(cast("Iterable[Any]", rows), num_rollouts)
    play = partial(play_all, players.trials, actor, policy, **options)
    known: list[Trajectory] = []
    with contextlib.ExitStack() as stack:
        if store is not None or resume:
            from agentsgym.evaluation.stored import StoredEvaluation  # noqa: PLC0415  # pyarrow, a tenth of a second

            settings: dict[str, Any] = {"store": store, "resume": resume, "agent_name": agent_name}
            stored = stack.enter_context(StoredEvaluation(players.envs, agent, players.tasks, limits, **settings))
            stored.look_up(num_rollouts)
            play = partial(stored.play_missing, players.trials, policy, **options)
            known = [*stored.known.values()]
            if on_resume is not None:
                on_resume(known)
        with kept_in_errors(on_finish, known) as keep:
            everything = play(on_finish=keep)
            counted = policy.without_small_groups(everything)
    return _summary(counted, everything, players.labels, seed)


def pooled(parts: Mapping[str, Evaluation], *, seed: int = 0) -> Evaluation:
    """Combine evaluations of single environments into one, as :func:`evaluate_mixed` would return it.

    This way, agents for one environment each can be compared with a policy that plays all of them.

    Args:
        parts: The evaluations by the names of their environments, with their rollouts.
        seed: Random seed of the bootstrap.

    Returns:
        The estimates over all rollouts, with consecutive task indices, and in ``by_environment`` those of each
        environment.

    Raises:
        ConfigError: There are no rollouts.
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
        raise ConfigError(f"cannot pool {len(parts)} evaluations without rollouts")
    return summarize(trajectories, clusters=clusters, environments=labels, seed=seed)


def label_of(row: DatasetRow) -> str:
    """Return the display name of a row's environment: its column ``environment``, or else the name of the class.

    >>> label_of({"env_class_path": "my_games.chess.Chess"})
    'Chess'
    """
    label = row.get(LABEL_COLUMN)
    return label if isinstance(label, str) and label else str(row.get("env_class_path")).rpartition(".")[2]


class _Players:
    """Builds the environment of each class and configuration once, and the trials of rows.

    Attributes:
        trials: The trials of all rows so far, row by row.
        envs: The environment of each row.
        tasks: The task of each row, with its seed.
        labels: The name of each row's environment.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, seed: int, limits: Mapping[str, Any]) -> None:
        self.trials: list[Trial] = []
        self.envs: list[MultistepEnv] = []
        self.tasks: list[dict[str, Any]] = []
        self.labels: list[str] = []
        self._built: dict[str, MultistepEnv] = {}
        self._tokenizer, self._seed, self._limits = tokenizer, seed, limits

    def add_all(self, rows: Iterable[Any], num_rollouts: int) -> None:
        """Create the trials of all rows without starting them.

        Raises:
            ConfigError: There are no rows, or the environment of a row cannot be built.
            TaskError: A task is invalid.
        """
        for index, row in enumerate(rows):
            try:
                self._add(row, num_rollouts)
            except (ConfigError, TaskError) as error:
                raise type(error)(f"row {index}: {error}") from error
        if not self.trials:
            raise ConfigError("evaluation needs at least one row, got none")

    def _add(self, row: Any, num_rollouts: int) -> None:
        if not isinstance(row, Mapping) or not isinstance(cast("DatasetRow", row).get("task_data"), Mapping):
            raise ConfigError(f"it must be a dataset row with a 'task_data' (a dict), got {shown(cast('object', row))}")
        fields = cast("DatasetRow", row)
        index = len(self.labels)
        task = dict(fields["task_data"])
        if task.get("seed") is None:
            task["seed"] = derive_seed("evaluation", self._seed, index)
        key = json.dumps([fields.get("env_class_path"), fields.get("env_config")], sort_keys=True, default=repr)
        if key not in self._built:
            self._built[key] = make(fields, self._tokenizer)
        env = self._built[key]
        trials = env.trials([task], num_rollouts, **self._limits)
        for trial in trials:
            trial.task_index = index
        self.trials += trials
        self.envs.append(env)
        self.tasks.append(task)
        self.labels.append(label_of(fields))


def _summary(
    kept: Sequence[Trajectory], everything: Sequence[Trajectory], labels: Sequence[str], seed: int
) -> Evaluation:
    """Return the estimates of the kept rollouts with the counts of all."""
    evaluation, whole = (
        summarize(some, seed=seed, environments=[labels[one.task_index] for one in some]) for some in (kept, everything)
    )
    parts = {name: _counted(evaluation.by_environment.get(name), part) for name, part in whole.by_environment.items()}
    total = replace(_counted(evaluation, whole), by_environment=parts)
    if any(part.fraction_of_optimal is None for part in parts.values()):
        return replace(total, fraction_of_optimal=None)  # it would only cover some of the environments
    return total


def _counted(kept: Evaluation | None, whole: Evaluation) -> Evaluation:
    """Replace the counts of an evaluation, of which None stands for no rollouts, with those of all rollouts."""
    counts: dict[str, Any] = {
        "num_failed": whole.num_failed,
        "stop_reasons": whole.stop_reasons,
        "trajectories": whole.trajectories,
        "clusters": whole.clusters,
    }
    if kept is None:  # all its task groups were left out
        none: dict[str, Any] = {"win_rate": None, "reward": None, "turns": None, "num_episodes": 0, "by_role": {}}
        return replace(whole, **none, num_left_out=whole.num_episodes)
    return replace(kept, **counts, num_left_out=whole.num_episodes - kept.num_episodes)
