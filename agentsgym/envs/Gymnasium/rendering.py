"""Render an environment as text, with marks in place of meaningful colors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from agentsgym.errors import ConfigError, EnvError
from agentsgym.texts import shown

#: Renders the agent's observation, from the environment (its wrappers included) and the raw observation.
Show = Callable[[Any, Any], str]

_COLORED = re.compile(r"\x1b\[(?!0?m)([0-9;]*)m([^\x1b]*)\x1b\[0m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MOST_NUMBERS = 64  # in an observation that is shown as numbers


def mark_colors(frame: str, marks: Mapping[str, tuple[str, str]] | None = None) -> str:
    r"""Enclose colored text in marks, and drop the colors.

    Args:
        frame: Text with ANSI escape sequences, possibly nested.
        marks: The opening and closing mark of each color, by its code; any other color gets brackets.

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
    """Render the environment's frame, with marks."""
    return mark_colors(frame_of(game)).strip("\n")


def frame_of(game: Any) -> str:
    """Render an environment with the mode ``ansi``.

    Raises:
        EnvError: The environment did not return text.
    """
    frame = game.render()
    if hasattr(frame, "getvalue"):
        frame = frame.getvalue()  # a StringIO, which Gymnasium allows
    if not isinstance(frame, str):
        raise EnvError(f"render() must return a str in the mode 'ansi', got {shown(frame)}")
    return frame


def show_observation(_game: Any, observation: Any) -> str:
    """Render an observation as numbers, floats rounded to four digits."""
    return f"Observation: {_numbers(observation)}"


def check_small(space: Any) -> None:
    """Reject observations that are too long to show as numbers, such as images.

    Raises:
        ConfigError: The space has more than 64 numbers, or an unknown number of them.
    """
    from gymnasium.spaces import flatdim  # noqa: PLC0415  # optional dependency

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
