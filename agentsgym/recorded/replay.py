"""Hold a conversation again that is known as text, and find where its answers lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentsgym.errors import ConfigError
from agentsgym.texts import shown
from agentsgym.tokens.transcript import Transcript
from agentsgym.types import Action, Message


class Place(NamedTuple):
    """Where an answer lies: fields of a :class:`~agentsgym.types.Turn`."""

    start: int
    stop: int
    prompt_start: int


def replay(
    transcript: Transcript, messages: Sequence[Message], answers: Mapping[int, Action], tokenizer: Any
) -> list[Place]:
    """Record a conversation as an environment records that of an agent which answers in text.

    What stands behind the last answer is left out.

    Args:
        transcript: A new one; it has the messages and the tokens afterwards.
        messages: The conversation.
        answers: The agent's actions by the indices of their messages, in order.
        tokenizer: The transcript's; None for none.

    Returns:
        The place of each answer.

    Raises:
        ConfigError: An answer has nothing in front of it to answer, or the tokenizer does not know a word of it.
        TemplateError: The chat template does not take the messages.
    """
    places: list[Place] = []
    said = 0
    unknown = getattr(tokenizer, "unk_token_id", None)
    for turn, (index, action) in enumerate(answers.items()):
        if index == said:
            before = (
                f"behind the answer messages[{index - 1}]: make one answer of both" if index else "at the beginning"
            )
            raise ConfigError(f"messages[{index}] is an answer to nothing, {before}")
        transcript.observe(messages[said:index])
        begin = transcript.segment_start
        start, stop = transcript.act(action)
        if unknown is not None and unknown in transcript.record()[start:stop]:
            raise ConfigError(f"the tokenizer has no token for a part of {shown(action.text, 60)} (turn {turn})")
        places.append(Place(start, stop, begin))
        said = index + 1
    return places
