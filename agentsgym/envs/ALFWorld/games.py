"""Find the games of an ALFWorld data folder, as ``alfworld-download`` lays it out.

::

    json_2.1.1/train/<task type>-<object>-…/trial_…/game.tw-pddl     the game, with its walkthrough
                                                   /traj_data.json   what its task type is
    json_2.1.1/valid_seen, json_2.1.1/valid_unseen                   likewise
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

from agentsgym.envs.shared.cached_folders import cache_folder
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
_DOWNLOAD = f"`alfworld-download` gets the data (into ${VARIABLE}, or ~/.cache/alfworld)"


def data_folder(data: str | None) -> Path:
    """Locate the data folder.

    Args:
        data: A path; None for ``$ALFWORLD_DATA``, or ``~/.cache/alfworld`` if that is not set.

    Raises:
        ConfigError: The folder does not exist; the message contains the download command.
    """
    known = data or os.environ.get(VARIABLE)
    folder = Path(known).expanduser() if known else Path.home() / ".cache" / "alfworld"
    if not folder.is_dir():
        source = "env_config['data']" if data else f"${VARIABLE}" if known else "its usual place"
        raise ConfigError(
            f"ALFWorld's data folder {folder} ({source}) does not exist. {_DOWNLOAD}; "
            "`python -m tools.households FOLDER` in a clone of agentsgym's repository makes small ones offline"
        )
    return folder


def find_games(data: Path, split: str) -> list[dict[str, str]]:
    """Find the tasks of a split: ``game``, the path of its file relative to the data folder, and ``task_type``.

    Games that ``AlfredTWEnv`` leaves out and invalid files are left out; the log has their number, by reason. The
    result is cached per file in the user's cache, ``agentsgym/alfworld``, and refreshed when a file has changed.

    Args:
        data: The data folder, or the ``json_2.1.1`` in it.
        split: A name in :data:`SPLITS`, or the folder's.

    Raises:
        ConfigError: The split does not exist, or contains no game.
    """
    name = SPLITS.get(split, split)
    if name not in SPLITS.values():
        known = ", ".join(map(repr, dict.fromkeys((*SPLITS, *SPLITS.values()))))
        raise ConfigError(f"split must be one of {known}, got {shown(split)}")
    folder = next((one for one in (data / _TREE / name, data / name) if one.is_dir()), None)
    if folder is None:
        raise ConfigError(f"ALFWorld's data in {data} have no {_TREE}/{name}. {_DOWNLOAD}")
    digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=12).hexdigest()
    cache = cache_folder("alfworld") / f"{digest}.json"
    known, found = _read_cache(cache), dict[str, list[str]]()
    for root, folders, files in os.walk(folder):
        folders.sort()
        if TASK in files:
            trial = Path(root)
            path = trial.relative_to(data).as_posix()
            stamp = f"{stamp_of(trial / TASK)} {stamp_of(trial / GAME)}"
            noted = known.get(path, [])
            found[path] = noted if len(noted) == 3 and noted[0] == stamp else [stamp, *_read_trial(trial, path)]
    if found != known:
        _write_cache(cache, found)
    tasks = [{"game": f"{path}/{GAME}", "task_type": kind} for path, (_, kind, why) in found.items() if not why]
    skipped = Counter(why for _, _, why in found.values() if why)
    reasons = ", ".join(f"{count} {why}" for why, count in skipped.items()) or "none"
    logger.info("%s has %d games; left out: %s", folder, len(tasks), reasons)
    if not tasks:
        raise ConfigError(f"{folder} has no game that can be played (left out: {reasons}). {_DOWNLOAD}")
    return tasks


def game_file(data: Path, path: Any) -> Path:
    """Locate the file of a task's game.

    Raises:
        TaskError: The path leaves the data folder, or the file does not exist.
    """
    if not isinstance(path, str) or not path:
        raise TaskError(
            f"task_data['game'] must be the path of a {GAME} relative to the data folder, got {shown(path)}"
        )
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise TaskError(f"task_data['game'] must be a path inside the data folder, got {shown(path)}")
    file = data / parts
    if not file.is_file():
        raise TaskError(f"task_data['game'] names {shown(path)}, which is not in the data folder {data}")
    return file


def stamp_of(file: Path) -> str:
    """Distinguish versions of a file, by its size and modification time; empty if it does not exist."""
    try:
        known = file.stat()
    except OSError:
        return ""
    return f"{known.st_mtime_ns}-{known.st_size}"


def _read_trial(trial: Path, path: str) -> tuple[str, str]:
    """Return the task type of a game, and why it is left out, which is empty for a playable one."""
    if any(word in path for word in _NOT_SUPPORTED):
        return "", "movable or sliced"
    if not (trial / GAME).is_file():
        return "", "without a game file"
    try:
        task: Any = json.loads((trial / TASK).read_text(encoding="utf-8"))
        game: Any = json.loads((trial / GAME).read_text(encoding="utf-8"))
        kind, is_solvable = task["task_type"], bool(game.get("solvable"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("the game in %s is left out, since it cannot be read: %s", trial, sentence_of(error))
        return "", "unreadable"
    if kind not in TASK_TYPES:
        return "", "of another task type"
    return kind, "" if is_solvable else "not known to be solvable"


def _read_cache(cache: Path) -> dict[str, list[str]]:
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # a damaged cache is rebuilt
        noted: Any = json.loads(cache.read_text(encoding="utf-8"))
        if noted["format"] == _FORMAT and all(map(is_strings, noted["trials"].values())):
            return noted["trials"]
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
