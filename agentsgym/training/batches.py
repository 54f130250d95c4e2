"""Rows of a generation batch as tensors, right-padded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from agentsgym.batch.padding import loss_mask, pad_right

if TYPE_CHECKING:
    from agentsgym.types import Trajectory


def row_tensors(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Sequence[float]],
    *,
    pad_token_id: int,
    multiple_of: int = 1,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Stack the rows of a batch.

    Args:
        trajectories: One a row.
        advantages: One number a token of each row.
        pad_token_id: Fills the ids.
        multiple_of: Round the width up to a multiple of it.
        device: Where the tensors go.

    Returns:
        ``prompt_completion_ids``, ``attention_mask``, ``agent_token_mask`` and ``advantages``, all (B, L); L is at
        least 3, so that the loss has a prompt and two columns of completion even where every rollout failed at its
        start: TRL's metrics take a single column for one number a row.
    """
    width = round_up(max(3, *(len(trajectory.token_ids) for trajectory in trajectories)), multiple_of)
    ids = _stack((trajectory.token_ids for trajectory in trajectories), width, pad_token_id, torch.long)
    attention_mask = _stack(([1] * len(trajectory.token_ids) for trajectory in trajectories), width, 0, torch.long)
    agent_token_mask = _stack(map(loss_mask, trajectories), width, 0, torch.long)
    # Nothing stands before a row's first token that could have led to it.
    agent_token_mask[:, :1] = 0
    tensors = {
        "prompt_completion_ids": ids,
        "attention_mask": attention_mask,
        "agent_token_mask": agent_token_mask,
        "advantages": _stack(advantages, width, 0.0, torch.float32) * agent_token_mask,
    }
    return {key: tensor.to(device) for key, tensor in tensors.items()}


def recorded_logprobs(trajectories: Sequence[Trajectory], like: torch.Tensor) -> torch.Tensor | None:
    """What the sampler gave for each agent token, (B, L) as ``like``; None if some row came without."""
    rows = [[0.0] * len(row.token_ids) if row.failed else row.logprobs for row in trajectories]
    if any(row is None for row in rows):
        return None
    return _stack((row or () for row in rows), like.shape[1], 0.0, torch.float32).to(like.device)


def round_up(number: int, multiple_of: int) -> int:
    """The smallest multiple that is not below a number.

    >>> round_up(9, 8), round_up(8, 8)
    (16, 8)
    """
    return -(-number // multiple_of) * multiple_of


def _stack(rows: Iterable[Sequence[Any]], width: int, value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([pad_right(row, width, value) for row in rows], dtype=dtype)
