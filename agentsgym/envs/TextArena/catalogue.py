"""Read ``catalogue.json``: the known facts about each TextArena game, by base id.

``python -m tools.textarena_catalogue`` generates the file by playing every game.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

CATALOGUE_FILE = Path(__file__).parent / "catalogue.json"
Status = Literal["ok", "words", "gamemaster", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GameEntry:
    """The known facts about one game.

    Attributes:
        min_players: The minimum number of players.
        max_players: The maximum number of players.
        status: ``"ok"`` for a game that runs unchanged, ``"words"`` for one that needs word data, ``"gamemaster"`` for
            one that needs a language model, ``"broken"`` for one that does not run.
        reason: The reason why the game is broken, or a note that it is patched; otherwise empty.
        min_python: The minimum Python version that can parse the game's source, such as ``"3.12"``; empty if all
            supported versions can.
        reproducible: Whether equal seeds and actions gave equal transcripts, even with other games interleaved and in
            another process.
        seeds_matter: Whether different seeds gave different games.
        hidden: Whether players may have private information; False only if every message went to everyone and prompts
            reveal at most which side a player is on.
        step_us: The CPU time of one step of the game alone, in microseconds, measured when the file was generated.
    """

    min_players: int
    max_players: int
    status: Status = "ok"
    reason: str = ""
    min_python: str = ""
    reproducible: bool = True
    seeds_matter: bool = True
    hidden: bool = True
    step_us: float | None = None


@functools.cache
def catalogue() -> dict[str, GameEntry]:
    """Return all games, by base id, in order."""
    found: dict[str, Any] = json.loads(CATALOGUE_FILE.read_text(encoding="utf-8"))
    return {game: GameEntry(**entry) for game, entry in found["games"].items()}


def games() -> dict[str, dict[str, Any]]:
    """Return the facts about each game that ``agentsgym envs`` prints."""
    listed = {game: asdict(entry) for game, entry in catalogue().items()}
    for facts in listed.values():
        needs = "a language model as its gamemaster" if facts["status"] == "gamemaster" else ""
        facts["note"] = facts.pop("reason") or needs
        del facts["step_us"]
    return listed
