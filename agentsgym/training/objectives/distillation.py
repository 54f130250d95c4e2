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
    from agentsgym.training.tensors.logprobs import Score
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

    def prepare(self, policy: Any, device: torch.device) -> None:
        """Move the teacher to a device.

        Raises:
            ConfigError: It cannot score the policy's tokens.
        """
        if self.teacher is None:
            return
        self.teacher.to(device)
        if self.teacher.config.vocab_size != policy.config.vocab_size:
            raise ConfigError(
                "Distillation's teacher must have the policy's vocabulary, got "
                f"{self.teacher.config.vocab_size} instead of {policy.config.vocab_size} tokens"
            )

    def advantages(
        self,
        tokens: TokenBatch,
        mask: torch.Tensor,
        trajectories: Sequence[Trajectory],
        tokenizer: PreTrainedTokenizerBase,
        score: Score,
        args: GRPOEnvConfig,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score a batch with the teacher and the policy.

        Args:
            tokens: The rows of the rollouts.
            mask: (B, L), 1 on the agent tokens that are trained on.
            trajectories: The rollouts of this rank.
            tokenizer: The policy's tokenizer.
            score: Runs the policy. Collective if weights are sharded.
            args: The settings.

        Returns:
            What is added to the advantages, and the gaps: (B, L) each, 0.0 on all other tokens.
        """
        own = tokens.recorded_logprobs
        if own is None or bool(own[mask.bool()].isnan().any()):
            own = score(tokens.ids, tokens.attention_mask, mask)[0]
        ids, attention_mask, labeled = self._teacher_rows(tokens, mask, trajectories, tokenizer)
        if self.teacher is None:
            found = score(ids, attention_mask, labeled)[0]
        else:
            size = args.per_device_train_batch_size
            columns = ids, attention_mask, labeled
            found = plain_logprobs(self.teacher, *columns, temperature=args.temperature, batch_size=size)
        taught = torch.zeros_like(own).masked_scatter(mask.bool(), found[labeled.bool()].to(own))
        gaps = (taught - own).masked_fill(mask == 0, 0.0)  # the recorded ones may be NaN there
        return self.weight * added_advantages(gaps, tokens.turn_index, mask, gate=self.gate, by=self.by), gaps

    def _teacher_rows(
        self,
        tokens: TokenBatch,
        mask: torch.Tensor,
        trajectories: Sequence[Trajectory],
        tokenizer: PreTrainedTokenizerBase,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows as the teacher sees them, with the context of each rollout before them: ids and masks, (B, L')."""
        if self.context is None:
            return tokens.ids, tokens.attention_mask, mask
        before = [_context_ids(self.context, one, tokenizer) for one in trajectories]
        columns: list[tuple[list[int], list[int], list[int]]] = []
        for index, (ids, attention, labels) in enumerate(
            zip(tokens.ids.tolist(), tokens.attention_mask.tolist(), mask.tolist(), strict=True)
        ):
            context = before[tokens.rows[index].rollout] if index < len(tokens.rows) else []
            start = int(bool(context) and ids[0] == context[0] == tokenizer.bos_token_id)  # one beginning is enough
            columns.append(
                ([*context, *ids[start:]], [1] * len(context) + attention[start:], [0] * len(context) + labels[start:])
            )
        padding = (int(tokenizer.pad_token_id or 0), 0, 0)  # pyright: ignore[reportArgumentType]
        ids, attention, labels = padded_columns(columns, padding, mask.device)
        return ids, attention, labels


class TeacherAdvantages(Objective):
    """Adds to the advantages what a teacher finds, and logs how far the policy is from it."""

    def __init__(
        self, distillation: Distillation, args: GRPOEnvConfig, trl: TRLInterface, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Move the teacher to the device of the policy.

        Raises:
            ConfigError: It cannot score the policy's tokens.
        """
        distillation.prepare(trl.policy(), trl.device)
        self._distillation, self._args, self._trl, self._tokenizer = distillation, args, trl, tokenizer

    def advantages(self, batch: ObservedBatch) -> torch.Tensor | None:
        """Return the teacher's part, nothing in an evaluation."""
        if not batch.phase.is_training:
            return None
        trl, mask, score = self._trl, batch.mask, partial(self._trl.score_policy, with_entropies=False)
        added, gaps = self._distillation.advantages(
            batch.tokens, mask, batch.batch.trajectories, self._tokenizer, score, self._args
        )
        total, count = trl.sum_over_ranks(torch.stack([gaps.sum(), mask.sum().to(gaps)])).tolist()
        trl.record_metrics({"distillation/kl": -total / max(1.0, count)}, is_training=True)
        return added


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
