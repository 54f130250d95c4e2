"""GRPO over many turns: TRL's trainer, fed by environments, with an advantage of its own for every turn."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from trl import GRPOTrainer

from agentsgym.agents.base import Agent, as_agent
from agentsgym.agents.policy import PolicyAgent, Sampling
from agentsgym.credit.advantages import ScoredRollout, get_estimator, gigpo, token_advantages, zero_variance_share
from agentsgym.errors import AgentsGymError, ConfigError
from agentsgym.evaluation.metrics import Evaluation, summarize
from agentsgym.rollouts.driver import drive
from agentsgym.training import _trl
from agentsgym.training.batches import round_up, row_tensors
from agentsgym.training.checks import check_model, check_size, finite_datasets
from agentsgym.training.config import ENV_POOLS, GRPOEnvConfig
from agentsgym.training.evaluating import counted_rollouts, untouched_global_generators
from agentsgym.training.in_step import ShardedPolicyAgent, policy_agent_type
from agentsgym.training.metrics import evaluation_metrics, rollout_metrics, without_tokens
from agentsgym.training.ranks import gathered, num_before, raised_together
from agentsgym.training.rows import Environments, group_seeds
from agentsgym.training.scoring import scores
from agentsgym.training.vllm_policy import VLLMPolicyAgent

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
    from transformers.trainer_utils import EvalLoopOutput, TrainOutput

    from agentsgym.credit.advantages import Scale
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.types import Trajectory

logger = logging.getLogger(__name__)


class GRPOEnvTrainer(GRPOTrainer):
    """TRL's ``GRPOTrainer`` for environments: plays the rows, and gives each turn's tokens their own advantage.

    Everything else is TRL's: losses, KL, gradient accumulation, ``num_iterations``, evaluation, checkpoints, logging.

    Attributes:
        environments: What the rows are played in.
        agent: Who plays them; by default the policy in training.
        last_evaluation: The newest evaluation during training, trajectories included; None before the first.
    """

    args: GRPOEnvConfig

    def __init__(  # noqa: PLR0913  # mirrors TRL's constructor
        self,
        model: str | PreTrainedModel,
        env: MultistepEnv | None = None,
        args: GRPOEnvConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        agent: Agent | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: PeftConfig | None = None,
    ) -> None:
        """Set up training; the arguments that TRL's trainer has too mean what they mean there.

        Args:
            model: A causal language model, or its name or path. With ``args.beta`` above 0 TRL loads the reference
                from that path, so weights that have changed since they were loaded (by ``imitate``, say) are to be
                saved with ``save_pretrained`` and loaded from there first.
            env: The environment of every row; None builds each row's own from its ``env_class_path`` and
                ``env_config``, so that one run can mix games.
            args: The settings.
            train_dataset: Rows with ``task_data`` and, without ``env``, ``env_class_path`` and ``env_config``.
            eval_dataset: Likewise.
            processing_class: The policy's tokenizer; by default that of ``env``, else the model's own.
            agent: Who plays. None is the policy in training; another agent should sample it too, or else the gradient
                is not that of the policy. Text without token ids is encoded and counted in the metric ``exact``.
            callbacks: As in TRL.
            optimizers: As in TRL.
            peft_config: As in TRL: adapters to be trained in place of the weights; with ``args.beta`` above 0 the
                reference is the model without them. A ``PeftModel`` as ``model`` goes on with the adapter it has.

        Raises:
            ConfigError: A row or a setting cannot be trained, or a dataset is empty.
            TaskError: A row's task cannot be played. (Rows of a stream are checked when they are played.)
        """
        args = args or GRPOEnvConfig()
        if train_dataset is None:
            raise ConfigError("train_dataset is missing: pass rows with 'task_data', e.g. Env.get_train_dataset()")
        if processing_class is None and env is not None:
            processing_class = env.tokenizer
        check_model(model, args, peft_config)
        args.align_saving()
        super().__init__(
            model=model,
            reward_funcs=_trl.environment,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
        )
        _trl.free_copies(self)
        self._policy_tokenizer = cast("PreTrainedTokenizerBase", self.processing_class)
        self.environments = Environments(env, self._policy_tokenizer)
        for name, dataset in finite_datasets(train_dataset=train_dataset, eval_dataset=eval_dataset):
            self.environments.check(dataset, name)
        check_size(train_dataset, args)
        agent_type = policy_agent_type(self.accelerator)
        self.agent = self._policy_agent(agent_type) if agent is None else as_agent(agent)
        self.last_evaluation: Evaluation | None = None
        self._estimator = get_estimator(args.advantage_estimator)
        self._pool = ENV_POOLS[args.env_pool](args.num_env_workers) if args.env_pool else None
        self._width_multiple = int(args.pad_to_multiple_of or 1)
        self._generation: int | None = None
        self._evaluated: list[Trajectory] = []
        self._warnings: set[str] = set()

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in transformers; a run that starts or resumes takes nothing over from an earlier one of this trainer."""
        self._generation = None
        if isinstance(self.agent, VLLMPolicyAgent):
            self.agent.weights_changed()
        _trl.start_afresh(self)
        return super().train(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Play the rows and return right-padded tensors for the loss.

        Returns:
            ``prompt_completion_ids``, ``attention_mask``, ``agent_token_mask`` and ``advantages``, all (B, L);
            ``old_per_token_logps``, ``ref_per_token_logps`` and (under vLLM) ``importance_sampling_ratio``, (B, L) or
            None; ``num_items_in_batch``, 0-dim, the
            number of agent tokens over all ranks.
        """
        first = num_before(len(inputs))
        trajectories = self._play(inputs, first)
        everyone = self._share(trajectories)
        rollouts = gathered(self._scored(inputs, trajectories, first))  # a group may straddle ranks
        with raised_together():  # an estimator of one's own may give this rank alone what does not fit its rollouts
            advantages = self._advantages(trajectories, rollouts, first)
        batch = self._batch(trajectories, advantages)
        self._record(everyone, rollouts, batch)
        return batch

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """TRL's own loss on the columns that matter: from the first agent token to the longest row's end."""
        mask = inputs["agent_token_mask"]
        last = round_up(max(3, int(inputs["attention_mask"].sum(1).max())), self._width_multiple)
        columns = mask.any(0).nonzero()
        # Never one column alone, which TRL's metrics would take for one number a row.
        first = max(1, min(int(columns[0]), last - 2)) if len(columns) else last - 2
        narrowed = _trl.loss_inputs(inputs, first, last)
        loss = super().compute_loss(
            _trl.only_labelled(model, mask[:, :last]), narrowed, return_outputs, num_items_in_batch
        )
        return loss if _trl.is_training(self) else _trl.mean(self, loss)

    def evaluation_loop(
        self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """TRL's loop, with win rate, reward and turns over all games and their intervals among the metrics.

        It draws from generators of its own, so that evaluating changes no number of the training that goes on.

        Raises:
            ConfigError: A batch would cut the rollouts of a task apart.
        """
        num_rollouts = cast("int", self.num_generations_eval)  # TRL has filled it in
        batch_size = self.args.eval_batch_size * self.args.world_size
        if batch_size % num_rollouts:
            raise ConfigError(
                f"per_device_eval_batch_size, times the number of ranks, must be a multiple of num_generations_eval "
                f"({num_rollouts}), so that the rollouts of a task stay together, got {batch_size}"
            )
        self._evaluated = []
        if isinstance(self.agent, VLLMPolicyAgent):
            self.agent.weights_changed()  # by whom, nobody says: evaluation may be called at any time
        with untouched_global_generators(), counted_rollouts(dataloader, num_rollouts) as count:
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
            self._evaluated = self._evaluated[: count()]
        if self._evaluated and output.metrics is not None:
            clusters = [index // num_rollouts for index in range(len(self._evaluated))]
            self.last_evaluation = summarize(self._evaluated, clusters=clusters)
            numbers = rollout_metrics(self._evaluated) | evaluation_metrics(self.last_evaluation)
            _trl.drop_metrics(self, numbers)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in numbers.items()})
        return output

    def _play(self, rows: Sequence[dict[str, Any]], first: int) -> list[Trajectory]:
        """Play this rank's rows, which are rows ``first`` and following of the generation batch."""
        phase = self._next_phase()
        seeds = group_seeds(len(rows), _trl.num_generations(self), self.args.seed, *phase, first=first)
        with raised_together():  # before any rank plays: an agent may be in step with those of the others
            trials = self.environments.trials(
                rows,
                seeds,
                max_turn_tokens=self.args.max_turn_tokens,
                max_completion_length=self.args.max_completion_length,
            )
        self._prepare_agent(phase, first, [trial.session_id for trial in trials])
        with raised_together():
            trajectories = drive(
                trials,
                self.agent,
                pool=self._pool,
                turn_timeout_s=self.args.turn_timeout_s,
                episode_timeout_s=self.args.episode_timeout_s,
            )
        return trajectories

    def _prepare_agent(self, phase: tuple[str, int], first: int, sessions: list[str]) -> None:
        """Make the policy ready to play, on all ranks together: its draws, its weights, how it is sampled."""
        if isinstance(self.agent, VLLMPolicyAgent):
            self.agent.begin(self.state.global_step)
        if isinstance(self.agent, PolicyAgent):
            self.agent.reseed(self.args.seed, *phase, first=first, sessions=sessions)
        if isinstance(self.agent, ShardedPolicyAgent):
            self.agent.begin()

    def _share(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The rollouts of all ranks, in training without what only their own rank needs of them."""
        if _trl.is_training(self):
            everyone = gathered([without_tokens(trajectory) for trajectory in trajectories])
        else:
            everyone = gathered(trajectories)
            self._evaluated.extend(everyone)
        self._check_rollouts(everyone)
        return everyone

    def _next_phase(self) -> tuple[str, int]:
        """Name this generation batch, so that its seeds are its own, also after a resume."""
        if not _trl.is_training(self):
            return "eval", len(self._evaluated)
        if self._generation is None:
            self._generation = self._generations_before()
        self._generation += 1
        return "train", self._generation

    def _generations_before(self) -> int:
        step, cycle = self.state.global_step, self.args.steps_per_cycle
        if step % cycle:
            raise ConfigError(
                f"a run resumes at a multiple of {cycle} steps, the boundaries of its generation cycle, since the rows "
                f"of a half-used cycle are not saved; got step {step}: resume from an earlier checkpoint, or start a "
                "new run with this one as its model"
            )
        return self.args.generations_at(step)

    def _check_rollouts(self, trajectories: Sequence[Trajectory]) -> None:
        """Stop where too many failed: every rank is given the rollouts of all, so that all of them stop."""
        failed = [trajectory for trajectory in trajectories if trajectory.failed]
        if len(failed) > self.args.max_failed_fraction * len(trajectories):
            raise AgentsGymError(
                f"{len(failed)} of {len(trajectories)} rollouts failed, more than max_failed_fraction = "
                f"{self.args.max_failed_fraction}; the first failed so:\n{failed[0].error}"
            )
        num_inexact = sum(not trajectory.exact for trajectory in trajectories)
        if num_inexact:
            self._warn_once(
                "%d of %d rollouts hold text that came without token ids: it was encoded here, and its tokens may not "
                "be those that were sampled",
                num_inexact,
                len(trajectories),
            )

    def _scored(
        self, rows: Sequence[dict[str, Any]], trajectories: Sequence[Trajectory], first: int
    ) -> list[ScoredRollout]:
        num_rollouts = _trl.num_generations(self)
        scored = [
            ScoredRollout.from_trajectory(
                trajectory,
                group=index // num_rollouts,
                turn_credit=self.environments.of(row).env_config["turn_credit"],
            )
            for index, (row, trajectory) in enumerate(zip(rows, trajectories, strict=True), first)
        ]
        keys = [key for rollout in scored for key in rollout.state_keys]
        if _is_gigpo(self._estimator) and keys and all(key is None for key in keys):
            self._warn_once("the game gives no state keys, so that gigpo is grpo: write its _state_key")
        return scored

    def _advantages(
        self, trajectories: Sequence[Trajectory], rollouts: Sequence[ScoredRollout], first: int
    ) -> list[list[float]]:
        """One number a token of this rank's trajectories, which are ``rollouts[first:]`` and following."""
        scale = cast("Scale", self.args.scale_rewards)  # the configuration has checked it
        turn_advantages = self._estimator(rollouts, discount=self.args.discount, scale=scale)
        if len(turn_advantages) != len(rollouts):
            raise ConfigError(
                f"advantage_estimator must return one list of numbers for each of {len(rollouts)} rollouts, got "
                f"{len(turn_advantages)}"
            )
        return [
            token_advantages(trajectory, numbers, estimator=self._estimator)
            for trajectory, numbers in zip(trajectories, turn_advantages[first:], strict=False)
        ]

    def _batch(self, trajectories: Sequence[Trajectory], advantages: Sequence[Sequence[float]]) -> dict[str, Any]:
        rows = row_tensors(
            trajectories,
            advantages,
            pad_token_id=cast("int", self._policy_tokenizer.pad_token_id),
            multiple_of=self._width_multiple,
            device=self.accelerator.device,
        )
        tensors, drift = scores(self, trajectories, rows, with_drift=self._is_drift_due())
        _trl.record_metrics(self, drift)
        return {**rows, **tensors, "num_items_in_batch": _trl.total(self, rows["agent_token_mask"].sum())}

    def _is_drift_due(self) -> bool:
        interval = self.args.drift_interval
        return bool(interval) and _trl.is_training(self) and ((self._generation or 1) - 1) % interval == 0

    def _record(
        self, trajectories: Sequence[Trajectory], rollouts: Sequence[ScoredRollout], batch: dict[str, Any]
    ) -> None:
        counts = batch["agent_token_mask"].sum(1).clamp(min=1)
        _trl.record_tokens(self, sum(gathered([int(batch["attention_mask"].sum())])))
        _trl.record_metrics(
            self, {**rollout_metrics(trajectories), "frac_reward_zero_std": zero_variance_share(rollouts)}
        )
        _trl.record_conversations(self, trajectories, gathered((batch["advantages"].sum(1) / counts).tolist()))

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._warnings:
            self._warnings.add(message)
            logger.warning(message, *values)

    @property
    def _policy(self) -> PreTrainedModel:
        return cast("PreTrainedModel", self.accelerator.unwrap_model(self.model))

    def _policy_agent(self, agent_type: type[PolicyAgent]) -> PolicyAgent | VLLMPolicyAgent:
        args = self.args
        stop = tuple(args.stop_strings or ())
        if args.use_vllm:
            return VLLMPolicyAgent(
                self.vllm_generation, self._policy_tokenizer, max_turn_tokens=args.max_turn_tokens, stop=stop
            )
        return agent_type(
            self._policy,
            self._policy_tokenizer,
            sampling=Sampling(
                temperature=args.temperature,
                top_k=args.top_k,
                top_p=args.top_p,
                min_p=args.min_p,
                repetition_penalty=args.repetition_penalty,
                stop=stop,
            ),
            max_turn_tokens=args.max_turn_tokens,
            context=self.accelerator.autocast,  # pyright: ignore[reportArgumentType]  # its default is None, untold
        )


def _is_gigpo(estimator: Any) -> bool:
    return (estimator.func if isinstance(estimator, partial) else estimator) is gigpo
