"""Measure how much the policy's answers depend on their prompts (RAGEN-2, 2604.06268).

For N turns of different tasks, each answer is scored under all N prompts. With the prompts x and the answers y::

    mutual information   mean_j [ log p(y_j | x_j) - log mean_i p(y_j | x_i) ]     in nats, at most log N
    retrieval            fraction of answers that are likelier under their own prompt than under any other

Both fall when the policy gives the same answers whatever it reads, which entropy does not show.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Final

import torch

from agentsgym.ranks import all_gather_objects
from agentsgym.training.tensors.logprobs import Score
from agentsgym.training.tensors.scoring import padded_columns

if TYPE_CHECKING:
    from agentsgym.types import Trajectory

MAX_TURNS: Final = 8
"""Number of turns that are compared, so that 64 rows are scored."""

Exchange = tuple[list[int], list[int]]
"""The token ids of a prompt and of the answer to it."""


def drawn_turns(trajectories: Sequence[Trajectory], groups: Sequence[int], seed: int) -> list[Exchange]:
    """Draw a turn from a rollout of each task group, of at most :data:`MAX_TURNS` groups.

    Args:
        trajectories: Rollouts, (B,).
        groups: The task group of each.
        seed: Random seed.
    """
    rng = random.Random(seed)
    exchanges: list[Exchange] = []
    for group in dict.fromkeys(groups):
        own = [one for one, place in zip(trajectories, groups, strict=True) if place == group and not one.failed]
        turns = [(one, turn) for one in own for turn in one.turns if turn.stop > turn.start > turn.prompt_start]
        if turns and len(exchanges) < MAX_TURNS:
            played, turn = rng.choice(turns)
            ids = [*played.token_ids]
            exchanges.append((ids[turn.prompt_start : turn.start], ids[turn.start : turn.stop]))
    return exchanges


def dependence_on_ranks(
    exchanges: Sequence[Exchange], score: Score, pad_token_id: int, device: torch.device
) -> dict[str, float]:
    """Average :func:`prompt_dependence` over the ranks; empty if a rank has less than two turns. Collective."""
    size = min(all_gather_objects([len(exchanges)]))  # the same on all ranks, as scoring is collective if sharded
    if size < 2:
        return {}
    found = all_gather_objects([prompt_dependence(exchanges[:size], score, pad_token_id, device)])
    return {name: fmean(one[name] for one in found) for name in found[0]}


def prompt_dependence(
    exchanges: Sequence[Exchange], score: Score, pad_token_id: int, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Score each answer under each prompt.

    Args:
        exchanges: At least two prompts with their answers.
        score: Runs the model.
        pad_token_id: Fills the ids.
        device: Where the tensors go.

    Returns:
        ``prompt_dependence/mutual_information`` in nats, and ``prompt_dependence/retrieval``.
    """
    pairs = [(prompt, answer) for (prompt, _), (_, answer) in product(exchanges, exchanges)]
    rows = [
        ([*prompt, *answer], [1] * (len(prompt) + len(answer)), [0] * len(prompt) + [1] * len(answer))
        for prompt, answer in pairs
    ]
    ids, attention_mask, labeled = padded_columns(rows, (pad_token_id, 0, 0), device)
    size = len(exchanges)
    logprobs = score(ids, attention_mask, labeled)[0].double().sum(1).reshape(size, size)  # [prompt, answer]
    information = logprobs.diagonal() - logprobs.logsumexp(0) + math.log(size)
    others = logprobs.masked_fill(torch.eye(size, dtype=torch.bool, device=logprobs.device), -math.inf)
    return {
        "prompt_dependence/mutual_information": float(information.mean()),
        "prompt_dependence/retrieval": float((logprobs.diagonal() > others.amax(0)).double().mean()),
    }
