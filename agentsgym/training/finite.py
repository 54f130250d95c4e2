"""Stop a run at the first NaN or infinity: in a loss, in a gradient before it is used, in a weight before it is saved.

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
    "the step is not taken and the weights are those from before it: look at the advantages and the importance ratios "
    "that were logged, at agents that report log-probabilities, and at the learning rate"
)
LOOK_AT_LOSS_AFTER_STEP = (
    "DeepSpeed has taken the step, and the weights are not saved: look at the advantages and the importance ratios "
    "that were logged, at agents that report log-probabilities, and at the learning rate, and resume from the last "
    "checkpoint"
)
LOOK_AT_GRADIENT = (
    "the step is not taken and the weights are those from before it: look at the loss, at half precision where numbers "
    "grow large, and at the learning rate"
)
SKIPPED_BY_DEEPSPEED = f"the gradients hold NaN or infinity, or their norm overflows; {LOOK_AT_GRADIENT}"
LOOK_AT_WEIGHTS = "they are not saved: lower the learning rate, and resume from the last checkpoint"
LOOK_AT_OTHERS = (
    "it was already so before the step: check what else changes the weights, such as a callback, "
    "and resume from the last checkpoint"
)


class NumberCheck(TrainerCallback):
    """Raises :class:`NonFiniteError` on all ranks in the optimizer step in which a number is NaN or infinite.

    Gradients that a ``GradScaler`` has scaled (``fp16``) are left to it: it skips steps whose gradients overflow.
    """

    def __init__(self, value_model: nn.Module | None = None) -> None:
        """Start without losses.

        Args:
            value_model: The model trained beside the policy; None for none.
        """
        self._value_model = value_model
        self._losses: list[torch.Tensor] = []
        self._weights: list[tuple[str, nn.Parameter]] = []
        self._policy: list[tuple[str, nn.Parameter]] = []  # looking for them takes as long as checking them
        self._trained: list[tuple[str, nn.Parameter]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Collective: check all weights, those that are not trained included."""
        self._weights = named = list(self._named(model))
        self._policy = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self._trained = [(name, one) for name, one in named if one.requires_grad]
        check_weights(named, f"before step {state.global_step + 1}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the losses of a step that was broken off."""
        self._losses = []

    def after_backward(self, loss: torch.Tensor, accelerator: Accelerator, step: int) -> None:
        """Collective in the last micro-batch of an optimizer step: check its losses, and the gradients.

        By then DeepSpeed has dropped the gradients and taken the step, or skipped it because they are not finite, as it
        would until the end of the run. A value head's are checked later: :func:`check_value_gradients`.

        Args:
            loss: The micro-batch's, 0-dim, without graph; checked later, since reading it would wait for the device.
            accelerator: Knows whether the optimizer is stepped next, and whether gradients are scaled.
            step: The number of the optimizer step, from 1 on.
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
            # A NaN in the loss of one rank is in the gradients of all of them, so the loss comes first.
            _raise([_loss_problem(losses), _gradient_problem(parameters)], f"step {step}")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collective: check the weights that were just changed; they have not been saved yet."""
        check_weights(self._trained, f"after step {state.global_step + 1}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let go of the weights."""
        self._weights, self._policy, self._trained = [], [], []

    def check_before_saving(self, model: Any) -> None:
        """Check all weights; collective where they are sharded. Ranks that hold the same ones need not all call this.

        Raises:
            NonFiniteError: One is NaN or infinite.
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
        named: Weights with their names; of a sharded model, each rank looks at its own shard.
        where: Description of the step, for error messages.
        on_all_ranks: Whether this is collective: it then raises on all ranks if one rank found something.
        advice: End of the error message.

    Raises:
        NonFiniteError: It names the first of them.
    """
    weights = [(name, _local(weight)) for name, weight in named]
    tensors = [weight for _, weight in weights if weight.is_floating_point() and weight.numel()]
    is_somewhere = any_rank if on_all_ranks else bool
    # The sum of squares overflows before a weight does; the maximum would show it immediately, at many times the cost.
    if not is_somewhere(_overflows(tensors, 2.0)) or not is_somewhere(_overflows(tensors, float("inf"))):
        return
    if on_all_ranks:
        _raise([_weight_problem(weights, advice)], where)
    raise NonFiniteError(f"{where}, {_weight_problem(weights, advice)}")


def check_value_gradients(value_model: nn.Module, step: int) -> None:
    """Raise if a gradient of the value head is NaN or infinite; all ranks have the same ones and raise together.

    Args:
        value_model: Its gradients are averaged over the ranks, and not clipped, which would spread a NaN over all.
        step: The number of the optimizer step, from 1 on.

    Raises:
        NonFiniteError: It names the parameter.
    """
    named = list(_value_head(value_model))
    gradients = _gradients(named)
    if gradients and not get_total_norm(gradients).isfinite():
        check_weights(named, f"step {step}", on_all_ranks=False, advice=LOOK_AT_OTHERS)
        raise NonFiniteError(f"step {step}: {_gradient_problem(named)}")


def _overflows(tensors: list[torch.Tensor], order: float) -> torch.Tensor:
    """Whether the norm of all of them together is NaN or infinite, bool and 0-dim."""
    return ~get_total_norm(tensors, norm_type=order).isfinite() if tensors else torch.tensor(False)


def _value_head(value_model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((f"value_head.{name}", parameter) for name, parameter in value_model.named_parameters())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, all of one that is not sharded, without graph."""
    if is_in_pieces(tensor):
        return own_piece(tensor).detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _gradients(named: Named) -> list[torch.Tensor]:
    gradients = (_local(one.grad) for _, one in named if one.grad is not None)
    return [gradient for gradient in gradients if gradient.numel()]


def _raise(problems: Sequence[str], where: str) -> None:
    """Collective: raise, on all ranks, the first problem that some rank has; "" is none."""
    for problem in problems:
        rank, found = first_of_ranks(problem)
        if found:
            raise NonFiniteError(f"{where}{rank and f', rank {rank}'}: {found}")


def _loss_problem(losses: torch.Tensor, advice: str = LOOK_AT_LOSS) -> str:
    values = losses.tolist()
    broken = [place for place, is_finite in enumerate(losses.isfinite().tolist()) if not is_finite]
    if not broken:
        return ""
    which = "" if len(values) == 1 else f" of micro-batch {broken[0] + 1} of {len(values)}"
    return f"the loss{which} is {values[broken[0]]}; {advice}"


def _gradient_problem(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Describe the broken gradient, of several the one nearest to the loss, which was computed first."""
    gradients = [(name, _local(one.grad)) for name, one in named if one.grad is not None]
    broken = [(name, gradient) for name, gradient in gradients if not gradient.isfinite().all()]
    if broken:
        name, gradient = broken[-1]
        count = f", as {len(broken)} of {len(gradients)} do" if len(broken) > 1 else ""
        return f"the gradient of {name!r} holds {_kind(gradient)}{count}; {LOOK_AT_GRADIENT}"
    norms = [(float(gradient.norm()), name) for name, gradient in gradients]
    if math.isfinite(sum(norm * norm for norm, _ in norms)):
        return ""
    _, name = max(norms)
    return f"the norm of the gradient overflows, by {name!r}; {LOOK_AT_GRADIENT}"


def _weight_problem(weights: Iterable[tuple[str, torch.Tensor]], advice: str) -> str:
    broken = [(name, weight) for name, weight in weights if not weight.isfinite().all()]
    if not broken:
        return ""
    name, weight = broken[0]
    more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
    return f"the weight {name!r}{more} holds {_kind(weight)}; {advice}"


def _kind(tensor: torch.Tensor) -> str:
    return "NaN" if tensor.isnan().any() else "infinity"
