"""Rows of a generation batch as tensors, right-padded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from agentsgym.batch.layouts import Row
from agentsgym.batch.padding import pad_right

if TYPE_CHECKING:
    from agentsgym.types import Trajectory


class Batch:
    """The rows of this rank, and what turns one value a token of each rollout into a tensor of them.

    Attributes:
        rows: In order; those of one rollout follow each other.
        ids: (B, L). L is at least 3, so that the loss has a prompt and two columns of completion even where every
            rollout failed at its start: TRL's metrics take a single column for one number a row. B is at least
            ``num_rows``: behind the rows stand fillers, three tokens of padding that nothing is learnt from.
        attention_mask: (B, L), 1 on all tokens of a row.
        turn_index: (B, L), the index of the turn that an agent token belongs to; -1 on every other token, and on a
            row's first, which nothing stands before that could have led to it.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        rows: Sequence[Row],
        *,
        pad_token_id: int,
        num_rows: int = 0,
        multiple_of: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """Stack rows.

        Args:
            trajectories: The rollouts that the rows are of.
            rows: Their layout.
            pad_token_id: Fills the ids.
            num_rows: How many rows there are to be, fillers included.
            multiple_of: Round the width up to a multiple of it.
            device: Where the tensors go.
        """
        self.rows = rows
        self._num_fillers = max(0, num_rows - len(rows))
        self._width = round_up(max([_LEAST, *map(len, rows)]), multiple_of)
        self._device = device
        ids = [row.cut(trajectories[row.rollout].token_ids) for row in rows]
        filler = [[pad_token_id] * _LEAST] * self._num_fillers
        self.ids = self._stacked([*ids, *filler], pad_token_id, torch.long)
        self.attention_mask = self._stacked([[1] * len(row) for row in [*ids, *filler]], 0, torch.long)
        self.turn_index = self._stacked([row.turn_index() for row in rows], -1, torch.long)
        self.turn_index[:, :1] = -1

    def agent_token_mask(self, counts: Sequence[bool]) -> torch.Tensor:
        """1 on the agent tokens of the rollouts that count, (B, L)."""
        kept = torch.tensor([counts[row.rollout] for row in self.rows] + [False] * self._num_fillers)
        return ((self.turn_index >= 0) & kept[:, None].to(self.turn_index.device)).long()

    def tensor(self, values: Sequence[Sequence[float]]) -> torch.Tensor:
        """Lay one value a token of each rollout, (T,), on the rows, (B, L); 0.0 elsewhere."""
        return self._stacked([row.cut(values[row.rollout]) for row in self.rows], 0.0, torch.float32)

    def row_weights(self, mask: torch.Tensor, loss_type: str) -> torch.Tensor:
        """What makes rows that are parts of a rollout weigh as that rollout would in one row, (B, 1).

        A loss that takes the mean over each row's agent tokens gives a token of a row of n the weight 1/n, where one
        row a rollout would give it 1/N: times n/N mends it. The other losses weigh tokens without looking at rows.

        Args:
            mask: From :meth:`agent_token_mask`.
            loss_type: As TRL names it.
        """
        weights = torch.ones(len(mask), 1, device=mask.device)
        if loss_type not in _ROW_MEANS:
            return weights
        counts = mask.sum(1)
        rollouts = torch.tensor([row.rollout for row in self.rows], device=mask.device)
        whole = torch.zeros(len(mask), dtype=counts.dtype, device=mask.device)
        whole.index_add_(0, rollouts, counts[: len(self.rows)])
        weights[: len(self.rows), 0] = counts[: len(self.rows)] / whole[rollouts].clamp(min=1)
        return weights

    def by_turn(self, values: torch.Tensor, num_turns: Sequence[int]) -> list[list[list[float]]]:
        """Gather one value a token, (B, L), by rollout, turn and agent token, (K, n_k) a rollout.

        Args:
            values: On the rows.
            num_turns: Turns of each rollout.
        """
        nested: list[list[list[float]]] = [[[] for _ in range(count)] for count in num_turns]
        for row, numbers in zip(self.rows, values.tolist(), strict=False):
            for k, turn in row.turns:
                nested[row.rollout][k] = numbers[turn.start - row.span.start : turn.stop - row.span.start]
        return nested

    def _stacked(self, rows: Iterable[Sequence[Any]], value: float, dtype: torch.dtype) -> torch.Tensor:
        stacked = [pad_right(row, self._width, value) for row in rows]
        stacked += [[value] * self._width] * (len(self.rows) + self._num_fillers - len(stacked))
        return torch.tensor(stacked, dtype=dtype).reshape(-1, self._width).to(self._device)


def recorded_logprobs(trajectories: Sequence[Trajectory], batch: Batch) -> torch.Tensor | None:
    """What the sampler gave for each agent token, (B, L), 0.0 elsewhere; None if some rollout came without."""
    known = [[0.0] * len(row.token_ids) if row.failed else row.logprobs for row in trajectories]
    if any(row is None for row in known):
        return None
    return batch.tensor([row or () for row in known])


def round_up(number: int, multiple_of: int) -> int:
    """The smallest multiple that is not below a number.

    >>> round_up(9, 8), round_up(8, 8)
    (16, 8)
    """
    return -(-number // multiple_of) * multiple_of


_LEAST = 3
_ROW_MEANS = ("grpo", "sapo")
