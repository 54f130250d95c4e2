"""Make games with TextWorld's generator and keep them on disk; runs in the engine's process."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentsgym.envs.kept_folders import cache_folder, is_whole, keep
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of

logger = logging.getLogger(__name__)

_FORMAT = 1  # of what is kept on disk
_NAME = "game.z8"
_MOST_TRIES = 20  # of seeds, for a map on which the quest fits


class MadeGame:
    """The file of a game that was made, and the temporary folder that it stands in, if it is not kept.

    Attributes:
        path: The story file; its description is beside it.
    """

    def __init__(self, path: Path, folder: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.path = path
        self._folder = folder

    def remove(self) -> None:
        """Remove the game, unless it is kept."""
        if self._folder is not None:
            self._folder.cleanup()


def made_game(kind: str, options: Mapping[str, Any], seed: int, cache_dir: str | None) -> MadeGame:
    """Give the game of a kind, its options and a seed: the one on disk, or a new one.

    Args:
        kind: A key of :data:`~agentsgym.envs.TextWorld.kinds.KINDS`.
        options: All options of that kind.
        seed: Decides the game, together with the options and TextWorld's version.
        cache_dir: Where games are kept; None for the user's cache, ``""`` for none on disk.

    Raises:
        Exception: The generator finds no such game.
    """
    if cache_dir != "":
        folder = cache_folder("textworld", cache_dir) / game_key(kind, options, seed)
        try:
            if not is_whole(folder, "the game"):
                keep(folder, lambda unfinished: _make(kind, options, seed, unfinished / _NAME))
        except OSError as error:
            logger.warning("the game is not kept in %s: %s", folder, sentence_of(error))
        else:
            return MadeGame(folder / _NAME)
    temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    path = Path(temporary.name) / _NAME
    _make(kind, options, seed, path)
    return MadeGame(path, temporary)


def game_key(kind: str, options: Mapping[str, Any], seed: int) -> str:
    """Hash what decides a game."""
    made_by = [_FORMAT, importlib.metadata.version("textworld"), kind, dict(options), seed]
    return hashlib.blake2b(json.dumps(made_by, sort_keys=True).encode(), digest_size=16).hexdigest()


def _make(kind: str, options: Mapping[str, Any], seed: int, path: Path) -> None:
    """Generate and compile a game; where a seed gives a map on which the quest does not fit, seeds that follow from it.

    Raises:
        QuestGenerationError: None of them does.
    """
    generator = importlib.import_module("textworld.generator")
    for attempt in range(1, _MOST_TRIES):
        try:
            game, settings = _generated(kind, options, seed)
            break
        except generator.QuestGenerationError:
            seed = derive_seed("textworld attempt", seed, attempt) % 2**31
    else:
        game, settings = _generated(kind, options, seed)
    settings.path = str(path)
    generator.compile_game(game, settings)
    for extra in [*path.parent.iterdir()]:
        if extra.suffix not in (".z8", ".json"):
            extra.unlink()  # the source, which nothing reads


def _generated(kind: str, options: Mapping[str, Any], seed: int) -> tuple[Any, Any]:
    textworld = importlib.import_module("textworld")
    textworld.g_rng.set_seed(seed)  # for whatever does not draw from the settings' own generators
    settings: Any = textworld.GameOptions()
    settings.seeds = seed
    settings.force_recompile = True
    if kind == "custom":
        settings.nb_rooms, settings.nb_objects = options["rooms"], options["objects"]
        settings.nb_parallel_quests = options["parallel_quests"]
        settings.quest_length = options["quest_length"]
        return importlib.import_module("textworld.generator").make_game(settings), settings
    challenges = importlib.import_module("textworld.challenges").CHALLENGES
    _, make, _ = challenges[f"tw-{kind}"]
    return make(dict(options), settings), settings
