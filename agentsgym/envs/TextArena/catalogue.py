"""Read ``catalogue.json``: what is known of each game of TextArena's, by its base id.

``python -m tools.textarena_catalogue`` makes the file by playing every game.
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
    """What is known of one game.

    Attributes:
        min_players: The fewest players.
        max_players: The most.
        status: ``"ok"``: it runs as it is; ``"words"``: it needs word data; ``"gamemaster"``: a language model;
            ``"broken"``: it does not run.
        reason: Why it is broken, or what was mended; empty where nothing is to be said.
        min_python: The least version of Python that reads its source, as ``"3.12"``; empty for all supported ones.
        reproducible: Whether equal seeds and actions gave equal transcripts, also with other games in between, and in
            another process.
        seeds_matter: Whether different seeds gave different games.
        hidden: Whether a player may know what another does not; False only where every message went to everyone, and
            prompts at most say which side a player is.
        step_us: Microseconds of processor time that one step of the bare game took when the file was made.
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
    """All games, by base id in order."""
    found: dict[str, Any] = json.loads(CATALOGUE_FILE.read_text(encoding="utf-8"))
    return {game: GameEntry(**entry) for game, entry in found["games"].items()}


def games() -> dict[str, dict[str, Any]]:
    """The facts that ``agentsgym envs`` shows of each game."""
    listed = {game: asdict(entry) for game, entry in catalogue().items()}
    for facts in listed.values():
        needs = "a language model as its gamemaster" if facts["status"] == "gamemaster" else ""
        facts["note"] = facts.pop("reason") or needs
        del facts["step_us"]
    return listed
