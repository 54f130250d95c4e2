"""Write households as ALFWorld's data lies on disk, so that whatever reads that reads them."""

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

#: The splits, with the names of their folders: ALFWorld calls the last two eval_in_distribution and
#: eval_out_of_distribution.
SPLITS = ("train", "valid_seen", "valid_unseen")
DATA = "json_2.1.1"
_TRIES = 1000  # to draw a household that is not there yet


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedHouseholds:
    """What was written.

    Attributes:
        folder: What to give as the data's folder, or as ``$ALFWORLD_DATA``.
        games: The game files of each split, in the order in which they were drawn.
        task_types: How many games there are of each task type, by split.
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
    """Write small households that ALFWorld's engine plays, with a walkthrough each.

    The files are ``folder/json_2.1.1/SPLIT/TASK-Object-None-Receptacle-ROOM/trial_T…/`` with ``game.tw-pddl``,
    ``traj_data.json`` and ``initial_state.pddl``, made from the domain, grammar, goals and tables that the ``alfworld``
    wheel ships; the engine itself is not run. The same arguments give the same bytes. No two games are equal, and a
    larger split begins with the games of a smaller one, if the splits before it are as large.

    ``train`` and ``valid_seen`` share rooms, and combinations of task type, object and receptacle, but not where things
    lie. ``valid_unseen`` has rooms whose receptacles are together in no room of the other two, and combinations, a
    fifth of all, that these never ask for. Neither depends on the seed, so that one set trains and another tests.

    Args:
        folder: Where to write; made if it is not there, empty otherwise.
        split_sizes: How many games each of ``"train"``, ``"valid_seen"`` and ``"valid_unseen"`` gets.
        seed: Of all draws.
        size: ``"tiny"`` (4 receptacles, 4 objects), ``"small"`` (6, 7) or ``"medium"`` (16 to 27, 14).
        task_types: Some of :data:`TASK_TYPES`, dealt out in turn; all six by default.
        searching: Whether walkthroughs look for the objects, in place of going straight to where they lie, which no
            player can know: what such a walkthrough does follows from what the game said before.

    Returns:
        Where the games are, and how many of which type.

    Raises:
        ConfigError: An argument is not valid, the folder holds something, or there are no more different households.
        MissingDependencyError: ``alfworld`` is not installed.
    """
    _check(split_sizes, seed, size)
    require("searching", searching, is_bool, "True or False")
    types = _checked_types(task_types)
    goal_folder = Path(folder)
    _check_folder(goal_folder)
    source = shipped()
    unfinished = goal_folder / f".{DATA}.{os.getpid()}"
    try:
        games = _write(unfinished, _drawn(source, split_sizes, (seed, size, types)), source, searching=searching)
        unfinished.rename(goal_folder / DATA)  # whole or not at all, whatever interrupts it
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return GeneratedHouseholds(
        folder=goal_folder,
        games={split: tuple(goal_folder / DATA / path for path, _ in made) for split, made in games.items()},
        task_types={split: Counter(task_type for _, task_type in made) for split, made in games.items()},
    )


def _check(split_sizes: Mapping[str, int], seed: int, size: str) -> None:
    require("seed", seed, is_int(0), "an int >= 0")
    require("size", size, one_of(*SIZES), "one of " + ", ".join(map(repr, SIZES)))
    if not split_sizes:
        raise ConfigError(f"split_sizes is empty: say how many games, as {{'train': 100}}; splits are {SPLITS}")
    for split, num_games in split_sizes.items():
        if split not in SPLITS:
            raise ConfigError(f"split_sizes has no split {shown(split)}{did_you_mean(str(split), SPLITS)}")
        require(f"split_sizes[{split!r}]", num_games, is_int(1), "a positive int (or leave that split out)")


def _checked_types(task_types: Sequence[str] | None) -> tuple[str, ...]:
    if task_types is None:
        return TASK_TYPES
    if isinstance(task_types, str) or not task_types:
        raise ConfigError(f"task_types must be a list of some of {TASK_TYPES}, got {shown(task_types)}")
    for one in task_types:
        if one not in TASK_TYPES:
            raise ConfigError(f"there is no task type {shown(one)}{did_you_mean(str(one), TASK_TYPES)}")
    return tuple(dict.fromkeys(task_types))


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; households are written into a folder")
    folder.mkdir(parents=True, exist_ok=True)
    inside = next(folder.iterdir(), None)
    if inside is not None:
        raise ConfigError(f"{folder} is not empty (it holds {inside.name}); households need an empty folder")


def _drawn(
    source: Shipped, split_sizes: Mapping[str, int], options: tuple[int, str, tuple[str, ...]]
) -> Iterator[tuple[str, int, Household]]:
    """Draw all games, one after the other, with their split and their number in it."""
    seed, size, types = options
    there: set[object] = set()
    for split in SPLITS:  # in this order, whatever the mapping's
        planner = Planner(source.rules, size, unseen=split == "valid_unseen")
        for number in range(split_sizes.get(split, 0)):
            task_type = types[number % len(types)]
            generator = random.Random(derive_seed("household", seed, size, split, task_type, number))
            tries = (planner.draw(task_type, generator) for _ in range(_TRIES))
            household = next((one for one in tries if one.game not in there), None)
            if household is None:
                raise ConfigError(
                    f"size {size!r} has no more different households of {task_type!r}: {number} are drawn for {split}; "
                    "ask for fewer, or for a larger size"
                )
            there.add(household.game)
            yield split, number, household


def _write(
    folder: Path, households: Iterator[tuple[str, int, Household]], source: Shipped, *, searching: bool
) -> dict[str, list[tuple[Path, str]]]:
    """Write the games; give their files, relative to the folder, and their task types."""
    written: dict[str, list[tuple[Path, str]]] = {}
    for split, number, household in households:
        task = household.task
        end = f"None-{task.receptacle}-{household.room.number}"
        place = Path(split, f"{task.task_type}-{task.target}-{end}", f"trial_T{number:06}")
        (folder / place).mkdir(parents=True)
        commands = walkthrough(household, source.rules, searching=searching)
        for name, text in _texts(household, source, commands, name=f"household_{split}_{number}").items():
            (folder / place / name).write_text(text, encoding="utf-8")
        written.setdefault(split, []).append((place / "game.tw-pddl", task.task_type))
    return written


def _texts(household: Household, source: Shipped, commands: Sequence[str], *, name: str) -> dict[str, str]:
    """Write what the files of a game hold, by their names."""
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
    return {
        "game.tw-pddl": json.dumps(game),
        "traj_data.json": json.dumps(_trajectory(household, fields, sentence, name), indent=2),
        "initial_state.pddl": pddl,
    }


def _trajectory(household: Household, fields: Mapping[str, str], sentence: str, name: str) -> dict[str, Any]:
    """Describe the task as ALFRED does, as far as ALFWorld's text games read it."""
    return {
        "task_id": name,
        "task_type": household.task.task_type,
        "pddl_params": {
            "object_target": fields["obj"],
            "parent_target": fields["recep"],
            "toggle_target": fields["toggle"],
            "mrecep_target": "",
            "object_sliced": False,
        },
        "scene": {
            "floor_plan": f"FloorPlan{household.room.number}",
            "scene_num": household.room.number,
        },
        "turk_annotations": {"anns": [{"task_desc": sentence, "high_descs": []}]},
    }
