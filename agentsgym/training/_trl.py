"""Access TRL's trainer: all private names of TRL are used here, except for three overridden methods.

``tests/training/test_trl_interface.py`` fails when TRL changes one of them. The trainer is typed ``Any``: TRL types
these members too loosely or not at all, so tests, not a type checker, protect this interface.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.trainer import utils
from trl.trainer.utils import create_model_from_path, use_adapter  # pyright: ignore[reportUnknownVariableType]

from agentsgym.agents.policy.attention import EXTENDED
from agentsgym.agents.policy.loading import load_tokenizer, load_weights, naming_the_model
from agentsgym.agents.policy.model import evaluation_mode
from agentsgym.agents.policy.packaged import converted
from agentsgym.agents.policy.saving import source_of
from agentsgym.agents.policy.sharded import is_sharded, zero_stage
from agentsgym.agents.policy.text_path import expose_decoder, without_adapters
from agentsgym.errors import ConfigError
from agentsgym.texts import shown
from agentsgym.training import zero
from agentsgym.training.tensors import scoring
from agentsgym.training.tensors.shared_prefix import can_share

if TYPE_CHECKING:
    from pathlib import Path

    from agentsgym.training.metrics.rollouts import CompletionRow

MicroBatch = dict[str, Any]


def unused_reward(*_: Any, **__: Any) -> list[float | None]:
    """Stand in for the reward function that TRL requires; it is never called, since rewards come from environments."""
    raise RuntimeError("rewards come from the environment: this reward function must never be called")


unused_reward.__name__ = "environment"  # TRL names a column of the completions table after it


def load(name_or_path: str, args: Any) -> Any:
    """Load a model as TRL's trainer does, which needs the options in ``args`` from then on only for a reference."""
    options: dict[str, Any] = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        options["device_map"] = None
    args.model_init_kwargs = args.model_init_kwargs if args.beta else None
    with naming_the_model(name_or_path):
        return load_weights(converted(name_or_path), create_model_from_path, **options)  # pyright: ignore[reportUnknownArgumentType]


def load_own_tokenizer(model: Any, args: Any) -> Any:
    """Load the tokenizer of the folder that a model is in or came from; a processor beside it is not needed."""
    options: dict[str, Any] = (isinstance(model, str) and args.model_init_kwargs) or {}
    return load_tokenizer(source_of(model), revision=options.get("revision"), trust_remote_code=args.trust_remote_code)


def check_experts(model: Any, args: Any) -> None:
    """Raise :class:`ConfigError` if TRL cannot compute the auxiliary loss of a mixture of experts."""
    config = model.config.get_text_config()
    given = args.router_aux_loss_coef
    weight = getattr(config, "router_aux_loss_coef", 0.0) if given is None else given
    if weight and hasattr(config, "output_router_logits") and not hasattr(config, "num_experts"):
        raise ConfigError(
            f"TRL cannot compute the router's auxiliary loss of a {config.model_type}, whose configuration has no "
            "num_experts: set router_aux_loss_coef to 0"
        )


def check_logits(model: Any, temperature: float, *, is_sharded: bool | None = None) -> None:
    """Keep experts as they are sampled, and raise :class:`ConfigError` if TRL computes other logits than the model.

    This runs two short forward passes, unless the weights are sharded, by default those of ZeRO-3.
    """
    scoring.keep_experts(model)
    change_head = getattr(utils, "add_fused_lm_head", None)  # Axolotl's older TRL, with which one can imitate, has none
    if change_head is None or (is_deepspeed_zero3_enabled() if is_sharded is None else is_sharded):
        return
    whole = without_adapters(model)
    expose_decoder(whole)
    attributes = whole.__dict__
    own = attributes.get("forward")
    change_head(whole, temperature)
    try:
        scoring.check_head(model, temperature)
    finally:
        del attributes["forward"]
        if own is not None:
            whole.forward = own


def check_loss(model: Any, args: Any) -> None:
    """Raise :class:`ConfigError` for a model whose loss TRL cannot compute, before it has a trainer."""
    check_experts(model, args)
    check_logits(model, getattr(args, "temperature", 1.0))


class NoTelemetry:
    """A trainer that sends no telemetry; TRL's trainers send some to the Hugging Face Hub when they are created.

    Unless ``HF_HUB_DISABLE_TELEMETRY`` or ``HF_HUB_OFFLINE`` is set, TRL would send the trainer class, the types of
    model, device, dataset and adapter, the number of processes (as one of four ranges), and package versions.
    """

    def _send_telemetry(self) -> None:
        """Send nothing."""


class TRLInterface:
    """The interface through which the rest of training uses the trainer; no other class holds a reference to it."""

    def __init__(self, trainer: Any) -> None:
        """Store a trainer that TRL's constructor has set up, without changing it."""
        self._trainer = trainer
        self.shares_prefixes = False

    # State of the trainer

    @property
    def is_training(self) -> bool:
        """Whether rollouts are for training rather than evaluation; like TRL, by whether the model is in train mode.

        Read it at the start of a batch or a loss and pass it on, since scoring switches the mode.
        """
        return self._trainer.model.training

    @property
    def num_rollouts(self) -> int:
        """Number of consecutive rows that are rollouts of the same task, in training or evaluation."""
        trainer = self._trainer
        return trainer.num_generations if self.is_training else trainer.num_generations_eval

    @property
    def global_step(self) -> int:
        """Number of completed optimizer steps."""
        return self._trainer.state.global_step

    @property
    def accumulation_steps(self) -> int:
        """Number of micro-batches that the current optimizer step accumulates."""
        return self._trainer.current_gradient_accumulation_steps

    @property
    def device(self) -> torch.device:
        """The device of batches."""
        return self._trainer.accelerator.device

    @property
    def has_aux_loss(self) -> bool:
        """Whether a mixture-of-experts auxiliary loss is added to the loss."""
        return self._trainer.aux_loss_enabled

    @property
    def clip_epsilons(self) -> dict[str, float]:
        """TRL's ``epsilon_low`` and ``epsilon_high``."""
        return {"epsilon_low": self._trainer.epsilon_low, "epsilon_high": self._trainer.epsilon_high}

    @property
    def vllm_generation(self) -> Any:
        """TRL's vLLM engine; None if transformers generates."""
        return getattr(self._trainer, "vllm_generation", None)

    def policy(self) -> Any:
        """The model being trained, unwrapped."""
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    # Set up once

    def set_up(self) -> None:
        """Patch, once, the parts of TRL's trainer that must behave differently here."""
        self.adapt_fused_heads()
        # TRL's loss receives sequence ratios as token ratios: agentsgym.training.loss.use_sequence_ratio.
        self._trainer.importance_sampling_level = "token"
        whole = without_adapters(self.policy())
        kinds = {type(part).__name__ for part in whole.modules()}
        # FSDP looks for each, among them layers of towers that the model does not have.
        whole._no_split_modules = [one for one in whole._no_split_modules or () if one in kinds]
        zero.register_head_weights(self.policy(), self._trainer.accelerator)

    def adapt_fused_heads(self) -> None:
        """Patch TRL's fused heads (with PEFT, the base model's) to score only labeled positions on every device.

        Without Triton, TRL's chunk size is also reduced, in every trainer of the process.
        """
        from trl.kernels import chunked_logprob  # noqa: PLC0415  # absent from versions that can run all but the trainer

        for scored in self._scored_models():
            scoring.score_labeled_only(scored)
            expose_decoder(scored)
        if not scoring.selects_labeled(self.policy().device):
            chunked_logprob.TOKEN_CHUNK_SIZE = scoring.POSITIONS_AT_ONCE

    def share_prefixes(self) -> None:
        """Let the rows of a micro-batch compute a shared beginning once, if the settings and the models allow it."""
        models, args = [*self._scored_models()], self._trainer.args
        draws = self.has_aux_loss or args.neftune_noise_alpha  # the noise of shared tokens would be shared, too
        half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        allowed = args.shared_prefix == "auto" and not draws
        self.shares_prefixes = allowed and all(can_share(model, half or model.dtype) for model in models)
        names = EXTENDED if self.shares_prefixes else {after: before for before, after in EXTENDED.items()}
        for model in models:
            model.packs_rows = self.shares_prefixes
            if (name := model.config._attn_implementation) in names:  # an earlier trainer may have shared
                model.set_attn_implementation(names[name])

    def _scored_models(self) -> Generator[Any]:
        policy, reference = self.policy(), self._trainer.ref_model
        yield policy.get_base_model() if hasattr(policy, "peft_config") else policy
        if reference is not None:
            yield self._trainer.accelerator.unwrap_model(reference)

    def reset_run_state(self) -> None:
        """Drop an interrupted run's position in the generation cycle, buffered rows and metrics not logged yet."""
        self._trainer._step, self._trainer._buffered_inputs = 0, None
        self._trainer._metrics["train"].clear()

    # Checkpoints

    def run_folder(self, trial: Any = None) -> str:
        """The folder of the run's checkpoints, or of one trial of a hyperparameter search."""
        return self._trainer._get_output_dir(trial)

    @contextlib.contextmanager
    def saving_into(self, folder: Path) -> Generator[None]:
        """Inside the block, write checkpoints to ``folder``, and do not push them to the hub."""
        trainer = self._trainer
        redirected = {"_get_output_dir": lambda *_, **__: str(folder), "_push_from_checkpoint": lambda *_: None}  # pyright: ignore[reportUnknownLambdaType, reportUnknownVariableType]
        vars(trainer).update(redirected)  # pyright: ignore[reportUnknownMemberType]
        try:
            yield
        finally:
            for name in redirected:
                del vars(trainer)[name]

    def save_checkpoint(self) -> None:
        """Collective: save a checkpoint as the trainer does, and notify its callbacks."""
        trainer = self._trainer
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    @contextlib.contextmanager
    def saving_all_state(self) -> Generator[None]:
        """Inside the block, save resumable checkpoints, even with ``save_only_model=True``."""
        args = self._trainer.args
        original, args.save_only_model = args.save_only_model, False
        try:
            yield
        finally:
            args.save_only_model = original

    def check_adapters(self, folder: Path) -> None:
        """Raise :class:`ConfigError` if a checkpoint's adapters, which PEFT would ignore, are on other layers."""
        policy, file = self.policy(), folder / "adapter_model.safetensors"
        if not file.is_file() or not hasattr(policy, "peft_config"):
            return
        from peft import get_peft_model_state_dict as adapters_in  # noqa: PLC0415  # pyright: ignore[reportUnknownVariableType]

        keys = load_file(file), adapters_in(policy, save_embedding_layers=False)
        saved, own = ({key for key in one if policy.base_model.prefix in key} for one in keys)
        if saved != own:
            raise ConfigError(
                f"the adapters in {folder} are on other layers than this run's ({shown(sorted(saved ^ own), 120)}): "
                "resume with the same class of model and the same target_modules and exclude_modules"
            )

    def push_checkpoint(self, folder: Path) -> None:
        """Push a checkpoint to the hub, as configured."""
        self._trainer._push_from_checkpoint(str(folder))

    @property
    def best_checkpoint(self) -> str | None:
        """The checkpoint of the best evaluation so far."""
        return self._trainer.state.best_model_checkpoint

    def record_best_checkpoint(self, place: Path, folder: Path | None = None) -> None:
        """Record the final path of the best checkpoint so far in the trainer's state.

        Args:
            place: The final path of the checkpoint that is being written.
            folder: Its temporary folder, if this rank wrote it; ``trainer_state.json`` there is updated too.
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
        """The reference model if ``sync_ref_model`` updates it, which makes it part of the run's state; else None."""
        trainer = self._trainer
        return trainer.accelerator.unwrap_model(trainer.ref_model) if trainer.args.sync_ref_model else None

    def release(self) -> None:
        """Drop the optimizer, the data and references to the process group, which a closed trainer does not need."""
        trainer = self._trainer
        if is_sharded(trainer.accelerator):  # sharded weights refer to the process group themselves
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
        """Number of tokens seen in training."""
        return self._trainer.state.num_input_tokens_seen

    def rewind_to_step_start(self, num_input_tokens_seen: int) -> None:
        """Drop the gradients of an unfinished optimizer step, and restore the token count."""
        self._trainer.state.num_input_tokens_seen = num_input_tokens_seen
        self._trainer.model.zero_grad()

    # Log-probabilities and the loss

    def score(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labeled: torch.Tensor,
        *,
        model: Any = None,
        with_entropies: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score every token that ``labeled`` marks, at the sampling temperature. Collective if weights are sharded.

        Runs without gradients and, like the sampler, without dropout, so the two sets of log-probabilities are
        comparable. ``model`` is the model being trained unless it is given.

        Returns:
            Log-probabilities, and the entropies in nats of the distributions that predict the tokens (0.0 without
            ``with_entropies``): each (B, L), 0.0 at all other tokens and in the first column, which has no context.
        """
        model = self._trainer.model if model is None else model
        size, width = self._trainer.args.per_device_train_batch_size, ids.shape[1] - 1
        chunks: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad(), evaluation_mode(model):
            parts: list[Sequence[torch.Tensor]] = [one.split(size) for one in (ids, attention_mask, labeled)]  # pyright: ignore[reportUnknownMemberType]
            for rows, attention, kept in zip(*parts, strict=True):
                # The trained model's head always computes entropies; a reference model's head does not.
                logprobs, entropies, *_ = self._trainer._get_per_token_logps_and_entropies(
                    scoring.mask_labels(model, kept), rows, attention, width, compute_entropy=with_entropies
                )
                entropies = entropies if with_entropies else torch.zeros_like(logprobs)
                chunks.append((logprobs, entropies.masked_fill(kept[:, 1:] == 0, 0.0)))
        logprobs, entropies = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        first = logprobs.new_zeros(len(ids), 1)
        return torch.cat([first, logprobs], dim=1), torch.cat([first, entropies], dim=1)

    def logprobs(
        self, model: Any, ids: torch.Tensor, attention_mask: torch.Tensor, labeled: torch.Tensor
    ) -> torch.Tensor:
        """Score every token that ``labeled`` marks, at the sampling temperature, in one forward pass with gradients.

        Returns:
            (B, L), attached to its graph; the values of all other tokens are meaningless.
        """
        logprobs, *_ = self._trainer._get_per_token_logps_and_entropies(
            scoring.mask_labels(model, labeled), ids, attention_mask, ids.shape[1] - 1
        )
        return torch.cat([logprobs.new_zeros(len(ids), 1), logprobs], dim=1)

    def score_reference(
        self, ids: torch.Tensor, attention_mask: torch.Tensor, labeled: torch.Tensor
    ) -> torch.Tensor | None:
        """The reference model's log-probabilities; None without a KL term. Collective if weights are sharded."""
        if self._trainer.beta == 0.0:
            return None
        with self.reference_model() as reference:
            return self.score(ids, attention_mask, labeled, model=reference, with_entropies=False)[0]

    @contextlib.contextmanager
    def reference_model(self) -> Generator[Any]:
        """The reference model of the KL term: TRL's, or with PEFT the policy with its adapters disabled.

        If the model was passed with an adapter, the reference is TRL's frozen copy of that adapter, ``"ref"``.
        """
        trainer = self._trainer
        if trainer.ref_model is not None:
            yield trainer.ref_model
            return
        policy = self.policy()
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
            yield trainer.model

    @contextlib.contextmanager
    def intercept_logprobs(self, on_logprobs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Generator[None]:
        """Call ``on_logprobs`` with the log-probabilities of the loss's forward pass, before the loss uses any input.

        Args:
            on_logprobs: Called with log-probabilities, attached to their graph, and entropies, both (B, T); returns the
                log-probabilities that the loss uses.
        """
        trainer, name = self._trainer, "_get_per_token_logps_and_entropies"
        score, is_own = getattr(trainer, name), name in vars(trainer)

        def scored(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            logprobs, entropies, *others = score(*args, **kwargs)
            return on_logprobs(logprobs, entropies), entropies, *others

        setattr(trainer, name, scored)
        try:
            yield
        finally:
            setattr(trainer, name, score) if is_own else delattr(trainer, name)

    def gathered_weights(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block, gather all weights on every rank, if that is configured. Collective under ZeRO-3."""
        trainer = self._trainer
        args, is_zero3 = trainer.args, zero_stage(trainer.accelerator) == 3
        if not (is_zero3 and args.ds3_gather_for_generation) or args.use_vllm:
            return contextlib.nullcontext()
        return zero.whole_weights(trainer.model_wrapped, trainer.accelerator, args.gradient_checkpointing_kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate one part of the loss."""
        zero.backward_of_part(self._trainer.accelerator, loss)

    def current_microbatch(
        self, inputs: MicroBatch, sort: Callable[[list[MicroBatch]], list[MicroBatch]]
    ) -> MicroBatch:
        """Sort the micro-batches that TRL has just buffered, and return the current one.

        Args:
            inputs: TRL's micro-batch; returned unchanged in evaluation.
            sort: Reorders the rows of a generation batch; takes and returns the same number of micro-batches.
        """
        trainer = self._trainer
        if not self.is_training:
            return inputs
        batches = trainer._buffered_inputs
        place = trainer._step % len(batches)
        if trainer._step % (len(batches) * trainer.num_iterations) == 0:
            trainer._buffered_inputs = batches = sort(batches)
        return batches[place]  # pyright: ignore[reportUnknownVariableType]

    # Sums over the ranks

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over all ranks of a tensor."""
        return self._trainer.accelerator.reduce(values, reduction="sum")

    def mean_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Collective: the mean over all ranks of a 0-dim tensor."""
        return self._trainer.accelerator.reduce(value, reduction="mean")

    # Logging

    def record_metrics(self, metrics: Mapping[str, float], *, is_training: bool) -> None:
        """Add metrics to those that TRL averages for its next log entry."""
        recorded = self._trainer._metrics["train" if is_training else "eval"]
        for name, value in metrics.items():
            recorded[name].append(value)

    @contextlib.contextmanager
    def muted_metrics(self, *, is_training: bool) -> Generator[None]:
        """Drop metrics recorded inside the block: for rows without agent tokens TRL would log an entropy of 0."""
        metrics = self._trainer._metrics["train" if is_training else "eval"]
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
            self._trainer._metrics["eval"].pop(name, None)

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
            logs["rewards"][unused_reward.__name__].append(row.final_reward)
            logs["advantages"].append(row.mean_advantage)
            logs["extra"]["turn_rewards"].append(row.turn_rewards)
            logs["extra"]["stop_reason"].append(row.stop_reason)
