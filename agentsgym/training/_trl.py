"""The seam with TRL: every private name of TRL that we read stands here, the two overridden methods aside.

``tests/training/test_trl_seam.py`` fails loudly when TRL moves one of them. Trainers are typed ``Any`` here: what is
read is what TRL declares too widely or not at all, so that the tests, not a type checker, hold this seam.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from trl.trainer.utils import use_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.types import Trajectory

Model = Callable[..., Any]


def environment(*_: Any, **__: Any) -> list[float | None]:
    """Stand in for the reward function that TRL insists on; rewards come from the environment, so none is called."""
    raise RuntimeError("rewards come from the environment: this reward function must never be called")


def needs_old_logprobs(args: GRPOEnvConfig) -> bool:
    """Whether updates run on rollouts of earlier weights, so that the loss needs the sampler's log-probabilities.

    Where generation and updates are in step, TRL takes the current ones, detached.
    """
    return args.gradient_accumulation_steps % args.micro_steps_per_generation != 0


def is_training(trainer: Any) -> bool:
    """Whether rollouts are for training, not for evaluation, as TRL tells them apart."""
    return trainer.model.training


def num_generations(trainer: Any) -> int:
    """How many consecutive rows are rollouts of one task."""
    return trainer.num_generations if is_training(trainer) else trainer.num_generations_eval


def start_afresh(trainer: Any) -> None:
    """Forget what an interrupted run left: its place in the generation cycle, rows to be used, numbers to be logged."""
    trainer._step, trainer._buffered_inputs = 0, None
    trainer._metrics["train"].clear()


def free_copies(trainer: Any) -> None:
    """Make a deep copy of the model run on its own weights.

    TRL puts its fused head around the ``forward`` of this very model (under PEFT: of the base model inside), which a
    copy would go on calling.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    model: PreTrainedModel = policy.get_base_model() if hasattr(policy, "peft_config") else policy
    fused_forward = model.forward

    @wraps(type(model).forward)  # ``generate`` reads the signature
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return fused_forward(*args, **kwargs) if self is model else type(self).forward(self, *args, **kwargs)

    model.forward = MethodType(forward, model)


@contextlib.contextmanager
def reference_model(trainer: Any) -> Generator[Any]:
    """The model that the KL term is about: TRL's own, or under PEFT the policy with its adapters off.

    An adapter that came with the model has a frozen copy of itself, which TRL calls ``"ref"``.
    """
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    policy = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
        yield trainer.model


def total(trainer: Any, number: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks of a 0-dim tensor."""
    return trainer.accelerator.reduce(number, reduction="sum")


def mean(trainer: Any, number: torch.Tensor) -> torch.Tensor:
    """The mean over all ranks of a 0-dim tensor."""
    return trainer.accelerator.reduce(number, reduction="mean")


def per_token_logps(
    trainer: Any, model: Any, ids: torch.Tensor, attention_mask: torch.Tensor, labelled: torch.Tensor
) -> torch.Tensor:
    """Score every token that ``labelled`` marks at the sampling temperature, without gradient.

    Returns:
        (B, L), 0.0 elsewhere and in the first column, which nothing stands before.
    """
    batch_size = trainer.args.per_device_train_batch_size
    chunks: list[torch.Tensor] = []
    with torch.no_grad():
        for start in range(0, len(ids), batch_size):
            rows = slice(start, start + batch_size)
            scored, *_ = trainer._get_per_token_logps_and_entropies(
                only_labelled(model, labelled[rows]), ids[rows], attention_mask[rows], ids.shape[1] - 1
            )
            chunks.append(scored)
    scored = torch.cat(chunks)
    return torch.cat([scored.new_zeros(len(ids), 1), scored], dim=1)


def only_labelled(model: Model, labelled: torch.Tensor) -> Model:
    """Call ``model`` with every other label ignored, so that TRL's fused head skips those tokens where it can.

    Args:
        model: Called by TRL with ``labels`` of shape (B, L).
        labelled: (B, L), 1 on the tokens whose log-probability is wanted.
    """

    def call(**kwargs: Any) -> Any:
        labels = kwargs["labels"].masked_fill(labelled == 0, -100)
        return model(**{**kwargs, "labels": labels})

    return call


def loss_inputs(batch: Mapping[str, Any], first: int, last: int) -> dict[str, Any]:
    """Cut our rows to the columns [0, last) and hand them to TRL's loss as prompt [0, first) and completion."""
    ids, attention_mask = batch["prompt_completion_ids"], batch["attention_mask"]
    inputs: dict[str, Any] = {
        "prompt_ids": ids[:, :first],
        "prompt_mask": attention_mask[:, :first],
        "completion_ids": ids[:, first:last],
        "completion_mask": attention_mask[:, first:last],
        "tool_mask": batch["agent_token_mask"][:, first:last],
        "advantages": batch["advantages"][:, first:last],
        "num_items_in_batch": batch["num_items_in_batch"],
    }
    for key in ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio"):
        if batch.get(key) is not None:
            inputs[key] = batch[key][:, first:last]
    return inputs


def record_metrics(trainer: Any, metrics: Mapping[str, float]) -> None:
    """Add to what TRL averages and logs at its next step."""
    for name, value in metrics.items():
        _metrics(trainer)[name].append(value)


def drop_metrics(trainer: Any, names: Iterable[str]) -> None:
    """Forget what was recorded in this mode, so that TRL's average over batches does not replace a better number."""
    for name in names:
        _metrics(trainer).pop(name, None)


def record_tokens(trainer: Any, num_tokens: int) -> None:
    """Count tokens seen in training, as TRL does."""
    if is_training(trainer):
        trainer.state.num_input_tokens_seen += num_tokens
    record_metrics(trainer, {"num_tokens": float(trainer.state.num_input_tokens_seen)})


def record_conversations(trainer: Any, trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> None:
    """Fill TRL's completions table: the first prompt, the conversation that followed, what it was paid.

    Args:
        trainer: The trainer whose table it is.
        trajectories: One a row.
        advantages: The mean over each row's agent tokens, since the table takes one number a row.
    """
    logs = trainer._logs
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        first = trajectory.turns[0].message_index if trajectory.turns else len(trajectory.messages)
        logs["prompt"].append(list(trajectory.messages[:first]))
        logs["completion"].append(list(trajectory.messages[first:]))
        logs["rewards"][environment.__name__].append(trajectory.final_reward)
        logs["advantages"].append(advantage)
        logs["extra"]["turn_rewards"].append(list(trajectory.turn_rewards))
        logs["extra"]["stop_reason"].append(trajectory.stop_reason.value)


def _metrics(trainer: Any) -> Any:
    return trainer._metrics["train" if is_training(trainer) else "eval"]
