"""Parse the tool calls in an agent's answer."""

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
    """Parse the calls, reasoning and text of an action without parsed calls; never raises.

    Sampled ids are parsed in the format of the chat template, which is determined once by rendering a call and parsing
    it. A text answer may also use ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, the only format if there is
    no template or it does not render calls. Calls inside reasoning are ignored; in text, everything before a first
    ``</think>`` without a ``<think>`` is reasoning that began in the prompt. An answer that was truncated at the token
    budget is not parsed, since a truncated call may look complete.

    A malformed call becomes a :class:`~agentsgym.types.ToolCall` with an ``error`` and stays in the text; the other
    calls are parsed. Arguments that a format writes as bare text get the types of the tool's schema; they are not
    validated here.

    Args:
        action: The agent's action.
        chat_format: The chat format of the tokenizer; None if there is only text.
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
        # Choose the format with more well-formed calls, that of the template if they are equal.
        answer = reader.read_text(action.text, tools)
        num_good = 0 if answer is None else _num_good(answer)
        # Exclude the template's reasoning, unless calls were found in the template's format.
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
