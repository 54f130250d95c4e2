"""Render environments as text, with marks instead of colors, and describe the supported ones: actions, rules, goals."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentsgym.envs.Gymnasium.exact import Hand, Transitions, blackjack_hands, blackjack_transitions, outcomes_of
from agentsgym.errors import ConfigError, EnvError
from agentsgym.texts import shown

#: Renders the agent's observation, given the environment (including its wrappers) and the raw observation.
Renderer = Callable[[Any, Any], str]

_COLORED = re.compile(r"\x1b\[(?!0?m)([0-9;]*)m([^\x1b]*)\x1b\[0m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MAX_NUMBERS = 64  # the size up to which an observation is shown as numbers


def mark_colors(frame: str, marks: Mapping[str, tuple[str, str]] | None = None) -> str:
    r"""Enclose colored text in marks, and remove the colors.

    Args:
        frame: Text with ANSI escape sequences, possibly nested.
        marks: The opening and closing mark of each color, by its ANSI code; brackets for any other color.

    >>> mark_colors("\x1b[41mS\x1b[0mFF")
    '[S]FF'
    >>> mark_colors("\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m", {"43": ("{", "}"), "34;1": ("(", ")")})
    '({R})'
    """
    marks = marks or {}

    def add_marks(match: re.Match[str]) -> str:
        opening, closing = marks.get(match[1], ("[", "]"))
        return f"{opening}{match[2]}{closing}"

    count = 1
    while count:
        frame, count = _COLORED.subn(add_marks, frame)
    return _ESCAPE.sub("", frame)


def render_frame(env: Any, _observation: Any) -> str:
    """Render an environment's frame, with marks instead of colors."""
    return mark_colors(ansi_frame(env)).strip("\n")


def ansi_frame(env: Any) -> str:
    """Render an environment whose render mode is ``ansi``."""
    frame = env.render()
    if hasattr(frame, "getvalue"):
        frame = frame.getvalue()  # a StringIO, which Gymnasium allows
    if not isinstance(frame, str):
        raise EnvError(f"the environment's render() must return a str in the mode 'ansi', got {shown(frame)}")
    return frame


def render_observation(_env: Any, observation: Any) -> str:
    """Render an observation as numbers, with floats rounded to four significant digits."""
    return f"Observation: {_numbers(observation)}"


def check_small(space: Any) -> None:
    """Reject observations that are too long to show as numbers, such as images."""
    from gymnasium.spaces import flatdim  # noqa: PLC0415  # optional dependency

    try:
        size = flatdim(space)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            "env_config['render'] must be a callable (env, observation) -> str for the observation space "
            f"{shown(space)}, whose size is not fixed"
        ) from error
    if size > _MAX_NUMBERS and len(getattr(space, "shape", None) or ()) > 0:
        raise ConfigError(
            f"env_config['render'] must be a callable (env, observation) -> str: an observation has {size} numbers, "
            f"and only up to {_MAX_NUMBERS} can be shown as numbers"
        )


def _numbers(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_numbers(part)}" for key, part in value.items())  # pyright: ignore[reportUnknownVariableType]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_numbers, value)) + ")"  # pyright: ignore[reportUnknownArgumentType]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
