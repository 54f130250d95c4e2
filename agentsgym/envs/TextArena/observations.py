"""Write a player's observation as the text of one message.

TextArena's games keep, for each player, a list of ``(from_id, message, type)`` that is emptied when the player
observes. The text is those messages, joined by newlines, without a prefix. Another player's message is written
``[Player 1] …``; the player's own messages are left out, since the conversation has them as the agent's actions.
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
    """Write the messages that are new to a player.

    Args:
        messages: The messages, as the game keeps them.
        seat: The player.
        roles: The players' names in the game.
        shared: Whether all players' actions are in one conversation, so that none has to be repeated.

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
    """Write a player's message, prefixed with the player's name in the game."""
    return f"[{roles.get(sender) or f'Player {sender}'}] {message}"


def with_header(seat: int, text: str) -> str:
    """Prefix a message of self-play with a header that names the player it is for."""
    return f"[Player {seat}]\n{text}"


def last_view(messages: list[Message]) -> list[Message]:
    """Keep the system message and the newest player's view of a conversation: everything from the last header on.

    A function for ``env_config["history"]`` if each observation is the whole conversation of the player to move, in
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
