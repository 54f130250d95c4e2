"""Learn to predict the environment: a loss on the observations between the turns of a rollout."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from agentsgym.credit.weights import aggregation_weights
from agentsgym.ranks import all_gather_objects
from agentsgym.training.objectives.objective import ForwardPass, Objective, Terms
from agentsgym.types import Trajectory

if TYPE_CHECKING:
    import torch

    from agentsgym.training._trl import TRLInterface
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.observing import ObservedBatch

logger = logging.getLogger(__name__)

RoleWeights = float | Mapping[str, float]
"""One weight for all observations, or the weights of messages by their role; a role that is not named has 0."""


class ObservationLoss(Objective):
    """The weighted mean of -log p over the observations that answer the turns trained on."""

    metric = "observation_loss"
    count_column = "num_observation_tokens"
    scored_column = "observation_weights"

    def __init__(self, args: GRPOEnvConfig, trl: TRLInterface) -> None:
        """Read the weights from the settings, which have some."""
        self._args = args
        self._weights = cast("RoleWeights", args.observation_loss)
        self._trl = trl

    def columns(self, batch: ObservedBatch) -> dict[str, torch.Tensor]:
        """Return ``observation_weights``, (B, L), 0.0 on all other tokens, and the number of tokens with a weight."""
        advantages, trajectories = batch.advantages, batch.batch.trajectories
        if batch.phase.is_training and batch.phase.index == 1:
            roles = {one.messages[turn.message_index + 1]["role"] for one in trajectories for turn in one.turns[:-1]}
            if not roles & {*(self._weights if isinstance(self._weights, Mapping) else roles)}:
                text = "observation_loss_weight=%s weights no observation of the first batch, whose roles are %s"
                logger.warning(text, self._weights, sorted(roles) or "none, since no rollout has a second turn")
        kept = [
            turns if is_included else [0.0] * len(turns)
            for turns, is_included in zip(advantages.kept_turns, advantages.included, strict=True)
        ]
        given = [observation_weights(one, self._weights, own) for one, own in zip(trajectories, kept, strict=True)]
        num_tokens = self._trl.sum_over_ranks((batch.tokens.tensor(given) > 0).sum())
        if self._args.loss_aggregation is not None:
            counts = [
                [sum(weight > 0 for weight in own[turn.stop : after.start]) for turn, after in pairwise(one.turns)]
                for one, own in zip(trajectories, given, strict=True)
            ]
            factors = aggregation_weights(
                all_gather_objects(counts),
                [rollout.scored.group for rollout in batch.batch.rollouts],
                [True] * len(batch.batch.rollouts),
                self._args.loss_aggregation,
                constant=self._args.max_completion_length,
            )
            own = [factors[i] for i in batch.batch.local_indices]
            given = [
                observation_weights(one, self._weights, turns) for one, turns in zip(trajectories, own, strict=True)
            ]
        return {"observation_weights": batch.tokens.tensor(given), "num_observation_tokens": num_tokens}

    def terms(self, forward: ForwardPass) -> Terms:
        """Return -log p of the observations."""
        weights = forward.batch["observation_weights"][:, forward.start : forward.stop]
        is_weighted = weights > 0
        values = -forward.logprobs.masked_fill(~is_weighted, 0.0)
        return Terms(weighted=(weights * values).sum(), total=values[is_weighted].sum(), count=is_weighted.sum())


def observation_weights(
    trajectory: Trajectory, weights: RoleWeights, factors: Sequence[float] | None = None
) -> list[float]:
    """Return the weight of each token: that of its observation between two turns, and 0.0 for all other tokens, (T,).

    The first prompt, a prompt that a rewritten history begins with, and what follows the last turn have no weight. An
    observation of several messages has the role of its first; tokens that the chat template adds belong to it.

    Args:
        trajectory: The rollout.
        weights: The weights by role.
        factors: What the weight of the observation after each turn is multiplied by; None for 1.

    >>> from agentsgym.types import StopReason, Turn
    >>> turns = [Turn(start=2, stop=3, message_index=1, reward=0.0), Turn(start=5, stop=6, message_index=3, reward=1.0)]
    >>> messages = [{"role": role, "content": ""} for role in ("user", "assistant", "tool", "assistant")]
    >>> played = Trajectory(
    ...     token_ids=[7, 7, 8, 7, 7, 8], turns=turns, messages=messages, final_reward=1.0, stop_reason=StopReason.DONE
    ... )
    >>> observation_weights(played, {"tool": 0.5})
    [0.0, 0.0, 0.0, 0.5, 0.5, 0.0]
    """
    found = [0.0] * len(trajectory.token_ids)
    for k, (before, after) in enumerate(pairwise(trajectory.turns)):
        if before.prompt_start != after.prompt_start:
            continue
        role = trajectory.messages[before.message_index + 1]["role"]
        weight = weights.get(role, 0.0) if isinstance(weights, Mapping) else weights
        factor = 1.0 if factors is None else factors[k]
        found[before.stop : after.start] = [weight * factor] * (after.start - before.stop)
    return found
