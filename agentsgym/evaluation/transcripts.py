"""Write a rollout as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator

from agentsgym.texts import visible
from agentsgym.types import Trajectory, Turn


def render_transcript(trajectory: Trajectory) -> str:
    r"""Write a rollout as text: a line that says how it went, then every message with its speaker.

    Answers carry their reward and whether the environment called them invalid. A failed rollout ends with its error.
    Control characters and escape sequences are written out (``\x1b[2J``): a terminal that shows the text obeys none.
    """
    parts = [f"=== {trajectory.headline} ==="]
    parts += [f"[{speaker}] {content}" for speaker, content in _speeches(trajectory)]
    if trajectory.error is not None:
        parts.append(f"[error] {trajectory.error.strip()}")
    return visible("\n".join(parts)) + "\n"


def _speeches(trajectory: Trajectory) -> Iterator[tuple[str, str]]:
    turns = {turn.message_index: turn for turn in trajectory.turns}
    for index, message in enumerate(trajectory.messages):
        note = _note(turns[index]) if index in turns else ""
        yield message["role"] + note, message["content"]


def _note(turn: Turn) -> str:
    return f" {turn.reward:+zg}{', invalid' if turn.invalid else ''}"
