"""Learn from a teacher on the turns that the policy itself played: on-policy distillation.

For a sampled token y after the prompt x, with a teacher q that may see a privileged context c::

    gap        Δ = log q(y | c, x) - log p(y | x)
    advantage  A + weight · σ(gate · Δ) · Δ          without a gate: A + weight · Δ

Without a gate, the expected gradient of the added term is that of ``-weight · KL(p ‖ q)``, token by token. The gate
(SDAR, 2605.15155) keeps what the teacher endorses and attenuates what it rejects, since a teacher that knows more than
the policy also rejects what the policy could not know better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from agentsgym.errors import ConfigError
from agentsgym.fields import is_number, is_positive_number, one_of, or_none, require
from agentsgym.texts import shown
from agentsgym.tokens.chat_format import ChatFormat
from agentsgym.training.objectives.objective import Objective
from agentsgym.training.tensors.scoring import padded_columns, plain_logprobs
from agentsgym.types import Message, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agentsgym.training._trl import TRLInterface
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.observing import ObservedBatch
    from agentsgym.training.tensors.token_batch import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """A teacher, and how much its opinion of each token counts.

    Args:
        weight: The weight of the teacher, relative to the advantages, which are about 1 in size by default.
        teacher: A causal language model with the policy's vocabulary; None for the policy itself, with ``context``.
        context: What the teacher knows beside the conversation, for each rollout: a text, which is shown to it as a
            system message before the conversation, or None. For example the solution, or the messages of a rollout
            that succeeded.
        gate: β of the gate σ(β·Δ); None for no gate.
        by: ``"token"``, or ``"turn"`` to give all tokens of a turn the mean gap of the turn.

    Raises:
        ConfigError: A value is invalid, or the policy would be its own teacher without a context.
    """

    weight: float = 0.1
    teacher: Any = None
    context: Callable[[Trajectory], str | None] | None = None
    gate: float | None = None
    by: Literal["token", "turn"] = "token"

    def __post_init__(self) -> None:
        require("Distillation(weight)", self.weight, is_positive_number, "a positive number")
        require("Distillation(gate)", self.gate, or_none(is_number(0)), "a non-negative number or None")
        require("Distillation(by)", self.by, one_of("token", "turn"), "'token' or 'turn'")
        require("Distillation(context)", self.context, lambda value: value is None or callable(value), "a function")
        if self.teacher is None and self.context is None:
            raise ConfigError(
                "Distillation without a teacher needs a context, a function that returns what the policy as its own "
                "teacher knows beside the conversation"
            )


class TeacherAdvantages(Objective):
    """Adds to the advantages what a teacher finds, and logs how far the policy is from it."""

    def __init__(
        self, distillation: Distillation, args: GRPOEnvConfig, trl: TRLInterface, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Move the teacher to the policy's device.

        Raises:
            ConfigError: It cannot score the policy's tokens.
        """
        self._given, self._args, self._trl, self._tokenizer = distillation, args, trl, tokenizer
        teacher, policy = distillation.teacher, trl.policy()
        if teacher is None:
            return
        teacher.to(trl.device)
        if teacher.config.vocab_size != policy.config.vocab_size:
            raise ConfigError(
                "Distillation's teacher must have the policy's vocabulary, got "
                f"{teacher.config.vocab_size} instead of {policy.config.vocab_size} tokens"
            )

    def advantages(self, batch: ObservedBatch) -> torch.Tensor | None:
        """Return the weighted gaps, nothing in an evaluation."""
        if not batch.phase.is_training:
            return None
        mask, given = batch.mask, self._given
        gaps = self.gaps(batch.tokens, mask, batch.batch.trajectories)
        total, count = map(float, self._trl.sum_over_ranks(torch.stack([gaps.sum(), mask.sum().to(gaps)])))
        self._trl.record_metrics({"distillation/kl": -total / max(1.0, count)}, is_training=True)
        return given.weight * added_advantages(gaps, batch.tokens.turn_index, mask, gate=given.gate, by=given.by)

    def gaps(self, tokens: TokenBatch, mask: torch.Tensor, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        """Score the tokens of a mask with the teacher and the policy. Collective if weights are sharded.

        Returns:
            log q - log p, (B, L); 0.0 on all other tokens.
        """
        own, score = tokens.recorded_logprobs, partial(self._trl.score, with_entropies=False)
        if own is None or bool(own[mask.bool()].isnan().any()):
            own = score(tokens.ids, tokens.attention_mask, mask)[0]
        columns = self.teacher_rows(tokens, mask, trajectories)
        if self._given.teacher is None:
            found = score(*columns)[0]
        else:
            size, temperature = self._args.per_device_train_batch_size, self._args.temperature
            found = plain_logprobs(self._given.teacher, *columns, temperature=temperature, batch_size=size)
        taught = torch.zeros_like(own).masked_scatter(mask.bool(), found[columns[2].bool()].to(own))
        return (taught - own).masked_fill(mask == 0, 0.0)  # what is recorded of other tokens may be NaN

    def teacher_rows(
        self, tokens: TokenBatch, mask: torch.Tensor, trajectories: Sequence[Trajectory]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows as the teacher sees them, with the context of each rollout before them: ids and masks, (B, L')."""
        get_context, tokenizer = self._given.context, self._tokenizer
        if get_context is None:
            return tokens.ids, tokens.attention_mask, mask
        before = [_context_ids(get_context, one, tokenizer) for one in trajectories]
        columns: list[tuple[list[int], list[int], list[int]]] = []
        rows: list[list[list[int]]] = [one.tolist() for one in (tokens.ids, tokens.attention_mask, mask)]  # pyright: ignore[reportUnknownMemberType]
        for index, (ids, attention, labels) in enumerate(zip(*rows, strict=True)):
            context = before[tokens.rows[index].rollout] if index < len(tokens.rows) else []
            start = int(bool(context) and ids[0] == context[0] == tokenizer.bos_token_id)  # one beginning is enough
            columns.append(
                ([*context, *ids[start:]], [1] * len(context) + attention[start:], [0] * len(context) + labels[start:])
            )
        padding = (int(tokenizer.pad_token_id or 0), 0, 0)  # pyright: ignore[reportArgumentType]
        ids, attention, labels = padded_columns(columns, padding, mask.device)
        return ids, attention, labels


def _context_ids(
    context: Callable[[Trajectory], str | None], trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    text = None if trajectory.failed else context(trajectory)
    if text is None:
        return []
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"Distillation's context must return a str or None, got {shown(text)}")
    message = Message(role="system", content=text)
    return ChatFormat.of(tokenizer, append=False).render([message], add_prompt=False)


def added_advantages(
    gaps: torch.Tensor, turn_index: torch.Tensor, mask: torch.Tensor, *, gate: float | None, by: str
) -> torch.Tensor:
    """Turn the gaps between teacher and policy into what is added to the advantages, without the weight.

    Args:
        gaps: (B, L), log q - log p of each agent token, 0.0 elsewhere.
        turn_index: (B, L), the turn of each agent token.
        mask: (B, L), 1 on the agent tokens that are trained on.
        gate: β of the gate; None for no gate.
        by: ``"token"`` or ``"turn"``.

    Returns:
        (B, L), 0.0 on all other tokens.
    """
    if by == "turn":
        num_turns = int(turn_index.max()) + 2
        place = turn_index.where(mask.bool(), -1) + 1  # column 0 collects all other tokens
        totals = gaps.new_zeros(len(gaps), num_turns).scatter_add_(1, place, gaps)
        counts = gaps.new_zeros(len(gaps), num_turns).scatter_add_(1, place, torch.ones_like(gaps))
        gaps = (totals / counts.clamp(min=1)).gather(1, place)
    return gaps * mask * (1.0 if gate is None else torch.sigmoid(gate * gaps))
