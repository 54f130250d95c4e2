"""Generate households in the layout of ALFWorld's data."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import is_bool, is_int, one_of, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown
from tools.households.plans import TASK_TYPES, Household, Planner
from tools.households.problem import problem, words
from tools.households.rooms import SIZES
from tools.households.shipped import Shipped, shipped
from tools.households.walkthrough import walkthrough

#: The splits by their folders; ALFWorld calls the last two eval_in_distribution and eval_out_of_distribution.
SPLITS = ("train", "valid_seen", "valid_unseen")
DATA = "json_2.1.1"
_TRIES = 1000  # draws of a household that differs from all others


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedHouseholds:
    """The written files.

    Attributes:
        folder: The data folder, for ``env_config["data"]`` or ``$ALFWORLD_DATA``.
        games: The game files of each split, in the order in which they were drawn.
        task_types: The number of games of each task type, by split.
    """

    folder: Path
    games: Mapping[str, tuple[Path, ...]]
    task_types: Mapping[str, Mapping[str, int]]


def generate_households(
    folder: str | Path,
    split_sizes: Mapping[str, int],
    *,
    seed: int = 0,
    size: str = "small",
    task_types: Sequence[str] | None = None,
    searching: bool = False,
) -> GeneratedHouseholds:
    """Write small households for ALFWorld's engine, each with a walkthrough.

    The files are ``folder/json_2.1.1/SPLIT/TASK-Object-None-Receptacle-ROOM/trial_T…/`` with ``game.tw-pddl``,
    ``traj_data.json`` and ``initial_state.pddl``, made from the domain, grammar, goals and tables that the ``alfworld``
    wheel ships; the engine itself is not run. The same arguments give the same bytes. No two games are equal, and a
    larger split begins with the games of a smaller one, if the splits before it are as large.

    ``train`` and ``valid_seen`` share rooms, and combinations of task type, object and receptacle, but not the places
    of things. ``valid_unseen`` has rooms with sets of receptacles that no room of the other two has, and combinations,
    a fifth of all, that these never use. Neither depends on the seed, so one set can train and another test.

    Args:
        folder: The folder to write to, which is created if necessary; it must be empty.
        split_sizes: The number of games of ``"train"``, ``"valid_seen"`` and ``"valid_unseen"``.
        seed: The random seed.
        size: ``"tiny"`` (4 receptacles, 4 objects), ``"small"`` (6, 7) or ``"medium"`` (16 to 27, 14).
        task_types: A subset of :data:`TASK_TYPES`, used in turn; None for all six.
        searching: Whether walkthroughs search for the objects instead of going straight to their places, which no
            player can know: each command of a search follows from the texts before it.

    Returns:
        The files, and the numbers of games.

    Raises:
        ConfigError: An argument is invalid, the folder is not empty, or there are no more different households.
        MissingDependencyError: ``alfworld`` is not installed.
    """
    _check(split_sizes, seed, size, task_types, searching=searching)
    types = TASK_TYPES if task_types is None else tuple(dict.fromkeys(task_types))
    goal_folder = Path(folder)
    if goal_folder.exists() and not goal_folder.is_dir():
        raise ConfigError(f"{goal_folder} is a file; households are written into a folder")
    goal_folder.mkdir(parents=True, exist_ok=True)
    inside = next(goal_folder.iterdir(), None)
    if inside is not None:
        raise ConfigError(
            f"{goal_folder} is not empty (it contains {inside.name}): choose an empty or new folder for the households"
        )
    source = shipped()
    unfinished = goal_folder / f".{DATA}.{os.getpid()}"
    try:
        games = _write(unfinished, _drawn(source, split_sizes, (seed, size, types)), source, searching=searching)
        unfinished.rename(goal_folder / DATA)  # atomic
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return GeneratedHouseholds(
        folder=goal_folder,
        games={split: tuple(goal_folder / DATA / path for path, _ in made) for split, made in games.items()},
        task_types={split: Counter(task_type for _, task_type in made) for split, made in games.items()},
    )


def _check(
    split_sizes: Mapping[str, int], seed: int, size: str, task_types: Sequence[str] | None, *, searching: bool
) -> None:
    require("seed", seed, is_int(0), "an int >= 0")
    require("size", size, one_of(*SIZES), "one of " + ", ".join(map(repr, SIZES)))
    if not split_sizes:
        raise ConfigError(f"split_sizes is empty: pass numbers of games, as in {{'train': 100}}; splits are {SPLITS}")
    for split, num_games in split_sizes.items():
        if split not in SPLITS:
            raise ConfigError(f"split_sizes has no split {shown(split)}{did_you_mean(str(split), SPLITS)}")
        require(f"split_sizes[{split!r}]", num_games, is_int(1), "a positive int (or omit that split)")
    require("searching", searching, is_bool, "True or False")
    if isinstance(task_types, str) or (task_types is not None and not task_types):
        raise ConfigError(f"task_types must be a list of some of {TASK_TYPES}, got {shown(task_types)}")
    for one in task_types or ():
        if one not in TASK_TYPES:
            raise ConfigError(f"task_types contains the unknown type {shown(one)}{did_you_mean(str(one), TASK_TYPES)}")


def _drawn(
    source: Shipped, split_sizes: Mapping[str, int], options: tuple[int, str, tuple[str, ...]]
) -> Iterator[tuple[str, int, Household]]:
    """Draw all games, one after the other, each with its split and its number in it."""
    seed, size, types = options
    drawn: set[object] = set()
    for split in SPLITS:  # in this order, whatever the mapping's
        planner = Planner(source.rules, size, unseen=split == "valid_unseen")
        for number in range(split_sizes.get(split, 0)):
            task_type = types[number % len(types)]
            generator = random.Random(derive_seed("household", seed, size, split, task_type, number))
            tries = (planner.draw(task_type, generator) for _ in range(_TRIES))
            household = next((one for one in tries if one.game not in drawn), None)
            if household is None:
                raise ConfigError(
                    f"size {size!r} has no more different households of {task_type!r}: {number} are drawn for {split}; "
                    "request fewer, or a larger size"
                )
            drawn.add(household.game)
            yield split, number, household


def _write(
    folder: Path, households: Iterator[tuple[str, int, Household]], source: Shipped, *, searching: bool
) -> dict[str, list[tuple[Path, str]]]:
    """Write the games; return their files, relative to the folder, and their task types."""
    written: dict[str, list[tuple[Path, str]]] = {}
    for split, number, household in households:
        task = household.task
        end = f"None-{task.receptacle}-{household.room.number}"
        place = Path(split, f"{task.task_type}-{task.target}-{end}", f"trial_T{number:06}")
        (folder / place).mkdir(parents=True)
        commands = walkthrough(household, source.rules, searching=searching)
        for name, text in _files(household, source, commands, name=f"household_{split}_{number}").items():
            (folder / place / name).write_text(text, encoding="utf-8")
        written.setdefault(split, []).append((place / "game.tw-pddl", task.task_type))
    return written


def _files(household: Household, source: Shipped, commands: Sequence[str], *, name: str) -> dict[str, str]:
    """Return the content of a game's files, by their names."""
    goal = source.goals[household.task.task_type]
    fields = words(household)
    lower = {key: word.lower() for key, word in fields.items()}
    sentence = goal.sentences[household.sentence % len(goal.sentences)].format(**lower)
    pddl = problem(household, goal, source.rules, name=name)
    game = {
        "pddl_domain": source.domain,
        "grammar": source.grammar.replace("UNKNOWN GOAL", sentence),
        "pddl_problem": pddl,
        "solvable": True,
        "walkthrough": [*commands],
    }
    trajectory: dict[str, Any] = {  # ALFRED's description of the task, as far as ALFWorld's text games read it
        "task_id": name,
        "task_type": household.task.task_type,
        "pddl_params": {
            "object_target": fields["obj"],
            "parent_target": fields["recep"],
            "toggle_target": fields["toggle"],
            "mrecep_target": "",
            "object_sliced": False,
        },
        "scene": {"floor_plan": f"FloorPlan{household.room.number}", "scene_num": household.room.number},
        "turk_annotations": {"anns": [{"task_desc": sentence, "high_descs": []}]},
    }
    return {
        "game.tw-pddl": json.dumps(game),
        "traj_data.json": json.dumps(trajectory, indent=2),
        "initial_state.pddl": pddl,
    }
