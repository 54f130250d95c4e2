"""Score tokens with any causal language model, a plain forward pass without TRL's head.

The head runs only on the positions whose next token has a label, a few at a time::

    ids ─▶ trunk ─▶ hidden states (B, L, H) ─▶ those that predict a label (N, H) ─▶ head ─▶ one number each ─▶ (B, L)

TRL's fused head does so where Triton runs. Elsewhere (a CPU, Apple's MPS) it scores every position, prompts and
observations included, in tiles of 4,096 positions by 32,768 words: about 5 GB for a large vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, Final

import torch
from torch import nn
from transformers.utils.import_utils import is_triton_available

from agentsgym.agents.policy.attention import EXTENDED
from agentsgym.agents.policy.model import evaluation_mode
from agentsgym.agents.policy.text_path import without_adapters
from agentsgym.batch.views import pad_right
from agentsgym.errors import ConfigError
from agentsgym.training.tensors.shared_prefix import Segments, rows_of, segments_of


def padded_columns(
    rows: Sequence[Sequence[Sequence[int]]], values: Sequence[int], device: torch.device | str
) -> list[torch.Tensor]:
    """Pad the columns of rows on the right, each with its value: one tensor per column, (B, L)."""
    width = max(len(row[0]) for row in rows)
    return [
        torch.tensor([pad_right(row[place], width, value) for row in rows], device=device)
        for place, value in enumerate(values)
    ]


@torch.no_grad()
def plain_logprobs(
    model: Any,
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    labeled: torch.Tensor,
    *,
    temperature: float = 1.0,
    batch_size: int = 8,
) -> torch.Tensor:
    """Compute the log-probabilities of labeled tokens, without gradient and without dropout.

    The head runs only on the positions that predict a labeled token, a few hundred at a time.

    Args:
        model: A causal language model of transformers.
        ids: (B, L), right-padded.
        attention_mask: (B, L).
        labeled: (B, L), 1 on the tokens to score; 0 in the first column, whose tokens have no context.
        temperature: Divisor of the logits.
        batch_size: Rows per forward pass.

    Returns:
        (B, L), 0.0 on all other tokens.
    """
    found = torch.zeros(ids.shape, device=ids.device)
    with evaluation_mode(model):
        for start in range(0, len(ids), batch_size):
            rows = slice(start, start + batch_size)
            found[rows] = _scored(model, ids[rows], attention_mask[rows], labeled[rows].bool(), temperature)
    return found


def _scored(
    model: Any, ids: torch.Tensor, attention_mask: torch.Tensor, labeled: torch.Tensor, temperature: float
) -> torch.Tensor:
    kept: list[torch.Tensor] = []

    def keep(states: torch.Tensor) -> torch.Tensor:
        kept.append(states[:, :-1][labeled[:, 1:].to(states.device)])  # (N, H)
        return states[:, :1]

    device = model.device
    with replaced_states(trunk_of(model), keep):
        model(input_ids=ids.to(device), attention_mask=attention_mask.to(device), use_cache=False)
    targets = ids[labeled].to(device).split(POSITIONS_AT_ONCE)
    scored = [
        (head_logits(model, states).float() / temperature).log_softmax(-1).gather(1, own[:, None])[:, 0]
        for states, own in zip(kept[0].split(POSITIONS_AT_ONCE), targets, strict=True)
    ]
    return torch.zeros(ids.shape, device=ids.device).masked_scatter(labeled, torch.cat(scored).to(ids.device))


POSITIONS_AT_ONCE: Final = 256
_NOT_BY_TOKEN: Final = frozenset(("loss", "aux_loss"))


def selects_labeled(device: torch.device) -> bool:
    """Whether TRL's fused head itself skips positions without a label on this device."""
    return is_triton_available() and device.type in {"cuda", "xpu"}


@contextmanager
def replaced_states(
    trunk: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor], *, is_first: bool = False
) -> Generator[None]:
    """Replace the trunk's last hidden states, (B, L, H), before the head reads them, or first of all hooks."""

    def hook(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        output.last_hidden_state = replace(output.last_hidden_state)
        return output

    handle = trunk.register_forward_hook(hook, prepend=is_first)
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
        is_fused = self is model and kwargs.get("fused_lm_head") and labels is not None
        tree = tree_of(model, kwargs) if is_fused else None
        if labels is None or not is_fused or (tree is None and selects_labeled(labels.device)):
            given = {} if labels is None else {"labels": labels}
            run = fused_forward if self is model else partial(type(self).forward, self)
            return run(*args, **given, **kwargs)
        has_label = labels[:, 1:] != -100  # (B, L - 1)

        def labeled(states: torch.Tensor) -> torch.Tensor:
            return states[:, :-1][has_label.to(states.device)][None]  # (1, N, H)

        given = kwargs if tree is None else kwargs | tree.inputs(labels.device)
        with unpacked(self.base_model, tree, labels.shape), replaced_states(self.base_model, labeled):
            output = fused_forward(*args, shift_labels=labels[:, 1:][has_label][None], **given)
        for name, value in list(output.items()):
            if name not in _NOT_BY_TOKEN:
                output[name] = value.new_zeros(has_label.shape).masked_scatter(has_label.to(value.device), value)
        return output

    model.forward = MethodType(forward, model)


def tree_of(model: Any, inputs: Mapping[str, Any]) -> Segments | None:
    """Return the tree of a batch's rows if the model may share prefixes, and these rows share enough."""
    if not getattr(model, "packs_rows", False) or model.config._attn_implementation not in EXTENDED.values():
        return None
    return segments_of(rows_of(inputs["input_ids"], inputs["attention_mask"]), inputs["input_ids"].numel())


def unpacked(trunk: nn.Module, tree: Segments | None, shape: torch.Size) -> AbstractContextManager[None]:
    """Return the hidden states of packed rows as those of padded rows, (B, L, H), before any other hook reads them."""
    if tree is None:
        return contextlib.nullcontext()
    places = torch.tensor([pad_right(row, shape[1], 0) for row in tree.places])
    return replaced_states(trunk, lambda states: states[0][places.to(states.device)], is_first=True)


def check_head(model: Any, temperature: float) -> None:
    """Raise :class:`ConfigError` if TRL's fused head leaves out what the model does to its logits, such as a cap.

    The states are made so large that a cap matters.
    """
    name = type(without_adapters(model)).__name__
    size = getattr(model.config.get_text_config(), "vocab_size", None) or 8
    ids = torch.arange(8, device=model.device)[None] % size
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with evaluation_mode(model), torch.no_grad():
        factor = 100 / model(**inputs, use_cache=False).logits.abs().max()
        with model.get_output_embeddings().register_forward_pre_hook(lambda _, states: states[0] * factor):  # pyright: ignore[reportUnknownLambdaType]
            logits = model(**inputs, use_cache=False).logits[:, :-1].float() / temperature
        try:
            with replaced_states(trunk_of(model), lambda states: states * factor):
                fused = model(**inputs, labels=ids, fused_lm_head=True).log_probs.float()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ConfigError(f"TRL's loss cannot run {name}: {type(error).__name__}: {error}") from error
    expected = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    if (fused - expected).abs().max() > 0.05 * expected.abs().max():  # more than any rounding
        raise ConfigError(
            f"TRL's loss computes other log-probabilities than {name}, because its configuration has no, or another, "
            "cap or scale of the logits than the model applies: set the text configuration's final_logit_softcapping "
            "(None without a cap, which may have another name, such as logits_soft_cap) and logit_scale (1.0 without a "
            "scale) to what the model does"
        )


def keep_experts(model: nn.Module) -> None:
    """Let Phi-3.5-MoE train the experts that it is sampled with: in training, SparseMixer would draw some of them."""
    for router in model.modules():
        if type(router).__name__ == "PhimoeTopKRouter":
            router.register_forward_pre_hook(_stop_drawing)


def _stop_drawing(router: nn.Module, _: Any) -> None:
    router.eval()


def head_logits(model: Any, states: torch.Tensor) -> torch.Tensor:
    """Compute the logits of hidden states, (N, H) to (N, V), scaled and capped as the model does.

    The model itself runs on one token, whose hidden states are replaced by these.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with replaced_states(trunk_of(model), lambda _: states[None]):
        return model(input_ids=token, use_cache=False).logits[0]


def trunk_of(model: Any) -> nn.Module:
    """Return the module whose hidden states the head reads, under PEFT that of the base model."""
    inner = without_adapters(model)
    trunk = inner.get_decoder() if inner.base_model is inner else inner.base_model
    return getattr(trunk, "decoder", trunk)  # OPT's head calls the inner one
