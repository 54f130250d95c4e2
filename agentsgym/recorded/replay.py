"""Record a conversation that is available as text, and locate its assistant messages in the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agentsgym.errors import ConfigError
from agentsgym.texts import shown
from agentsgym.tokens.chat_format import ChatFormat
from agentsgym.tokens.transcript import Transcript
from agentsgym.types import Action, Message


class AnswerSpan(NamedTuple):
    """The location of an assistant message in the tokens, as in :class:`~agentsgym.types.Turn`."""

    start: int
    stop: int
    prompt_start: int


def record_conversation(
    transcript: Transcript, messages: Sequence[Message], actions: Mapping[int, Action], chat_format: ChatFormat | None
) -> list[AnswerSpan]:
    """Record a conversation in a transcript, as an environment does with an agent that responds in text.

    Messages after the last assistant message are not recorded. ``actions`` has the action of each assistant message by
    the message's index, in order.

    Returns:
        The location of each assistant message.

    Raises:
        ConfigError: An assistant message follows no other message, or contains a word unknown to the tokenizer.
        TemplateError: The chat template rejects the messages.
    """
    spans: list[AnswerSpan] = []
    next_index = 0
    for turn, (index, action) in enumerate(actions.items()):
        if index == next_index:
            problem = (
                f"directly follows another one, messages[{index - 1}]: merge the two, or add a message between them"
                if index
                else "is the first message: add a message before it"
            )
            raise ConfigError(f"the assistant message messages[{index}] {problem}")
        transcript.observe(messages[next_index:index])
        prompt_start = transcript.segment_start
        start, stop = transcript.act(action)
        if chat_format is not None:
            ids = transcript.record()[start:stop]
            # Some tokenizers use one token for end of turn and unknown words.
            if ids and ids[-1] in chat_format.stop_token_ids:
                ids = ids[:-1]
            unknown = getattr(chat_format.tokenizer, "unk_token_id", None)
            if unknown is not None and unknown in ids:
                raise ConfigError(f"the tokenizer cannot encode part of {shown(action.text, 60)} (turn {turn})")
        spans.append(AnswerSpan(start, stop, prompt_start))
        next_index = index + 1
    return spans
