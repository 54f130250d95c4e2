"""Find the games in an ALFWorld data folder, which has the layout of ``alfworld-download``.

::

    json_2.1.1/train/<task type>-<object>-…/trial_…/game.tw-pddl     the game, with its walkthrough
                                                   /traj_data.json   its task type
    json_2.1.1/valid_seen, json_2.1.1/valid_unseen                   the same for the other splits
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from agentsgym.cached_folders import cache_folder
from agentsgym.errors import ConfigError, TaskError
from agentsgym.fields import is_strings
from agentsgym.texts import sentence_of, shown

logger = logging.getLogger(__name__)

TASK_TYPES = (
    "pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep", "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep", "pick_two_obj_and_place",
)  # fmt: skip
#: The names of the splits in the engine's own configuration, and their folders.
SPLITS = {"train": "train", "eval_in_distribution": "valid_seen", "eval_out_of_distribution": "valid_unseen"}
GAME, TASK = "game.tw-pddl", "traj_data.json"
VARIABLE = "ALFWORLD_DATA"
_TREE = "json_2.1.1"
_FORMAT = 1
_NOT_SUPPORTED = ("movable", "Sliced")
_DOWNLOAD = f"`alfworld-download` downloads the data (into ${VARIABLE}, or ~/.cache/alfworld)"


def data_folder(data: str | None) -> Path:
    """Locate the data folder.

    Args:
        data: A path; None for ``$ALFWORLD_DATA``, or ``~/.cache/alfworld`` if that is not set.
    """
    path = data or os.environ.get(VARIABLE)
    folder = Path(path).expanduser() if path else Path.home() / ".cache" / "alfworld"
    if not folder.is_dir():
        source = "env_config['data']" if data else f"${VARIABLE}" if path else "the default"
        raise ConfigError(
            f"ALFWorld's data folder {folder} ({source}) does not exist. {_DOWNLOAD}; `python -m tools.households "
            "FOLDER` in a clone of agentsgym's repository generates small data offline"
        )
    return folder


def find_games(data: Path, split: str) -> list[dict[str, str]]:
    """Find the tasks of a split; each has its ``game``, a path relative to the data folder, and its ``task_type``.

    Invalid files, and games that ``AlfredTWEnv`` also skips, are skipped; their number by reason is logged. The result
    is cached in ``agentsgym/alfworld`` in the user's cache, and refreshed for each file that has changed.

    Args:
        data: The data folder, or the folder ``json_2.1.1`` in it.
        split: A name in :data:`SPLITS`, or the name of the split's folder.
    """
    name = SPLITS.get(split, split)
    if name not in SPLITS.values():
        known = ", ".join(map(repr, dict.fromkeys((*SPLITS, *SPLITS.values()))))
        raise ConfigError(f"split must be one of {known}, got {shown(split)}")
    folder = next((path for path in (data / _TREE / name, data / name) if path.is_dir()), None)
    if folder is None:
        raise ConfigError(f"ALFWorld's data folder {data} does not contain {_TREE}/{name}. {_DOWNLOAD}")
    digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=12).hexdigest()
    cache = cache_folder("alfworld") / f"{digest}.json"
    known, found = _read_cache(cache), dict[str, list[str]]()
    for root, folders, files in os.walk(folder):
        folders.sort()
        if TASK in files:
            trial = Path(root)
            path = trial.relative_to(data).as_posix()
            stamp = f"{file_stamp(trial / TASK)} {file_stamp(trial / GAME)}"
            cached = known.get(path, [])
            found[path] = cached if len(cached) == 3 and cached[0] == stamp else [stamp, *_read_trial(trial, path)]
    if found != known:
        _write_cache(cache, found)
    tasks = [{"game": f"{path}/{GAME}", "task_type": kind} for path, (_, kind, why) in found.items() if not why]
    skipped = Counter(why for _, _, why in found.values() if why)
    reasons = ", ".join(f"{count} {why}" for why, count in skipped.items()) or "none"
    logger.info("%s has %d games; skipped: %s", folder, len(tasks), reasons)
    if not tasks:
        raise ConfigError(f"{folder} has no playable game (skipped: {reasons}). {_DOWNLOAD}")
    return tasks


def game_file(data: Path, path: Any) -> Path:
    """Locate the file of a task's game."""
    if not isinstance(path, str) or not path:
        raise TaskError(
            f"task_data['game'] must be the path of a {GAME} relative to the data folder, got {shown(path)}"
        )
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise TaskError(f"task_data['game'] must be a path inside the data folder, got {shown(path)}")
    file = data / parts
    if not file.is_file():
        raise TaskError(f"task_data['game'] is {shown(path)}, which does not exist in the data folder {data}")
    return file


def file_stamp(file: Path) -> str:
    """Return the modification time and size of a file, which identify its version; empty if it does not exist."""
    try:
        status = file.stat()
    except OSError:
        return ""
    return f"{status.st_mtime_ns}-{status.st_size}"


def _read_trial(trial: Path, path: str) -> tuple[str, str]:
    """Return a game's task type, and the reason why it is skipped, which is empty if it is playable."""
    if any(word in path for word in _NOT_SUPPORTED):
        return "", "movable or sliced"
    if not (trial / GAME).is_file():
        return "", "without a game file"
    try:
        task: Any = json.loads((trial / TASK).read_text(encoding="utf-8"))
        game: Any = json.loads((trial / GAME).read_text(encoding="utf-8"))
        kind, is_solvable = task["task_type"], bool(game.get("solvable"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("the game in %s is skipped, since it cannot be read: %s", trial, sentence_of(error))
        return "", "unreadable"
    if kind not in TASK_TYPES:
        return "", "of another task type"
    return kind, "" if is_solvable else "not known to be solvable"


def _read_cache(cache: Path) -> dict[str, list[str]]:
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # a damaged cache is rebuilt
        cached: Any = json.loads(cache.read_text(encoding="utf-8"))
        if cached["format"] == _FORMAT and all(map(is_strings, cached["trials"].values())):
            return cached["trials"]
    return {}


def _write_cache(cache: Path, found: Mapping[str, list[str]]) -> None:
    """Write the cache atomically."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache.parent, delete=False, encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "trials": found}, file)
        Path(file.name).replace(cache)
    except OSError as error:
        logger.warning("the list of ALFWorld's games cannot be cached in %s: %s", cache, sentence_of(error))
