"""Weight observation tokens for a loss on them, so that the policy also learns to predict its environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from agentsgym.types import Trajectory

if TYPE_CHECKING:
    import torch

    from agentsgym.training.tensors.token_batch import TokenBatch

RoleWeights = float | Mapping[str, float]
"""One weight for all observations, or the weights of messages by their role; a role that is not named has 0."""


def observation_columns(
    trajectories: Sequence[Trajectory],
    included: Sequence[bool],
    weights: RoleWeights,
    tokens: TokenBatch,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return the columns of the loss on observations. Collective.

    Returns:
        ``observation_weights``, (B, L), 0.0 on all tokens that are not trained on so, and ``num_observation_tokens``,
        the number of the others on all ranks, 0-dim.
    """
    given = [
        observation_weights(one, weights if is_included else 0.0)
        for one, is_included in zip(trajectories, included, strict=True)
    ]
    columns = tokens.tensor(given)
    return {"observation_weights": columns, "num_observation_tokens": sum_over_ranks((columns > 0).sum())}


def observation_weights(trajectory: Trajectory, weights: RoleWeights) -> list[float]:
    """Return the weight of each token: that of its observation between two turns, and 0.0 for all other tokens, (T,).

    The first prompt, a prompt that a rewritten history begins with, and what follows the last turn have no weight. An
    observation of several messages has the role of its first; tokens that the chat template adds belong to it.

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
    for before, after in pairwise(trajectory.turns):
        if before.prompt_start != after.prompt_start:
            continue
        role = trajectory.messages[before.message_index + 1]["role"]
        weight = weights.get(role, 0.0) if isinstance(weights, Mapping) else weights
        found[before.stop : after.start] = [weight] * (after.start - before.stop)
    return found
