"""Stop a run at the first NaN or infinity: in a loss, a gradient before it is used, or a weight before it is saved.

::

    loss of each micro-batch ─▶ gradients ─▶ (checked) ─▶ optimizer step ─▶ weights ─▶ (checked) ─▶ checkpoint

A check costs one pass over the gradients or the weights, and one synchronization with the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import TrainerCallback

from agentsgym.errors import NonFiniteError
from agentsgym.ranks import any_rank, first_of_ranks
from agentsgym.training.zero import has_skipped_step, is_in_pieces, own_piece

if TYPE_CHECKING:
    from accelerate import Accelerator

Named = Iterable[tuple[str, torch.Tensor]]

LOOK_AT_LOSS = (
    "the step was skipped and the weights are unchanged: check the logged advantages and importance ratios, agents "
    "that report log-probabilities, and the learning rate"
)
LOOK_AT_LOSS_AFTER_STEP = (
    "DeepSpeed has already taken the step, and the weights are not saved: check the logged advantages and importance "
    "ratios, agents that report log-probabilities, and the learning rate, and resume from the last checkpoint"
)
LOOK_AT_GRADIENT = (
    "the step was skipped and the weights are unchanged: check the loss, the learning rate, and whether half precision "
    "overflows"
)
SKIPPED_BY_DEEPSPEED = f"the gradients contain NaN or infinity, or their norm overflows; {LOOK_AT_GRADIENT}"
LOOK_AT_WEIGHTS = "they are not saved: lower the learning rate, and resume from the last checkpoint"
LOOK_AT_OTHERS = (
    "it already did before the step: check for other code that changes the weights, such as a callback, "
    "and resume from the last checkpoint"
)


class NonFiniteCheck(TrainerCallback):
    """Raises :class:`NonFiniteError` on all ranks in the first optimizer step with a NaN or infinite value.

    Gradients scaled by a ``GradScaler`` (``fp16``) are not checked: it skips steps whose gradients overflow.
    """

    def __init__(self, value_model: nn.Module | None = None) -> None:
        self._value_model = value_model
        self._losses: list[torch.Tensor] = []
        self._weights: list[tuple[str, nn.Parameter]] = []
        self._policy: list[tuple[str, nn.Parameter]] = []  # stored: finding them takes as long as checking them
        self._trained: list[tuple[str, nn.Parameter]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Check all weights, including those that are not trained. Collective."""
        self._weights = named = list(self._named(model))
        self._policy = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self._trained = [(name, one) for name, one in named if one.requires_grad]
        check_weights(named, f"before step {state.global_step + 1}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Discard the losses of an interrupted step."""
        self._losses = []

    def after_backward(self, loss: torch.Tensor, accelerator: Accelerator, step: int) -> None:
        """After the last micro-batch of an optimizer step, check its losses and the gradients (collective).

        By then, DeepSpeed has discarded the gradients, and has either taken the step or skipped it because they are not
        finite; without this check, it would keep skipping steps until the end of the run. The value head's gradients
        are checked later, by :func:`check_value_gradients`.

        Args:
            loss: The micro-batch's loss, 0-dim, detached; checked later, since reading it would wait for the device.
            accelerator: The accelerator; it shows whether the optimizer steps next and whether gradients are scaled.
            step: The number of the optimizer step, from 1.
        """
        self._losses.append(loss)
        if not accelerator.sync_gradients:
            return
        losses, self._losses = torch.stack(self._losses), []
        broken = ~losses.isfinite().all()
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            is_skipped = has_skipped_step(accelerator)
            if any_rank(broken | is_skipped):
                advice = LOOK_AT_LOSS if is_skipped else LOOK_AT_LOSS_AFTER_STEP
                _raise([_loss_problem(losses, advice)], f"step {step}")
                raise NonFiniteError(f"step {step}: {SKIPPED_BY_DEEPSPEED}")  # DeepSpeed does not report the rank
            return
        parameters = [] if accelerator.scaler is not None else self._policy
        if gradients := _gradients(parameters):
            broken |= ~get_total_norm(gradients).isfinite().to(broken.device)
        if any_rank(broken):
            check_weights(self._weights, f"step {step}", advice=LOOK_AT_OTHERS)
            # A NaN in one rank's loss is in the gradients of all ranks, so the loss is reported first.
            _raise([_loss_problem(losses), _gradient_problem(parameters)], f"step {step}")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the weights that were just changed and are not saved yet. Collective."""
        check_weights(self._trained, f"after step {state.global_step + 1}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop the references to the weights."""
        self._weights, self._policy, self._trained = [], [], []

    def check_before_saving(self, model: Any) -> None:
        """Check all weights. Collective if they are sharded; ranks with equal weights need not all call this.

        Raises:
            NonFiniteError: A weight is NaN or infinite.
        """
        named = list(self._named(model))
        is_sharded = any(isinstance(weight, DTensor) or is_in_pieces(weight) for _, weight in named)
        check_weights(named, "in the model that is to be saved", on_all_ranks=is_sharded)

    def _named(self, model: Any) -> Iterable[tuple[str, nn.Parameter]]:
        yield from model.named_parameters()
        if self._value_model is not None:
            yield from _value_head(self._value_model)


def check_weights(named: Named, where: str, *, on_all_ranks: bool = True, advice: str = LOOK_AT_WEIGHTS) -> None:
    """Raise if a weight is NaN or infinite.

    Args:
        named: Weights with their names; of a sharded model, each rank checks its shard.
        where: Description of the step, for error messages.
        on_all_ranks: Whether this is collective, and raises on all ranks if any rank finds such a weight.
        advice: End of the error message.
    """
    weights = [(name, _local(weight)) for name, weight in named]
    tensors = [weight for _, weight in weights if weight.is_floating_point() and weight.numel()]
    is_somewhere = any_rank if on_all_ranks else bool
    # The maximum alone would be exact, but costs many times more; the 2-norm may also overflow with finite weights.
    if not is_somewhere(_overflows(tensors, 2.0)) or not is_somewhere(_overflows(tensors, float("inf"))):
        return
    if on_all_ranks:
        _raise([_weight_problem(weights, advice)], where)
    raise NonFiniteError(f"{where}, {_weight_problem(weights, advice)}")


def check_value_gradients(value_model: nn.Module, step: int) -> None:
    """Raise if a gradient of the value head is NaN or infinite; all ranks have the same gradients and raise together.

    Args:
        value_model: The value model; its gradients are averaged over the ranks but not clipped yet, since clipping
            would spread a NaN to all of them.
        step: The number of the optimizer step, from 1.
    """
    named = list(_value_head(value_model))
    gradients = _gradients(named)
    if gradients and not get_total_norm(gradients).isfinite():
        check_weights(named, f"step {step}", on_all_ranks=False, advice=LOOK_AT_OTHERS)
        raise NonFiniteError(f"step {step}: {_gradient_problem(named)}")


def _overflows(tensors: list[torch.Tensor], order: float) -> torch.Tensor:
    """Whether the norm over all tensors is NaN or infinite, as a 0-dim bool tensor."""
    return ~get_total_norm(tensors, norm_type=order).isfinite() if tensors else torch.tensor(False)


def _value_head(value_model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((f"value_head.{name}", parameter) for name, parameter in value_model.named_parameters())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, or all of it if it is not sharded, detached."""
    if is_in_pieces(tensor):
        return own_piece(tensor).detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _gradients(named: Named) -> list[torch.Tensor]:
    gradients = (_local(one.grad) for _, one in named if one.grad is not None)
    return [gradient for gradient in gradients if gradient.numel()]


def _raise(problems: Sequence[str], where: str) -> None:
    """Raise the first problem that any rank has, on all ranks; an empty string means no problem. Collective."""
    for problem in problems:
        rank, found = first_of_ranks(problem)
        if found:
            raise NonFiniteError(f"{where}{rank and f', rank {rank}'}: {found}")


def _loss_problem(losses: torch.Tensor, advice: str = LOOK_AT_LOSS) -> str:
    values: list[float] = losses.tolist()
    broken = [place for place, is_finite in enumerate(losses.isfinite().tolist()) if not is_finite]
    if not broken:
        return ""
    which = "" if len(values) == 1 else f" of micro-batch {broken[0] + 1} of {len(values)}"
    return f"the loss{which} is {values[broken[0]]}; {advice}"


def _gradient_problem(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Describe a non-finite gradient; if there are several, the one nearest to the loss, which was computed first."""
    gradients = [(name, _local(one.grad)) for name, one in named if one.grad is not None]
    broken = [(name, gradient) for name, gradient in gradients if not gradient.isfinite().all()]
    if broken:
        name, gradient = broken[-1]
        count = f", as {len(broken)} of {len(gradients)} do" if len(broken) > 1 else ""
        return f"the gradient of {name!r} contains {_kind(gradient)}{count}; {LOOK_AT_GRADIENT}"
    norms = [(float(gradient.norm()), name) for name, gradient in gradients]
    if math.isfinite(sum(norm * norm for norm, _ in norms)):
        return ""
    _, name = max(norms)
    return f"the norm of the gradient overflows, mostly from {name!r}; {LOOK_AT_GRADIENT}"


def _weight_problem(weights: Iterable[tuple[str, torch.Tensor]], advice: str) -> str:
    broken = [(name, weight) for name, weight in weights if not weight.isfinite().all()]
    if not broken:
        return ""
    name, weight = broken[0]
    more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
    return f"the weight {name!r}{more} contains {_kind(weight)}; {advice}"


def _kind(tensor: torch.Tensor) -> str:
    return "NaN" if tensor.isnan().any() else "infinity"
