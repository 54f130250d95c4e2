"""How a generation batch is played: seeds, limits, what fails, and which task groups are played again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from datasets import IterableDataset

from agentsgym.agents.policy import PolicyAgent
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import AgentsGymError, ConfigError
from agentsgym.rollouts.driver import drive
from agentsgym.seeding import derive_seed
from agentsgym.training import _trl
from agentsgym.training.in_step import ShardedPolicyAgent
from agentsgym.training.metrics import without_tokens
from agentsgym.training.ranks import gathered, num_before, raised_together
from agentsgym.training.rows import group_seeds
from agentsgym.training.rules import ENV_POOLS
from agentsgym.training.selection import penalise_truncated, useless_groups
from agentsgym.training.vllm_policy import VLLMPolicyAgent

if TYPE_CHECKING:
    from agentsgym.training.trainer import GRPOEnvTrainer
    from agentsgym.types import Trajectory

Phase = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A generation batch that has been played.

    Attributes:
        rows: What this rank's rollouts played, (B,): dataset rows.
        trajectories: This rank's rollouts, (B,).
        first: Index of this rank's first rollout among those of all ranks.
        everyone: The rollouts of all ranks; in training without what only their own rank needs of them.
        replaced: Rollouts of all ranks that others have taken the place of.
    """

    rows: Sequence[Mapping[str, Any]]
    trajectories: list[Trajectory]
    first: int
    everyone: list[Trajectory]
    replaced: list[Trajectory]


class Player:
    """Plays the rows of a trainer, on all its ranks together.

    Attributes:
        generation: Number of the newest generation batch of training; None before the first.
        evaluated: The rollouts of the evaluation that is under way or was the last.
    """

    def __init__(self, trainer: GRPOEnvTrainer) -> None:
        """Take whose rows they are.

        Raises:
            ConfigError: Task groups are to be replaced by others, and the dataset is a stream.
        """
        args = trainer.args
        if args.zero_variance_groups == "resample" and isinstance(trainer.train_dataset, IterableDataset):
            raise ConfigError("zero_variance_groups='resample' draws tasks anew, which a stream of rows does not allow")
        self._trainer = trainer
        self._args = args
        self._pool = ENV_POOLS[args.env_pool](args.num_env_workers) if args.env_pool else None
        self.generation: int | None = None
        self.evaluated: list[Trajectory] = []

    def play(self, rows: Sequence[Mapping[str, Any]]) -> Played:
        """Play this rank's rows, and in training what is to take the place of task groups without use."""
        first = num_before(len(rows))
        phase = self._next_phase()
        trajectories = self._play(rows, range(first, first + len(rows)), phase)
        played = Played(
            rows=rows, trajectories=trajectories, first=first, everyone=self._share(trajectories), replaced=[]
        )
        self._check_rollouts(played.everyone)
        if not _trl.is_training(self._trainer):
            self.evaluated.extend(played.everyone)
        elif self._args.zero_variance_groups == "resample":
            for attempt in range(1, self._args.max_resamples + 1):
                groups = self._useless(played.everyone)
                if not groups:
                    break
                played = self._play_again(played, groups, (*phase, "again", attempt))
                self._check_rollouts([*played.everyone, *played.replaced])
        return played

    def _useless(self, everyone: Sequence[Trajectory]) -> set[int]:
        num_rollouts = _trl.num_generations(self._trainer)
        rollouts = [
            ScoredRollout.from_trajectory(trajectory, group=index // num_rollouts)
            for index, trajectory in enumerate(everyone)
        ]
        return useless_groups(penalise_truncated(rollouts, everyone, self._args), self._args)

    def _play_again(self, played: Played, groups: set[int], phase: Phase) -> Played:
        """Replace whole task groups, wherever their rows are, each by a task that all ranks draw alike."""
        num_rollouts = _trl.num_generations(self._trainer)
        dataset: Any = self._trainer.train_dataset
        drawn = {group: dataset[derive_seed("task", self._args.seed, *phase, group) % len(dataset)] for group in groups}
        mine = range(played.first, played.first + len(played.rows))
        indices = [index for index in mine if index // num_rollouts in groups]
        rows, trajectories = list(played.rows), list(played.trajectories)
        again = self._play([drawn[index // num_rollouts] for index in indices], indices, phase)
        for index, trajectory in zip(indices, again, strict=True):
            rows[index - played.first] = drawn[index // num_rollouts]
            trajectories[index - played.first] = trajectory
        everyone, replaced = list(played.everyone), list(played.replaced)
        for index, trajectory in zip(gathered(indices), self._share(again), strict=True):
            replaced.append(everyone[index])
            everyone[index] = trajectory
        return replace(played, rows=rows, trajectories=trajectories, everyone=everyone, replaced=replaced)

    def _play(self, rows: Sequence[Mapping[str, Any]], indices: Sequence[int], phase: Phase) -> list[Trajectory]:
        """Play rows that have these places in the generation batch of all ranks."""
        trainer, args = self._trainer, self._args
        num_rollouts = _trl.num_generations(trainer)
        seeds = [seed for index in indices for seed in group_seeds(1, num_rollouts, args.seed, *phase, first=index)]
        with raised_together():  # before any rank plays: an agent may be in step with those of the others
            trials = trainer.environments.trials(
                rows,
                seeds,
                max_turn_tokens=args.max_turn_tokens,
                max_completion_length=args.max_completion_length,
            )
        self._prepare_agent(phase, [trial.session_id for trial in trials])
        with raised_together():
            trajectories = drive(
                trials,
                trainer.agent,
                pool=self._pool,
                turn_timeout_s=args.turn_timeout_s,
                episode_timeout_s=args.episode_timeout_s,
            )
        return trajectories

    def _prepare_agent(self, phase: Phase, sessions: list[str]) -> None:
        """Make the policy ready to play, on all ranks together: its draws, its weights, how it is sampled."""
        agent, first = self._trainer.agent, num_before(len(sessions))
        if isinstance(agent, VLLMPolicyAgent):
            agent.begin(self._trainer.state.global_step)
        if isinstance(agent, PolicyAgent):
            agent.reseed(self._args.seed, *phase, first=first, sessions=sessions)
        if isinstance(agent, ShardedPolicyAgent):
            agent.begin()

    def _share(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The rollouts of all ranks, in training without what only their own rank needs of them."""
        is_training = _trl.is_training(self._trainer)
        return gathered([without_tokens(row) for row in trajectories] if is_training else trajectories)

    def _next_phase(self) -> Phase:
        """Name this generation batch, so that its seeds are its own, also after a resume."""
        if not _trl.is_training(self._trainer):
            return "eval", len(self.evaluated)
        if self.generation is None:
            self.generation = self._generations_before()
        self.generation += 1
        return "train", self.generation

    def _generations_before(self) -> int:
        step, cycle = self._trainer.state.global_step, self._args.steps_per_cycle
        if step % cycle:
            raise ConfigError(
                f"a run resumes at a multiple of {cycle} steps, the boundaries of its generation cycle, since the rows "
                f"of a half-used cycle are not saved; got step {step}: resume from an earlier checkpoint, or start a "
                "new run with this one as its model"
            )
        return self._args.generations_at(step)

    def _check_rollouts(self, trajectories: Sequence[Trajectory]) -> None:
        """Stop where too many failed: every rank is given the rollouts of all, so that all of them stop."""
        failed = [trajectory for trajectory in trajectories if trajectory.failed]
        if len(failed) > self._args.max_failed_fraction * len(trajectories):
            raise AgentsGymError(
                f"{len(failed)} of {len(trajectories)} rollouts failed, more than max_failed_fraction = "
                f"{self._args.max_failed_fraction}; the first failed so:\n{failed[0].error}"
            )
