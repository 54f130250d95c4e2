"""Stack rollouts as right-padded tensors, and build the inputs of TRL's loss from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch

from agentsgym.batch.layouts import TrainingRow
from agentsgym.batch.views import pad_right, round_up

if TYPE_CHECKING:
    from agentsgym.credit.assignment import TokenAdvantages
    from agentsgym.training.tensors.logprobs import TokenLogprobs
    from agentsgym.training.tensors.loss_types import LossType
    from agentsgym.types import Trajectory

MIN_WIDTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The training rows of this rank's rollouts as tensors: token ids, masks, turns.

    One row with all its columns, of a rollout of two turns (P a first prompt, A what the agent sampled, O an
    observation, · padding); the later columns come from :mod:`~agentsgym.credit.assignment` and
    :mod:`~agentsgym.training.tensors.logprobs`::

        token                P1    P2    A1    A2    O1    A3    ·
        ids                  11    12    31    2     14    32    0
        attention_mask       1     1     1     1     1     1     0
        turn_index           -1    -1    0     0     -1    1     -1
        agent_token_mask     0     0     1     1     0     1     0      turn_index ≥ 0, and the rollout is trained on
        advantages           0.0   0.0   0.5   0.5   0.0   -1.0  0.0    one number a turn, on that turn's tokens
        recorded_logprobs    0.0   0.0   -1.2  -0.1  0.0   -0.7  0.0    the sampler's; so old, reference and sampling
        value_targets        nan   nan   1.5   nan   nan   1.0   nan    with a value head

    The loss predicts token t from the tokens before it, so a row's first token, which has none, belongs to no turn.

    Attributes:
        rows: In order; those of one rollout follow each other.
        ids: (B, L). L is at least 3, so that the loss has a prompt and two columns of completion even where every
            rollout failed at its start: TRL's metrics take a single column for one number a row. B may be more than
            there are rows: padding rows follow, three tokens of padding each, which are not trained on.
        attention_mask: (B, L), 1 on all tokens of a row.
        turn_index: (B, L), the index of the turn that an agent token belongs to; -1 on every other token.
        recorded_logprobs: (B, L), the sampler's for each agent token (NaN: not known), 0.0 elsewhere; None if some
            rollout has none.
    """

    rows: Sequence[TrainingRow]
    ids: torch.Tensor
    attention_mask: torch.Tensor
    turn_index: torch.Tensor
    recorded_logprobs: torch.Tensor | None

    @classmethod
    def stack(
        cls,
        trajectories: Sequence[Trajectory],
        rows: Sequence[TrainingRow],
        *,
        pad_token_id: int,
        num_rows: int = 0,
        multiple_of: int = 1,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Stack rows.

        Args:
            trajectories: The rollouts that the rows are of.
            rows: Their layout.
            pad_token_id: Fills the ids.
            num_rows: The number of rows to stack, padding rows included.
            multiple_of: Round the width up to a multiple of it.
            device: Where the tensors go.
        """
        # What has no turn is not trained on, and its first prompt may be longer than the model allows.
        rows = [row if row.turns else replace(row, span=row.span[:MIN_WIDTH]) for row in rows]
        width = round_up(max([MIN_WIDTH, *map(len, rows)]), multiple_of)
        num_padding = max(0, num_rows - len(rows))
        shape = (len(rows) + num_padding, width)
        ids = [row.cut(trajectories[row.rollout].token_ids) for row in rows]
        padding = [[pad_token_id] * MIN_WIDTH] * num_padding
        turn_index = _stacked([row.turn_index() for row in rows], -1, torch.long, shape)
        turn_index[:, :1] = -1
        # A failed rollout is not trained on, even with log-probabilities.
        logprobs = [[0.0] * len(one.token_ids) if one.failed else one.logprobs for one in trajectories]
        recorded = None
        if None not in logprobs:
            cut = [row.cut(logprobs[row.rollout] or ()) for row in rows]
            recorded = _stacked(cut, 0.0, torch.float32, shape).to(device)
        return cls(
            rows=rows,
            ids=_stacked([*ids, *padding], pad_token_id, torch.long, shape).to(device),
            attention_mask=_stacked([[1] * len(row) for row in [*ids, *padding]], 0, torch.long, shape).to(device),
            turn_index=turn_index.to(device),
            recorded_logprobs=recorded,
        )

    def agent_token_mask(self, included: Sequence[bool]) -> torch.Tensor:
        """Mark the agent tokens of the rollouts that are trained on: (B, L), 1 there."""
        num_padding = len(self.ids) - len(self.rows)
        kept = torch.tensor([included[row.rollout] for row in self.rows] + [False] * num_padding)
        return ((self.turn_index >= 0) & kept[:, None].to(self.turn_index.device)).long()

    def sampled_entropy(self, mask: torch.Tensor) -> float | None:
        """The mean of -log p over the masked tokens as sampled, in nats, an unbiased estimate; None if unknown."""
        if self.recorded_logprobs is None:
            return None
        known = self.recorded_logprobs[mask.bool()]
        known = known[~known.isnan()]
        return -float(known.mean()) if len(known) else None

    def tensor(self, values: Sequence[Sequence[float]]) -> torch.Tensor:
        """Lay one value a token of each rollout, (T,), on the rows, (B, L); 0.0 elsewhere."""
        cut = [row.cut(values[row.rollout]) for row in self.rows]
        return _stacked(cut, 0.0, torch.float32, tuple(self.ids.shape)).to(self.ids.device)

    def row_weights(self, mask: torch.Tensor, loss_type: LossType) -> torch.Tensor:
        """Weigh rows so that those of one rollout count as that rollout would in one row, (B, 1).

        A loss that takes the mean over each row's agent tokens gives a token of a row of n the weight 1/n, where one
        row a rollout would give it 1/N: multiplying by n/N corrects it. The other losses weigh tokens
        independently of rows.

        Args:
            mask: From :meth:`agent_token_mask`.
            loss_type: The type of the loss.
        """
        weights = torch.ones(len(mask), 1, device=mask.device)
        if loss_type.mean_over != "tokens_of_row":
            return weights
        num_tokens = mask.sum(1)
        rollouts = torch.tensor([row.rollout for row in self.rows], device=mask.device)
        whole = torch.zeros(len(mask), dtype=num_tokens.dtype, device=mask.device)
        whole.index_add_(0, rollouts, num_tokens[: len(self.rows)])
        weights[: len(self.rows), 0] = num_tokens[: len(self.rows)] / whole[rollouts].clamp(min=1)
        return weights

    def by_turn(self, values: torch.Tensor, num_turns: Sequence[int]) -> list[list[list[float]]]:
        """Gather one value a token, (B, L), by rollout, turn and agent token, (K, n_k) a rollout.

        Args:
            values: On the rows.
            num_turns: Turns of each rollout.
        """
        nested: list[list[list[float]]] = [[[] for _ in range(count)] for count in num_turns]
        for row, numbers in zip(self.rows, values.tolist(), strict=False):  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType, reportUnknownVariableType]
            for k, turn in row.turns:
                nested[row.rollout][k] = numbers[turn.start - row.span.start : turn.stop - row.span.start]
        return nested


def trl_batch(  # noqa: PLR0913  # the parts of a batch
    tokens: TokenBatch,
    mask: torch.Tensor,
    advantages: TokenAdvantages,
    logprobs: TokenLogprobs,
    *,
    loss_type: LossType,
    multiplies_ratio: bool,
    added: Iterable[torch.Tensor | None] = (),
) -> dict[str, Any]:
    """Assemble the columns that :meth:`GRPOEnvTrainer._generate_and_score_completions` returns.

    Args:
        tokens: The rows.
        mask: (B, L), 1 on the agent tokens that are trained on.
        advantages: One number a token of each rollout.
        logprobs: What the loss compares with.
        loss_type: The type of the loss.
        multiplies_ratio: Whether the loss multiplies with the importance ratio itself, as TRL's does under vLLM alone;
            elsewhere it is multiplied into the advantages.
        added: What objectives add to the advantages, (B, L) each; None for nothing.
    """
    values = tokens.tensor(advantages.advantages)
    for own in filter(torch.is_tensor, added):
        values = values + own * tokens.tensor(advantages.weights)
    values = values * mask * tokens.row_weights(mask, loss_type)
    if logprobs.importance_ratio is not None and not multiplies_ratio:
        values = values * logprobs.importance_ratio
    return {
        "prompt_completion_ids": tokens.ids,
        "attention_mask": tokens.attention_mask,
        "agent_token_mask": mask,
        "advantages": values,
        "turn_index": tokens.turn_index.where(mask.bool(), -1),
        "old_per_token_logps": logprobs.old,
        "ref_per_token_logps": logprobs.reference,
        "sampling_per_token_logps": logprobs.sampling,
        "importance_sampling_ratio": logprobs.importance_ratio if multiplies_ratio else None,
        "num_items_in_batch": torch.tensor(advantages.num_tokens, device=mask.device),
        "num_rollouts": torch.tensor(len(advantages.advantages)),
    }


def _stacked(rows: Iterable[Sequence[Any]], value: float, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    num_rows, width = shape
    stacked = [pad_right(row, width, value) for row in rows]
    stacked += [[value] * width] * (num_rows - len(stacked))
    return torch.tensor(stacked, dtype=dtype).reshape(-1, width)
