"""Generate games with TextWorld and cache them on disk; used in the engine's process."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import logging
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentsgym.cached_folders import cache_folder, is_intact, write_folder
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of

logger = logging.getLogger(__name__)

_FORMAT = 1  # version of the format on disk
_NAME = "game.z8"
_MAX_ATTEMPTS = 20  # seeds tried to find a map on which the quest fits


@contextmanager
def story_file(kind: str, options: Mapping[str, Any], seed: int, cache_dir: str | None) -> Generator[Path, None, None]:
    """Provide the path of a game's story file, cached or generated; its .json description is in the same folder.

    Without a cache, both are deleted when the context exits, so nothing is left if the engine is killed later.

    Args:
        kind: A key of :data:`~agentsgym.envs.TextWorld.kinds.KINDS`.
        options: All options of that kind.
        seed: The seed, which determines the game together with the options and TextWorld's version.
        cache_dir: The folder of cached games; None for the user's cache, ``""`` for no cache on disk.

    Raises:
        Exception: The generator cannot make such a game.
    """
    if cache_dir != "":
        folder = cache_folder("textworld", cache_dir) / game_key(kind, options, seed)
        try:
            if not is_intact(folder, "the game"):
                write_folder(folder, lambda unfinished: _make(kind, options, seed, unfinished / _NAME))
        except OSError as error:
            logger.warning("the game cannot be cached in %s: %s", folder, sentence_of(error))
        else:
            yield folder / _NAME
            return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        path = Path(temporary) / _NAME
        _make(kind, options, seed, path)
        yield path


def game_key(kind: str, options: Mapping[str, Any], seed: int) -> str:
    """Hash the parameters that determine a game."""
    parameters = [_FORMAT, importlib.metadata.version("textworld"), kind, dict(options), seed]
    return hashlib.blake2b(json.dumps(parameters, sort_keys=True).encode(), digest_size=16).hexdigest()


def _make(kind: str, options: Mapping[str, Any], seed: int, path: Path) -> None:
    """Generate and compile a game.

    Raises:
        QuestGenerationError: No seed tried produced a map on which the quest fits.
        ValueError: The compiler rejects the game.
    """
    generator = importlib.import_module("textworld.generator")
    try:
        attempt = 1
        while True:
            try:
                game, settings = _generate(kind, options, seed)
                break
            except generator.QuestGenerationError:
                if attempt == _MAX_ATTEMPTS:
                    raise
            seed = derive_seed("textworld attempt", seed, attempt) % 2**31
            attempt += 1
        settings.path = str(path)
        generator.compile_game(game, settings)
    except generator.CouldNotCompileGameError as error:  # the first line of its message is empty
        raise ValueError(
            f"TextWorld's compiler rejected the game of kind {kind!r} generated with the options {dict(options)}: use "
            "options for a smaller game"
        ) from error
    for extra in [*path.parent.iterdir()]:
        if extra.suffix not in (".z8", ".json"):
            extra.unlink()  # the game's source, which is not needed


def _generate(kind: str, options: Mapping[str, Any], seed: int) -> tuple[Any, Any]:
    textworld = importlib.import_module("textworld")
    textworld.g_rng.set_seed(seed)  # for code that uses this global generator instead of those in the settings
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
