"""Descriptions of the supported environments: their actions, their rules in words, and their definition of success."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentsgym.envs.Gymnasium.exact import Hand, Transitions, blackjack_hands, blackjack_transitions, outcomes_of
from agentsgym.envs.Gymnasium.rendering import Renderer, ansi_frame, mark_colors, render_frame, render_observation
from agentsgym.errors import EnvError

#: Returns whether an episode succeeded, given the environment, its last reward, and whether it terminated rather than
#: being truncated by a limit.
Won = Callable[[Any, float, bool], bool]


def find_description(env_id: str) -> EnvDescription | None:
    """Look up the description of an id, regardless of its version."""
    return _DESCRIPTIONS.get(env_id.rpartition("-v")[0])


def map_from_frame(frame: str) -> list[str]:
    """Return the map in a frame of FrozenLake."""
    return ["".join(char for char in line if char.isalpha()) for line in frame.splitlines()]


def _frozen_lake_frame(env: Any, _observation: Any) -> str:
    _, _, grid = ansi_frame(env).partition("\n")  # the first line is the last action
    row, column = divmod(int(env.unwrapped.s), int(env.unwrapped.ncol))
    lines = [list(line) for line in mark_colors(grid, {"41": ("", "")}).split("\n") if line]
    lines[row][column] = f"[{lines[row][column]}]"
    return "\n".join(map(" ".join, lines))


_TAXI_MARKS = {"43": ("[", "]"), "42": ("{", "}"), "34;1": ("(", ")"), "35": ("<", ">")}


def _taxi_frame(env: Any, _observation: Any) -> str:
    frame = ansi_frame(env)
    return mark_colors(frame[: frame.rindex("+") + 1], _TAXI_MARKS)  # the last action follows the grid


def _hand(env: Any, observation: Any) -> Hand:
    """Return the hand; the number of cards shows whether a sum of 21 is a natural."""
    total, dealer, ace = (int(number) for number in observation)
    is_natural = total == 21 and len(env.unwrapped.player) == 2
    return total, dealer, bool(ace), is_natural


def _blackjack_text(hand: Hand) -> str:
    total, dealer, ace, is_natural = hand
    kind = "a natural" if is_natural else "with an ace that counts as 11" if ace else "no ace counts as 11"
    return f"Your hand: {total}, {kind}. The dealer shows: {'an ace' if dealer == 1 else dealer}."


def _blackjack_frame(env: Any, observation: Any) -> str:
    return _blackjack_text(_hand(env, observation))


def _frames_of_states(env: Any, show: Renderer) -> dict[str, int]:
    """Return the frame of every state; the environment is left in the last state."""
    frames: dict[str, int] = {}
    for state in range(len(env.unwrapped.P)):
        env.unwrapped.s = state
        if frames.setdefault(show(env, state), state) != state:
            raise EnvError(f"the states {frames[show(env, state)]} and {state} are rendered identically")
    return frames


def _reached_goal(env: Any, _reward: float, terminated: bool) -> bool:
    inner = env.unwrapped
    row, column = divmod(int(inner.s), int(inner.ncol))
    return terminated and bytes(inner.desc[row, column]) == b"G"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvDescription:
    """The description of one Gymnasium environment; only ``show`` must be picklable.

    Attributes:
        actions: The names of the actions, in order.
        rules: The rules, written for the agent.
        show: Renders the agent's observation.
        won: Determines whether an episode succeeded.
        transitions: Returns the exact transition table; None if there is none.
        frames: Returns every frame that the agent may see, with the number of its state.
        state: Returns the number of the current state, given the environment and the observation.
        has_maps: Whether a task may define a custom map.
    """

    actions: tuple[str, ...]
    rules: str
    show: Renderer
    won: Won
    transitions: Callable[[Any], Transitions | None] = outcomes_of
    frames: Callable[[Any, Renderer], dict[str, int]] = _frames_of_states
    state: Callable[[Any, Any], int] = lambda env, _observation: int(env.unwrapped.s)
    has_maps: bool = False


_NUMBER_OF_HAND: Mapping[Hand, int] = {hand: number for number, hand in enumerate(blackjack_hands())}

_FROZEN_LAKE = EnvDescription(
    actions=("left", "down", "right", "up"),
    rules=(
        "You cross a frozen lake on foot. S is the start, F is ice, H is a hole, G is the goal, and your place is in "
        "brackets. Reach G and fall into no H. The ice may be slippery: then you may slip to a side."
    ),
    show=_frozen_lake_frame,
    won=_reached_goal,
    has_maps=True,
)
_TAXI = EnvDescription(
    actions=("south", "north", "east", "west", "pickup", "dropoff"),
    rules=(
        "You drive a taxi. R, G, Y and B are stops, and | is a wall. The empty taxi is in [], the waiting passenger is "
        "in (), the destination is in <>, and a taxi that carries the passenger is in {}. Drive to the passenger, pick "
        "them up, drive to the destination, and drop them off there, in as few turns as you can."
    ),
    show=_taxi_frame,
    won=lambda _env, _reward, terminated: terminated,
)
_CLIFF_WALKING = EnvDescription(
    actions=("up", "right", "down", "left"),
    rules=(
        "You walk along a cliff. x is your place, o is firm ground, C is the cliff, and T is the goal. Each turn costs "
        "1, a step over the cliff costs 100 and takes you back to the start. Reach T."
    ),
    show=render_frame,
    won=lambda _env, _reward, terminated: terminated,
)
_BLACKJACK = EnvDescription(
    actions=("stick", "hit"),
    rules=(
        "You play Blackjack against the dealer. Come closer to 21 than the dealer does, but not over it. hit draws a "
        "card, stick ends your turn. The dealer draws until the sum is 17 or more."
    ),
    show=_blackjack_frame,
    won=lambda _, reward, terminated: terminated and reward > 0,
    transitions=lambda env: blackjack_transitions(natural=bool(env.unwrapped.natural), sab=bool(env.unwrapped.sab)),
    frames=lambda _env, _show: {_blackjack_text(hand): number for hand, number in _NUMBER_OF_HAND.items()},
    state=lambda env, observation: _NUMBER_OF_HAND[_hand(env, observation)],
)
_DESCRIPTIONS = {
    "FrozenLake": _FROZEN_LAKE,
    "FrozenLake8x8": _FROZEN_LAKE,
    "Taxi": _TAXI,
    "CliffWalking": _CLIFF_WALKING,
    "Blackjack": _BLACKJACK,
}
RENDERERS: Mapping[str, Renderer] = {"ansi": render_frame, "observation": render_observation}
