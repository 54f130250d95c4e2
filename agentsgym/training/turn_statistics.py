"""What the loss does turn by turn: means over the agent tokens of each turn index, over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch

NUM_TURNS: Final = 100  # as many as two digits name
STATISTICS: Final = ("entropy", "ratio", "clip_ratio", "advantage")

_CLIPPED_ON_BOTH_SIDES: Final = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "luspo"})


class TurnStatistics:
    """Sums over agent tokens by turn index, kept on the device: nothing waits for it until :meth:`metrics`.

    Turn k is k turns into the row's rollout. Turns from ``num_turns`` on are left out: pooled they would be a mean
    over turns that have little in common, and few rollouts get there.
    """

    def __init__(
        self,
        num_turns: int = NUM_TURNS,
        names: Sequence[str] = STATISTICS,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start with nothing.

        Args:
            num_turns: How many turns have a number of their own; the same on all ranks.
            names: What is summed, the same on all ranks; without ``"clip_ratio"`` where the loss clips nothing.
            device: That of the tensors to come.

        Raises:
            ValueError: There is no turn or no name.
        """
        if num_turns < 1 or not names:
            raise ValueError(f"statistics need a turn and a name, got {num_turns!r} turns and the names {names!r}")
        self.num_turns, self.names = num_turns, tuple(names)
        # The first row counts tokens; the last column is for what belongs to none of the turns.
        self._sums = torch.zeros(1 + len(self.names), num_turns + 1, device=device)

    def add(self, turn_index: torch.Tensor, **values: torch.Tensor) -> None:
        """Add a micro-batch.

        Args:
            turn_index: (B, T), long: the turn that the token belongs to, -1 off the agent tokens.
            values: For each of the names (B, T), or (B, 1) for one number a row; without gradient, and read on agent
                tokens alone.

        Raises:
            ValueError: The names are others than those it was made with.
        """
        if values.keys() != set(self.names):
            raise ValueError(f"the statistics {', '.join(self.names)} are wanted, got {', '.join(values) or 'none'}")
        is_kept = (turn_index >= 0) & (turn_index < self.num_turns)
        columns = turn_index.where(is_kept, self.num_turns).flatten()  # (B·T,)
        rows = [torch.ones_like(turn_index), *(values[name].detach().expand_as(turn_index) for name in self.names)]
        self._sums.index_add_(1, columns, torch.stack([row.float() for row in rows]).flatten(1))

    def metrics(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """The means since the last call, over all ranks, and start anew.

        Args:
            reduce: The sum over all ranks of a tensor; called once, on every rank with a tensor of one shape.

        Returns:
            ``{name}/turn_{k:02d}`` for every turn index that has agent tokens on some rank: the names are the same on
            all ranks.
        """
        counts, *sums = reduce(self._sums[:, : self.num_turns].contiguous()).tolist()
        self._sums.zero_()
        return {
            f"{name}/turn_{k:02d}": own[k] / count
            for k, count in enumerate(counts)
            if count
            for name, own in zip(self.names, sums, strict=True)
        }


def clip_bounds(loss_type: str, *, epsilon_low: float, epsilon_high: float) -> tuple[float, float] | None:
    """Where a loss type cuts the ratio, as TRL does.

    Args:
        loss_type: As TRL names it.
        epsilon_low: The trainer's.
        epsilon_high: Likewise; for ``"cispo"`` it is the bound itself, not its distance from 1.

    Returns:
        The lower and the upper bound for :func:`clipped`; None for a loss that has none (``sapo``, ``vespo``).
    """
    if loss_type == "cispo":
        return -math.inf, epsilon_high
    return (1 - epsilon_low, 1 + epsilon_high) if loss_type in _CLIPPED_ON_BOTH_SIDES else None


def clipped(ratio: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """Tell where the clip holds a token back: above the upper bound if it is rewarded, below the lower if punished.

    What TRL counts in ``clip_ratio/region_mean`` and, with the bounds of ``cispo``, in ``cispo_clip_ratio`` (there the
    ratio is cut for a punished token too, which TRL does not count). Like there, the cut of ``delta`` is not counted.

    Args:
        ratio: (B, T) or (B, 1), current to old probability.
        advantages: (B, T).
        low: From :func:`clip_bounds`.
        high: Likewise.

    Returns:
        (B, T), boolean.
    """
    return ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
