"""Play without waiting for training: the sampler continues while the policy is trained on finished rollouts.

::

    rollout thread    group 0 ─ group 1 ─ group 2 ─ group 3 ─ group 4 ─ ...     (one batch of live rollouts)
    training          wait │ batch (1, 0) │ train │ batch (2, 4) │ train ...
    weights           0                           1                      2

docs/asynchronous.md explains why TRL's ``AsyncGRPOTrainer`` is not used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from datasets import IterableDataset

from agentsgym.agents.base import Agent
from agentsgym.agents.trained import BatchStart, as_trained_policy
from agentsgym.envs.datasets.environments import group_seeds
from agentsgym.envs.finished import FinishedRollouts
from agentsgym.envs.play import limit_context, prepare_play, retry_of
from agentsgym.errors import ConfigError
from agentsgym.ranks import DeferredError, all_gather_objects, process_state
from agentsgym.rollouts.driver import TrialStream
from agentsgym.training.generation.batch import GenerationBatch, Phase
from agentsgym.training.generation.generator import RolloutGenerator
from agentsgym.training.generation.in_flight import GroupsInFlight, TaskOrder, TaskSource
from agentsgym.training.metrics.rollouts import RolloutSummary, staleness_metrics

if TYPE_CHECKING:
    from agentsgym.envs.dataset_rows import DatasetRow
    from agentsgym.envs.datasets.environments import Environments
    from agentsgym.envs.trial import Trial
    from agentsgym.failures import FailurePolicy
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.types import Trajectory


_POLL_S = 0.25  # between two checks for a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A task group.

    Attributes:
        number: Position of the group in the task order.
        row_index: Index of its row in the dataset.
        row: The row.
        trials: Its rollouts, not yet started.
    """

    number: int
    row_index: int
    row: DatasetRow
    trials: Sequence[Trial]


PlayedGroup = tuple[Group, "Sequence[Trajectory]"]
"""A task group that was played, and its rollouts in the order of their trials."""


class RolloutsAhead:
    """Plays the task groups of one rank in a thread, until it is closed.

    Attributes:
        waited_s: Seconds for which :meth:`take` waited for the latest batch.
        num_updates: The number of generation batches that were trained on.
        changed: Guards all other attributes; held while values change on which the draw of a group may depend.
    """

    def __init__(
        self,
        in_flight: GroupsInFlight,
        groups: Iterator[Group],
        agent: Any,
        *,
        policy: FailurePolicy,
        num_batches: int | None = None,
        **options: Any,
    ) -> None:
        """Start the thread; no group begins yet.

        Args:
            in_flight: Decides which groups begin and which are trained on.
            groups: The groups to play, in order.
            agent: The agent that acts.
            policy: Determines how often a failed rollout is retried.
            num_batches: Number of generation batches in the run; None if unknown.
            **options: See :class:`~agentsgym.rollouts.driver.TrialStream`.
        """
        self.waited_s = 0.0
        self._in_flight, self._groups = in_flight, groups
        self._policy, self._num_batches = policy, num_batches
        self._num_live, self._pool = in_flight.size * in_flight.num_rollouts, options.get("pool")
        self._begun: dict[int, Group] = {}
        self._places: dict[str, tuple[int, int, Trial]] = {}  # by session: group number, index in the group, trial
        self._played: dict[int, dict[int, Trajectory]] = {}
        self._prepared: set[int] = set()
        self.num_updates = self._next_batch = 0
        self.changed = threading.Condition()
        self._agent = agent
        self._hooks = FinishedRollouts(self._went_through, lambda: self._stream.post(self._take))
        self._stream = TrialStream(agent, self._finished, max_concurrent=self._num_live, **options)

    def take(self, num_updates: int, interrupt: Callable[[], None]) -> list[PlayedGroup]:
        """Wait for a batch; call this once the sampler has the newest weights. Other groups are played meanwhile.

        Args:
            num_updates: Number of generation batches that were trained on.
            interrupt: Called a few times per second; its exceptions are raised here, and the rollouts continue.

        Raises:
            AgentsGymError: The rollouts failed.
        """
        since = time.monotonic()
        with self.changed:
            self.num_updates = self._next_batch = num_updates
            self._prepared.clear()
            self._begin()
            while (numbers := self._in_flight.take(num_updates)) is None:
                self._stream.check()
                interrupt()
                self.changed.wait(_POLL_S)
            self._next_batch += 1
            self._begin()
            self.waited_s = time.monotonic() - since
            taken: list[PlayedGroup] = []
            for number in numbers:
                played = self._played.pop(number)
                taken.append((self._begun.pop(number), [played[index] for index in range(len(played))]))
            return taken

    def close(self) -> None:
        """Drop the rollouts in progress, and end the thread."""
        self._stream.close()
        with self.changed:
            self._hooks.close()

    def _begin(self) -> None:
        """Begin as many groups as possible."""
        last = None if self._num_batches is None else self._num_batches - 1
        while self._in_flight.may_begin(self.num_updates, self._next_batch, last):
            group = next(self._groups)
            self._in_flight.begin(group.number, self.num_updates)
            self._begun[group.number], self._played[group.number] = group, {}
            for index, trial in enumerate(group.trials):
                self._places[trial.session_id] = group.number, index, trial
            # Environments are prepared before their first group in each batch, for the maximum number of live episodes.
            new = [trial for trial in group.trials if id(trial.env) not in self._prepared]
            self._prepared.update(id(trial.env) for trial in new)
            if new:
                prepare_play(new, max_concurrent=self._num_live, pool=self._pool, num_live=self._num_live)
            limit_context(group.trials, self._agent)
            self._hooks.expect(group.trials, self._agent)
            self._stream.add(group.trials)

    # On the stream's thread

    def _finished(self, trajectory: Trajectory) -> None:
        with self.changed:
            _, _, trial = self._places[trajectory.session_id]
            self._hooks.add(trial.env, trajectory, may_retry=trial.num_retries < self._policy.max_retries)

    def _take(self) -> None:
        with self.changed:
            self._hooks.take()

    def _went_through(self, trajectory: Trajectory, may_retry: bool) -> None:
        number, index, trial = self._places.pop(trajectory.session_id)
        if trajectory.failed and may_retry:
            trial = retry_of(trial, self._policy)
            self._places[trial.session_id] = number, index, trial
            self._stream.add([trial])
            return
        self._played[number][index] = trajectory
        self._in_flight.finish(number)
        self._begin()
        self.changed.notify_all()


class AsyncRolloutGenerator(RolloutGenerator):
    """Plays training batches ahead of time, in a thread; evaluations are played as usual.

    It orders the tasks itself, every row once per epoch, since tasks start long before TRL supplies their rows.

    Attributes:
        order: The task order, and which tasks were trained on.
    """

    def __init__(
        self, environments: Environments, agent: Any, args: GRPOEnvConfig, dataset: Any, curriculum: TaskSource | None
    ) -> None:
        num_rows = args.per_device_train_batch_size * cast("int", args.steps_per_generation)  # set by TRL
        if num_rows % cast("int", args.num_generations):
            raise ConfigError(
                "with max_staleness > 0, each rank plays complete task groups: per_device_train_batch_size * "
                f"steps_per_generation must be a multiple of num_generations ({args.num_generations}), got {num_rows}"
            )
        if isinstance(dataset, IterableDataset):
            raise ConfigError(
                "max_staleness > 0 plays tasks ahead of training, which an IterableDataset does not allow: set it to 0"
            )
        self.order = self._tasks = TaskOrder(len(dataset), args.seed, shuffle=args.shuffle_dataset is not False)
        self._ahead: RolloutsAhead | None = None
        self._ahead_pool = args.make_env_pool()
        super().__init__(environments, agent, args, dataset, curriculum)

    def set_agent(self, agent: Any) -> None:
        """Use an agent from now on; rollouts in progress are dropped."""
        if not as_trained_policy(agent).samples_during_updates:
            raise ConfigError(
                "max_staleness > 0 requires an agent that can sample while the policy is being updated, from a "
                "separate copy of the weights: set use_vllm=True and vllm_mode='server', or pass "
                "agent=CopiedPolicyAgent(model, tokenizer) or a TrainedPolicy with samples_during_updates=True; "
                f"got {agent.__class__.__name__}"
            )
        self._end_ahead()
        super().set_agent(agent)

    def begin_run(self, num_trained: int) -> None:
        """Reset the state of an earlier run; ``num_trained`` task groups were trained on before this run."""
        self._end_ahead()
        self._tasks.reset(num_trained)

    def close(self) -> None:
        """Drop rollouts in progress, and end the workers."""
        self._end_ahead()
        super().close()

    def generate(self, rows: Sequence[DatasetRow], phase: Phase) -> GenerationBatch:
        """In training, update the sampler, wait for a batch of this rank's groups, and exchange it. Collective.

        Args:
            rows: The rows of this rank, the same number on every rank; in training, only their number matters.
            phase: The purpose of the batch.

        Raises:
            AgentsGymError: Too many rollouts failed, or the thread that plays them ended with an error.
        """
        if not phase.is_training:
            batch = super().generate(rows, phase)
            # `finish` is called only at the end of the run, so the policy must forget finished sessions here.
            self.policy.forget([trajectory.session_id for trajectory in batch.trajectories])
            if self._ahead is not None:
                self._prepare(phase, f"ahead after {self._ahead.num_updates}")
            return batch
        error, played = DeferredError(), list[PlayedGroup]()
        with self.gathered_weights(), error.capturing():
            self._prepare(phase, "ahead")
        with error.capturing(), self._reporting_errors(phase):
            if not error.first:
                if self._ahead is None:
                    self._ahead = self._play_ahead(len(rows) // phase.num_rollouts, phase.num_rollouts)
                played = self._ahead.take(phase.index - 1, partial(self.interrupt, phase))
        return self._exchange(played, phase, error)

    def _prepare(self, phase: Phase, purpose: str) -> None:
        """Update the sampler's weights; later rollouts use different draws on each rank. Collective."""
        parts = (self._args.seed, purpose, *phase.seed_parts, "rank", process_state().process_index)
        self.policy.prepare(BatchStart(seed_parts=parts, session_ids=(), first_session=0, step=phase.step))

    @property
    def _player(self) -> Agent:
        return self.agent if self._ahead is None else _Shared(self.agent)

    def _play_ahead(self, size: int, num_rollouts: int) -> RolloutsAhead:
        """Start playing ahead, for batches of ``size`` groups on this rank."""
        args = self._args
        return RolloutsAhead(
            GroupsInFlight(size, num_rollouts, args.max_staleness),
            self._groups(num_rollouts),
            self.agent,
            policy=self._failure_policy,
            num_batches=self.num_batches(),
            pool=self._ahead_pool,
            turn_timeout_s=args.turn_timeout_s,
            episode_timeout_s=args.episode_timeout_s,
        )

    def _groups(self, num_rollouts: int) -> Iterator[Group]:
        """Yield this rank's task groups, in order; a curriculum draws each group when it starts."""
        state, args = process_state(), self._args
        for number in self._tasks.untrained(state.process_index, state.num_processes):
            drawn = None if self._curriculum is None else self._curriculum.draw(args.seed, "ahead", number)
            index = self._tasks.row(number) if drawn is None else drawn
            row = self._dataset[index]
            seeds = group_seeds(num_rollouts, num_rollouts, args.seed, "ahead", first=number * num_rollouts)
            trials = self._environments.trials(
                [row] * num_rollouts,
                seeds,
                places=[(number, rollout) for rollout in range(num_rollouts)],
                max_turn_tokens=args.max_turn_tokens,
                max_completion_length=args.max_completion_length,
            )
            yield Group(number=number, row_index=index, row=row, trials=trials)

    def _exchange(self, played: Sequence[PlayedGroup], phase: Phase, error: DeferredError) -> GenerationBatch:
        """Exchange the summaries of the groups that the ranks have played. Collective."""
        rows, trajectories = list["DatasetRow"](), list["Trajectory"]()
        for index, (group, own) in enumerate(played, process_state().process_index * len(played)):
            rows += [group.row] * len(own)
            trajectories += [replace(trajectory, task_index=index) for trajectory in own]
        first, summaries = process_state().process_index * len(rows), list[RolloutSummary]()
        with error.capturing():
            summaries = self._summaries(rows, trajectories, [one.task_index for one in trajectories])
            if self._failures is not None:
                for trajectory in trajectories:
                    self._failures.note(trajectory)
            self.policy.forget([trajectory.session_id for trajectory in trajectories])
        rollouts = all_gather_objects(summaries, error.first)
        ahead = cast("RolloutsAhead", self._ahead)  # exists, since no rank has an error
        versions = [
            [turn.policy_version for turn in one.turns if turn.policy_version is not None] for one in trajectories
        ]
        own_groups = [(group.number, group.row_index) for group, _ in played]
        groups, versions, waits_s = zip(*all_gather_objects([(own_groups, versions, ahead.waited_s)]), strict=True)
        trained = list(chain.from_iterable(groups))
        self._tasks.trained(number for number, _ in trained)
        if self._curriculum is not None:
            trained_rows = [self._dataset[index] for _, index in trained for _ in range(phase.num_rollouts)]
            with ahead.changed:  # no group begins
                self._curriculum.record(trained_rows, rollouts)
        self._check_failures(rollouts)
        batch = self._batch(rows, trajectories, first, rollouts, ())
        num_updates, at = self._args.generations_at(phase.step), self._args.generations_at
        known = list(chain.from_iterable(versions))
        return replace(batch, metrics=staleness_metrics(known, lambda version: num_updates - at(version), waits_s))

    def _end_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._ahead_pool is not None:
            self._ahead_pool.close()


class _Shared(Agent):
    """Wraps a shared agent so that the end of a rollout does not call its ``finish``."""

    def __init__(self, inner: Any) -> None:
        self.act = inner.act
        if callable(getattr(inner, "aact", None)):
            self.aact = inner.aact
