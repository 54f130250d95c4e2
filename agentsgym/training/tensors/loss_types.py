"""Describe what each of TRL's loss types averages over and where it clips."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

MeanOver = Literal["tokens_of_row", "rows", "tokens_of_batch", "tokens_of_microbatch", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossType:
    """One value of ``loss_type``.

    Attributes:
        mean_over: The average that the loss takes: over ``"tokens_of_row"`` (each row's agent tokens, then the rows),
            ``"rows"`` (of each row's sum over tokens), ``"tokens_of_batch"`` (the agent tokens of the generation batch,
            whose number is known when the batch is built) or ``"tokens_of_microbatch"``, or a sum divided by a
            ``"constant"``.
        clip: Where the importance ratio is clipped: on ``"both"`` sides of 1, only at an ``"upper"`` bound, or nowhere
            (None).
        multiplies_row_ratios: Whether the loss multiplies the ratios of all tokens of a row.
    """

    mean_over: MeanOver
    clip: Literal["both", "upper"] | None
    multiplies_row_ratios: bool = False

    def clip_bounds(self, *, epsilon_low: float, epsilon_high: float) -> tuple[float, float] | None:
        """Compute the bounds of the ratio as TRL does; None if the ratio is not clipped.

        Args:
            epsilon_low: The trainer's ``epsilon_low``.
            epsilon_high: The trainer's ``epsilon_high``; if ``clip`` is ``"upper"``, the bound itself rather than its
                distance from 1.
        """
        if self.clip == "upper":
            return -math.inf, epsilon_high
        return None if self.clip is None else (1 - epsilon_low, 1 + epsilon_high)


LOSS_TYPES: Final[Mapping[str, LossType]] = {
    "grpo": LossType(mean_over="tokens_of_row", clip="both"),
    "bnpo": LossType(mean_over="tokens_of_microbatch", clip="both"),
    "dr_grpo": LossType(mean_over="constant", clip="both"),
    "dapo": LossType(mean_over="tokens_of_batch", clip="both"),
    "cispo": LossType(mean_over="tokens_of_batch", clip="upper"),
    "sapo": LossType(mean_over="tokens_of_row", clip=None),
    "luspo": LossType(mean_over="rows", clip="both"),
    "vespo": LossType(mean_over="tokens_of_batch", clip=None, multiplies_row_ratios=True),
}
