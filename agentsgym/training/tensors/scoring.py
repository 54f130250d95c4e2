"""Score tokens with any causal language model, a plain forward pass without TRL's head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agentsgym.agents.eval_mode import evaluation_mode
from agentsgym.batch.padding import pad_right
from agentsgym.training.tensors.labeled_head import POSITIONS_AT_ONCE, head_logits, replaced_states, trunk_of


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
