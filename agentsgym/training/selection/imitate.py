"""Train a model to imitate the agent of recorded trajectories (behavior cloning).

::

    Trajectory ─▶ imitation_rows (ids and labels as recorded) ─▶ bucketed_order ─▶ trl.SFTTrainer

The demonstrations may come from a scripted expert or be a policy's best rollouts; nothing is tokenized again.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unicodedata import normalize

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback, TrainerState
from trl import SFTConfig, SFTTrainer

from agentsgym.agents.policy.loading import warn_of_slow_bfloat16
from agentsgym.agents.policy.model import check_is_model, fixed_rope_length
from agentsgym.agents.policy.text_path import freeze_beyond_text, freeze_spared
from agentsgym.errors import ConfigError
from agentsgym.fields import check_rollout, check_rollouts, is_bool, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown
from agentsgym.tokens.unknown_words import unknown_id, warn_of_unknown_words
from agentsgym.training._trl import NoTelemetry, check_loss
from agentsgym.training.finite import NonFiniteCheck
from agentsgym.types import Trajectory
from agentsgym.versions import recompute_by_default

IGNORED = -100  # the label that the loss ignores
_BATCHES_PER_BUCKET = 50


def imitate(
    model: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    tokenizer: PreTrainedTokenizerBase,
    args: SFTConfig | None = None,
    *,
    observation_loss: bool = False,
    callbacks: list[TrainerCallback] | None = None,
) -> TrainerState:
    """Train a model in place on the agent tokens of trajectories, with the mean negative log-likelihood as loss.

    Failed trajectories are skipped. Rows follow the order of :func:`bucketed_order`, regardless of the sampling
    strategy in ``args``; all epochs together are one epoch for the trainer. Like any ``Trainer``, this seeds the global
    random generators with ``args.seed``.

    Args:
        model: A causal language model; only its weights are changed.
        trajectories: The demonstrations, recorded with this tokenizer.
        tokenizer: The tokenizer, for the padding id; it is saved with checkpoints.
        args: TRL's settings; None for :func:`imitation_config`.
        observation_loss: Whether the model also learns to predict observations: all tokens after the first prompt.
        callbacks: Callbacks for ``Trainer``.

    Returns:
        The trainer's state; ``log_history`` has the losses.

    Raises:
        ConfigError: The first argument is not a model, there is nothing to train on, a trajectory is too long or has
            ids that the model does not have, or ``args`` requests packing.
        NonFiniteError: A loss, a gradient or a weight became NaN or infinite.
    """
    check_is_model(model, "imitate(model, trajectories, tokenizer)")
    args = imitation_config() if args is None else args
    if not isinstance(args, SFTConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"imitate(args) must be TRL's SFTConfig or None, got a {type(args).__name__}")
    if args.packing:
        raise ConfigError("imitate builds its own training rows and does not support packing: set packing=False")
    check_loss(model, args)
    rows = imitation_rows(trajectories, observation_loss=observation_loss)
    check_ids(rows, model)
    problem = misfit(tokenizer, trajectories[0])
    if problem is not None and unknown_id(tokenizer) not in trajectories[0].token_ids:
        raise ConfigError(f"the demonstrations were recorded with another tokenizer than the model's: {problem}")
    warn_of_unknown_words(tokenizer, trajectories)
    lengths = [len(row["input_ids"]) for row in rows]
    if args.max_length is not None and max(lengths) > args.max_length:
        raise ConfigError(
            f"a trajectory has {max(lengths)} tokens, but args.max_length is {args.max_length}: raise it, or remove "
            "long trajectories (truncation would drop their ends)"
        )
    sequential = copy.copy(args)  # the rows are already ordered and tokenized
    sequential.train_sampling_strategy = "sequential"
    sequential.num_train_epochs = 1
    sequential.dataset_kwargs = {"skip_prepare_dataset": True}
    warn_of_slow_bfloat16(model, is_autocast=bool(args.bf16))
    with _restoring_all_but_weights(model):
        freeze_spared(model)
        if args.ddp_find_unused_parameters is None:
            freeze_beyond_text(model)
        trainer = _CheckedTrainer(
            model=model,
            args=sequential,
            train_dataset=Dataset.from_list(rows).select(_layout(lengths, args)),
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        trainer.add_callback(trainer.numbers)
        trainer.remove_callback(PrinterCallback)  # a library does not print; the losses are in the state
        trainer.train()
    return trainer.state


class _CheckedTrainer(NoTelemetry, SFTTrainer):
    """Stops at the first NaN or infinity."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.numbers = NonFiniteCheck()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the training step, and check the loss and the gradients."""
        loss = super().training_step(*args, **kwargs)
        self.numbers.after_backward(loss, self.accelerator, self.state.global_step + 1)
        return loss

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model unless a weight is NaN or infinite."""
        self.numbers.check_before_saving(self.model)
        super().save_model(*args, **kwargs)


def imitation_rows(trajectories: Sequence[Trajectory], *, observation_loss: bool = False) -> list[dict[str, list[int]]]:
    """Convert trajectories to rows for ``SFTTrainer``, with ids as recorded; failed ones are skipped.

    Args:
        trajectories: The demonstrations.
        observation_loss: Whether all tokens from the first agent token on are labels, rather than only agent tokens.

    Returns:
        One row per trajectory, or one per segment if its history was rewritten: ``input_ids`` (T,) and ``labels``
        (T,), -100 for tokens without loss.
    """
    check_rollouts("the demonstrations", trajectories)
    require("observation_loss", observation_loss, is_bool, "True or False")
    rows: list[dict[str, list[int]]] = []
    for trajectory in trajectories:
        check_rollout("a demonstration", trajectory)
        if trajectory.failed:
            continue
        mask = trajectory.agent_token_mask
        if 1 not in mask:
            raise ConfigError(
                f"imitation needs agent tokens, but one trajectory has none (session {trajectory.session_id!r}, "
                f"{len(mask)} tokens): record it from an environment with a tokenizer"
            )
        for part in trajectory.segments:
            ids, own_mask = list(trajectory.token_ids[part.start : part.stop]), mask[part.start : part.stop]
            if 1 not in own_mask:
                continue
            first = own_mask.index(1)
            is_label = [(observation_loss and k >= first) or agent == 1 for k, agent in enumerate(own_mask)]
            labels = [token if kept else IGNORED for token, kept in zip(ids, is_label, strict=True)]
            rows.append({"input_ids": ids, "labels": labels})
    if not rows:
        raise ConfigError(
            f"imitation needs at least one trajectory that did not fail, got {len(trajectories)}, all of which failed"
        )
    return rows


def check_ids(rows: Sequence[Mapping[str, Sequence[int]]], model: Any) -> None:
    """Check that a model has embeddings for all ids of some rows, and that its RoPE does not change within them.

    Raises:
        ConfigError: It does not.
    """
    largest, vocabulary_size = max(max(row["input_ids"]) for row in rows), model.config.get_text_config().vocab_size
    if largest >= vocabulary_size:
        raise ConfigError(
            f"a trajectory has the token id {largest}, but the model has embeddings for {vocabulary_size} ids: record "
            "the demonstrations with the model's tokenizer"
        )
    length, fixed = max(len(row["input_ids"]) for row in rows), fixed_rope_length(model)
    if fixed is not None and length > fixed:
        raise ConfigError(
            f"a trajectory has {length} tokens, but beyond {fixed} the frequencies of the model's RoPE change, for all "
            "rows of a batch: leave out longer trajectories"
        )


def misfit(tokenizer: Any, trajectory: Trajectory) -> str | None:
    """Describe why the tokens of a rollout are not those of a tokenizer; None if they are."""
    if trajectory.failed or not trajectory.turns:
        return None
    if not trajectory.token_ids:
        return "no tokens"
    if max(trajectory.token_ids) >= len(tokenizer):
        return f"token {max(trajectory.token_ids)} outside a vocabulary of {len(tokenizer)}"
    prompt = trajectory.turns[0].prompt_messages or trajectory.messages
    first = next((one["content"] for one in prompt if one["role"] != "system"), "")
    decoded: str = tokenizer.decode(trajectory.token_ids[: trajectory.turns[0].start])
    # Templates and tokenizers may change white space, case and the composition of characters.
    letters, found = ("".join(normalize("NFKC", text.casefold()).split()) for text in (first, decoded))
    if letters in found:
        return None
    return f"prompt {shown(first, 60)} decoded as {shown(decoded, 60)}"


def bucketed_order(lengths: Sequence[int], *, batch_size: int, num_passes: int, seed: int) -> list[int]:
    """Order rows so that each batch has rows of similar length, while the order of batches is random.

    In each epoch, rows are shuffled and divided into buckets of 50 batches; each bucket is sorted by length and divided
    into batches, and the batches are shuffled. (A policy learns badly from batches sorted by length.) A batch that two
    epochs share has rows drawn at random, so that all other batches are complete.

    Args:
        lengths: Tokens of each row, (N,).
        batch_size: Rows per batch.
        num_passes: Number of epochs.
        seed: Equal seeds give equal orders.

    Returns:
        Row indices, (num_passes * N,): every epoch is a permutation of all rows.

    >>> bucketed_order([3, 9, 3, 9], batch_size=2, num_passes=2, seed=0)
    [2, 0, 1, 3, 1, 3, 2, 0]
    """
    generator = Random(derive_seed("imitation order", seed))
    bucket = _BATCHES_PER_BUCKET * batch_size
    order: list[int] = []
    for _ in range(num_passes):
        rows = list(range(len(lengths)))
        generator.shuffle(rows)
        head = -len(order) % batch_size
        order += rows[:head]
        whole = rows[head : len(rows) - (len(rows) - head) % batch_size]
        ranked = sorted(range(len(whole)), key=lambda place: (place // bucket, lengths[whole[place]]))
        batches = [ranked[start : start + batch_size] for start in range(0, len(ranked), batch_size)]
        generator.shuffle(batches)
        order += [whole[place] for batch in batches for place in batch]
        order += rows[head + len(whole) :]
    return order


def imitation_config(**settings: Any) -> SFTConfig:
    """Create TRL's settings without a length limit, checkpoints and reporting.

    Without an accelerator, ``bf16`` and ``gradient_checkpointing``, which TRL enables by default, are off.

    Args:
        **settings: Any field of ``SFTConfig``, to override the defaults chosen here.
    """
    defaults: dict[str, Any] = {
        "output_dir": str(Path(tempfile.gettempdir()) / "agentsgym_imitation"),  # stays empty without checkpoints
        "max_length": None,
        "save_strategy": "no",
        "report_to": "none",
    }
    if settings.get("use_cpu") or not torch.accelerator.is_available():
        defaults |= {"bf16": False, "gradient_checkpointing": None, "dataloader_pin_memory": False}
    config = SFTConfig(**(defaults | settings))
    recompute_by_default(config, is_recomputed=False)
    return config


def tiny_imitation_config(num_steps: int, **settings: Any) -> SFTConfig:
    """Create settings for a tiny policy: batches of 16, learning rate 3e-3 with warm-up and linear decay to 10%.

    Args:
        num_steps: Number of optimizer steps; the first 2% of them warm up.
        **settings: Any field of ``SFTConfig``, to override the defaults chosen here.

    Raises:
        ConfigError: ``num_steps`` is below 1.
    """
    if num_steps < 1:
        raise ConfigError(f"imitation needs at least one step, got {num_steps=}")
    num_warmup = max(1, num_steps // 50)
    defaults = {
        "max_steps": num_steps,
        "per_device_train_batch_size": 16,
        "learning_rate": 3e-3,
        "warmup_steps": num_warmup,
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": num_steps - num_warmup, "decay_type": "linear", "min_lr_ratio": 0.1},
        "logging_steps": 100,
    }
    return imitation_config(**(defaults | settings))


def _layout(lengths: Sequence[int], args: SFTConfig) -> list[int]:
    """Order as many rows as the run uses, by ``max_steps`` if set, or else by ``num_train_epochs``."""
    if args.max_steps > 0:
        num_processes = args.world_size
        num_rows = args.max_steps * args.per_device_train_batch_size * args.gradient_accumulation_steps * num_processes
    else:
        num_rows = math.ceil(len(lengths) * args.num_train_epochs)
    return bucketed_order(
        lengths,
        batch_size=args.per_device_train_batch_size,
        num_passes=math.ceil(num_rows / len(lengths)),
        seed=args.data_seed if args.data_seed is not None else args.seed,
    )[:num_rows]


@contextmanager
def _restoring_all_but_weights(model: PreTrainedModel) -> Generator[None]:
    """Undo a trainer's changes to a model, except for the weights.

    The trainer's wrapper around ``forward`` is bound to this model, so a deep copy would still call the original.
    """
    training, use_cache = model.training, getattr(model.config, "use_cache", None)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    forwards = {module: vars(module).get("forward") for module in model.modules()}
    try:
        yield
    finally:
        model.train(training)
        model.config.use_cache = use_cache
        if use_cache is None:  # models of images and text have it in another place
            del vars(model.config)["use_cache"]
        for weight in trained:
            weight.requires_grad = True
        for module, forward in forwards.items():
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward
