"""Format a player's observation as the text of one message.

For each player, a TextArena game has a list of ``(from_id, message, type)`` that is emptied when the player observes.
The text is these messages, joined by newlines. Another player's message is prefixed with ``[Player 1]``; the player's
own messages are omitted, since the conversation contains them as the agent's actions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentsgym.types import Message

NOTHING_NEW = "It is your turn."
_HEADER = re.compile(r"\[Player \d+\]\n")
GAME_ID = -1


def text_of(messages: Sequence[Any], seat: int, roles: Mapping[int, str], *, shared: bool = False) -> str:
    """Format the messages that are new to a player.

    If the conversation is shared by all players, it contains their actions, so none has to be repeated. ``roles`` are
    the players' names in the game.

    Raises:
        ValueError: A message is malformed.
    """
    lines: list[str] = []
    for entry in messages:
        sender, message, kind = entry
        if not isinstance(message, str) or not hasattr(kind, "name"):
            raise ValueError(f"a game's message must be (int, str, ObservationType), got {entry!r}")
        if kind.name != "PLAYER_ACTION":
            lines.append(message)
        elif not shared and sender != seat and not (sender == GAME_ID and len(roles) <= 2):
            lines.append(with_sender(sender, message, roles))
    return "\n".join(lines) or NOTHING_NEW


def with_sender(sender: int, message: str, roles: Mapping[int, str]) -> str:
    """Prefix a player's message with the player's name in the game."""
    return f"[{roles.get(sender) or f'Player {sender}'}] {message}"


def with_header(seat: int, text: str) -> str:
    """Prefix a self-play message with a header that names its recipient."""
    return f"[Player {seat}]\n{text}"


def last_view(messages: list[Message]) -> list[Message]:
    """Return the system message and the messages from the last header on, which are the current player's conversation.

    A function for ``env_config["history"]`` if each observation is the complete conversation of the player to move, in
    which only the first message has a header (:func:`with_header`). Text in an action that looks like a header is
    ignored.
    """
    starts = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "user" and _HEADER.match(message["content"])
    ]
    system = [message for message in messages[:1] if message["role"] == "system"]
    return [*system, *messages[starts[-1] :]] if starts else messages
