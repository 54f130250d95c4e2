"""Render rollouts as readable text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from agentsgym.fields import check_rollout
from agentsgym.texts import visible

if TYPE_CHECKING:
    from agentsgym.types import Trajectory


def render_transcript(trajectory: Trajectory) -> str:
    r"""Render a rollout as text: a summary line, then every message with its role.

    The agent's messages show the reward, with its named rewards other than 0, whether the action was invalid, and the
    tool calls that were parsed, as ``price(good='eggs')``, below its thought. A failed rollout ends with its error.
    Control characters are escaped (``\x1b[2J``), so that a terminal does not execute them.
    """
    check_rollout("render_transcript(trajectory)", trajectory)
    parts = [f"=== {trajectory.headline} ==="]
    turns = {turn.message_index: turn for turn in trajectory.turns}
    for index, message in enumerate(trajectory.messages):
        turn = turns.get(index)
        components = {} if turn is None else turn.components or {}
        named = "".join(f", {name} {amount:+zg}" for name, amount in components.items() if amount)
        note = "" if turn is None else f" {turn.reward:+zg}{named}{', invalid' if turn.invalid else ''}"
        calls = [_call_text(call.get("function", {})) for call in message.get("tool_calls", ())]
        text = "\n".join([message["content"]] * bool(message["content"] or not calls) + calls)
        if thought := message.get("reasoning_content"):
            parts.append(f"[thought] {thought}")
        parts.append(f"[{message['role']}{note}] {text}")
    if trajectory.error is not None:
        parts.append(f"[error] {trajectory.error.strip()}")
    return visible("\n".join(parts)) + "\n"


def _call_text(function: Mapping[str, Any]) -> str:
    arguments: Any = function.get("arguments", "")
    if not isinstance(arguments, dict):  # a server's JSON text
        return f"{function.get('name')}({arguments})"
    given = cast("dict[str, Any]", arguments).items()
    return f"{function.get('name')}({', '.join(f'{name}={value!r}' for name, value in given)})"
