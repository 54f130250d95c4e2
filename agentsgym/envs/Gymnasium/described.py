"""The supported environments: their actions, their rules in words, and the definition of success."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentsgym.envs.Gymnasium.exact import Hand, Transitions, blackjack_hands, blackjack_transitions, outcomes_of
from agentsgym.envs.Gymnasium.rendering import Show, frame_of, mark_colors, show_frame, show_observation
from agentsgym.errors import EnvError

#: Returns whether an episode succeeded, from the environment, its last reward, and whether it terminated (no limit).
Won = Callable[[Any, float, bool], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedGame:
    """The description of one Gymnasium environment; only ``show`` need be picklable.

    Attributes:
        actions: The names of the actions, in order.
        rules: The rules for the agent.
        show: The function that renders the agent's observation.
        won: The function that determines success.
        transitions: The function that returns the transition table; None if it is not exact.
        frames: The function that returns every frame that the agent may see, with the number of its state.
        state: The function that returns the number of the current state, from the environment and the observation.
        renders: Whether it is made with the render mode ``ansi``.
        has_maps: Whether a task may define a custom map.
    """

    actions: tuple[str, ...]
    rules: str
    show: Show
    won: Won
    transitions: Callable[[Any], Transitions | None] = outcomes_of
    frames: Callable[[Any, Show], dict[str, int]]
    state: Callable[[Any, Any], int]
    renders: bool = True
    has_maps: bool = False


def described_game(game_id: str) -> DescribedGame | None:
    """Look up the description of an id, regardless of its version."""
    return _DESCRIBED.get(game_id.rpartition("-v")[0])


def rows_of_frame(frame: str) -> list[str]:
    """Return the map in a frame of FrozenLake."""
    return ["".join(one for one in line if one.isalpha()) for line in frame.splitlines()]


def _frozen_lake_frame(game: Any, _observation: Any) -> str:
    _, _, grid = frame_of(game).partition("\n")  # the first line is the last action
    row, column = divmod(int(game.unwrapped.s), int(game.unwrapped.ncol))
    lines = [list(line) for line in mark_colors(grid, {"41": ("", "")}).split("\n") if line]
    lines[row][column] = f"[{lines[row][column]}]"
    return "\n".join(map(" ".join, lines))


_TAXI_MARKS = {"43": ("[", "]"), "42": ("{", "}"), "34;1": ("(", ")"), "35": ("<", ">")}


def _taxi_frame(game: Any, _observation: Any) -> str:
    frame = frame_of(game)
    return mark_colors(frame[: frame.rindex("+") + 1], _TAXI_MARKS)  # the last action follows the grid


def _hand(game: Any, observation: Any) -> Hand:
    """Read the hand; whether it is a natural follows from the cards."""
    total, dealer, ace = (int(one) for one in observation)
    is_natural = total == 21 and len(game.unwrapped.player) == 2
    return total, dealer, bool(ace), is_natural


def _blackjack_text(hand: Hand) -> str:
    total, dealer, ace, is_natural = hand
    kind = "a natural" if is_natural else "with an ace that counts as 11" if ace else "no ace counts as 11"
    return f"Your hand: {total}, {kind}. The dealer shows: {'an ace' if dealer == 1 else dealer}."


def _blackjack_frame(game: Any, observation: Any) -> str:
    return _blackjack_text(_hand(game, observation))


def _frames_of_states(game: Any, show: Show) -> dict[str, int]:
    """Every state's frame. The caller's environment is left in the last state."""
    frames: dict[str, int] = {}
    for state in range(len(game.unwrapped.P)):
        game.unwrapped.s = state
        if frames.setdefault(show(game, state), state) != state:
            raise EnvError(f"the states {frames[show(game, state)]} and {state} look alike")
    return frames


def _reached_goal(game: Any, _reward: float, terminated: bool) -> bool:
    inner = game.unwrapped
    row, column = divmod(int(inner.s), int(inner.ncol))
    return terminated and bytes(inner.desc[row, column]) == b"G"


_NUMBER_OF_HAND: Mapping[Hand, int] = {hand: number for number, hand in enumerate(blackjack_hands())}

_FROZEN_LAKE = DescribedGame(
    actions=("left", "down", "right", "up"),
    rules=(
        "You cross a frozen lake on foot. S is the start, F is ice, H is a hole, G is the goal, and your place is in "
        "brackets. Reach G and fall into no H. The ice may be slippery: then you may slip to a side."
    ),
    show=_frozen_lake_frame,
    won=_reached_goal,
    frames=_frames_of_states,
    state=lambda game, _: int(game.unwrapped.s),
    has_maps=True,
)
_TAXI = DescribedGame(
    actions=("south", "north", "east", "west", "pickup", "dropoff"),
    rules=(
        "You drive a taxi. R, G, Y and B are stops, and | is a wall. The empty taxi is in [], the waiting passenger is "
        "in (), the destination is in <>, and a taxi that carries the passenger is in {}. Drive to the passenger, pick "
        "them up, drive to the destination, and drop them off there, in as few turns as you can."
    ),
    show=_taxi_frame,
    won=lambda _game, _reward, terminated: terminated,
    frames=_frames_of_states,
    state=lambda game, _: int(game.unwrapped.s),
)
_CLIFF_WALKING = DescribedGame(
    actions=("up", "right", "down", "left"),
    rules=(
        "You walk along a cliff. x is your place, o is firm ground, C is the cliff, and T is the goal. Each turn costs "
        "1, a step over the cliff costs 100 and takes you back to the start. Reach T."
    ),
    show=show_frame,
    won=lambda _game, _reward, terminated: terminated,
    frames=_frames_of_states,
    state=lambda game, _: int(game.unwrapped.s),
)
_BLACKJACK = DescribedGame(
    actions=("stick", "hit"),
    rules=(
        "You play Blackjack against the dealer. Come closer to 21 than the dealer does, but not over it. hit draws a "
        "card, stick ends your turn. The dealer draws until the sum is 17 or more."
    ),
    show=_blackjack_frame,
    won=lambda _, reward, terminated: terminated and reward > 0,
    transitions=lambda game: blackjack_transitions(natural=bool(game.unwrapped.natural), sab=bool(game.unwrapped.sab)),
    frames=lambda _game, _show: {_blackjack_text(hand): number for hand, number in _NUMBER_OF_HAND.items()},
    state=lambda game, observation: _NUMBER_OF_HAND[_hand(game, observation)],
    renders=False,
)
_DESCRIBED = {
    "FrozenLake": _FROZEN_LAKE,
    "FrozenLake8x8": _FROZEN_LAKE,
    "Taxi": _TAXI,
    "CliffWalking": _CLIFF_WALKING,
    "Blackjack": _BLACKJACK,
}
SHOWS: Mapping[str, Show] = {"ansi": show_frame, "observation": show_observation}
