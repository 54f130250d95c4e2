"""Render rollouts as readable text."""

from __future__ import annotations

from agentsgym.texts import visible
from agentsgym.types import Trajectory


def render_transcript(trajectory: Trajectory) -> str:
    r"""Render a rollout as text: a summary line, then every message with its role.

    The agent's messages show the reward and whether the action was invalid. A failed rollout ends with its error.
    Control characters are escaped (``\x1b[2J``), so that a terminal does not execute them.
    """
    parts = [f"=== {trajectory.headline} ==="]
    turns = {turn.message_index: turn for turn in trajectory.turns}
    for index, message in enumerate(trajectory.messages):
        turn = turns.get(index)
        named = "" if turn is None else "".join(f", {name} {x:+zg}" for name, x in (turn.components or {}).items())
        note = "" if turn is None else f" {turn.reward:+zg}{named}{', invalid' if turn.invalid else ''}"
        parts.append(f"[{message['role']}{note}] {message['content']}")
    if trajectory.error is not None:
        parts.append(f"[error] {trajectory.error.strip()}")
    return visible("\n".join(parts)) + "\n"
