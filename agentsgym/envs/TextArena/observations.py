"""Write what a player of a game is shown as the text of one message.

TextArena's games keep, for each player, a list of ``(from_id, message, type)`` that is emptied when the player is
asked. The text is those messages, joined by newlines, without a prefix. What another player said is written
``[Player 1] …``; what the player said itself is left out, since the conversation has it as the agent's own answer.
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
        messages: As the game keeps them.
        seat: The player.
        roles: The players' names in the game.
        shared: Whether all players' answers stand in one conversation, so that none has to be repeated.

    Raises:
        ValueError: A message is none.
    """
    lines: list[str] = []
    for entry in messages:
        sender, message, kind = entry
        if not isinstance(message, str) or not hasattr(kind, "name"):
            raise ValueError(f"a game's message must be (int, str, ObservationType), got {entry!r}")
        if kind.name != "PLAYER_ACTION":
            lines.append(message)
        elif not shared and sender != seat and not (sender == GAME_ID and len(roles) <= 2):
            lines.append(said_by(sender, message, roles))
    return "\n".join(lines) or NOTHING_NEW


def said_by(sender: int, message: str, roles: Mapping[int, str]) -> str:
    """Write what a player said, with the name that the game gives the player."""
    return f"[{roles.get(sender) or f'Player {sender}'}] {message}"


def with_header(seat: int, text: str) -> str:
    """Name the player that a message of self-play is for, in its first line."""
    return f"[Player {seat}]\n{text}"


def last_view(messages: list[Message]) -> list[Message]:
    """Keep of a conversation the system message and the newest player's view: from the last header on.

    A function for ``env_config["history"]`` where each observation is the whole conversation of the player whose turn
    it is, of which only the first message has a header (:func:`with_header`). What looks like one in an answer is none.
    """
    starts = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "user" and _HEADER.match(message["content"])
    ]
    system = [message for message in messages[:1] if message["role"] == "system"]
    return [*system, *messages[starts[-1] :]] if starts else messages
