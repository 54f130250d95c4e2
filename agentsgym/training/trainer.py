"""Train over many turns with GRPO: TRL's trainer on rollouts of environments, with an advantage for every turn.

::

    rows ─▶ GenerationBatch ─▶ TokenBatch ─▶ TokenAdvantages ─▶ TokenLogprobs ─▶ TRL's dict ─▶ loss
            (rollouts)         (B, L)        (B, L)             (B, L)
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Never, cast

import torch
from trl import GRPOTrainer

from agentsgym.agents.build import build_policy
from agentsgym.agents.policy.model import tokenizer_in
from agentsgym.agents.policy.text_path import freeze_beyond_text, freeze_spared, spare_layers
from agentsgym.batch.views import round_up
from agentsgym.credit.assignment import AdvantageAssigner, TokenAdvantages
from agentsgym.errors import ConfigError
from agentsgym.ranks import all_gather_objects, count_real_rollouts, gather_to_main, raise_on_all_ranks
from agentsgym.statistics.metrics import Evaluation, summarize_outcomes
from agentsgym.training._trl import TRLInterface, load, load_own_tokenizer, unused_reward
from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.generation.asynchronous import AsyncRolloutGenerator
from agentsgym.training.generation.batch import GenerationBatch, Phase, PlayedEvaluation, packed_values, unpacked_values
from agentsgym.training.generation.generator import RolloutGenerator
from agentsgym.training.lifecycle.restartable import RestartableTrainer
from agentsgym.training.lifecycle.resuming import generations_before, preserve_rng_state
from agentsgym.training.loss import MicrobatchLoss, regroup_rows, row_sum
from agentsgym.training.memory import MemoryWarning
from agentsgym.training.metrics.diagnostics import Diagnostics, dependence_on_ranks, drawn_turns
from agentsgym.training.metrics.loss import FlushMetrics, LossStatistics
from agentsgym.training.metrics.rollouts import CompletionRow, evaluation_metrics, rollout_metrics
from agentsgym.training.model_checks import (
    build_environments,
    check_datasets,
    check_env,
    check_exactness,
    check_leagues,
    check_model,
    check_objects,
    check_parts,
    check_sampling,
    check_sharding,
    merges_adapters,
    naming_causes,
)
from agentsgym.training.objectives.demonstrations import DemonstrationLoss
from agentsgym.training.objectives.distillation import TeacherAdvantages
from agentsgym.training.objectives.observations import ObservationLoss
from agentsgym.training.objectives.value_head import ValueLoss, ValueModel
from agentsgym.training.observing import BatchObserver, ObservedBatch, build_observers, checked_metrics, flushing
from agentsgym.training.tensors.importance import gap_metrics
from agentsgym.training.tensors.logprobs import KnownLogprobs, TokenLogprobs, token_logprobs
from agentsgym.training.tensors.token_batch import TokenBatch, trl_batch
from agentsgym.training.trackers import begin_trackio, set_up_reports
from agentsgym.training.validation import reject_trl_arguments

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
    from transformers.trainer_utils import EvalLoopOutput, TrainOutput

    from agentsgym.agents.base import Agent
    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.credit.scored import ScoredRollout
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.training.objectives.demonstrations import Demonstrations
    from agentsgym.training.objectives.distillation import Distillation
    from agentsgym.training.objectives.objective import Objective
    from agentsgym.training.selection.curriculum import Curriculum


class GRPOEnvTrainer(RestartableTrainer):
    """TRL's ``GRPOTrainer`` for environments: plays the rows, and computes an advantage for each turn.

    For scripts that handle everything except training; :class:`~agentsgym.recipes.run.TrainingRun` adds evaluation,
    warm starts and files, and :func:`agentsgym.train` performs a complete run from a configuration.

    The rest is TRL's: losses, KL, gradient accumulation, ``num_iterations``, evaluation, checkpoints, logging.

    Attributes:
        environments: The environments of the rows.
        generator: Plays the rows.
        value_model: Predicts returns for ``turn_gae`` and ``bilevel_gae``; None without ``args.value_head``.
        objectives: What is learned in addition to the advantages, in the order in which the losses are added.
        statistics: Per-turn loss statistics since the last log.
        observers: Callbacks that receive every generation batch: those in ``callbacks``, and those that store or show
            the rollouts as configured in ``args``.
        last_evaluation: The latest evaluation: the numbers of all ranks, and the trajectories that this rank played;
            None before the first.

    Arguments shared with TRL's trainer have the same meaning.

    Args:
        model: A causal language model, or its name or path, or ``"smollm2"``
            (:func:`~agentsgym.agents.policy.packaged.packaged_model`). With ``args.beta`` above 0, TRL loads the
            reference model from that path, so a model whose weights have changed since it was loaded (e.g. by
            ``imitate``) must first be saved with ``save_pretrained`` and reloaded from there.
        env: The environment of every row; None to build each row's environment from its ``env_class_path`` and
            ``env_config``, so that one run can mix environments.
        args: The settings.
        train_dataset: Rows with ``task_data`` and, without ``env``, ``env_class_path`` and ``env_config``.
        eval_dataset: Rows of the same form.
        processing_class: The policy's tokenizer; by default the tokenizer of ``env``, or else the model's.
        agent: The agent that acts; None for the policy being trained. Any other agent should sample from that policy
            too; otherwise, the gradient is off-policy and biased. Text without token ids is tokenized, and lowers the
            metric ``exact``.
        curriculum: Draws the tasks of each generation batch by their win rates so far; None for the order of the rows.
        distillation: A teacher that scores the policy's turns, in addition to the rewards; None for rewards alone.
        demonstrations: Trajectories that the policy keeps imitating meanwhile; None for none.
        callbacks: As in TRL.
        optimizers: As in TRL.
        peft_config: As in TRL: adapters to train instead of the weights; with ``args.beta`` above 0, the reference is
            the model without them. A ``PeftModel`` as ``model`` continues with its adapter.
        **unsupported: TRL's other arguments, such as ``reward_funcs``, which are rejected with an explanation.

    Raises:
        ConfigError: A row or a setting does not allow training, or a dataset is empty.
        TaskError: A row's task cannot be played. (Rows of an iterable dataset are checked when they are played.)
    """

    last_evaluation: Evaluation | None = None

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
        curriculum: Curriculum | None = None,
        distillation: Distillation | None = None,
        demonstrations: Demonstrations | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: PeftConfig | None = None,
        **unsupported: Never,
    ) -> None:
        """Set up training without playing anything; the class docstring documents the arguments."""
        args = GRPOEnvConfig() if args is None else args
        reject_trl_arguments(unsupported)
        if not isinstance(args, GRPOEnvConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"args must be a GRPOEnvConfig, which has all fields of TRL's GRPOConfig, got a {type(args).__name__}"
            )
        check_datasets(train_dataset, eval_dataset, args, curriculum)
        check_env(env)
        check_objects(
            curriculum=curriculum, distillation=distillation, demonstrations=demonstrations, callbacks=callbacks
        )
        check_leagues(env, callbacks or ())
        check_sampling(agent, model, args)
        check_model(model, args, peft_config)
        if processing_class is None:
            processing_class = load_own_tokenizer(model, args) if env is None else env.tokenizer
        self._given_processing_class = processing_class
        settings = args.for_trl()
        if isinstance(model, str):
            model = load(model, settings)
        with naming_causes(args):
            super().__init__(
                model=model,
                reward_funcs=unused_reward,
                args=settings,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=tokenizer_in(processing_class),
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=spare_layers(peft_config, model),
            )
        self.args.vllm_server_base_url = args.vllm_server_base_url  # TRL received only the first of several servers
        self.args.reward_weights, self.args.model_init_kwargs = args.reward_weights, args.model_init_kwargs  # likewise
        self._trl = TRLInterface(self)
        self._trl.set_up()
        freeze_spared(self._trl.policy())
        if args.ddp_find_unused_parameters is None:
            freeze_beyond_text(self._trl.policy())
        tokenizer = cast("PreTrainedTokenizerBase", self.processing_class)
        self.environments = build_environments(env, tokenizer, self.args, train_dataset, eval_dataset)
        self.curriculum = curriculum
        self._build(tokenizer, agent, distillation, demonstrations)

    def _build(
        self,
        tokenizer: PreTrainedTokenizerBase,
        agent: Agent | None,
        distillation: Distillation | None,
        demonstrations: Demonstrations | None,
    ) -> None:
        args, trl = self.args, self._trl
        policy, accelerator = trl.policy(), self.accelerator
        flags = {"has_aux_loss": trl.has_aux_loss, "has_own_scheduler": self.lr_scheduler is not None}
        check_parts(policy, tokenizer, args, accelerator, **flags)
        settings: dict[str, Any] = {
            "max_turn_tokens": args.max_turn_tokens,
            "stop": tuple(args.stop_strings or ()),
            "merges_adapters": merges_adapters(policy, args, accelerator, has_agent=agent is not None),
        }
        if agent is None:
            agent = build_policy(policy, tokenizer, args, accelerator, trl.vllm_generation, **settings)
        check_exactness(policy, agent, args, accelerator)
        trl.share_prefixes()
        self._pad_token_id = cast("int", tokenizer.pad_token_id)
        self._num_generations: int | None = None  # generation batches of training so far; None before the first
        self._evaluated = PlayedEvaluation()
        self._assigner = AdvantageAssigner(args)
        generator_type = AsyncRolloutGenerator if args.max_staleness else RolloutGenerator
        self.generator = generator_type(self.environments, agent, args, self.train_dataset, self.curriculum)
        self._diagnostics = Diagnostics(args, self.estimator)
        self.statistics = LossStatistics(args.loss, **trl.clip_epsilons, device=trl.device)
        head: dict[str, Any] = {"kind": args.value_head, **args.value_head_options, "context": accelerator.autocast}
        self.value_model = None if args.value_head is None else ValueModel(policy, **head)
        objectives = [
            None if args.observation_loss is None else ObservationLoss(args, trl),
            self.value_model and ValueLoss(self.value_model, trl),
            distillation and TeacherAdvantages(distillation, args, trl, tokenizer),
            demonstrations and DemonstrationLoss(demonstrations, trl, args.seed),
        ]
        self.objectives: list[Objective] = [one for one in objectives if one is not None]
        self._microbatch_loss = MicrobatchLoss(trl, args, self.statistics, self.objectives)
        set_up_reports(self.callback_handler.callbacks, args.tracked_groups, args.printed_groups)
        observers = build_observers(args, self.environments, self.estimator)
        for callback in (MemoryWarning(), *observers, FlushMetrics(self.flush_statistics), *self.objectives):
            self.add_callback(callback)
        self.observers = [one for one in self.callback_handler.callbacks if isinstance(one, BatchObserver)]
        self._set_up_lifecycle()
        self.generator.interrupt = self._preemption.interrupt
        self.generator.gathered_weights = trl.gathered_weights
        self.generator.num_batches = lambda: args.generations_at(self.state.max_steps)

    def _begin_run(self) -> None:
        self._num_generations = None
        self._trl.share_prefixes()  # another trainer may have changed what the model does
        self.generator.begin_run(0)
        self._assigner = AdvantageAssigner(self.args)
        self._diagnostics = Diagnostics(self.args, self.estimator)
        self.statistics.clear()
        if self.curriculum is not None:
            self.curriculum.reset()
        self.generator.policy.weights_changed()
        self._trl.reset_run_state()

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, and log each kind of failure once: see :class:`RestartableTrainer` for the arguments."""
        with self.generator.keeping_workers(), self.generator.counting_failures(), flushing(self.observers):
            return super().train(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Play the rows and return right-padded tensors for the loss. Collective.

        After playing, ranks exchange summaries of the rollouts, the predictions of the value head if there is one, and
        logged values.

        Returns:
            ``prompt_completion_ids``, ``attention_mask``, ``agent_token_mask``, ``advantages`` and ``turn_index`` (-1
            on all other tokens), all (B, L), where B is the number of rows of the layout, padding rows included;
            ``old_per_token_logps``, ``ref_per_token_logps``, ``sampling_per_token_logps``, (under vLLM)
            ``importance_sampling_ratio``, (B, L) or None; ``num_items_in_batch``, the agent tokens of all ranks, and
            ``num_rollouts``, the number of rollouts of this rank, 0-dim; and the columns of the objectives.
        """
        phase = self._phase()
        with self._preemption.pace.rollouts(is_training=phase.is_training):
            batch = self.generator.generate(inputs, phase)
        tokens = self._token_batch(batch, phase)
        rollouts = self._with_values(batch, tokens)
        with raise_on_all_ranks():  # a user's estimator may fail on a single rank
            advantages = self._assigner.assign(
                rollouts,
                batch.local_indices,
                batch.trajectories,
                [one.num_trained_tokens for one in batch.rollouts],
                is_training=phase.is_training,
            )
        mask = tokens.agent_token_mask(advantages.included)
        logprobs = self._token_logprobs(batch, tokens, mask, phase)
        self._record(batch, advantages, logprobs, phase, tokens.sampled_entropy(mask))
        observed = ObservedBatch(
            batch=batch, phase=phase, tokens=tokens, mask=mask, advantages=advantages, logprobs=logprobs
        )
        for observer in self.observers:
            observer.on_batch(observed)
        columns = trl_batch(
            tokens,
            mask,
            advantages,
            logprobs,
            loss_type=self.args.loss,
            multiplies_ratio=self.args.use_vllm,
            added=[one.advantages(observed) for one in self.objectives],
        )
        for objective in self.objectives:
            columns |= objective.columns(observed)
        return columns

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return TRL's micro-batch, with rows regrouped if that does not change the gradient."""
        inputs = super()._prepare_inputs(generation_batch)
        flags = {"has_aux_loss": self._trl.has_aux_loss, "shares": self._trl.shares_prefixes}
        return self._trl.current_microbatch(inputs, partial(regroup_rows, args=self.args, **flags))

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Compute the loss, on the columns from the first agent token to the end of the longest row. Collective."""
        is_training = self._trl.is_training

        def trl_loss(model: Any, columns: dict[str, Any]) -> torch.Tensor:
            return super(GRPOEnvTrainer, self).compute_loss(model, columns, return_outputs, num_items_in_batch)

        loss = self._microbatch_loss(model, inputs, trl_loss, is_training=is_training)
        return loss if is_training else self._trl.mean_over_ranks(loss)

    @staticmethod
    def get_off_policy_mask(  # pyright: ignore[reportIncompatibleMethodOverride]  # TRL calls it by keywords
        advantages: torch.Tensor, mask: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Apply TRL's sequence-level rule, which depends on the sign of the sum of a row's advantages."""
        return GRPOTrainer.get_off_policy_mask(advantages=row_sum(advantages, mask), mask=mask, **kwargs)

    @staticmethod
    def get_gamma_weights(  # pyright: ignore[reportIncompatibleMethodOverride]  # likewise
        advantages: torch.Tensor, mask: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Weight complete rows as TRL's VESPO does, by the sign of the sum of a row's advantages."""
        return GRPOTrainer.get_gamma_weights(advantages=row_sum(advantages, mask), mask=mask, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, after checking that it can shard the weights if that is configured."""
        check_sharding(self.args)
        super().create_accelerator_and_postprocess()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create TRL's optimizer, and add the value head's parameters with a separate learning rate."""
        optimizer = super().create_optimizer(model)
        if self.value_model is not None:
            self.value_model.add_to(optimizer)
        return optimizer

    def evaluation_loop(
        self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Run TRL's loop, and add win rate, reward and turns over all rollouts to the metrics, with intervals.

        The global random generators are restored afterwards, so that an evaluation does not affect training.

        Raises:
            ConfigError: A batch would split the rollouts of a task, or evaluation precedes training under DeepSpeed.
        """
        self._check_can_evaluate()
        num_rollouts = cast("int", self.num_generations_eval)  # TRL has filled it in
        batch_size = self.args.eval_batch_size * self.args.world_size
        if batch_size % num_rollouts:
            raise ConfigError(
                f"per_device_eval_batch_size, times the number of ranks, must be a multiple of num_generations_eval "
                f"({num_rollouts}), so that the rollouts of a task stay together, got {batch_size}"
            )
        self._evaluated = PlayedEvaluation()
        begin_trackio(self.callback_handler.callbacks, self.args, self.state, self.control, model=self.model)
        self.generator.policy.weights_changed()  # evaluate() may follow any weight change
        with (
            self.generator.keeping_workers(),
            flushing(self.observers),
            preserve_rng_state(self._trl.device),
            count_real_rollouts(dataloader, num_rollouts) as count,
        ):
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
            outcomes, own = self._evaluated.first(count())
        if outcomes and output.metrics is not None:
            clusters = [index // num_rollouts for index in range(len(outcomes))]
            environments = [outcome.environment for outcome in outcomes]
            self.last_evaluation = summarize_outcomes(outcomes, own, clusters=clusters, environments=environments)
            metrics = rollout_metrics(outcomes) | evaluation_metrics(self.last_evaluation)
            self._trl.drop_evaluation_metrics(metrics)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def flush_statistics(self) -> None:
        """Add the loss statistics since the last call to the next log entry. Collective."""
        if self._trl.is_training:
            metrics = self.statistics.metrics(self._trl.sum_over_ranks)
            self._trl.record_metrics(metrics, is_training=True)

    @property
    def agent(self) -> Agent:
        """The agent that acts; by default the policy being trained."""
        return self.generator.agent

    @agent.setter
    def agent(self, agent: Agent) -> None:
        self.generator.set_agent(agent)

    @property
    def estimator(self) -> BoundEstimator:
        """The estimator of advantages; its ``state`` persists between generation batches."""
        return self._assigner.estimator

    def _phase(self) -> Phase:
        """Number this generation batch, so that its seeds are unique even after a resume."""
        trl = self._trl
        step, num_rollouts = trl.global_step, trl.num_rollouts
        if not trl.is_training:
            return Phase(kind="eval", index=self._evaluated.num_rollouts, step=step, num_rollouts=num_rollouts)
        before = generations_before(step, self.args) if self._num_generations is None else self._num_generations
        self._num_generations = before + 1
        return Phase(kind="train", index=before + 1, step=step, num_rollouts=num_rollouts)

    def _token_batch(self, batch: GenerationBatch, phase: Phase) -> TokenBatch:
        """Stack this rank's rows, padded to the same number on all ranks."""
        args, num_rows = self.args, 0
        if args.layout != "trajectory":
            size = len(batch.trajectories)
            if phase.is_training:
                size = args.per_device_train_batch_size * cast("int", args.steps_per_generation)
            num_rows = round_up(batch.max_rows, size)
        return TokenBatch.stack(
            batch.trajectories,
            batch.training_rows,
            pad_token_id=self._pad_token_id,
            num_rows=num_rows,
            multiple_of=int(args.pad_to_multiple_of or 1),
            device=self._trl.device,
        )

    def _with_values(self, batch: GenerationBatch, tokens: TokenBatch) -> list[ScoredRollout]:
        """Add the predictions of the value head, if any, to the rollouts of all ranks. Collective with a value head."""
        if self.value_model is None:
            return batch.scored
        values = self.value_model.values(tokens.ids, tokens.attention_mask, self.args.per_device_train_batch_size)
        by_turn = tokens.by_turn(values, [len(trajectory.turns) for trajectory in batch.trajectories])
        traits = self.estimator.traits
        first_only = traits is not None and "values" not in traits.uses
        packed = [packed_values(turns, first_only=first_only) for turns in by_turn]
        predicted = map(unpacked_values, all_gather_objects(packed))
        return [replace(rollout, values=nested) for rollout, nested in zip(batch.scored, predicted, strict=True)]

    def _token_logprobs(
        self, batch: GenerationBatch, tokens: TokenBatch, mask: torch.Tensor, phase: Phase
    ) -> TokenLogprobs:
        args = self.args
        known: set[KnownLogprobs] = {rollout.logprobs for rollout in batch.rollouts}
        if args.importance_correction is not None and "none" in known and not args.use_vllm:
            raise ConfigError(
                "vllm_importance_sampling_correction=True requires an agent that returns the log-probabilities of its "
                "tokens, but this agent does not"
            )
        columns = tokens.ids, tokens.attention_mask, mask
        scored = token_logprobs(
            mask,
            tokens.recorded_logprobs,
            known,
            partial(self._trl.score, *columns),
            correction=args.importance_correction,
            needs_old=args.needs_old_logprobs,
            needs_sampling=args.off_policy_mask_threshold is not None,
            is_trained_policy=self.generator.policy.logprobs_match_trained_weights,
            compares=self._compares(phase),
        )
        return replace(scored, reference=self._trl.score_reference(*columns))

    def _compares(self, phase: Phase) -> bool:
        """Whether this batch is one of those that ``drift_interval`` selects."""
        interval = self.args.drift_interval
        return bool(interval) and phase.is_training and (phase.index - 1) % interval == 0

    def _record(
        self,
        batch: GenerationBatch,
        advantages: TokenAdvantages,
        logprobs: TokenLogprobs,
        phase: Phase,
        entropy: float | None,
    ) -> None:
        """Log the batch. Collective if log-probabilities were compared, or completions are logged."""
        trl, rollouts, is_training = self._trl, batch.rollouts, phase.is_training
        if is_training:
            num_tokens = [rollout.num_agent_tokens for rollout in rollouts]
            self._diagnostics.check(advantages.rollouts, num_tokens, is_flat=advantages.is_flat)
        self._diagnostics.warn_of_text(sum(not rollout.exact for rollout in rollouts), len(rollouts))
        metrics = rollout_metrics([*rollouts, *batch.replaced]) | advantages.metrics | dict(batch.metrics)
        metrics |= trl.count_tokens(sum(rollout.num_row_tokens for rollout in rollouts), is_training=is_training)
        if is_training and self.args.zero_variance_groups == "resample":
            metrics["groups/resampled"] = len(batch.replaced) / len(rollouts)
        if is_training and self.curriculum is not None:
            metrics |= self.curriculum.metrics()
        if logprobs.comparison is not None:
            metrics |= gap_metrics(all_gather_objects([logprobs.comparison]))
        if self._compares(phase):
            groups = [index // phase.num_rollouts for index in batch.local_indices]
            exchanges = drawn_turns(batch.trajectories, groups, phase.index)
            score = partial(trl.score, with_entropies=False)
            metrics |= dependence_on_ranks(exchanges, score, self._pad_token_id, trl.device)
        if is_training:
            self._diagnostics.collapse.add(metrics, entropy)
            metrics |= {name: value for one in self.observers for name, value in checked_metrics(one).items()}
        trl.record_metrics(metrics, is_training=is_training)
        shown = list(map(CompletionRow.of, batch.trajectories, advantages.advantages))
        trl.record_completions(gather_to_main(shown) if self.args.log_completions else shown)
        if not is_training:
            self._evaluated.add(batch)
