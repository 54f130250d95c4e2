"""ALFWorld: text households in which the agent finds objects, changes them and puts them where they belong."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Unpack

from agentsgym.cached_folders import cache_folder, replacing
from agentsgym.envs.ALFWorld import SPEC
from agentsgym.envs.config import validated_config
from agentsgym.envs.contract import State
from agentsgym.envs.datasets.options import SEED_OPTION, Part, checked_options, rows_of
from agentsgym.envs.shared.text_worlds import TextWorldBase, process_fields, read_command
from agentsgym.errors import ConfigError, TaskError
from agentsgym.fields import Field, choice_field, is_bool, is_int, is_number, is_str, is_strings, or_none, require
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from datasets import Dataset

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


GO = "go to "
LISTED = "You can: "
_BEFORE = re.compile(r"^(?:>+|act(?:ion)?\s*:|\d+[.:)])\s*", re.I)

_RULES = """You are in a household, and you are given a task. You see what is where you are. In each turn you give one \
command:

go to (place)
open (place), close (place)
take (thing) from (place), move (thing) to (place)
clean (thing) with (place), heat (thing) with (place), cool (thing) with (place)
slice (thing) with (thing)
use (thing), examine (thing or place)
look, inventory

Things and places have numbers: take apple 2 from countertop 1. You can hold one thing at a time. To take or move \
something you must be at the place, and the place must be open. Things are cleaned with a sink basin, heated with a \
microwave and cooled with a fridge. A command that cannot be followed changes nothing. Say the command, and nothing \
else."""
_OPTIONS: Mapping[str, Field] = {
    **SEED_OPTION,
    "size": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
    "split": Field(default=None, expected=f"one of {', '.join(map(repr, SPLITS))}", valid=or_none(is_str)),
    "task_types": Field(
        default=None,
        expected=f"a non-empty list of names from {', '.join(map(repr, TASK_TYPES))}, or None",
        valid=or_none(lambda value: is_strings(value) and len(value) > 0 and {*value} <= {*TASK_TYPES}),
    ),
}
_DEFAULT_SPLIT: Mapping[Part, str] = {"train": "train", "eval": "eval_out_of_distribution"}


class DatasetOptions(TypedDict, total=False):
    """Options of the generated rows.

    Attributes:
        split: ``"train"``, ``"eval_in_distribution"`` or ``"eval_out_of_distribution"``, or the name of a split's
            folder, such as ``"valid_seen"``. The default is ``"train"`` for training, and
            ``"eval_out_of_distribution"`` for evaluation.
        task_types: A subset of the six task types; None for all.
        size: The number of rows; by default one per game.
        seed: The seed that determines the order of games and the tasks' seeds.
    """

    split: str
    task_types: list[str] | None
    size: int | None
    seed: int


class ALFWorldEnv(TextWorldBase):
    """Household tasks of ALFWorld (arXiv 2010.03768), run by ALFWorld's text engine.

    A task is ``{"game": "json_2.1.1/train/…/game.tw-pddl", "task_type": str, "seed": int}``; the path is relative to
    the data folder. Games are deterministic: the seed only determines which rollouts share a task.

    Keys of ``env_config`` in addition to the common ones (``max_steps_per_episode`` is 50 by default):

    - ``data``: the data folder; None for ``$ALFWORLD_DATA``, or ``~/.cache/alfworld`` if that is not set.
    - ``show_commands``: the admissible commands that each observation lists: ``"all"`` (default), ``"here"`` (without
      ``go to`` commands, whose targets are named in the first observation), or ``"none"``.
    - ``reward``: ``"success"`` (default): 1 for the turn that solves the task; or ``"progress"``: the change in the
      fraction of the goal's conditions that hold, which is negative if the turn undoes one. With either reward, this
      fraction is ``info["progress"]`` and the potential for potential-based shaping.
    - ``rejected_penalty``: the cost of a command that the engine rejects ("Nothing happens.").
    - ``rejected_is_invalid``: whether such a command counts as an invalid action, of which ``error_allowance`` are
      allowed; by default it only wastes a turn.
    - ``num_processes``: the maximum number of engine processes; each runs many games.
    - ``step_timeout_s``, ``start_timeout_s``: the time in seconds after which an engine counts as hung and is replaced.
    - ``max_games_per_process``: the number of games after which a process is replaced; None to never replace it.
    - ``cache_mb``: the size in megabytes of the cache of engine responses, which the rollouts of a task share; 0 for no
      cache.
    """

    spec = SPEC
    engine: ClassVar[str] = "agentsgym.envs.ALFWorld.engine:HouseholdEngine"
    config_fields: ClassVar[Mapping[str, Field]] = {
        "data": Field(default=None, expected="the path of a folder, or None", valid=or_none(is_str)),
        "show_commands": choice_field("all", "here", "none"),
        "reward": choice_field("success", "progress"),
        "rejected_penalty": Field(default=0.0, expected="a number >= 0", valid=is_number(0)),
        "rejected_is_invalid": Field(default=False, expected="True or False", valid=is_bool),
        **process_fields(num_processes=2),
        "max_games_per_process": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
        "cache_mb": Field(default=64.0, expected="a number >= 0", valid=is_number(0)),
    }
    default_config: ClassVar[Mapping[str, Any]] = {"max_steps_per_episode": 50}
    task_fields: ClassVar[Collection[str] | None] = ("game", "task_type")

    @functools.cached_property
    def _data(self) -> Path:
        return data_folder(self.env_config["data"])

    def _check_config(self, config: dict[str, Any]) -> None:
        super()._check_config(config)
        _ = self._data  # raises if there is none

    def _process_limits(self) -> dict[str, Any]:
        return {key: self.env_config[key] for key in ("max_games_per_process", "cache_mb")}

    def _engine_task(self, task_data: Mapping[str, Any]) -> dict[str, Any]:
        file = game_file(self._data, task_data["game"])
        # The stamp distinguishes versions of the file, so that responses cached for an earlier version are not used.
        return {"file": str(file), "stamp": file_stamp(file)}

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        game_file(self._data, task_data.get("game"))
        kinds, given = f"one of {', '.join(TASK_TYPES)}", task_data.get("task_type")
        require("task_data['task_type']", given, or_none(lambda kind: kind in TASK_TYPES), kinds, TaskError)

    def _observation(self, response: Mapping[str, Any]) -> str:
        show = self.env_config["show_commands"]
        if show == "none":
            return response["text"]
        omitted = ("help", GO) if show == "here" else ("help",)
        commands = [command for command in response["admissible"] if not command.startswith(omitted)]
        return f"{response['text']}\n\n{LISTED}{', '.join(commands)}."

    def _step_episode(self, session_id: str, state: State, action: str) -> tuple[State, float, bool, dict[str, Any]]:
        command = extract_command(action)
        next_state = self._run(session_id, state, command)
        response = next_state["response"]
        info: dict[str, Any] = {"success": response["won"], "command": command, "accepted": response["understood"]}
        if state["task"].get("task_type") is not None:
            info["task_type"] = state["task"]["task_type"]
        before, progress = state["response"]["progress"], response["progress"]
        if progress is not None:
            info["progress"] = progress
        reward = float(response["won"])
        if self.env_config["reward"] == "progress":
            if before is None or progress is None:
                game = state["task"]["game"]
                raise TaskError(
                    "env_config['reward'] = 'progress' needs a goal whose conditions can be counted, which the game "
                    f"{game} does not have"
                )
            reward = progress - before
        if not response["understood"]:
            reward -= self.env_config["rejected_penalty"]
            info |= {"invalid": True} if self.env_config["rejected_is_invalid"] else {}
        return next_state, reward, response["won"], info

    def _state_key(self, state: State) -> Hashable:
        """The game, and the places and states of all its objects."""
        return state["task"]["game"], state["response"]["key"]

    def _system_prompt(self) -> str:
        return _RULES

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Return rows to train on, one per game; the options are those of :class:`DatasetOptions`."""
        return task_dataset(cls, env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:
        """Return rows of ``"eval_out_of_distribution"`` by default; otherwise like :meth:`get_train_dataset`."""
        return task_dataset(cls, env_config, "eval", options)


def extract_command(text: str) -> str:
    """Extract the command from an agent's text, in lower case as the engine expects it; ``""`` if there is none.

    >>> extract_command("Action: Take mug 1 from  desk 1.")
    'take mug 1 from desk 1'
    """
    return _BEFORE.sub("", (read_command(text) or "").lower())


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Return the rows of a split."""
    config = validated_config(env_class, env_config)
    settings = checked_options(options, _OPTIONS)
    split = settings["split"] or _DEFAULT_SPLIT[part]
    wanted = settings["task_types"] or TASK_TYPES
    found = find_games(data_folder(config["data"]), split)
    tasks = [task for task in found if task["task_type"] in wanted]
    if not tasks:
        raise ConfigError(f"the split {split!r} has no game with one of the task types {', '.join(wanted)}")
    return rows_of(tasks, env_class, env_config, part, settings)


def data_folder(data: str | None) -> Path:
    """Locate the data folder.

    It has the layout of ``alfworld-download``::

        json_2.1.1/train/<task type>-<object>-…/trial_…/game.tw-pddl     the game, with its walkthrough
                                                       /traj_data.json   its task type
        json_2.1.1/valid_seen, json_2.1.1/valid_unseen                   the same for the other splits

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
    place = f"the path of a {GAME} relative to the data folder"
    require("task_data['game']", path, lambda given: given and is_str(given), place, TaskError)
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
        with replacing(cache, is_synced=False) as file:
            file.write(json.dumps({"format": _FORMAT, "trials": found}).encode())
    except OSError as error:
        logger.warning("the list of ALFWorld's games cannot be cached in %s: %s", cache, sentence_of(error))
