"""GRPO over many turns: TRL's trainer, fed by environments, with an advantage of its own for every turn."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOTrainer

from agentsgym.agents.base import Agent, as_agent
from agentsgym.batch.layouts import LAYOUTS
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import ConfigError
from agentsgym.evaluation.metrics import Evaluation, summarize
from agentsgym.training import _trl
from agentsgym.training.batches import Batch, round_up
from agentsgym.training.checks import check_env, check_model, check_parts, check_size, finite_datasets
from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.crediting import Credited, Crediting
from agentsgym.training.evaluating import counted_rollouts, untouched_global_generators
from agentsgym.training.in_step import policy_agent_type
from agentsgym.training.learnt import ValueSteps, load_learnt, save_learnt
from agentsgym.training.losses import loss_in_parts
from agentsgym.training.metrics import evaluation_metrics, rollout_metrics
from agentsgym.training.observing import BeforeLogs, LossStatistics
from agentsgym.training.playing import Played, Player
from agentsgym.training.policies import agent_of, value_model_of
from agentsgym.training.ranks import gathered, raised_together
from agentsgym.training.resuming import ResumedOrder
from agentsgym.training.rows import Environments
from agentsgym.training.rules import check_environment
from agentsgym.training.scoring import scores
from agentsgym.training.vllm_policy import VLLMPolicyAgent

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
    from transformers.trainer_utils import EvalLoopOutput, TrainOutput

    from agentsgym.credit.advantages import BoundEstimator, PotentialShaping
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.types import Trajectory

logger = logging.getLogger(__name__)


class GRPOEnvTrainer(GRPOTrainer):
    """TRL's ``GRPOTrainer`` for environments: plays the rows, and gives each turn's tokens their own advantage.

    Everything else is TRL's: losses, KL, gradient accumulation, ``num_iterations``, evaluation, checkpoints, logging.

    Attributes:
        environments: What the rows are played in.
        agent: Who plays them; by default the policy in training.
        player: Plays the rows.
        value_model: Foretells returns for ``turn_gae`` and ``bilevel_gae``; None without ``args.value_head``.
        statistics: What the loss told of its turns since the last log.
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
        check_env(env)
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
        _trl.take_ratios_of_tokens(self)
        self._policy_tokenizer = cast("PreTrainedTokenizerBase", self.processing_class)
        self.environments = Environments(env, self._policy_tokenizer, check=partial(check_environment, args=args))
        for name, dataset in finite_datasets(train_dataset=train_dataset, eval_dataset=eval_dataset):
            self.environments.check(dataset, name)
        check_size(train_dataset, args)
        check_parts(self)
        agent_type = policy_agent_type(self.accelerator)
        self.agent = agent_of(self, agent_type) if agent is None else as_agent(agent)
        self.last_evaluation: Evaluation | None = None
        self.player = Player(self)
        self.add_callback(ResumedOrder())
        self.add_callback(BeforeLogs(self.record_statistics))
        self.value_model = value_model_of(self)
        if self.value_model is not None:
            self.add_callback(ValueSteps(self.value_model))
        self._crediting = Crediting(args)
        self.statistics = LossStatistics(self)
        self._width_multiple = int(args.pad_to_multiple_of or 1)
        self._has_warned_of_text = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in transformers; a run that starts or resumes takes nothing over from an earlier one of this trainer."""
        self.player.generation = None
        self._crediting = Crediting(self.args)
        self.statistics = LossStatistics(self)
        if isinstance(self.agent, VLLMPolicyAgent):
            self.agent.weights_changed()
        _trl.start_afresh(self)
        if resume_from_checkpoint:
            folder = resume_from_checkpoint
            if folder is True:
                folder = get_last_checkpoint(cast("str", self.args.output_dir))
            if folder is not None:  # where there is none, transformers says so
                load_learnt(self, Path(folder))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Play the rows and return right-padded tensors for the loss.

        Returns:
            ``prompt_completion_ids``, ``attention_mask``, ``agent_token_mask``, ``advantages`` and ``turn_index`` (-1
            off agent tokens), all (B, L), B the number of rows that the layout makes, fillers included;
            ``old_per_token_logps``, ``ref_per_token_logps``, ``sampling_per_token_logps``, (under vLLM)
            ``importance_sampling_ratio`` and (with a value head) ``value_targets``, (B, L) or None;
            ``num_items_in_batch`` and ``num_value_targets``, agent tokens and targets over all ranks, and
            ``num_rollouts`` of a rank, 0-dim.
        """
        is_training = _trl.is_training(self)
        played = self.player.play(inputs)
        layout = self._layout(played.trajectories)
        rollouts = gathered(self._scored(played, layout))  # a group may straddle ranks
        rollouts, filtered = self._crediting.selected(rollouts, played.everyone) if is_training else (rollouts, {})
        with raised_together():  # an estimator of one's own may give a turn of this rank alone more numbers than tokens
            numbers = self._crediting.turn_advantages(rollouts, is_training=is_training)
            credited = self._crediting.credited(played, rollouts, numbers, is_training=is_training)
        batch = self._batch(played, layout, credited)
        # Of an evaluation they would tell about groups that nothing is learnt from.
        told = {**filtered, **self._crediting.metrics(rollouts, numbers)} if is_training else {}
        self._record(played, layout, credited, told)
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """TRL's micro-batches, in each rows of like length where that changes no gradient."""
        inputs = super()._prepare_inputs(generation_batch)
        return _trl.with_sorted_windows(self, inputs)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """TRL's own loss on the columns that matter, from the first agent token to the longest row's end."""
        loss = loss_in_parts(
            self,
            model,
            inputs,
            lambda model, rows: super(GRPOEnvTrainer, self).compute_loss(
                model, rows, return_outputs, num_items_in_batch
            ),
        )
        return loss if _trl.is_training(self) else _trl.mean(self, loss)

    @staticmethod
    def get_off_policy_mask(  # pyright: ignore[reportIncompatibleMethodOverride]  # TRL calls it by keywords
        advantages: torch.Tensor, mask: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """TRL's rule for whole sequences, by the sign of what a row's advantages come to."""
        return GRPOTrainer.get_off_policy_mask(advantages=_trl.row_sum(advantages, mask), mask=mask, **kwargs)

    @staticmethod
    def get_gamma_weights(  # pyright: ignore[reportIncompatibleMethodOverride]  # likewise
        advantages: torch.Tensor, mask: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Likewise: VESPO weighs a whole row by one number."""
        return GRPOTrainer.get_gamma_weights(advantages=_trl.row_sum(advantages, mask), mask=mask, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """TRL's, and in it the value head's parameters with a learning rate of their own."""
        optimizer = super().create_optimizer(model)
        if self.value_model is not None:
            self.value_model.join(optimizer)
        return optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in transformers, with the value head and what the estimator remembers beside the model."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            save_learnt(self, Path(output_dir or cast("str", self.args.output_dir)))

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
        self.player.evaluated = []
        if isinstance(self.agent, VLLMPolicyAgent):
            self.agent.weights_changed()  # by whom, nobody says: evaluation may be called at any time
        with untouched_global_generators(), counted_rollouts(dataloader, num_rollouts) as count:
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
            self.player.evaluated = self.player.evaluated[: count()]
        if self.player.evaluated and output.metrics is not None:
            clusters = [index // num_rollouts for index in range(len(self.player.evaluated))]
            self.last_evaluation = summarize(self.player.evaluated, clusters=clusters)
            numbers = rollout_metrics(self.player.evaluated) | evaluation_metrics(self.last_evaluation)
            _trl.drop_metrics(self, numbers)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in numbers.items()})
        return output

    def _layout(self, trajectories: Sequence[Trajectory]) -> Batch:
        """Lay this rank's rollouts out as rows, on all ranks equally many."""
        args, layout = self.args, LAYOUTS[self.args.layout]
        with raised_together():
            rows = [row for i, trajectory in enumerate(trajectories) for row in layout(i, trajectory)]
        num_rows = 0
        if args.layout != "trajectory":
            size = max(gathered([len(trajectories)]))
            if _trl.is_training(self):
                size = args.per_device_train_batch_size * cast("int", args.steps_per_generation)
            num_rows = round_up(max(gathered([len(rows)])), size)
        return Batch(
            trajectories,
            rows,
            pad_token_id=cast("int", self._policy_tokenizer.pad_token_id),
            num_rows=num_rows,
            multiple_of=self._width_multiple,
            device=self.accelerator.device,
        )

    def _scored(self, played: Played, layout: Batch) -> list[ScoredRollout]:
        num_rollouts = _trl.num_generations(self)
        scored = [
            ScoredRollout.from_trajectory(
                trajectory,
                group=index // num_rollouts,
                turn_credit=self.environments.of(row).env_config["turn_credit"],
                game=self.environments.game(row),
            )
            for index, (row, trajectory) in enumerate(zip(played.rows, played.trajectories, strict=True), played.first)
        ]
        if self.value_model is None:
            return scored
        values = self.value_model.values(layout.ids, layout.attention_mask, self.args.per_device_train_batch_size)
        nested = layout.by_turn(values, [len(trajectory.turns) for trajectory in played.trajectories])
        return [replace(rollout, values=own) for rollout, own in zip(scored, nested, strict=True)]

    def _batch(self, played: Played, layout: Batch, credited: Credited) -> dict[str, Any]:
        mask = layout.agent_token_mask(credited.counts)
        advantages = layout.tensor(credited.advantages) * mask * layout.row_weights(mask, self.args.loss_type)
        scored = scores(self, played.trajectories, layout, mask, with_drift=self._is_drift_due())
        if scored.ratio is not None and not self.args.use_vllm:  # TRL multiplies with it under vLLM alone
            advantages = advantages * scored.ratio
        batch = {
            "prompt_completion_ids": layout.ids,
            "attention_mask": layout.attention_mask,
            "agent_token_mask": mask,
            "advantages": advantages,
            "turn_index": layout.turn_index.where(mask.bool(), -1),
            "old_per_token_logps": scored.old,
            "ref_per_token_logps": scored.ref,
            "sampling_per_token_logps": scored.sampling,
            "importance_sampling_ratio": scored.ratio if self.args.use_vllm else None,
            "num_items_in_batch": _trl.total(self, mask.sum()),
            "num_rollouts": torch.tensor(max(gathered([len(played.trajectories)]))),
        }
        _trl.record_metrics(self, scored.metrics)
        if credited.value_targets is None:
            return batch
        targets = layout.tensor(credited.value_targets).masked_fill(mask == 0, math.nan)
        return {**batch, "value_targets": targets, "num_value_targets": _trl.total(self, targets.isfinite().sum())}

    def record_statistics(self) -> None:
        """Add what the loss told of its turns since the last time to what is logged next; collective."""
        if _trl.is_training(self):
            _trl.record_metrics(self, self.statistics.metrics(partial(_trl.total, self)))

    def _is_drift_due(self) -> bool:
        interval = self.args.drift_interval
        return bool(interval) and _trl.is_training(self) and ((self.player.generation or 1) - 1) % interval == 0

    def _record(self, played: Played, layout: Batch, credited: Credited, metrics: dict[str, float]) -> None:
        self._warn_of_text(played.everyone)
        _trl.record_tokens(self, sum(gathered([len(row) for row in layout.rows])))
        _trl.record_metrics(self, {**rollout_metrics([*played.everyone, *played.replaced]), **metrics})
        if _trl.is_training(self) and self.args.zero_variance_groups == "resample":
            _trl.record_metrics(self, {"groups/resampled": len(played.replaced) / len(played.everyone)})
        means = [
            sum(numbers) / max(1, sum(trajectory.agent_token_mask))
            for numbers, trajectory in zip(credited.advantages, played.trajectories, strict=True)
        ]
        _trl.record_conversations(self, played.everyone, gathered(means))

    def _warn_of_text(self, trajectories: Sequence[Trajectory]) -> None:
        num_inexact = sum(not trajectory.exact for trajectory in trajectories)
        if num_inexact and not self._has_warned_of_text:
            self._has_warned_of_text = True
            logger.warning(
                "%d of %d rollouts hold text that came without token ids: it was encoded here, and its tokens may not "
                "be those that were sampled",
                num_inexact,
                len(trajectories),
            )

    @property
    def estimator(self) -> BoundEstimator | PotentialShaping:
        """What turns rewards into advantages; its ``memory`` is what it keeps from one generation batch to the next."""
        return self._crediting.estimator
