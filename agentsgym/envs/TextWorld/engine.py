"""Generate TextWorld's games, cache them on disk, and run one; used in an engine's process."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import logging
import re
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentsgym.cached_folders import cache_folder, is_intact, write_folder
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of

logger = logging.getLogger(__name__)

_VERSION = 8  # the version of the Z-machine, which is the first byte of a story file
_BANNER = re.compile(r"^[ \\_$|/<>]*[\\_$|][ \\_$|/<>]*$\n?", re.M)
_PROMPT = re.compile(r"\n?>[ ]*(?:-=[^\n]*)?\s*\Z")  # the input prompt, followed by the status line
_ENDED = re.compile(r"\s*Would you like to RESTART, RESTORE a saved game, QUIT or UNDO the last command\?\s*\Z")
_EMPTY_LINES = re.compile(r"\n\s*\n(?:\s*\n)*")
_FORMAT = 1  # version of the format on disk
_NAME = "game.z8"
_MAX_ATTEMPTS = 20  # seeds tried to find a map on which the quest fits


class TextWorldEngine:
    """Runs one game at a time; see :mod:`agentsgym.envs.shared.engines`.

    The argument of ``start`` is ``{"file": path}``, or has the keys ``kind``, ``options``, ``seed`` and ``cache_dir``
    for a game to generate.
    """

    def __init__(self) -> None:
        self._textworld: Any = importlib.import_module("textworld")
        self._path: Path | None = None
        self._env: Any = None
        self._game: Any = None  # TextWorld's state of the game
        self._num_moves = 0
        self._first_length = 0
        self._progress = 0.0

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        """Generate the game unless it is a file, and start it.

        Raises:
            ValueError: The file is not a TextWorld game.
        """
        if "file" in game:
            self._begin(Path(game["file"]))
        else:
            with story_file(game["kind"], game["options"], game["seed"], game["cache_dir"]) as path:
                self._begin(path, is_generated=True)
        self._num_moves = self._game["moves"]
        self._first_length = len(self._game["policy_commands"] or ())
        self._progress = 0.0
        state = self._game
        return {
            "text": opening(state["feedback"]),
            "verbs": state["verbs"],
            "walkthrough": list(state.get("extra.walkthrough") or ()),
            "max_score": state["max_score"],
            **self._common_response(),
        }

    def step(self, command: str) -> dict[str, Any]:
        """Run one command."""
        self._game, _, _ = self._env.step(command)
        state, before = self._game, self._num_moves
        self._num_moves = state["moves"]
        ended = bool(state["won"] or state["lost"])
        return {
            "text": narrative(state["feedback"]),
            "understood": ended or self._num_moves != before,
            **self._common_response(),
        }

    def close(self) -> None:
        """Close the game's interpreter."""
        if self._env is not None:
            self._env.close()
        self._env = self._path = None

    def _begin(self, path: Path, *, is_generated: bool = False) -> None:
        """Start the game, after loading it unless it is the previous one; the file is not needed afterwards."""
        if not is_generated or path != self._path:
            self.close()
            with path.open("rb") as file:
                if file.read(1) != bytes([_VERSION]):
                    raise ValueError(
                        f"{path} must be a game for version {_VERSION} of the Z-machine (a .z8 file, as written by "
                        "tw-make)"
                    )
            infos = self._textworld.EnvInfos(
                admissible_commands=True, policy_commands=True, facts=True, won=True, lost=True, score=True,
                max_score=True, extras=["walkthrough"],
            )  # fmt: skip
            self._env = self._textworld.start(str(path), request_infos=infos)
            self._env.seed(0)  # otherwise a game with randomness would be seeded by the clock
            self._path = path
        self._game = self._env.reset()

    def _common_response(self) -> dict[str, Any]:
        """Return the part of a response that ``start`` and ``step`` share."""
        state = self._game
        won, lost, policy = bool(state["won"]), bool(state["lost"]), list(state["policy_commands"] or ())
        score = 1.0 if won else min(1.0, (state["score"] or 0) / (state["max_score"] or 1))
        # The progress is the completed fraction of the shortest known solution: 1 when won, negative after a detour,
        # and 0 if the game can no longer be won. In a state without a known solution it is unchanged. If no solution
        # was known at the start, the score is used instead.
        if won or not self._first_length:
            self._progress = score
        elif lost or state["_game_progression"].failed:
            self._progress = 0.0
        elif policy:
            self._progress = 1 - len(policy) / self._first_length
        # The facts and the score determine the remaining task.
        position = "\n".join([*sorted(map(str, state["_facts"])), str(state["score"])])
        return {
            "admissible": [] if won or lost else state["admissible_commands"],
            "policy": policy,
            "won": won,
            "lost": lost,
            "score": score,
            "progress": self._progress,
            "key": hashlib.blake2b(position.encode(), digest_size=12).hexdigest(),
        }


def narrative(feedback: str) -> str:
    r"""Strip the prompt, the status line and redundant empty lines.

    >>> narrative("\nYou can't go that way.\n\n\n>      -= Bedroom =-1/6")
    "You can't go that way."
    """
    text = _ENDED.sub("", _PROMPT.sub("", feedback))
    return _EMPTY_LINES.sub("\n\n", text).strip()


def opening(feedback: str) -> str:
    """Strip the banner, and everything that :func:`narrative` strips."""
    return narrative(_BANNER.sub("", feedback))


@contextmanager
def story_file(kind: str, options: Mapping[str, Any], seed: int, cache_dir: str | None) -> Generator[Path, None, None]:
    """Provide the path of a game's story file, cached or generated; its .json description is in the same folder.

    Without a cache, both are deleted when the context exits, so nothing is left if the engine is killed later.

    Args:
        kind: A key of :data:`~agentsgym.envs.TextWorld.env.KINDS`.
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
