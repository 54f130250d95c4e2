"""Assign the rewards of an environment to turns and tokens.

Two settings are independent: which turns are rewarded (``turn_credit``), and which tokens of a turn get its reward
(``token_credit``). For a trajectory ``..AA.B`` (a dot is an environment token, a letter is a token of an action) whose
turns have the rewards 2 and 1::

    turn_credit     A    B        token_credit   . . A A . B      (turn_credit "step")
    "step"          2    1        "spread"       0 0 1 1 0 1
    "final"         0    3        "last"         0 0 0 2 0 1
    "repeat_final"  3    3        "each"         0 0 2 2 0 1
    "spread_final"  2    1

If rewards are given by role, each role is handled separately, with its own final reward and its own last turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from agentsgym.credit.components import amounts_of, names_of
from agentsgym.errors import ConfigError
from agentsgym.fields import check_choice
from agentsgym.texts import shown
from agentsgym.types import Trajectory

Key = TypeVar("Key", bound=Hashable)
TurnCredit = Callable[[Sequence[float], float, Sequence[int]], list[float]]
"""(turn rewards (K,), final reward, agent tokens of each turn (K,)) → the reward of each turn, (K,)."""

TokenCredit = Callable[[float, int], list[float]]
"""(the reward of a turn, its number of tokens n) → the reward of each of its tokens, (n,)."""


TURN_CREDITS: Final[Mapping[str, TurnCredit]] = {
    "step": lambda rewards, _final_reward, _counts: list(rewards),  # as the environment returned them
    "final": lambda rewards, final_reward, _counts: [0.0] * (len(rewards) - 1) + [final_reward] if rewards else [],
    "repeat_final": lambda rewards, final_reward, _counts: [final_reward] * len(rewards),
    # Evenly over all agent tokens of the trajectory.
    "spread_final": lambda _rewards, final_reward, counts: [
        final_reward * n / sum(counts) if n else 0.0 for n in counts
    ],
}

TOKEN_CREDITS: Final[Mapping[str, TokenCredit]] = {
    "spread": lambda amount, n: [amount / n] * n if n else [],  # evenly over the turn's tokens
    "last": lambda amount, n: [0.0] * (n - 1) + [amount] if n else [],  # on the turn's last token
    "each": lambda amount, n: [amount] * n,  # the full amount on each of the turn's tokens
}


def check_credit(turn_credit: str, token_credit: str) -> None:
    """Reject unknown names, and settings that contradict each other.

    Args:
        turn_credit: Which turn is rewarded, a key of :data:`TURN_CREDITS`.
        token_credit: Where in the turn, a key of :data:`TOKEN_CREDITS`.

    Raises:
        ConfigError: A name is unknown, or ``"spread_final"``, which already assigns rewards to tokens, is combined with
            a ``token_credit`` other than ``"spread"``.
    """
    check_choice("turn_credit", turn_credit, TURN_CREDITS)
    check_choice("token_credit", token_credit, TOKEN_CREDITS)
    if turn_credit == "spread_final" and token_credit != "spread":
        raise ConfigError(f"turn_credit 'spread_final' requires token_credit 'spread', got {token_credit!r}")


def credited_rewards(trajectory: Trajectory, turn_credit: str) -> list[float]:
    """Assign a reward to each turn of a trajectory by ``turn_credit``.

    If the final reward is given by role, each role's turns are rewarded as if there were no other roles. With
    ``"spread_final"`` a turn without tokens gets 0.

    Args:
        trajectory: The rollout.
        turn_credit: A key of :data:`TURN_CREDITS`.

    Returns:
        One amount per turn, (K,).

    Raises:
        ConfigError: ``turn_credit`` is unknown.
        ValueError: A role that has turns has no final reward, although another role has one.
    """
    rewards = [turn.reward for turn in trajectory.turns]
    return _credited(trajectory, turn_credit, rewards, trajectory.final_reward, trajectory.final_rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardComponent:
    """One component of a rollout's rewards.

    Attributes:
        turn_rewards: The component of each turn's reward, after ``turn_credit``, (K,).
        final_reward: The component of the final reward.
        final_rewards: The component of each role's final reward, if rewards are given by role; otherwise empty.
    """

    turn_rewards: Sequence[float]
    final_reward: float
    final_rewards: Mapping[Hashable, float] = field(default_factory=dict[Hashable, float])


def credited_components(trajectory: Trajectory, turn_credit: str) -> dict[str, RewardComponent]:
    """Assign each component of the rewards to turns as :func:`credited_rewards` does; empty without named rewards."""
    rewards = [(turn.reward, turn.components) for turn in trajectory.turns]
    final = (trajectory.final_reward, trajectory.final_components)
    if final[1] is None and all(components is None for _, components in rewards):
        return {}
    found: dict[str, RewardComponent] = {}
    for name in names_of([final, *rewards]):
        own, [total], by_role = amounts_of(name, rewards), amounts_of(name, [final]), dict[Hashable, float]()
        if trajectory.final_rewards:
            by_role = {
                role: math.fsum(own[k] for k in turns) for role, turns in indices_by_key(trajectory.roles).items()
            }
        turn_rewards = _credited(trajectory, turn_credit, own, total, by_role)
        found[name] = RewardComponent(turn_rewards=turn_rewards, final_reward=total, final_rewards=by_role)
    return found


def _credited(
    trajectory: Trajectory,
    turn_credit: str,
    turn_rewards: Sequence[float],
    final_reward: float,
    final_rewards: Mapping[Hashable, float],
) -> list[float]:
    check_choice("turn_credit", turn_credit, TURN_CREDITS)
    credit, counts = TURN_CREDITS[turn_credit], token_counts(trajectory)
    if not final_rewards:
        return credit(turn_rewards, final_reward, counts)
    rewards = [*turn_rewards]
    roles = [turn.role for turn in trajectory.turns]
    check_final_rewards(roles, final_rewards)
    for role, turns in indices_by_key(roles).items():
        own = credit([rewards[k] for k in turns], final_rewards[role], [counts[k] for k in turns])
        for k, amount in zip(turns, own, strict=True):
            rewards[k] = amount
    return rewards


def check_final_rewards(roles: Iterable[Hashable], final_rewards: Mapping[Hashable, float]) -> None:
    """Check that either every role that has turns has a final reward, or no role has one.

    Raises:
        ConfigError: A role has no final reward, although another role has one.
    """
    if final_rewards and (missing := set(roles).difference(final_rewards)):
        raise ConfigError(
            f"final_rewards must have a reward for each role that has a turn, but has none for {shown(missing)}"
        )


def indices_by_key(keys: Iterable[Key]) -> dict[Key, list[int]]:
    """The indices of each key, such as the turns of each role, in the order in which the keys first appear.

    >>> indices_by_key("XOX")
    {'X': [0, 2], 'O': [1]}
    """
    indices: dict[Key, list[int]] = {}
    for index, key in enumerate(keys):
        indices.setdefault(key, []).append(index)
    return indices


def scatter_to_tokens(
    trajectory: Trajectory, entries: Sequence[float | Sequence[float]], *, fill: float = 0.0, name: str = "number"
) -> list[float]:
    """Assign each turn's number to all of its tokens, or its list of numbers to the tokens one by one.

    Args:
        trajectory: The rollout.
        entries: One entry per turn, (K,): a number, or a list with one number per token of the turn.
        fill: The number of every environment token.
        name: What an entry is, for error messages.

    Returns:
        (T,).

    Raises:
        ValueError: There is not one entry per turn, or a turn's list does not have one number per token.
    """
    if len(entries) != len(trajectory.turns):
        raise ValueError(f"expected one {name} per turn: {len(trajectory.turns)} turns, got {len(entries)}")
    scattered = [fill] * len(trajectory.token_ids)  # (T,)
    for k, (turn, entry) in enumerate(zip(trajectory.turns, entries, strict=True)):
        num_tokens = turn.stop - turn.start
        numbers = list(entry) if isinstance(entry, Sequence) else [entry] * num_tokens
        if len(numbers) != num_tokens:
            raise ValueError(
                f"the list of {name}s for turn {k} must have one entry per token ({num_tokens}), got {len(numbers)}"
            )
        scattered[turn.start : turn.stop] = numbers
    return scattered


def per_token_rewards(
    trajectory: Trajectory, *, turn_credit: str = "step", token_credit: str = "spread"
) -> list[float]:
    """Assign a trajectory's rewards to its tokens.

    With ``"spread"`` and ``"last"`` they add up to the rewards of the turns that have tokens.

    Args:
        trajectory: The rollout.
        turn_credit: Which turn is rewarded, a key of :data:`TURN_CREDITS`.
        token_credit: Where in the turn, a key of :data:`TOKEN_CREDITS`.

    Returns:
        (T,), 0.0 on every environment token.

    Raises:
        ConfigError: See :func:`check_credit`.
    """
    check_credit(turn_credit, token_credit)
    amounts, place = credited_rewards(trajectory, turn_credit), TOKEN_CREDITS[token_credit]
    rewards = [0.0] * len(trajectory.token_ids)  # (T,)
    for turn, amount in zip(trajectory.turns, amounts, strict=True):
        rewards[turn.start : turn.stop] = place(amount, turn.stop - turn.start)
    return rewards


def token_counts(trajectory: Trajectory) -> list[int]:
    """The number of agent tokens of each turn, (K,)."""
    return [turn.stop - turn.start for turn in trajectory.turns]
