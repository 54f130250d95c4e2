"""Play TextWorld quests, of the kinds of games that TextWorld generates, or of files."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from agentsgym.envs.config import validated_config
from agentsgym.envs.contract import State
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.options import (
    COMMON_OPTIONS,
    CommonOptions,
    Part,
    checked_options,
    dataset_of,
    drawn_options,
    names_in_part,
    rows_of,
    task_seed,
)
from agentsgym.envs.shared.text_worlds import TextWorldBase, process_fields
from agentsgym.envs.TextWorld import SPEC
from agentsgym.errors import ConfigError, TaskError
from agentsgym.fields import (
    Field,
    choice_field,
    has_str_keys,
    is_bool,
    is_fraction,
    is_int,
    is_str,
    is_strings,
    one_of,
    or_none,
    require,
)
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset


FILES = "files"
_MAX_ROOMS = 100  # the Z-machine's limit for the rooms of a coin collector


def _between(low: int, high: int) -> Field:
    return Field(
        default=low, expected=f"an int from {low} to {high}", valid=lambda value: is_int(low)(value) and value <= high
    )


_FLAG = Field(default=False, expected="True or False", valid=is_bool)

#: The options of each kind, by name; ``files`` are existing games.
KINDS: Mapping[str, Mapping[str, Field]] = {
    "custom": {
        "rooms": Field(default=3, expected="a positive int", valid=is_int(1)),
        "objects": Field(default=6, expected="a positive int", valid=is_int(1)),
        "quest_length": Field(default=3, expected="a positive int", valid=is_int(1)),
        "parallel_quests": Field(default=1, expected="a positive int", valid=is_int(1)),
    },
    "coin_collector": {"level": _between(1, 300)},
    "treasure_hunter": {"level": _between(1, 30)},
    "cooking": {
        "recipe": _between(1, 5),
        "take": Field(default=0, expected="an int from 0 to recipe", valid=is_int(0)),
        "go": Field(
            default=1, expected="1, 6, 9 or 12", valid=lambda value: is_int(1)(value) and value in (1, 6, 9, 12)
        ),
        "open": _FLAG,
        "cook": _FLAG,
        "cut": _FLAG,
        "drop": _FLAG,
        "recipe_seed": Field(default=0, expected="a non-negative int", valid=is_int(0)),
        "split": Field(
            default=None, expected="'train', 'valid', 'test' or None", valid=or_none(one_of("train", "valid", "test"))
        ),
    },
    "simple": {
        "rewards": choice_field("dense", "balanced", "sparse"),
        "goal": choice_field("detailed", "brief", "none"),
        "test": _FLAG,
    },
    FILES: {},
}


def games() -> dict[str, dict[str, str]]:
    """Return the kinds that are generated rather than read from files, for ``agentsgym envs``."""
    return {kind: {"note": "Made from a seed."} for kind in KINDS if kind != FILES}


def checked_game_options(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of a kind and fill in the defaults.

    >>> checked_game_options("coin_collector", {"level": 5})
    {'level': 5}
    >>> checked_game_options("simple", {"goals": "brief"})
    Traceback (most recent call last):
    agentsgym.errors.ConfigError: env_config['options'] of kind 'simple' has no option 'goals'; did you mean 'goal'?
    """
    place = "env_config['options']"
    options = checked_options(given, KINDS[kind], f"{place} of kind {kind!r}", f"{place}[{{!r}}]")
    if kind == "cooking":
        _check_cooking(options)
    elif kind == "coin_collector":
        level = options["level"]
        num_rooms = ((level - 1) // 100 + 1) * ((level - 1) % 100 + 1)
        if num_rooms > _MAX_ROOMS:
            raise ConfigError(
                f"env_config['options']['level'] = {level} has {num_rooms} rooms, but TextWorld supports at most "
                f"{_MAX_ROOMS}: use a level from 1 to 150 or from 201 to 233"
            )
    return options


def _check_cooking(options: Mapping[str, Any]) -> None:
    if options["take"] > options["recipe"]:
        raise ConfigError(
            "env_config['options']['take'], the number of ingredients that must be found, must be at most "
            f"env_config['options']['recipe'] = {options['recipe']}, got {options['take']}"
        )
    if options["recipe_seed"] and not options["take"]:
        raise ConfigError(
            "env_config['options']['recipe_seed'] only selects which ingredients must be found, so it requires "
            "env_config['options']['take'] to be at least 1"
        )


_DIRECTIONS = ("north", "south", "east", "west", "up", "down")
# The verbs allowed in addition to those of a game. Commands to the interpreter, such as quit, restart, undo, save and
# tw-…, are not allowed.
_ALWAYS = {*_DIRECTIONS, *"nsewudilxz", "look", "inventory", "examine", "read", "go", "walk", "get", "pick", "wait"}
_SEVERAL = re.compile(r"[.;]|\bthen\b", re.I)
_FILE_OPTIONS: Mapping[str, Field] = {
    **COMMON_OPTIONS,
    "files": Field(
        default=None,
        expected="a folder or a list of paths",
        valid=lambda value: is_str(value) or (is_strings(value) and len(value) > 0),
    ),
}
_GENERATION_OPTIONS: Mapping[str, Field] = {
    **drawn_options(100),
    "num_games": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
}


class TextWorldEnv(TextWorldBase):
    """Text quests in worlds that TextWorld generates from a seed (arXiv 1806.11532).

    A task is ``{"game_seed": int}``, or, for the kind ``files``, ``{"file": path}`` with the path of a ``.z8`` game. If
    ``game_seed`` is missing, it is derived from the task's ``seed``, so that the episodes of a trial share one game.

    Keys of ``env_config`` in addition to the common ones:

    - ``kind``: ``"custom"``, ``"coin_collector"``, ``"treasure_hunter"``, ``"cooking"``, ``"simple"`` or ``"files"``.
    - ``options``: the options of the kind; see :data:`~agentsgym.envs.TextWorld.env.KINDS`.
    - ``admissible_commands``: whether each prompt lists the admissible commands.
    - ``reward``: ``"score"`` rewards each turn with the increase in the score, as a fraction of the maximum score;
      ``"win"`` rewards only the winning turn, with 1. The rewards of a won game sum to 1.
    - ``progress_share``: the fraction of the reward, in [0, 1], that is based on progress toward winning instead.
    - ``cache_dir``: the folder of generated games; None for the user's cache, ``""`` for no cache on disk.
    - ``num_processes``, ``step_timeout_s``, ``start_timeout_s``: the settings of the engine's processes.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = {
        "kind": choice_field(*KINDS),
        "options": Field(default={}, expected="a dict of options of the kind", valid=has_str_keys),
        "reward": choice_field("score", "win"),
        "progress_share": Field(default=0.0, expected="a number in [0, 1]", valid=is_fraction),
        "cache_dir": Field(default=None, expected="a path, '' for none on disk, or None", valid=or_none(is_str)),
        "admissible_commands": Field(default=True, expected="True or False", valid=is_bool),
        **process_fields(num_processes=4),
    }
    default_config: ClassVar[Mapping[str, Any]] = {"max_steps_per_episode": 50, "error_allowance": 50}
    task_fields: ClassVar[Collection[str] | None] = ("game_seed", "file")

    engine: ClassVar[str] = "agentsgym.envs.TextWorld.engine:TextWorldEngine"

    def _check_config(self, config: dict[str, Any]) -> None:
        checked_game_options(config["kind"], config["options"])
        super()._check_config(config)

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        file: Any = task_data.get("file")
        seed: Any = task_data.get("game_seed")
        if self.env_config["kind"] == FILES:
            path = Path(file).expanduser() if is_str(file) else Path()
            is_game = path.suffix == ".z8" and path.is_file()
            wanted = "the path of a .z8 file, as written by tw-make"
            require("task_data['file']", file, lambda _: is_game, wanted, TaskError)
            if not path.with_suffix(".json").is_file():
                raise TaskError(f"task_data['file'] = {shown(file)} needs its description {path.stem}.json next to it")
        elif file is not None:
            raise TaskError(
                "task_data['file'] is only valid if env_config['kind'] is 'files', but it is "
                f"{self.env_config['kind']!r}"
            )
        is_seed = or_none(lambda value: is_int(0)(value) and value < 2**32)
        require("task_data['game_seed']", seed, is_seed, "an int from 0 to 2**32 - 1", TaskError)

    def _engine_task(self, task_data: Mapping[str, Any]) -> dict[str, Any]:
        config = self.env_config
        if config["kind"] == FILES:
            return {"file": str(Path(task_data["file"]).expanduser().resolve())}
        seed = task_data.get("game_seed")
        return {
            "kind": config["kind"],
            "options": checked_game_options(config["kind"], config["options"]),
            "seed": derive_seed("textworld game", task_data["seed"]) % 2**31 if seed is None else seed,
            "cache_dir": config["cache_dir"],
        }

    def _rejection_reason(self, state: State, command: str) -> str | None:
        verbs = {*state["first_response"]["verbs"], *_ALWAYS}
        if command.split(maxsplit=1)[0].lower() not in verbs:
            return f"That is no command here. The verbs are: {', '.join(state['first_response']['verbs'])}."
        if _SEVERAL.search(command):
            return "Give one command at a time."
        return None

    def _return(self, response: Mapping[str, Any]) -> float:
        share: float = self.env_config["progress_share"]
        earned = response["score"] if self.env_config["reward"] == "score" else float(response["won"])
        return (1 - share) * earned + share * response["progress"]

    def _system_prompt(self) -> str:
        return (
            "You play a text adventure. Do what the game asks for. Answer each turn with one command in one line, such "
            "as: go east"
        )

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:  # type: ignore[override]
        """Return rows to train on; the options are those of :class:`DatasetOptions`."""
        return task_dataset(cls, env_config, "train", options)

    @classmethod
    def get_eval_dataset(cls, env_config: dict[str, Any] | None = None, **options: Unpack[DatasetOptions]) -> Dataset:  # type: ignore[override]
        """Return rows to evaluate on, with other game seeds or files; otherwise like :meth:`get_train_dataset`."""
        return task_dataset(cls, env_config, "eval", options)


class DatasetOptions(CommonOptions, total=False):
    """Options of the generated rows.

    Attributes:
        size: The number of rows; by default 100 for generated games, or one per file.
        seed: The seed of the generated games, or of the order of the files.
        num_games: The number of different generated games, which the rows cycle through; by default one per row.
        files: A folder, or a list of paths of ``.z8`` files (kind ``files`` only).
        split: ``"disjoint"`` if training and evaluation share no file, ``"all"`` if both use all files (kind ``files``
            only).
        eval_fraction: The fraction of files that ``"disjoint"`` reserves for evaluation, in (0, 1) (kind ``files``
            only).
    """

    num_games: int | None
    files: Any


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Return rows with the columns ``env_class_path``, ``env_config`` and ``task_data``."""
    config = validated_config(env_class, env_config)
    checked_game_options(config["kind"], config["options"])
    if config["kind"] == FILES:
        settings = checked_options(options, _FILE_OPTIONS)
        files: Any = settings["files"]
        if isinstance(files, str):
            files = sorted(Path(files).expanduser().rglob("*.z8"))
            if not files:
                raise ConfigError(
                    "files must be a folder of .z8 games or a list of paths, but no .z8 files were found in "
                    f"{shown(settings['files'])}"
                )
        names = names_in_part([*map(str, files)], part, settings, "files")
        return rows_of([{"file": name} for name in names], env_class, env_config, part, settings)
    settings = checked_options(options, _GENERATION_OPTIONS)
    num_games: int = settings["num_games"] or settings["size"]
    games: list[int] = [task_seed(part, "textworld game", settings["seed"], game) % 2**31 for game in range(num_games)]
    tasks = [
        {"game_seed": games[row % num_games], "seed": task_seed(part, "textworld task", settings["seed"], row)}
        for row in range(settings["size"])
    ]
    return dataset_of(tasks, class_path(env_class), env_config)
