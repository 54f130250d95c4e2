"""Format a player's observation as the text of one message, and read the outcome of a game.

For each player, a TextArena game has a list of ``(from_id, message, type)`` that is emptied when the player observes.
The text is these messages, joined by newlines. Another player's message is prefixed with ``[Player 1]``; the player's
own messages are omitted, since the conversation contains them as the agent's actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_TURNS_OF_SET = 20  # each turn can find one set

#: The condition for a win in single-player games that may reward mere progress with 1, by the folder of their class.
_WINS: Mapping[str, Callable[[Any], bool]] = {
    "Countdown": lambda game: game.numbers[-1] == game.target and len(game.numbers) < len(game.orig_numbers),
    "FifteenPuzzle": lambda game: game._is_solved(),
    "Game2048": lambda game: game._max_tile() >= game.target_tile,
    "Set": lambda game: game.state.game_state["score"] >= _TURNS_OF_SET,
    "Slitherlink": lambda game: game._is_solved(),
}

#: The maximum worth of progress in an unsolved game: one minus the smallest possible remainder.
_MAX_PROGRESS: Mapping[str, Callable[[Any], float]] = {
    "Countdown": lambda _: 1 - 1 / 1000,  # a distance of one
    "FifteenPuzzle": lambda _: 1 - 1 / 16,  # one place
    "Slitherlink": lambda game: 1 - 1 / (game.R * game.C),  # one clue
}


NOTHING_NEW = "It is your turn."
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


def is_won(game: Any, rewards: Mapping[int, float], seat: int, outcome: Mapping[str, Any]) -> bool:
    """Return whether a player won by the rules of a game that is over; a reward for progress is not a win.

    ``outcome`` is the game's info about the player.
    """
    if outcome.get("invalid_move"):
        return False
    if len(rewards) > 1:
        return rewards[seat] == max(rewards.values()) > min(rewards.values())
    wins = _WINS.get(folder_of(game))
    return rewards[seat] >= 1.0 and (wins is None or wins(game))


def worth(game: Any, reward: float) -> float:
    """Return the worth of a single player's reward, which is less than 1 if the game rewards mere progress with 1."""
    max_progress = _MAX_PROGRESS.get(folder_of(game))
    if max_progress is None or reward < 1.0 or _WINS[folder_of(game)](game):
        return reward
    return max_progress(game)


def folder_of(game: Any) -> str:
    """Return the folder of a game's class, or, for a patched class, of the original class."""
    modules = (base.__module__ for base in type(game).__mro__)
    return next((name.split(".")[-2] for name in modules if name.startswith("textarena.envs.")), "")
