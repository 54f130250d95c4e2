"""Determine how a chat template marks the reasoning of an answer: by rendering one, or by its own markers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

_THOUGHT, _REPLY = "thinkable", "repliable"
_MARKER = r"<[^<>\s]{1,40}>(?:thought\n)?|\[/?[A-Z_]{1,40}\]|\u25c1/?\w{1,40}\u25b7"
_LAST_MARKER = re.compile(rf"(?:{_MARKER})\s*\Z")
_FIRST_MARKER = re.compile(rf"\s*({_MARKER})")


class ThoughtMarkers(NamedTuple):
    """What a family of models writes around its reasoning.

    Attributes:
        opens: Opening marker, which may be part of the generation prompt.
        closes: Closing marker.
        after: What the template prints between reasoning and the text of an answer; the closing marker if unknown.
    """

    opens: str
    closes: str
    after: str = ""


THINK: Final = ThoughtMarkers("<think>", "</think>")
KNOWN_MARKERS: Final = (
    THINK,  # DeepSeek, EXAONE 4, GLM, Granite 3.3, Hunyuan, LFM2.5, MiniMax, Nemotron, OLMo 3, Phi 4, Qwen, SmolLM3 …
    ThoughtMarkers("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ThoughtMarkers("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ThoughtMarkers("[THINK]", "[/THINK]"),  # Magistral, Ministral
    ThoughtMarkers("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ThoughtMarkers("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThoughtMarkers("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi-VL
    ThoughtMarkers("<thought>", "</thought>"),  # EXAONE Deep
)
"""The markers of known families, in the order in which they are tried; some print reasoning only beside a call."""

Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""Renders a conversation; empty if the template raises."""


def thought_markers(template: str, render: Render) -> ThoughtMarkers | None:
    """Find the markers of reasoning; None if a template has none.

    Args:
        template: The source of the chat template.
        render: The template, as a function of a conversation.
    """
    parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _REPLY}]
    for answer in (
        {"role": "assistant", "content": _REPLY, "reasoning_content": _THOUGHT, "thinking": _THOUGHT},
        {"role": "assistant", "content": parts},
    ):
        head, is_printed, tail = render([{"role": "user", "content": "question"}, answer]).partition(_THOUGHT)
        opens, closes = _LAST_MARKER.search(head), _FIRST_MARKER.match(tail)
        if is_printed and opens and closes and _REPLY in tail:
            kept = opens[0] if opens[0].endswith("thought\n") else opens[0].rstrip()
            return ThoughtMarkers(kept, closes[1], tail.partition(_REPLY)[0])
    return next((one for one in KNOWN_MARKERS if one.opens.strip() in template or one.closes in template), None)
