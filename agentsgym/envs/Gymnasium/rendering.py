"""Render an environment as text, with marks instead of colors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

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
