"""Generate the rollouts of a stock trainer's batch in the same way as this library's trainer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from transformers import TrainerCallback

from agentsgym.agents.base import as_agent
from agentsgym.agents.build import build_policy, refuse_prompt_learning
from agentsgym.agents.policy.sharded import zero_stage
from agentsgym.agents.trained import BatchStart, as_trained_policy
from agentsgym.agents.vllm.lockstep import LockstepVLLMPolicyAgent
from agentsgym.agents.vllm.policy import VLLMPolicyAgent
from agentsgym.credit.assignment import AdvantageAssigner
from agentsgym.credit.scored import ScoredRollout
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.datasets.environments import Environments, group_seeds
from agentsgym.envs.play import play
from agentsgym.errors import ConfigError, TooManyFailuresError
from agentsgym.ranks import DeferredError, all_gather_objects, process_state, raise_on_all_ranks
from agentsgym.texts import shown
from agentsgym.types import Trajectory

if TYPE_CHECKING:
    from agentsgym.credit.settings import CreditArgs, CreditSettings
    from agentsgym.envs.dataset_rows import DatasetRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerSettings:
    """The arguments of ``rollout_func``: settings of rollouts for a stock trainer.

    Attributes:
        env: The environment, a function that builds it from a tokenizer, or None for the ones that rows name.
        credit_settings: The settings of advantages.
        agent: The agent that plays; None for the policy in training.
        max_turn_tokens: The maximum number of tokens in one turn.
        stop_strings: Strings that end a turn.
        max_failed_fraction: The fraction of failed rollouts above which the run stops.
        drive_options: Further options of :func:`~agentsgym.rollouts.driver.drive`.
    """

    env: MultistepEnv | Callable[[Any], MultistepEnv] | None
    credit_settings: CreditSettings
    agent: Any
    max_turn_tokens: int
    stop_strings: Sequence[str]
    max_failed_fraction: float
    drive_options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """This process's rollouts of a generation batch.

    Attributes:
        trajectories: The rollouts, (B,), group after group.
        advantages: One number per token of each rollout, (B, T).
        included: Whether each rollout is trained on, (B,).
    """

    trajectories: Sequence[Trajectory]
    advantages: Sequence[Sequence[float]]
    included: Sequence[bool]


class GroupPlayer:
    """Generates rollouts for one trainer."""

    def __init__(self, trainer: Any, settings: PlayerSettings) -> None:
        """Build the environments and the agent without starting an episode, and add a callback to the trainer.

        Only public attributes of the ``GRPOTrainer`` are used.

        Raises:
            ConfigError: The environment or the model is unsuitable.
        """
        tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
        self._args, self._settings = trainer.args, settings
        self._numbers = _BatchNumbers()
        trainer.add_callback(self._numbers)
        self.filler: int = tokenizer.pad_token_id or 0  # in otherwise empty rows
        self.environments = Environments(
            _environment(settings.env, tokenizer),
            tokenizer,
            check=check_environment,
            template_options=getattr(trainer, "chat_template_kwargs", None),
        )
        refuse_prompt_learning(getattr(model, "peft_config", {}).values())
        self.agent = as_agent(settings.agent if settings.agent is not None else self._policy(trainer, model, tokenizer))
        self._policy_in_training = as_trained_policy(self.agent)
        self._assigner = AdvantageAssigner(cast("CreditArgs", settings.credit_settings))  # read-only

    def _policy(self, trainer: Any, model: Any, tokenizer: Any) -> Any:
        if zero_stage(trainer.accelerator):
            raise ConfigError(
                "rollouts in a stock GRPOTrainer under DeepSpeed are untested and therefore not supported: use "
                "GRPOEnvTrainer, or shard with fsdp=True"
            )
        absent = {"vllm_server_urls": (), "max_staleness": 0}  # a GRPOConfig lacks these fields
        settings: Any = SimpleNamespace(**{**absent, **vars(trainer.args)})
        return build_policy(
            model,
            tokenizer,
            settings,
            trainer.accelerator,
            getattr(trainer, "vllm_generation", None),
            max_turn_tokens=self._settings.max_turn_tokens,
            stop=self._settings.stop_strings,
        )

    def play(
        self, rows: Sequence[DatasetRow], *, num_rows: int, num_rollouts: int, step: int, is_training: bool
    ) -> Played:
        """Collective: generate the rollouts of rows that form task groups.

        Args:
            rows: This process's rows, the same number on every process; the trainer repeats each task ``num_rows``
                times consecutively.
            num_rows: The number of rows in a task group.
            num_rollouts: The number of rollouts per group, for its first rows; if below ``num_rows``, groups must be
                complete on each process.
            step: The number of optimizer steps so far.
            is_training: Whether the rollouts are for training.
        """
        state = process_state()
        rank = state.process_index
        with raise_on_all_ranks():
            check_groups(rows, num_rows, first=rank * len(rows))
        if num_rollouts != num_rows:
            rows = [row for index, row in enumerate(rows) if index % num_rows < num_rollouts]
        first = rank * len(rows)
        places = [divmod(index, num_rollouts) for index in range(first, first + len(rows))]
        if is_training:
            seed_parts = (self._args.seed, "train", self._numbers.next_training(self._args, step))
        else:
            seed_parts = (self._args.seed, "eval", self._numbers.next_evaluation(len(rows) * state.num_processes))
        trajectories, scored = self._play(rows, places, seed_parts, step)
        with raise_on_all_ranks():  # a custom estimator may fail on one rank only
            local_indices = range(first, first + len(rows))
            counts = [sum(rollout.token_counts) for rollout in scored]
            found = self._assigner.assign(scored, local_indices, trajectories, counts, is_training=is_training)
        return Played(trajectories=trajectories, advantages=found.advantages, included=found.included)

    def _play(
        self, rows: Sequence[DatasetRow], places: Sequence[tuple[int, int]], seed_parts: Sequence[Any], step: int
    ) -> tuple[list[Trajectory], list[ScoredRollout]]:
        """Collective: return the rollouts of this process, and the estimator inputs of all processes."""
        first, error = process_state().process_index * len(rows), DeferredError()
        trials, trajectories, found = list[Any](), list[Trajectory](), list[tuple[ScoredRollout, str | None]]()
        with error.capturing():
            trials = self.environments.trials(
                rows,
                [seed for group, _ in places for seed in group_seeds(1, 1, *seed_parts, first=group)],
                places=places,
                max_turn_tokens=self._settings.max_turn_tokens,
                max_completion_length=self._args.max_completion_length,
            )
        with error.capturing():
            if isinstance(self.agent, VLLMPolicyAgent | LockstepVLLMPolicyAgent):
                self.agent.weights_loaded(step)  # by TRL, before this call
            sessions = [trial.session_id for trial in trials]
            start = BatchStart(seed_parts=seed_parts, session_ids=sessions, first_session=first, step=step)
            self._policy_in_training.prepare(start)
        with error.capturing():  # an agent in lockstep with other ranks must take part even without trials
            trajectories = play([] if error.first else trials, self.agent, **self._settings.drive_options)
        with error.capturing():
            if not error.first:
                self.environments.check_starts(rows, trajectories)
                for row, trajectory in zip(rows, trajectories, strict=True):
                    scored = ScoredRollout.from_trajectory(
                        trajectory,
                        group=trajectory.task_index,
                        turn_credit=self.environments.of(row).env_config["turn_credit"],
                        environment=self.environments.identity(row),
                    )
                    found.append((scored, trajectory.error))
        gathered = all_gather_objects(found, error.first)
        errors = [message for scored, message in gathered if scored.failed]
        if len(errors) > self._settings.max_failed_fraction * len(gathered):  # on all ranks, or on none
            raise TooManyFailuresError(
                f"{len(errors)} of {len(gathered)} rollouts failed, more than max_failed_fraction = "
                f"{self._settings.max_failed_fraction}; the first failure was:\n{errors[0]}"
            )
        return trajectories, [scored for scored, _ in gathered]


class _BatchNumbers(TrainerCallback):
    """Numbers the generation batches of a run as this library's trainer does, so that the seeds are the same.

    Training batches are numbered from 1, across resumes; an evaluation batch's number is the number of rollouts before
    it in the evaluation.
    """

    def __init__(self) -> None:
        self._num_generations: int | None = None  # None before a run's first batch
        self._num_evaluated = 0

    def next_training(self, args: Any, step: int) -> int:
        """Return the number of the training batch that starts after ``step`` optimizer steps."""
        if self._num_generations is None:
            accumulation = args.gradient_accumulation_steps
            micro_steps = args.steps_per_generation * args.num_iterations
            cycle = math.lcm(micro_steps, accumulation) // accumulation
            if step % cycle:
                logger.warning(
                    "the run resumes at step %d, within a generation cycle of %d steps; checkpoints do not contain the "
                    "cycle's unused rows, so it continues with different rollouts: set save_steps to a multiple of %d",
                    step,
                    cycle,
                    cycle,
                )
            self._num_generations = math.ceil(step * accumulation / micro_steps)
        self._num_generations += 1
        self._num_evaluated = 0
        return self._num_generations

    def next_evaluation(self, num_rollouts: int) -> int:
        """Return the number of the next evaluation batch, which has ``num_rollouts`` rollouts across all processes."""
        index = self._num_evaluated
        self._num_evaluated += num_rollouts
        return index

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Reset the numbering when a run starts."""
        self._num_generations = None

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Reset the numbering, so that the next evaluation uses the same numbers."""
        self._num_evaluated = 0

    on_predict = on_evaluate


def check_groups(rows: Sequence[DatasetRow], num_rows: int, *, first: int) -> None:
    """Raise :class:`ConfigError` if rows of one task group have different tasks."""
    for index, (one, other) in enumerate(pairwise(rows), 1):
        if (first + index) % num_rows and one != other:
            raise ConfigError(
                f"rows {index - 1} and {index} of the batch belong to one task group of num_generations={num_rows} but "
                f"have different tasks: the trainer must repeat each row {num_rows} times consecutively, as "
                "GRPOTrainer does, and evaluation batches must contain complete groups (per_device_eval_batch_size, "
                "num_generations_eval)"
            )


def _environment(env: Any, tokenizer: Any) -> MultistepEnv | None:
    if env is None or isinstance(env, MultistepEnv):
        if env is not None and env.tokenizer is None:
            raise ConfigError(
                "env has no tokenizer: build it with the trainer's tokenizer, or pass a function, such as its class"
            )
        return env
    made = env(tokenizer) if callable(env) else None
    if not isinstance(made, MultistepEnv):
        raise ConfigError(
            f"env must be a MultistepEnv, a function that returns one given a tokenizer, or None, got {shown(env)}"
        )
    return made


def check_environment(env: MultistepEnv) -> None:
    """Raise :class:`ConfigError` if an environment's rollouts are not a single sequence of tokens."""
    history = env.env_config["history"]
    if history != "append":
        raise ConfigError(
            f"env_config['history']={history!r} rewrites history, but rollout_func must return a rollout as "
            "one sequence of tokens: use history='append', or train with GRPOEnvTrainer(layout='turn')"
        )
