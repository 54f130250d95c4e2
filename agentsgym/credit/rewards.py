"""Place the rewards of an environment on turns and tokens.

Two independent choices: which turn is rewarded (``turn_credit``), and where in the turn the amount lies
(``token_credit``). A trajectory ``..AA.B`` (``.`` an environment token, a letter an action's token) whose turns were
rewarded with 2 and 1::

    turn_credit     A    B        token_credit   . . A A . B      (turn_credit "step")
    "step"          2    1        "spread"       0 0 1 1 0 1
    "final"         0    3        "last"         0 0 0 2 0 1
    "repeat_final"  3    3        "each"         0 0 2 2 0 1
    "spread_final"  2    1

Where a game says what each role is paid, all of this goes by role: the final reward is the role's own, its last turn
the last of the role.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.texts import shown
from agentsgym.types import Trajectory

TurnCredit = Callable[[Sequence[float], float, Sequence[int]], list[float]]
"""(turn rewards (K,), final reward, agent tokens of each turn (K,)) → the reward of each turn, (K,)."""

TokenCredit = Callable[[float, int], list[float]]
"""(the reward of a turn, its number of tokens n) → the reward of each of its tokens, (n,)."""


def _step(turn_rewards: Sequence[float], _final_reward: float, _token_counts: Sequence[int]) -> list[float]:
    return list(turn_rewards)


def _final(turn_rewards: Sequence[float], final_reward: float, _token_counts: Sequence[int]) -> list[float]:
    num_turns = len(turn_rewards)
    return [final_reward if k == num_turns - 1 else 0.0 for k in range(num_turns)]


def _repeat_final(turn_rewards: Sequence[float], final_reward: float, _token_counts: Sequence[int]) -> list[float]:
    return [final_reward] * len(turn_rewards)


def _spread_final(_turn_rewards: Sequence[float], final_reward: float, token_counts: Sequence[int]) -> list[float]:
    num_tokens = sum(token_counts)
    return [final_reward * count / num_tokens if count else 0.0 for count in token_counts]


def _spread(amount: float, num_tokens: int) -> list[float]:
    return [amount / num_tokens] * num_tokens if num_tokens else []


def _last(amount: float, num_tokens: int) -> list[float]:
    return [0.0] * (num_tokens - 1) + [amount] if num_tokens else []


def _each(amount: float, num_tokens: int) -> list[float]:
    return [amount] * num_tokens


TURN_CREDITS: Final[Mapping[str, TurnCredit]] = {
    "step": _step,  # what the environment gave for the turn
    "final": _final,  # the final reward, on the last turn only
    "repeat_final": _repeat_final,  # the final reward, on every turn
    "spread_final": _spread_final,  # the final reward, evenly over all agent tokens of the trajectory
}

TOKEN_CREDITS: Final[Mapping[str, TokenCredit]] = {
    "spread": _spread,  # evenly over the turn's tokens
    "last": _last,  # on the turn's last token
    "each": _each,  # the whole on each of the turn's tokens
}


def check_credit(turn_credit: str, token_credit: str) -> None:
    """Refuse a pair of names that means nothing.

    Args:
        turn_credit: Which turn is rewarded, a key of :data:`TURN_CREDITS`.
        token_credit: Where in the turn, a key of :data:`TOKEN_CREDITS`.

    Raises:
        ConfigError: A name is unknown, or ``"spread_final"``, which is already about tokens, comes with another
            ``token_credit`` than ``"spread"``.
    """
    _check_name("turn_credit", turn_credit, TURN_CREDITS)
    _check_name("token_credit", token_credit, TOKEN_CREDITS)
    if turn_credit == "spread_final" and token_credit != "spread":
        raise ConfigError(f"turn_credit 'spread_final' needs token_credit 'spread', got {token_credit!r}")


def credited_turn_rewards(
    turn_rewards: Sequence[float],
    final_reward: float,
    token_counts: Sequence[int],
    turn_credit: str,
    *,
    roles: Sequence[Hashable] = (),
    final_rewards: Mapping[Hashable, float] | None = None,
) -> list[float]:
    """Give each turn the reward that ``turn_credit`` assigns to it.

    Args:
        turn_rewards: What the environment gave for each turn, (K,).
        final_reward: The reward of the whole rollout.
        token_counts: Agent tokens of each turn, (K,); only ``"spread_final"`` uses them, and without any token
            it rewards no turn.
        turn_credit: A key of :data:`TURN_CREDITS`.
        roles: Whose turn each is, (K,).
        final_rewards: The final reward of each role, where the game says so: each role's own turns are then rewarded
            as if there were no others.

    Returns:
        One amount a turn, (K,).

    Raises:
        ConfigError: ``turn_credit`` is unknown.
        ValueError: The two sequences differ in length, or a role has turns and no final reward.

    >>> credited_turn_rewards([2.0, 1.0], 3.0, [2, 1], "final")
    [0.0, 3.0]
    >>> credited_turn_rewards([2.0, 1.0], 3.0, [2, 4], "spread_final")
    [1.0, 2.0]
    >>> won = {"X": 1.0, "O": -1.0}
    >>> credited_turn_rewards([0.0, -1.0, 1.0], 1.0, [1, 1, 1], "repeat_final", roles="XOX", final_rewards=won)
    [1.0, -1.0, 1.0]
    """
    _check_name("turn_credit", turn_credit, TURN_CREDITS)
    if len(turn_rewards) != len(token_counts):
        raise ValueError(f"each turn needs a reward and a token count, got {len(turn_rewards)} and {len(token_counts)}")
    credit = TURN_CREDITS[turn_credit]
    if not final_rewards:
        return credit(turn_rewards, final_reward, token_counts)
    check_final_rewards(roles, final_rewards)
    credited = [0.0] * len(turn_rewards)
    for role, turns in turns_by_role(roles).items():
        own = credit([turn_rewards[k] for k in turns], final_rewards[role], [token_counts[k] for k in turns])
        for k, amount in zip(turns, own, strict=True):
            credited[k] = amount
    return credited


def credited_rewards(trajectory: Trajectory, turn_credit: str) -> list[float]:
    """Give each turn of a trajectory the reward that ``turn_credit`` assigns to it, (K,), each role by itself.

    Args:
        trajectory: Gives the turns, their rewards and roles, and the final rewards.
        turn_credit: A key of :data:`TURN_CREDITS`.

    Raises:
        ConfigError: ``turn_credit`` is unknown.
        ValueError: A role has turns and no final reward, and another has one.
    """
    return credited_turn_rewards(
        [turn.reward for turn in trajectory.turns],
        trajectory.final_reward,
        token_counts(trajectory),
        turn_credit,
        roles=[turn.role for turn in trajectory.turns],
        final_rewards=trajectory.final_rewards,
    )


def check_final_rewards(roles: Iterable[Hashable], final_rewards: Mapping[Hashable, float]) -> None:
    """Raise unless each role of the turns has a final reward, or none has.

    Raises:
        ValueError: A role has none, and another has one.
    """
    if final_rewards and (missing := set(roles).difference(final_rewards)):
        raise ValueError(
            f"final_rewards must have a reward for each role that took a turn, but has none for {shown(missing)}"
        )


def turns_by_role(roles: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """The indices of each role's turns, by the roles' first turns.

    >>> turns_by_role("XOX")
    {'X': [0, 2], 'O': [1]}
    """
    turns: dict[Hashable, list[int]] = {}
    for k, role in enumerate(roles):
        turns.setdefault(role, []).append(k)
    return turns


def place_on_tokens(trajectory: Trajectory, amounts: Sequence[float], token_credit: str) -> list[float]:
    """Place one amount a turn on that turn's tokens.

    Args:
        trajectory: Gives the spans of the turns and the number of tokens T.
        amounts: One a turn, (K,); that of a turn without tokens lies on no token.
        token_credit: A key of :data:`TOKEN_CREDITS`.

    Returns:
        (T,), 0.0 on every environment token.

    Raises:
        ConfigError: ``token_credit`` is unknown.
        ValueError: There is not one amount for each turn.
    """
    _check_name("token_credit", token_credit, TOKEN_CREDITS)
    _check_one_a_turn(trajectory, amounts, "amount")
    place = TOKEN_CREDITS[token_credit]
    numbers = [place(*turn) for turn in zip(amounts, token_counts(trajectory), strict=True)]
    return scatter_to_tokens(trajectory, numbers)


def scatter_to_tokens(
    trajectory: Trajectory, entries: Sequence[float | Sequence[float]], *, fill: float = 0.0, name: str = "number"
) -> list[float]:
    """Put each turn's number on all of its tokens, or its list of numbers on them one by one.

    Args:
        trajectory: Gives the spans of the turns and the number of tokens T.
        entries: One entry a turn, (K,): a number, or a list of one number a token of the turn.
        fill: What every environment token gets.
        name: What an entry is called in an error.

    Returns:
        (T,).

    Raises:
        ValueError: There is not one entry for each turn, or a turn's list has not one number for each of its tokens.
    """
    _check_one_a_turn(trajectory, entries, name)
    scattered = [fill] * len(trajectory.token_ids)  # (T,)
    for k, (turn, entry) in enumerate(zip(trajectory.turns, entries, strict=True)):
        num_tokens = turn.stop - turn.start
        numbers = list(entry) if isinstance(entry, Sequence) else [entry] * num_tokens
        if len(numbers) != num_tokens:
            raise ValueError(f"turn {k} has {num_tokens} tokens, got {len(numbers)} {name}s for them")
        scattered[turn.start : turn.stop] = numbers
    return scattered


def per_token_rewards(
    trajectory: Trajectory, *, turn_credit: str = "step", token_credit: str = "spread"
) -> list[float]:
    """Place a trajectory's rewards on its tokens.

    With ``"spread"`` and ``"last"`` they add up to the rewards of the turns that have tokens.

    Args:
        trajectory: Gives the turns, their rewards, and the final reward.
        turn_credit: Which turn is rewarded, a key of :data:`TURN_CREDITS`.
        token_credit: Where in the turn, a key of :data:`TOKEN_CREDITS`.

    Returns:
        (T,), 0.0 on every environment token.

    Raises:
        ConfigError: As :func:`check_credit`.
    """
    check_credit(turn_credit, token_credit)
    return place_on_tokens(trajectory, credited_rewards(trajectory, turn_credit), token_credit)


def token_counts(trajectory: Trajectory) -> list[int]:
    """Agent tokens of each turn, (K,)."""
    return [turn.stop - turn.start for turn in trajectory.turns]


def _check_one_a_turn(trajectory: Trajectory, entries: Sequence[object], name: str) -> None:
    if len(entries) != len(trajectory.turns):
        raise ValueError(f"expected one {name} per turn: {len(trajectory.turns)} turns, got {len(entries)}")


def _check_name(option: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ConfigError(f"{option} is unknown: {name!r}{did_you_mean(str(name), known)}")
