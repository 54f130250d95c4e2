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
    """Record a conversation like an environment whose agent answers in text.

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
    next_index = 0
    for turn, (index, action) in enumerate(answers.items()):
        if index == next_index:
            before = (
                f"behind the answer messages[{index - 1}]: make one answer of both" if index else "at the beginning"
            )
            raise ConfigError(f"messages[{index}] is an answer without a message before it, {before}")
        transcript.observe(messages[next_index:index])
        begin = transcript.segment_start
        start, stop = transcript.act(action)
        if chat_format is not None:
            ids = transcript.record()[start:stop]
            if ids and ids[-1] in chat_format.stop_token_ids:  # in some tokenizers, also the unknown-word token
                ids = ids[:-1]
            unknown = getattr(chat_format.tokenizer, "unk_token_id", None)
            if unknown is not None and unknown in ids:
                raise ConfigError(f"the tokenizer cannot encode a part of {shown(action.text, 60)} (turn {turn})")
        places.append(Place(start, stop, begin))
        next_index = index + 1
    return places
