"""Run a model's head only on the positions whose next token has a label, a few at a time.

::

    ids ─▶ trunk ─▶ hidden states (B, L, H) ─▶ those that predict a label (N, H) ─▶ head ─▶ one number each ─▶ (B, L)

TRL's fused head does so where Triton runs. Elsewhere (a CPU, Apple's MPS) it scores every position, prompts and
observations included, in tiles of 4,096 positions by 32,768 words: about 5 GB for a large vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, Final

import torch
from torch import nn
from transformers.utils.import_utils import is_triton_available

POSITIONS_AT_ONCE: Final = 256
_NOT_BY_TOKEN: Final = frozenset(("loss", "aux_loss"))


def selects_labeled(device: torch.device) -> bool:
    """Whether TRL's fused head itself skips positions without a label on this device."""
    return is_triton_available() and device.type in {"cuda", "xpu"}


@contextmanager
def replaced_states(trunk: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> Generator[None]:
    """Replace the trunk's last hidden states, (B, L, H), before the head reads them."""

    def hook(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        output.last_hidden_state = replace(output.last_hidden_state)
        return output

    handle = trunk.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def mask_labels(model: Callable[..., Any], labeled: torch.Tensor) -> Callable[..., Any]:
    """Call ``model`` with every other label ignored, so that the fused head skips those tokens.

    Args:
        model: Called by TRL with ``labels`` of shape (B, L).
        labeled: (B, L), 1 on the tokens whose log-probability is needed.
    """

    def call(**kwargs: Any) -> Any:
        labels = kwargs["labels"].masked_fill(labeled == 0, -100)
        return model(**{**kwargs, "labels": labels})

    return call


def score_labeled_only(model: Any) -> None:
    """Make a model with TRL's fused head score those positions alone whose next token has a label, on any device.

    The head's results for a position are the same up to rounding; the other positions are 0, as in TRL. A deep copy
    runs as its class defines: TRL binds the head to this instance, so a copy would otherwise run on its weights.

    Args:
        model: A causal language model with TRL's fused head, not wrapped by PEFT.
    """
    fused_forward = model.forward

    @wraps(type(model).forward)  # ``generate`` reads the signature
    def forward(self: Any, *args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        is_scored = kwargs.get("fused_lm_head") and labels is not None and not selects_labeled(labels.device)
        if self is not model or not is_scored or labels is None:
            given = {} if labels is None else {"labels": labels}
            run = fused_forward if self is model else partial(type(self).forward, self)
            return run(*args, **given, **kwargs)
        has_label = labels[:, 1:] != -100  # (B, L - 1)

        def labeled(states: torch.Tensor) -> torch.Tensor:
            return states[:, :-1][has_label.to(states.device)][None]  # (1, N, H)

        with replaced_states(self.base_model, labeled):
            output = fused_forward(*args, shift_labels=labels[:, 1:][has_label][None], **kwargs)
        for name, value in list(output.items()):
            if name not in _NOT_BY_TOKEN:
                output[name] = value.new_zeros(has_label.shape).masked_scatter(has_label.to(value.device), value)
        return output

    model.forward = MethodType(forward, model)


def head_logits(model: Any, states: torch.Tensor) -> torch.Tensor:
    """Compute the logits of hidden states, (N, H) to (N, V), scaled and capped as the model does.

    The model itself runs on one token, whose hidden states are replaced by these.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with replaced_states(trunk_of(model), lambda _: states[None]):
        return model(input_ids=token, use_cache=False).logits[0]


def trunk_of(model: Any) -> nn.Module:
    """Return the module whose hidden states the head reads, under PEFT that of the base model."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    return inner.get_decoder() if inner.base_model is inner else inner.base_model
