"""Read the calls of tools in an agent's answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentsgym.tokens.calls.families import HERMES
from agentsgym.tokens.calls.forms import Answer
from agentsgym.tokens.calls.reader import reader_of
from agentsgym.types import Action

if TYPE_CHECKING:
    from agentsgym.tokens.chat_format import ChatFormat


def with_calls(action: Action, chat_format: ChatFormat | None, tools: Sequence[Mapping[str, Any]]) -> Action:
    """Read calls, thoughts and text of an action without parsed calls; nothing is raised.

    Sampled ids are read as the chat template writes calls: its form is found once, by rendering a call and reading it
    back. A text answer may also call as ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, the only form without
    a template, or with one that writes no calls. A call inside a thought does not count; in text, everything before a
    first ``</think>`` without a ``<think>`` is a thought that began in the prompt. An answer that the budget cut is not
    read, since a cut call may look complete.

    A call that cannot be read becomes a :class:`~agentsgym.types.ToolCall` with an ``error`` and stays in the text; the
    other calls are read. Arguments that a form writes as bare text get the types of the tool's schema; nothing else is
    checked here.

    Args:
        action: The agent's action.
        chat_format: How the tokenizer writes calls; None if there is only text.
        tools: The JSON schemas of the tools.
    """
    if action.tool_calls or action.finish_reason == "length":
        return action
    reader = None if chat_format is None else reader_of(chat_format)
    if reader is None or reader.form is None:
        answer = _of_text(action.text)
    elif action.token_ids is not None:
        answer = reader.read(action.token_ids, tools)
    else:
        # The reading in which more of the calls are well-formed, the template's own on a tie.
        answer = reader.read_text(action.text, tools)
        num_good = 0 if answer is None else _num_good(answer)
        # Without what the template marks as thoughts, unless it found calls itself.
        other = _of_text(action.text if answer is None or num_good else answer.content)
        if answer is None:
            answer = other
        elif other is not None and _num_good(other) > num_good:
            answer = dataclasses.replace(other, reasoning=other.reasoning or answer.reasoning)
    if answer is None:
        return action
    return dataclasses.replace(
        action, text=answer.content.strip(), reasoning=answer.reasoning or action.reasoning, tool_calls=answer.calls
    )


def _of_text(text: str) -> Answer | None:
    answer = HERMES.answer(None, text, {})
    return answer if answer.calls else None


def _num_good(answer: Answer) -> int:
    return sum(call.error is None for call in answer.calls)
