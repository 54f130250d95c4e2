"""Replace a long history by a note that the agent writes, and that is trained like any other turn.

::

    first prompt ▏turn ▏turn ▏turn ▏"Write a note…" ▏note      history exceeds summarize_over_tokens
    first prompt ▏note ▏new observation ▏turn ▏turn …           a new segment
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from agentsgym.errors import ConfigError
from agentsgym.types import Message

if TYPE_CHECKING:
    from agentsgym.tokens.transcript import Transcript

SUMMARIZE: Final = "summarize"
"""The value of ``env_config["history"]``."""

DEFAULT_PROMPT: Final = (
    "Write a note of everything that matters for the rest of this conversation. You will see the note and the first "
    "message, and nothing else of what was said so far."
)


class NotedHistory:
    """The history of one conversation, as a function from messages to messages (see ``Transcript``).

    Attributes:
        limit: Number of tokens above which a note is requested.
        prompt: The request.
        note_turns: Indices of the turns in which notes were written.
    """

    def __init__(self, limit: int, prompt: str) -> None:
        self.limit, self.prompt = limit, prompt
        self.note_turns: list[int] = []
        self._is_written = False

    def is_due(self, transcript: Transcript, num_turns: int) -> bool:
        """Whether the prompt is too long; never before the first turn or directly after a note, which cannot help then.

        Without a tokenizer, four characters count as a token.
        """
        size = len(transcript.token_ids)
        if not size:
            size = sum(len(message["content"]) for message in transcript.prompt_messages) // 4
        return size > self.limit and num_turns > (self.note_turns[-1] + 1 if self.note_turns else 0)

    def written(self, turn: int) -> None:
        """Replace the history from the next prompt on by the note that was just written in a turn."""
        self.note_turns.append(turn)
        self._is_written = True

    def __call__(self, messages: list[Message]) -> list[Message]:
        """Keep the system message, the first message and the note of earlier messages, if a note was just written."""
        if not self._is_written:
            return messages
        self._is_written = False
        note = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
        first = next((place for place, message in enumerate(messages) if message["role"] != "system"), 0)
        return [*messages[: first + 1], messages[note], *messages[note + 1 :]]


def as_text(messages: list[Message]) -> list[Message]:
    """Turn results of tools into user messages, since a note precedes them instead of their calls."""
    return [
        Message(role="user", content=message["content"]) if message["role"] == "tool" else message
        for message in messages
    ]


def check_notes(config: Mapping[str, Any]) -> None:
    """Reject a limit without notes, and notes without a limit.

    Raises:
        ConfigError: Only one of the two is set.
    """
    has_limit = config["summarize_over_tokens"] is not None
    if (config["history"] == SUMMARIZE) != has_limit:
        given = "it is None" if not has_limit else f"history is {config['history']!r}"
        raise ConfigError(
            "env_config['history'] = 'summarize' and env_config['summarize_over_tokens'] must be set together, but "
            + given
        )
