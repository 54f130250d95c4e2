"""Replay a conversation that is known as text, and locate its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agentsgym.errors import ConfigError
from agentsgym.texts import shown
from agentsgym.tokens.chat_format import ChatFormat
from agentsgym.tokens.transcript import Transcript
from agentsgym.types import Action, Message


class Place(NamedTuple):
    """The location of an answer: fields of a :class:`~agentsgym.types.Turn`."""

    start: int
    stop: int
    prompt_start: int


def replay(
    transcript: Transcript, messages: Sequence[Message], answers: Mapping[int, Action], chat_format: ChatFormat | None
) -> list[Place]:
    """Record a conversation as an environment records that of an agent which answers in text.

    Anything after the last answer is left out.

    Args:
        transcript: A new transcript, which receives the messages and the tokens.
        messages: The conversation.
        answers: The agent's actions by the indices of their messages, in order.
        chat_format: The transcript's chat format; None for none.

    Returns:
        The location of each answer.

    Raises:
        ConfigError: An answer has nothing before it, or contains a word that is unknown to the tokenizer.
        TemplateError: The chat template rejects the messages.
    """
    places: list[Place] = []
    said = 0
    for turn, (index, action) in enumerate(answers.items()):
        if index == said:
            before = (
                f"behind the answer messages[{index - 1}]: make one answer of both" if index else "at the beginning"
            )
            raise ConfigError(f"messages[{index}] is an answer without a message before it, {before}")
        transcript.observe(messages[said:index])
        begin = transcript.segment_start
        start, stop = transcript.act(action)
        if chat_format is not None and _has_unknown(transcript.record()[start:stop], chat_format):
            raise ConfigError(f"the tokenizer cannot encode a part of {shown(action.text, 60)} (turn {turn})")
        places.append(Place(start, stop, begin))
        said = index + 1
    return places


def _has_unknown(answer: Sequence[int], chat_format: ChatFormat) -> bool:
    """Whether an answer contains the unknown-word token, which in some tokenizers is also the one that ends a turn."""
    unknown = getattr(chat_format.tokenizer, "unk_token_id", None)
    is_ended = bool(answer) and answer[-1] in chat_format.stop_token_ids
    return unknown is not None and unknown in (answer[:-1] if is_ended else answer)
