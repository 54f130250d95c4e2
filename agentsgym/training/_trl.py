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

from agentsgym.agents.modes import evaluation_mode

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


def take_ratios_of_tokens(trainer: Any) -> None:
    """Have the loss take token-level ratios whatever the settings say: :func:`use_sequence_ratio` does the rest."""
    trainer.importance_sampling_level = "token"


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


def accumulation_steps(trainer: Any) -> int:
    """How many micro-batches the optimizer step that is under way accumulates."""
    return trainer.current_gradient_accumulation_steps


def total(trainer: Any, number: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks of a tensor."""
    return trainer.accelerator.reduce(number, reduction="sum")


def mean(trainer: Any, number: torch.Tensor) -> torch.Tensor:
    """The mean over all ranks of a 0-dim tensor."""
    return trainer.accelerator.reduce(number, reduction="mean")


def per_token_logps(
    trainer: Any, model: Any, ids: torch.Tensor, attention_mask: torch.Tensor, labelled: torch.Tensor
) -> torch.Tensor:
    """Score every token that ``labelled`` marks at the sampling temperature, without gradient and without dropout.

    The sampler has none either, so that what is left between the two is theirs.

    Returns:
        (B, L), 0.0 elsewhere and in the first column, which nothing stands before.
    """
    batch_size = trainer.args.per_device_train_batch_size
    chunks: list[torch.Tensor] = []
    with torch.no_grad(), evaluation_mode(model):
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
    for key in ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps"):
        if batch.get(key) is not None:
            inputs[key] = batch[key][:, first:last]
    return inputs


@contextlib.contextmanager
def scored_by_loss(trainer: Any, look: Callable[[torch.Tensor, torch.Tensor], None]) -> Generator[None]:
    """Show ``look`` what the loss's own forward pass gives, before the loss reads anything else.

    Args:
        trainer: Whose loss is computed inside.
        look: Called with log-probabilities, with their graph, and entropies, both (B, T).
    """
    name = "_get_per_token_logps_and_entropies"
    score, is_own = getattr(trainer, name), name in vars(trainer)

    def scored(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        logps, entropies, *others = score(*args, **kwargs)
        look(logps, entropies)
        return logps, entropies, *others

    setattr(trainer, name, scored)
    try:
        yield
    finally:
        setattr(trainer, name, score) if is_own else delattr(trainer, name)


def use_sequence_ratio(inputs: dict[str, Any], logps: torch.Tensor) -> None:
    """Make TRL's token-level ratio that of the row, each token with its own gradient (GSPO, 2507.18071).

    ``s = exp(mean_t (logp_t - old_t))`` over the row's agent tokens t is what every token's ratio becomes, and
    ``s·∇logp_t`` its gradient. Where nothing says what the old log-probabilities are the ratio is 1 anyway. TRL's own
    sequence level averages the advantages of a row.

    Args:
        inputs: What :func:`loss_inputs` gave; changed in place.
        logps: (B, T), with their graph.
    """
    old = inputs.get("old_per_token_logps")
    if old is None:
        return
    mask = inputs["tool_mask"] * inputs["completion_mask"]
    log_ratio = ((logps - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    inputs["old_per_token_logps"] = (logps - log_ratio).detach()


def row_sum(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of a row's advantages, (B, 1), in whose sign TRL's rules for whole sequences are interested."""
    return (advantages * mask).sum(1, keepdim=True)


def with_sorted_windows(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Sort the micro-batches that TRL has just buffered, and return the one whose turn it is."""
    if not is_training(trainer):
        return inputs
    batches = trainer._buffered_inputs
    place = trainer._step % len(batches)
    if trainer._step % (len(batches) * trainer.num_iterations) == 0:
        trainer._buffered_inputs = batches = sort_windows(trainer, batches)
    return batches[place]


def sort_windows(trainer: Any, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put rows of like length into the same micro-batch, within the rows of one optimizer step.

    TRL shuffles rows, so that a micro-batch is as wide as the longest row that happens to be in it. Gradients of one
    step are summed, so that it does not matter in which of its micro-batches a row stands, except to what is a mean
    over the tokens of one, or a quantile: ``bnpo``, the entropy bonus, ``top_entropy_quantile``, a mixture of experts'
    auxiliary loss.

    Args:
        trainer: Whose settings they are.
        batches: The micro-batches of a generation batch, as TRL buffers them.
    """
    args, size = trainer.args, len(batches[0]["attention_mask"])
    window = min(args.gradient_accumulation_steps, len(batches))
    has_bonus = args.entropy_coef != 0 or args.use_adaptive_entropy
    is_mean_of_microbatch = (
        args.loss_type == "bnpo" or has_bonus or args.top_entropy_quantile < 1 or trainer.aux_loss_enabled
    )
    is_cut_apart = len(batches) % window or args.gradient_accumulation_steps % window
    if window == 1 or is_cut_apart or is_mean_of_microbatch:
        return batches
    ordered: list[dict[str, Any]] = []
    for start in range(0, len(batches), window):
        rows = {key: _joined([batch[key] for batch in batches[start : start + window]]) for key in batches[0]}
        order = rows["attention_mask"].sum(1).argsort(descending=True, stable=True)
        ordered += [_rows(rows, places) for places in order.split(size)]
    return ordered


def _joined(parts: list[Any]) -> Any:
    return torch.cat(parts) if torch.is_tensor(parts[0]) and parts[0].dim() else parts[0]


def _rows(batch: Mapping[str, Any], places: torch.Tensor) -> dict[str, Any]:
    return {key: value[places] if torch.is_tensor(value) and value.dim() else value for key, value in batch.items()}


def in_parts(batch: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    """Cut a micro-batch of more than ``size`` rows into parts of so many, rows of like length together."""
    num_rows = len(batch["attention_mask"])
    if num_rows <= size:
        return [dict(batch)]
    order = batch["attention_mask"].sum(1).argsort(descending=True, stable=True)
    return [_rows(batch, places) for places in order.split(size)]


def record_metrics(trainer: Any, metrics: Mapping[str, float]) -> None:
    """Add to what TRL averages and logs at its next step."""
    for name, value in metrics.items():
        _metrics(trainer)[name].append(value)


@contextlib.contextmanager
def unrecorded(trainer: Any) -> Generator[None]:
    """Forget what is recorded inside: of rows without agent tokens TRL would tell that their entropy is 0."""
    metrics = _metrics(trainer)
    counts = {name: len(values) for name, values in metrics.items()}
    try:
        yield
    finally:
        for name in list(metrics):
            del metrics[name][counts.get(name, 0) :]
            if not metrics[name]:
                del metrics[name]


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
