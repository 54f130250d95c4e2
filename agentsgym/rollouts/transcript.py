"""The exact token stream of one conversation.

A token that the agent sampled is never decoded and encoded again, and the prompt of every turn is exactly the ids
recorded so far::

    observe          act         observe                    act
    first prompt  ▏  sampled ids  ▏ end of turn? glue, text  ▏ sampled ids
    mask 0        ▏  mask 1       ▏ mask 0                   ▏ mask 1
"""

from __future__ import annotations

from collections.abc import Sequence

from agentsgym.rollouts.chat_format import ENDED_BY_TEXT, ChatFormat
from agentsgym.types import Action, Message

__all__ = ["ChatFormat", "Transcript"]

_NOWHERE = -1


class Transcript:
    """One live conversation: messages and, with a tokenizer, the tokens that stand for them.

    Observations and actions take turns: ``observe``, ``act``, ``observe``, …

    Attributes:
        messages: The conversation so far.
        token_ids: Its exact tokens, (T,); empty without a tokenizer.
    """

    __slots__ = ("_ended_by", "_format", "_num_messages", "_num_tokens", "messages", "token_ids")

    def __init__(self, chat_format: ChatFormat | None) -> None:
        """Begin an empty conversation, with messages only if ``chat_format`` is None."""
        self.messages: list[Message] = []
        self.token_ids: list[int] = []
        self._format = chat_format
        self._ended_by: int | None = None
        self._num_messages = _NOWHERE  # before the observation that waits for an action
        self._num_tokens = _NOWHERE

    def observe(self, messages: Sequence[Message]) -> None:
        """Append an observation and the generation prompt: the work of its own text, whatever came before.

        Args:
            messages: What is new; the first time the whole first prompt, system message included.

        Raises:
            TemplateError: The chat template does not take messages of these roles here.
            RuntimeError: The last observation still waits for its action.
        """
        if self._num_messages >= 0:
            raise RuntimeError("observe wants an action after each observation, but the last one has none yet")
        num_messages, num_tokens = len(self.messages), len(self.token_ids)
        chat_format = self._format
        if chat_format is not None:
            roles = tuple([message["role"] for message in messages])
            scaffold = chat_format.later(roles, self._ended_by) if num_messages else chat_format.first(roles)
            scaffold.write([message["content"] for message in messages], self.token_ids)
        self.messages += messages
        self._num_messages, self._num_tokens = num_messages, num_tokens

    def retract(self) -> None:
        """Take back the last observation, messages and tokens.

        Raises:
            RuntimeError: There is none, or it has its action already.
        """
        if self._num_messages < 0:
            raise RuntimeError("retract wants an observation without an action, but there is none")
        del self.messages[self._num_messages :]
        del self.token_ids[self._num_tokens :]
        self._num_messages = self._num_tokens = _NOWHERE

    def act(self, action: Action, limit: int | None = None) -> tuple[int, int]:
        """Append what the agent said.

        Sampled ids are kept as they are. Text without ids is encoded once and closed with the template's end of turn.
        A turn that nothing ended is closed by the template's own tokens in front of the next observation, outside
        the span.

        Args:
            action: The answer to the last observation.
            limit: The most tokens for text without ids; what is cut by it is not closed, and its message is what is
                left of it. None for no limit.

        Returns:
            The span ``[start, stop)`` of the agent's tokens; empty without a tokenizer.

        Raises:
            RuntimeError: There is no observation to answer.
        """
        if self._num_messages < 0:
            raise RuntimeError("act wants an observation to answer, but the last one has its action already")
        self._num_messages = self._num_tokens = _NOWHERE
        text, start = action.text, len(self.token_ids)
        chat_format = self._format
        if chat_format is not None and action.token_ids is not None:
            self.token_ids += action.token_ids
            self._ended_by = chat_format.ended_by(action.token_ids, action.finish_reason)
        elif chat_format is not None:
            text = self._write(chat_format, text, limit)
        self.messages.append({"role": "assistant", "content": text})
        return start, len(self.token_ids)

    def _write(self, chat_format: ChatFormat, text: str, limit: int | None) -> str:
        """Append the tokens of an answer that was given as text; returns the text, or what the limit left of it."""
        trimmed = text if chat_format.answer_trim is None else chat_format.answer_trim(text)
        token_ids = chat_format.encode(trimmed + chat_format.text_before_end)
        end = chat_format.end_of_turn_ids
        if limit is not None and len(token_ids) + len(end) > limit:
            self._ended_by = None
            self.token_ids += token_ids[:limit]
            return text if len(token_ids) <= limit else chat_format.decode(token_ids[:limit])
        self._ended_by = (ENDED_BY_TEXT if chat_format.end_of_turn_id is None else end[-1]) if end else None
        self.token_ids += [*token_ids, *end]
        return text
