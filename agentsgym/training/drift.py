"""Measure how far the sampler is from the trained model, by the log-probabilities of agent tokens.

With ``q`` a token's probability under the sampler and ``p`` under the model, both at the sampling temperature::

    gap    |log q − log p|             0 if sampler and model agree
    k1     mean(log q − log p)         unbiased estimate of KL(q‖p); may be negative
    k3     mean(p/q − 1 − log(p/q))    also unbiased, and never negative (arXiv 2402.03300, eq. 4)
    ratio  p/q                         the importance sampling weight of a token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from agentsgym.errors import ConfigError
from agentsgym.fields import is_int, is_number, require
from agentsgym.training.tensors.scoring import padded_columns, plain_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentsgym.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A comparison of recorded log-probabilities with those of a model; the module docstring has the formulas.

    Attributes:
        num_tokens: Number of agent tokens that were compared.
        largest_gap: The largest absolute difference; NaN if a recorded log-probability is NaN.
        mean_gap: The mean absolute difference.
        trajectory: Index of the trajectory with the largest gap.
        turn: Index of the turn with the largest gap.
        token: Index of the token with the largest gap in the trajectory's ``token_ids``.
        kl_k1: The k1 estimate of KL(sampler‖model).
        kl_k3: The k3 estimate, which is never negative.
        ratio_min: The smallest ratio model / sampler.
        ratio_mean: The mean ratio, 1 in expectation for any gap.
        ratio_max: The largest ratio.
        num_without_logprobs: Number of trajectories skipped because they have no log-probabilities.
        num_inexact_turns: Number of turns skipped because they were tokenized from text.
        num_without_context: Number of tokens skipped because no token precedes them.
    """

    num_tokens: int
    largest_gap: float
    mean_gap: float
    trajectory: int
    turn: int
    token: int
    kl_k1: float
    kl_k3: float
    ratio_min: float
    ratio_mean: float
    ratio_max: float
    num_without_logprobs: int = 0
    num_inexact_turns: int = 0
    num_without_context: int = 0

    def __str__(self) -> str:
        return (
            f"{self.num_tokens} tokens: largest gap {self.largest_gap:.2e} (trajectory {self.trajectory}, turn "
            f"{self.turn}, token {self.token}), mean gap {self.mean_gap:.2e}, KL k1 {self.kl_k1:.2e}, k3 "
            f"{self.kl_k3:.2e}, ratio {self.ratio_min:.4f} to {self.ratio_max:.4f}, mean {self.ratio_mean:.4f}; "
            + _left_out(self.num_without_logprobs, self.num_inexact_turns, self.num_without_context)
        )


class _Token(NamedTuple):
    turn: int
    place: int  # in the trajectory
    recorded: float


class _ScoredSegment(NamedTuple):
    """One segment: its start in its trajectory, the ids of the forward pass, and the tokens to score."""

    trajectory: int
    start: int
    ids: list[int]
    tokens: list[_Token]


def logprob_gap(
    model: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    *,
    temperature: float = 1.0,
    batch_size: int = 8,
    pad_token_id: int = 0,
) -> Drift:
    """Score every agent token with a plain forward pass, and compare with the recorded log-probabilities.

    Each segment is a row, padded on the right, that ends with its last compared token. The head runs only on compared
    tokens, a few hundred at a time. The model runs without gradients and in evaluation mode; the modes of its modules
    are restored afterwards.

    Args:
        model: A causal language model of transformers, with the weights used for sampling. If sampling ran under
            autocast, call this under autocast too.
        trajectories: Rollouts with log-probabilities, failed ones included.
        temperature: The sampler's temperature; 0 (greedy) scores at 1, as the sampler does.
        batch_size: Rows per forward pass.
        pad_token_id: The padding id; any id of the vocabulary works, since nothing attends to it.

    Raises:
        ConfigError: A number is out of range, or there are no tokens to compare.
    """
    require("temperature", temperature, is_number(0), "a non-negative number")
    require("batch_size", batch_size, is_int(1), "a positive int")
    scored = [(index, row) for index, row in enumerate(trajectories) if row.logprobs is not None]
    segments = [segment for index, trajectory in scored for segment in _segments(index, trajectory)]
    left_out = {
        "num_without_logprobs": len(trajectories) - len(scored),
        "num_inexact_turns": sum(not turn.exact for _, trajectory in scored for turn in trajectory.turns),
        "num_without_context": sum(token.place == row.start for row in segments for token in row.tokens),
    }
    # A segment's first token has no probability; sorting by length saves padding.
    rows = [row._replace(tokens=[token for token in row.tokens if token.place > row.start]) for row in segments]
    rows = sorted((row for row in rows if row.tokens), key=lambda row: len(row.ids))
    if not rows:
        raise ConfigError(
            f"there is nothing to compare: none of the {len(trajectories)} trajectories has an agent token with a "
            f"recorded log-probability ({_left_out(**left_out)})"
        )
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    recomputed = torch.cat([_score(model, batch, temperature or 1.0, pad_token_id) for batch in batches])
    places = [(row.trajectory, token) for row in rows for token in row.tokens]
    recorded = torch.tensor([token.recorded for _, token in places], dtype=torch.float64)
    log_ratio = recomputed.double() - recorded  # (N,), in double precision: ratios may be large
    gap, ratio = log_ratio.abs(), log_ratio.exp()
    trajectory, worst = places[int(gap.argmax())]
    return Drift(
        num_tokens=len(places),
        largest_gap=gap.max().item(),
        mean_gap=gap.mean().item(),
        trajectory=trajectory,
        turn=worst.turn,
        token=worst.place,
        kl_k1=-log_ratio.mean().item(),
        kl_k3=(log_ratio.expm1() - log_ratio).mean().item(),
        ratio_min=ratio.min().item(),
        ratio_mean=ratio.mean().item(),
        ratio_max=ratio.max().item(),
        **left_out,
    )


def _segments(index: int, trajectory: Trajectory) -> list[_ScoredSegment]:
    """Return one row for each segment with an exact action."""
    tokens: dict[int, list[_Token]] = {}  # by the start of the segment
    for k, turn in enumerate(trajectory.turns):
        if turn.exact and turn.stop > turn.start and trajectory.logprobs is not None:
            span = range(turn.start, turn.stop)
            tokens.setdefault(turn.prompt_start, []).extend(_Token(k, i, trajectory.logprobs[i]) for i in span)
    return [
        _ScoredSegment(index, start, list(trajectory.token_ids[start : own[-1].place + 1]), own)
        for start, own in tokens.items()
    ]


def _score(
    model: PreTrainedModel, rows: Sequence[_ScoredSegment], temperature: float, pad_token_id: int
) -> torch.Tensor:
    """Return the model's log-probabilities of the rows' tokens, row by row, (N,)."""
    columns = [(row.ids, [1] * len(row.ids)) for row in rows]
    ids, mask = padded_columns(columns, (pad_token_id, 0), model.device)  # (B, L) each
    labeled = torch.zeros_like(ids, dtype=torch.bool)
    for row, own in zip(labeled, rows, strict=True):
        row[[token.place - own.start for token in own.tokens]] = True
    return plain_logprobs(model, ids, mask, labeled, temperature=temperature, batch_size=len(rows))[labeled].cpu()


def _left_out(num_without_logprobs: int, num_inexact_turns: int, num_without_context: int) -> str:
    return (
        f"skipped {num_without_logprobs} trajectories without log-probabilities, {num_inexact_turns} turns that were "
        f"tokenized from text, and {num_without_context} tokens without context"
    )
