"""Play a generation batch: derive seeds, apply limits, handle failures, and resample task groups."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from datasets import IterableDataset

from agentsgym.agents.base import as_agent
from agentsgym.agents.trained import BatchStart, as_trained_policy
from agentsgym.batch.layouts import LAYOUTS
from agentsgym.credit.assignment import uninformative_task_groups
from agentsgym.credit.scored import ScoredRollout
from agentsgym.envs.dataset_rows import DatasetRow
from agentsgym.envs.datasets.environments import group_seeds
from agentsgym.envs.finished import hooks_of
from agentsgym.envs.play import TrialRounds
from agentsgym.errors import AgentsGymError, ConfigError, TooManyFailuresError
from agentsgym.failures import FailureCount, FailureLog, FailurePolicy, RetrySeed
from agentsgym.ranks import DeferredError, RolloutsAbortedError, all_gather_objects, process_state
from agentsgym.seeding import derive_seed
from agentsgym.training.generation.batch import GenerationBatch, Phase, short_summaries
from agentsgym.training.metrics.rollouts import RolloutSummary

if TYPE_CHECKING:
    from agentsgym.agents.base import Agent
    from agentsgym.envs.datasets.environments import Environments
    from agentsgym.envs.trial import Trial
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.generation.in_flight import TaskOrder, TaskSource
    from agentsgym.types import Trajectory

logger = logging.getLogger(__name__)

MAX_RESAMPLES: Final = 3  # per generation batch


class RolloutGenerator:
    """Plays dataset rows, on all ranks together.

    Attributes:
        order: The task order, and which tasks were trained on so far, if the generator draws its own rows (asynchronous
            training); None if TRL supplies the rows.
        agent: The agent that acts.
        policy: The same agent, as a trainable policy that prepares for each batch.
        interrupt: Called between turns with the phase, and also with the error if the rollouts ended with one; an
            exception that it raises aborts the rollouts on all ranks.
        gathered_weights: Returns a context manager, entered by all ranks together, inside which the policy is prepared
            and acts.
        num_batches: Returns the number of generation batches of the run.
    """

    order: TaskOrder | None = None

    def __init__(
        self, environments: Environments, agent: Any, args: GRPOEnvConfig, dataset: Any, curriculum: TaskSource | None
    ) -> None:
        """Create the configured pool, without playing anything.

        Args:
            environments: The environments of the rows.
            agent: The agent that acts, or any object that can be adapted to one.
            args: The settings.
            dataset: The training rows, from which replacement tasks are drawn if task groups are resampled.
            curriculum: Draws the tasks of each training batch instead of the given rows; None to use the rows.

        Raises:
            ConfigError: The dataset is an ``IterableDataset`` although task groups are resampled or a curriculum is
                used; or the agent implements only part of the interface of a trainable policy.
        """
        if args.zero_variance_groups == "resample" and isinstance(dataset, IterableDataset):
            raise ConfigError(
                "zero_variance_groups='resample' draws replacement tasks, which an IterableDataset does not allow"
            )
        self._environments = environments
        self.set_agent(agent)
        self._args = args
        self._failure_policy = FailurePolicy(
            max_failed_fraction=args.max_failed_fraction,
            max_retries=args.episode_retries,
            retry_seed=cast("RetrySeed", args.retry_seed),  # checked with the other settings
        )
        self._dataset = dataset
        self._curriculum = curriculum
        if curriculum is not None:
            curriculum.bind(dataset)
        self._layout = LAYOUTS[args.layout]
        self._pool = args.make_env_pool()
        self._num_pool_users = 0
        self._failures: FailureLog | None = None
        self.interrupt: Callable[..., None] = lambda *_: None
        self.num_batches: Callable[[], int | None] = lambda: None
        self.gathered_weights: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def set_agent(self, agent: Any) -> None:
        """Use an agent from now on.

        Args:
            agent: An agent, or any object that can be adapted to one.

        Raises:
            ConfigError: ``agent`` is not an agent and cannot be adapted to one, or it implements only part of the
                interface of a trainable policy.
        """
        # The policy comes from the original object, since an adapter from `as_agent` lacks the policy's methods.
        self.agent, self.policy = as_agent(agent), as_trained_policy(agent)

    def begin_run(self, num_trained: int) -> None:
        """Prepare for a run before which ``num_trained`` task groups were trained on; nothing to do here."""

    @contextlib.contextmanager
    def counting_failures(self) -> Generator[None]:
        """Log each kind of failure once per run, and the number of repetitions at the end of the run."""
        with FailureLog(logger) as log:
            self._failures = log
            try:
                yield
            finally:
                self._failures = None

    @contextlib.contextmanager
    def keeping_workers(self) -> Generator[None]:
        """Inside the block, keep the pool's threads or processes between generation batches; end them afterwards.

        An evaluation during training uses the workers of the training.
        """
        self._num_pool_users += 1
        try:
            yield
        finally:
            self._num_pool_users -= 1
            if not self._num_pool_users:
                self.close()

    def close(self) -> None:
        """End the pool's threads or processes."""
        if self._pool is not None:
            self._pool.close()

    def generate(self, rows: Sequence[DatasetRow], phase: Phase) -> GenerationBatch:
        """Play this rank's rows, and in training resample uninformative task groups if configured. Collective.

        Args:
            rows: The rows of this rank, the same number on every rank.
            phase: The purpose of the batch (training or evaluation), and its seeds.

        Raises:
            AgentsGymError: Too many rollouts failed, or ranks have different numbers of rows.
        """
        first = process_state().process_index * len(rows)
        indices = range(first, first + len(rows))
        drawn: dict[int, DatasetRow] = {}
        if self._curriculum is not None and phase.is_training:
            drawn = self._draw(range(process_state().num_processes * len(rows) // phase.num_rollouts), phase)
            rows = [drawn[i // phase.num_rollouts] for i in indices]
        trajectories, rollouts = self._play(rows, indices, phase, first)
        if len(rollouts) != process_state().num_processes * len(rows):
            raise AgentsGymError(
                "all ranks must play the same number of rows: leave accelerator_config['even_batches'] at True"
            )
        if self._curriculum is not None and drawn:
            self._curriculum.record([drawn[i // phase.num_rollouts] for i in range(len(rollouts))], rollouts)
        self._check_failures(rollouts)
        batch = self._batch(rows, trajectories, first, rollouts, ())
        if not phase.is_training:
            return batch
        for attempt in range(1, MAX_RESAMPLES + 1) if self._args.zero_variance_groups == "resample" else ():
            groups = uninformative_task_groups(batch.scored, self._args)
            if not groups:
                break
            batch = self._resample(batch, groups, replace(phase, attempt=attempt))
            self._check_failures([*batch.rollouts, *batch.replaced])
        return batch

    def _batch(
        self,
        rows: Sequence[DatasetRow],
        trajectories: Sequence[Trajectory],
        first: int,
        rollouts: Sequence[RolloutSummary],
        replaced: Sequence[RolloutSummary],
    ) -> GenerationBatch:
        return GenerationBatch(
            dataset_rows=rows,
            trajectories=trajectories,
            training_rows=[row for i, one in enumerate(trajectories) for row in self._layout(i, one)],
            first=first,
            rollouts=rollouts,
            replaced=replaced,
        )

    def _resample(self, batch: GenerationBatch, groups: set[int], phase: Phase) -> GenerationBatch:
        """Replace complete task groups, even across ranks. Collective; all ranks draw the same tasks."""
        num_rollouts, drawn = phase.num_rollouts, self._draw(sorted(groups), phase)
        global_indices = [i for i in range(len(batch.rollouts)) if i // num_rollouts in groups]
        indices = [i for i in global_indices if i in batch.local_indices]
        num_before = sum(i < batch.first for i in global_indices)
        replacements, summaries = self._play([drawn[i // num_rollouts] for i in indices], indices, phase, num_before)
        if self._curriculum is not None:
            self._curriculum.record([drawn[i // num_rollouts] for i in global_indices], summaries)
        rows, trajectories = list(batch.dataset_rows), list(batch.trajectories)
        for i, trajectory in zip(indices, replacements, strict=True):
            rows[i - batch.first] = drawn[i // num_rollouts]
            trajectories[i - batch.first] = trajectory
        rollouts, replaced = list(batch.rollouts), list(batch.replaced)
        for i, summary in zip(global_indices, summaries, strict=True):
            replaced.append(rollouts[i])
            rollouts[i] = summary
        return self._batch(rows, trajectories, batch.first, rollouts, replaced)

    def _draw(self, groups: Iterable[int], phase: Phase) -> dict[int, DatasetRow]:
        """Draw a row for each given task group, the same on all ranks."""
        dataset, curriculum = self._dataset, self._curriculum
        parts = {group: (self._args.seed, *phase.seed_parts, group) for group in groups}
        if curriculum is not None:
            return {group: dataset[curriculum.draw(*seed)] for group, seed in parts.items()}
        return {group: dataset[derive_seed("task", *seed) % len(dataset)] for group, seed in parts.items()}

    def _play(
        self, rows: Sequence[DatasetRow], indices: Sequence[int], phase: Phase, num_before: int
    ) -> tuple[list[Trajectory], list[RolloutSummary]]:
        """Play rows, and exchange the summaries of the rollouts. Collective.

        Args:
            rows: The rows of this rank.
            indices: The indices of these rows in the generation batch of all ranks.
            phase: The purpose of the batch.
            num_before: Number of rows that are played by lower ranks.

        Returns:
            The rollouts of this rank, and the summaries of the rollouts of all ranks.
        """
        args, error = self._args, DeferredError()
        trials, trajectories, summaries = list["Trial"](), list["Trajectory"](), list[RolloutSummary]()
        with error.capturing():
            parts = (args.seed, *phase.seed_parts)
            trials = self._environments.trials(
                rows,
                [group_seeds(1, phase.num_rollouts, *parts, first=i)[0] for i in indices],
                places=map(phase.place, indices),
                max_turn_tokens=args.max_turn_tokens,
                max_completion_length=args.max_completion_length,
            )
            _check_complete_groups(trials, phase.num_rollouts)
        policy = self._failure_policy
        count = FailureCount(policy, process_state().num_processes * len(rows))
        with FailureLog(logger) if self._failures is None else contextlib.nullcontext(self._failures) as log:
            # A nonzero limit applies to the rollouts of all ranks, so it is checked after they have been played.
            rounds = TrialRounds(trials, policy, log, None if args.max_failed_fraction else count.add)
            self._play_round(rounds, phase, num_before, error)
            for attempt in range(1, args.episode_retries + 1):  # the same rounds on every rank, even without trials
                counts = all_gather_objects([len(rounds.pending)], error.first)
                if not any(counts):
                    break
                self._play_round(rounds, phase, sum(counts[: process_state().process_index]), error, "retry", attempt)
        with error.capturing():
            if not error.first:
                trajectories = rounds.trajectories
                summaries = self._summaries(rows, trajectories, [i // phase.num_rollouts for i in indices])
        return trajectories, all_gather_objects(summaries, error.first)

    def _play_round(
        self, rounds: TrialRounds, phase: Phase, num_before: int, error: DeferredError, *seed_parts: str | int
    ) -> None:
        """Play the pending trials; a rank with an error takes part without trials. Collective."""
        args = self._args
        with self.gathered_weights():
            with error.capturing():
                self.policy.prepare(
                    BatchStart(
                        seed_parts=(args.seed, *phase.seed_parts, *seed_parts),
                        session_ids=[trial.session_id for trial in rounds.pending],
                        first_session=num_before,
                        step=phase.step,
                    )
                )
            with error.capturing(), self._reporting_errors(phase):
                # The agents of all ranks may run in lockstep, so a rank without trials still joins their calls.
                if error.first:
                    rounds.pending.clear()
                rounds.play(
                    self._player,
                    pool=self._pool,
                    turn_timeout_s=args.turn_timeout_s,
                    episode_timeout_s=args.episode_timeout_s,
                    interrupt=partial(self.interrupt, phase),
                )

    @property
    def _player(self) -> Agent:
        """The agent that plays the rounds; asynchronous training overrides it."""
        return self.agent

    @contextlib.contextmanager
    def _reporting_errors(self, phase: Phase) -> Generator[None]:
        """Report an error of the rollouts to ``interrupt``: a signal may have killed the pool's processes."""
        try:
            yield
        except RolloutsAbortedError:
            raise
        except Exception as error:
            self.interrupt(phase, error)
            raise

    def _summaries(
        self, rows: Sequence[DatasetRow], trajectories: Sequence[Trajectory], groups: Sequence[int]
    ) -> list[RolloutSummary]:
        """Check the rollouts of this rank, and summarize them for the other ranks."""
        self._environments.check_starts(rows, trajectories)
        summaries: list[RolloutSummary] = []
        for trajectory, row, group in zip(trajectories, rows, groups, strict=True):
            scored = ScoredRollout.from_trajectory(
                trajectory,
                group=group,
                turn_credit=self._environments.of(row).env_config["turn_credit"],
                environment=self._environments.identity(row),
            )
            summary = RolloutSummary.of(trajectory, self._layout(0, trajectory), scored)
            retries = trajectory.num_retries if self._args.episode_retries else None
            summaries.append(replace(summary, environment=self._environments.label(row), num_retries=retries))
        return short_summaries(summaries)

    def _check_failures(self, rollouts: Sequence[RolloutSummary]) -> None:
        """Raise if too many rollouts failed; every rank has all summaries, so all ranks raise together."""
        failed = [rollout for rollout in rollouts if rollout.failed]
        if len(failed) > self._args.max_failed_fraction * len(rollouts):
            raise TooManyFailuresError(
                f"{len(failed)} of {len(rollouts)} rollouts failed, more than max_failed_fraction = "
                f"{self._args.max_failed_fraction}; the first failure was:\n{failed[0].error}"
            )


def _check_complete_groups(trials: Sequence[Trial], num_rollouts: int) -> None:
    """Raise :class:`ConfigError` if a task group that a hook takes at once is divided among ranks."""
    sizes: Counter[int] = Counter()
    label = ""
    for trial in trials:
        for hook in [one for one in hooks_of(trial.env) if one.takes_groups][:1]:
            sizes[trial.task_index] += 1
            label = hook.label
    if any(size != num_rollouts for size in sizes.values()):
        raise ConfigError(
            f"{label} needs complete task groups on each rank: per_device_train_batch_size * steps_per_generation must "
            f"be a multiple of num_generations ({num_rollouts})"
        )
