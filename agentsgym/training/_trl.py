"""Access TRL's trainer: every private name of TRL is read here, except for three overridden methods.

``tests/training/test_trl_seam.py`` fails when TRL changes one of them. The trainer is typed ``Any`` here: TRL declares
these members too widely or not at all, so that the tests, not a type checker, guard this seam.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from trl.kernels import chunked_logprob
from trl.trainer.utils import use_adapter

from agentsgym.agents.eval_mode import evaluation_mode
from agentsgym.agents.policy.sharded import is_sharded, zero_stage
from agentsgym.training import zero
from agentsgym.training.tensors import labeled_head
from agentsgym.training.tensors.labels import mask_labels

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from agentsgym.training.metrics.rollouts import CompletionRow

MicroBatch = dict[str, Any]


def environment(*_: Any, **__: Any) -> list[float | None]:
    """Stand in for the reward function that TRL requires; rewards come from the environment, so none is called."""
    raise RuntimeError("rewards come from the environment: this reward function must never be called")


class NoTelemetry:
    """A trainer that sends no telemetry; TRL's trainers send some to the Hugging Face Hub when they are built.

    Unless ``HF_HUB_DISABLE_TELEMETRY`` or ``HF_HUB_OFFLINE`` is set, TRL would send the kinds of trainer, model,
    device, dataset and adapter, the number of processes in four classes, and versions of packages.
    """

    def _send_telemetry(self) -> None:
        """Send nothing."""


class TRLSeam:
    """The parts of a trainer that the rest of training needs; nothing else takes or stores one."""

    def __init__(self, trainer: Any) -> None:
        """Keep a trainer that TRL's constructor has set up, unchanged."""
        self._trainer = trainer

    # State of the trainer

    @property
    def is_training(self) -> bool:
        """Whether rollouts are for training, not for evaluation, as TRL distinguishes them: by the model's own mode.

        Read it where a batch or a loss begins and pass it on: scoring switches this mode.
        """
        return self._trainer.model.training

    @property
    def num_rollouts(self) -> int:
        """Number of consecutive rows that are rollouts of one task, in training or evaluation."""
        trainer = self._trainer
        return trainer.num_generations if self.is_training else trainer.num_generations_eval

    @property
    def global_step(self) -> int:
        """Optimizer steps that are done."""
        return self._trainer.state.global_step

    @property
    def accumulation_steps(self) -> int:
        """Number of micro-batches that the current optimizer step accumulates."""
        return self._trainer.current_gradient_accumulation_steps

    @property
    def num_ranks(self) -> int:
        """Number of processes that train together."""
        return self._trainer.accelerator.num_processes

    @property
    def device(self) -> torch.device:
        """The device of batches."""
        return self._trainer.accelerator.device

    @property
    def has_aux_loss(self) -> bool:
        """Whether a mixture of experts' auxiliary loss is added to the loss."""
        return self._trainer.aux_loss_enabled

    @property
    def clip_epsilons(self) -> dict[str, float]:
        """TRL's own ``epsilon_low`` and ``epsilon_high``."""
        return {"epsilon_low": self._trainer.epsilon_low, "epsilon_high": self._trainer.epsilon_high}

    @property
    def vllm_generation(self) -> Any:
        """TRL's engine; None where transformers generates."""
        return getattr(self._trainer, "vllm_generation", None)

    def policy(self) -> Any:
        """The model in training, unwrapped."""
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    # Set up once

    def set_up(self) -> None:
        """Adapt, once, the parts of TRL's trainer that this package needs otherwise."""
        self.adapt_fused_heads()
        # Sequence ratios are passed to TRL's loss as those of tokens: agentsgym.training.loss.use_sequence_ratio.
        self._trainer.importance_sampling_level = "token"
        zero.announce_head(self.policy(), self._trainer.accelerator)

    def adapt_fused_heads(self) -> None:
        """Make TRL's fused heads score labeled positions alone on any device, and a deep copy run on its own weights.

        TRL puts its head around the ``forward`` of this very model (under PEFT: of the base model inside), which a copy
        would still call. Without Triton its tiles are made small too, in every trainer of the process.
        """
        policy, reference = self.policy(), self._trainer.ref_model
        model: PreTrainedModel = policy.get_base_model() if hasattr(policy, "peft_config") else policy
        for scored in (model, *([] if reference is None else [self._trainer.accelerator.unwrap_model(reference)])):
            labeled_head.score_labeled_alone(scored)
        if not labeled_head.selects_labeled(model.device):
            chunked_logprob.TOKEN_CHUNK_SIZE = labeled_head.POSITIONS_AT_ONCE
        labeled_head.make_deepcopy_safe(model)

    def reset_run_state(self) -> None:
        """Drop the state of an interrupted run: place in the generation cycle, buffered rows, values to be logged."""
        self._trainer._step, self._trainer._buffered_inputs = 0, None
        self._trainer._metrics["train"].clear()

    # Checkpoints

    def run_folder(self, trial: Any = None) -> str:
        """The folder in which the run's checkpoints are, or that of a hyperparameter search's trial."""
        return self._trainer._get_output_dir(trial)

    @contextlib.contextmanager
    def saving_into(self, folder: Path) -> Generator[None]:
        """Write checkpoints into another folder, and push none of them, until they are complete."""
        trainer = self._trainer
        redirected = {"_get_output_dir": lambda *_, **__: str(folder), "_push_from_checkpoint": lambda *_: None}
        vars(trainer).update(redirected)
        try:
            yield
        finally:
            for name in redirected:
                del vars(trainer)[name]

    def save_checkpoint(self) -> None:
        """Collective: save a checkpoint as the trainer does, and let its callbacks know."""
        trainer = self._trainer
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    @contextlib.contextmanager
    def saving_all_state(self) -> Generator[None]:
        """Write checkpoints that can be resumed, even if the settings request models alone."""
        args = self._trainer.args
        given, args.save_only_model = args.save_only_model, False
        try:
            yield
        finally:
            args.save_only_model = given

    def push_checkpoint(self, folder: Path) -> None:
        """Push a checkpoint to the hub, as configured."""
        self._trainer._push_from_checkpoint(str(folder))

    @property
    def best_checkpoint(self) -> str | None:
        """The checkpoint of the best evaluation so far."""
        return self._trainer.state.best_model_checkpoint

    def name_best_checkpoint(self, place: Path, folder: Path | None = None) -> None:
        """Name the best checkpoint so far by where it will be.

        Args:
            place: Where the checkpoint will be that is being written.
            folder: Where it is now, if this rank has written it: the state of the run in there is corrected.
        """
        state = self._trainer.state
        if not state.best_global_step:
            return
        best = place.with_name(f"checkpoint-{state.best_global_step}")
        if best != place and not best.exists():
            return
        state.best_model_checkpoint = str(best)
        if folder is not None:
            state.save_to_json(str(folder / "trainer_state.json"))

    def synced_reference(self) -> Any:
        """The reference model where ``sync_ref_model`` moves it, so that it is part of the run's state; else None."""
        trainer = self._trainer
        return trainer.accelerator.unwrap_model(trainer.ref_model) if trainer.args.sync_ref_model else None

    def release(self) -> None:
        """Drop the optimizer, the data and references to the process group, none of which a closed trainer needs."""
        trainer = self._trainer
        if is_sharded(trainer.accelerator):  # in place: the weights themselves hold the group
            trainer.model = trainer.generator.agent = trainer.generator.policy = None
        trainer.model_wrapped, trainer.deepspeed = trainer.model, None
        trainer.ref_model = None
        trainer.optimizer = trainer.lr_scheduler = trainer._buffered_inputs = None
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, None, None
        handler.train_dataloader = handler.eval_dataloader = None
        trainer.accelerator.free_memory()

    # The state of a run

    @property
    def num_input_tokens_seen(self) -> int:
        """Tokens that were seen in training."""
        return self._trainer.state.num_input_tokens_seen

    def return_to_step_begin(self, num_input_tokens_seen: int) -> None:
        """Drop the gradients of an optimizer step that is not finished, and set the count of tokens back."""
        self._trainer.state.num_input_tokens_seen = num_input_tokens_seen
        self._trainer.model.zero_grad()

    # Log-probabilities and the loss

    def score(
        self,
        model: Any,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labeled: torch.Tensor,
        *,
        with_entropies: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective where weights are sharded: score every token that ``labeled`` marks, at the sampling temperature.

        Without gradient, and without dropout: the sampler has none either, so that the two can be compared.

        Returns:
            Log-probabilities, and the entropies of the distributions before the tokens, in nats (0.0 without
            ``with_entropies``): each (B, L), 0.0 elsewhere and in the first column, which has no context.
        """
        size, width = self._trainer.args.per_device_train_batch_size, ids.shape[1] - 1
        chunks: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad(), evaluation_mode(model):
            for rows, attention, kept in zip(
                ids.split(size), attention_mask.split(size), labeled.split(size), strict=True
            ):
                # The trained model's head has the entropies in any case; a reference model's has none.
                logprobs, entropies, *_ = self._trainer._get_per_token_logps_and_entropies(
                    mask_labels(model, kept), rows, attention, width, compute_entropy=with_entropies
                )
                given = entropies if with_entropies else torch.zeros_like(logprobs)
                chunks.append((logprobs, given.masked_fill(kept[:, 1:] == 0, 0.0)))
        logprobs, entropies = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        first = logprobs.new_zeros(len(ids), 1)
        return torch.cat([first, logprobs], dim=1), torch.cat([first, entropies], dim=1)

    def score_reference(
        self, ids: torch.Tensor, attention_mask: torch.Tensor, labeled: torch.Tensor
    ) -> torch.Tensor | None:
        """Collective where weights are sharded: log-probabilities by the reference of the KL term; None without."""
        if self._trainer.beta == 0.0:
            return None
        with self.reference_model() as reference:
            return self.score(reference, ids, attention_mask, labeled, with_entropies=False)[0]

    @contextlib.contextmanager
    def reference_model(self) -> Generator[Any]:
        """The reference model of the KL term: TRL's own, or under PEFT the policy with its adapters off.

        An adapter that came with the model has a frozen copy of itself, which TRL calls ``"ref"``.
        """
        trainer = self._trainer
        if trainer.ref_model is not None:
            yield trainer.ref_model
            return
        policy = self.policy()
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
            yield trainer.model

    @contextlib.contextmanager
    def intercept_logprobs(self, on_logprobs: Callable[[torch.Tensor, torch.Tensor], None]) -> Generator[None]:
        """Pass on the log-probabilities of the loss's own forward pass, before the loss reads anything else.

        Args:
            on_logprobs: Called with log-probabilities, with their graph, and entropies, both (B, T).
        """
        trainer, name = self._trainer, "_get_per_token_logps_and_entropies"
        score, is_own = getattr(trainer, name), name in vars(trainer)

        def scored(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            logprobs, entropies, *others = score(*args, **kwargs)
            on_logprobs(logprobs, entropies)
            return logprobs, entropies, *others

        setattr(trainer, name, scored)
        try:
            yield
        finally:
            setattr(trainer, name, score) if is_own else delattr(trainer, name)

    def holding_weights(self) -> contextlib.AbstractContextManager[None]:
        """Collective under ZeRO-3: hold all weights on every rank inside, if that is configured."""
        trainer = self._trainer
        args, is_zero3 = trainer.args, zero_stage(trainer.accelerator) == 3
        if not (is_zero3 and args.ds3_gather_for_generation) or args.use_vllm:
            return contextlib.nullcontext()
        return zero.whole_weights(trainer.model_wrapped, trainer.accelerator, args.gradient_checkpointing_kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Go backward through a part of the loss."""
        zero.backward_of_part(self._trainer.accelerator, loss)

    def current_microbatch(
        self, inputs: MicroBatch, sort: Callable[[list[MicroBatch]], list[MicroBatch]]
    ) -> MicroBatch:
        """Sort the micro-batches that TRL has just buffered, and return the current one.

        Args:
            inputs: TRL's micro-batch; returned unchanged in evaluation.
            sort: From the micro-batches of a generation batch to as many.
        """
        trainer = self._trainer
        if not self.is_training:
            return inputs
        batches = trainer._buffered_inputs
        place = trainer._step % len(batches)
        if trainer._step % (len(batches) * trainer.num_iterations) == 0:
            trainer._buffered_inputs = batches = sort(batches)
        return batches[place]

    # Sums over the ranks

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over all ranks of a tensor."""
        return self._trainer.accelerator.reduce(values, reduction="sum")

    def mean_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Collective: the mean over all ranks of a 0-dim tensor."""
        return self._trainer.accelerator.reduce(value, reduction="mean")

    # Logging

    def _metrics(self, *, is_training: bool) -> Any:
        return self._trainer._metrics["train" if is_training else "eval"]

    def record_metrics(self, metrics: Mapping[str, float], *, is_training: bool) -> None:
        """Add metrics to those that TRL averages and logs next."""
        recorded = self._metrics(is_training=is_training)
        for name, value in metrics.items():
            recorded[name].append(value)

    @contextlib.contextmanager
    def muted_metrics(self, *, is_training: bool) -> Generator[None]:
        """Drop metrics that are recorded inside: for rows without agent tokens TRL would log an entropy of 0."""
        metrics = self._metrics(is_training=is_training)
        counts = {name: len(values) for name, values in metrics.items()}
        try:
            yield
        finally:
            for name in list(metrics):
                del metrics[name][counts.get(name, 0) :]
                if not metrics[name]:
                    del metrics[name]

    def drop_evaluation_metrics(self, names: Iterable[str]) -> None:
        """Drop metrics of an evaluation, so that TRL's average over batches does not replace a better value."""
        for name in names:
            self._metrics(is_training=False).pop(name, None)

    def count_tokens(self, num_tokens: int, *, is_training: bool) -> dict[str, float]:
        """Count tokens seen in training, as TRL does, and return the metric."""
        state = self._trainer.state
        if is_training:
            state.num_input_tokens_seen += num_tokens
        return {"num_tokens": float(state.num_input_tokens_seen)}

    def record_completions(self, rows: Sequence[CompletionRow]) -> None:
        """Fill TRL's completions table: the first prompt, the conversation that followed, its reward."""
        logs = self._trainer._logs
        for row in rows:
            logs["prompt"].append(row.prompt)
            logs["completion"].append(row.completion)
            logs["rewards"][environment.__name__].append(row.final_reward)
            logs["advantages"].append(row.mean_advantage)
            logs["extra"]["turn_rewards"].append(row.turn_rewards)
            logs["extra"]["stop_reason"].append(row.stop_reason)
