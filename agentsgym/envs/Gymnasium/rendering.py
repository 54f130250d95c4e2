"""Show a game as text: frames whose colors say something get marks instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from agentsgym.errors import ConfigError, EnvError
from agentsgym.texts import shown

#: Writes what the agent sees, from the game (its wrappers included) and the observation.
Show = Callable[[Any, Any], str]

_COLORED = re.compile(r"\x1b\[(?!0?m)([0-9;]*)m([^\x1b]*)\x1b\[0m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MOST_NUMBERS = 64  # of an observation that is shown as numbers


def mark_colors(frame: str, marks: Mapping[str, tuple[str, str]] | None = None) -> str:
    r"""Put what is colored between two marks, and drop the colors.

    Args:
        frame: Text with ANSI escape sequences, which may be nested.
        marks: The two marks of each color, by its code; any other color gets brackets.

    >>> mark_colors("\x1b[41mS\x1b[0mFF")
    '[S]FF'
    >>> mark_colors("\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m", {"43": ("{", "}"), "34;1": ("(", ")")})
    '({R})'
    """
    known = marks or {}

    def marked(match: re.Match[str]) -> str:
        opening, closing = known.get(match[1], ("[", "]"))
        return f"{opening}{match[2]}{closing}"

    count = 1
    while count:
        frame, count = _COLORED.subn(marked, frame)
    return _ESCAPE.sub("", frame)


def show_frame(game: Any, _observation: Any) -> str:
    """Show what the environment renders, marked."""
    return mark_colors(frame_of(game)).strip("\n")


def frame_of(game: Any) -> str:
    """Render an environment of the mode ``ansi``.

    Raises:
        EnvError: It gave no text.
    """
    frame = game.render()
    if hasattr(frame, "getvalue"):
        frame = frame.getvalue()  # a StringIO, which Gymnasium allows
    if not isinstance(frame, str):
        raise EnvError(f"render() must return a str in the mode 'ansi', got {shown(frame)}")
    return frame


def show_observation(_game: Any, observation: Any) -> str:
    """Show an observation as numbers, rounded to four digits where they have fractions."""
    return f"Observation: {_numbers(observation)}"


def check_small(space: Any) -> None:
    """Refuse observations that are too long to be read as numbers, an image for example.

    Raises:
        ConfigError: There are more than 64 numbers, or it is not known how many.
    """
    from gymnasium.spaces import flatdim  # noqa: PLC0415  # an extra

    try:
        size = flatdim(space)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(f"env_config['render'] must be a callable for observations of {shown(space)}") from error
    if size > _MOST_NUMBERS and len(getattr(space, "shape", None) or ()) > 0:
        raise ConfigError(
            f"env_config['render'] must be a callable (game, observation) -> str: an observation has {size} numbers, "
            f"and at most {_MOST_NUMBERS} are shown as they are"
        )


def _numbers(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_numbers(one)}" for key, one in value.items())  # pyright: ignore[reportUnknownVariableType]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_numbers, value)) + ")"  # pyright: ignore[reportUnknownArgumentType]
    return f"{value:.4g}" if isinstance(value, float) else str(value)
