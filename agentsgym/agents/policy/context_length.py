"""Compare a prompt with the longest sequence that a model or an engine can process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentsgym.errors import AgentError


def num_positions(model: Any) -> int | None:
    """Return the maximum sequence length of a model, in tokens, from its configuration; None if it has no limit.

    RoPE scaling is taken into account: in many configurations, ``max_position_embeddings`` is the length before it.
    """
    config: Any = model.config.get_text_config(decoder=True)
    positions: int | None = getattr(config, "max_position_embeddings", None)
    rope: Any = getattr(config, "rope_parameters", None)
    if positions is None or getattr(config, "alibi", False):
        return None
    if not isinstance(rope, Mapping):
        return positions
    parameters = cast("Mapping[str, Any]", rope)
    by_layer_type: list[Mapping[str, Any]] = [one for one in parameters.values() if isinstance(one, Mapping)]  # Gemma 3
    longest = positions
    for one in by_layer_type or [parameters]:
        if one.get("rope_type") not in ("llama3", "longrope"):  # for these, max_position_embeddings is already scaled
            scaled = (one.get("factor") or 1) * (one.get("original_max_position_embeddings") or positions)
            longest = max(longest, int(scaled))
    return longest


def budget_within(limit: int | None, prompt: Sequence[int], room: int, limit_name: str, remedy: str = "") -> int:
    """Reduce a turn's token budget to what a limit leaves after the prompt.

    Args:
        limit: Maximum tokens of prompt and answer; None if there is no limit or it is unknown.
        prompt: The ids before the answer.
        room: The turn's budget.
        limit_name: Name of the limit, for the error message, such as ``"the maximum context length of vLLM"``.
        remedy: How to raise the limit, for the error message.
    """
    if limit is None:
        return room
    if len(prompt) < limit:
        return min(room, limit - len(prompt))
    raise AgentError(
        f"a prompt of {len(prompt)} tokens leaves no room for an answer within {limit_name} ({limit} tokens): {remedy}"
        f"set env_config['max_trajectory_tokens'] to at most {limit}, so that episodes end earlier"
    )
