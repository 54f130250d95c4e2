"""Read the files that the ``alfworld`` wheel ships for its games: domain, grammar, goals, and places of things.

The files are found and read without importing ``alfworld``, whose import creates a folder in the user's home.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentsgym.envs.ALFWorld import SPEC
from agentsgym.errors import ConfigError, MissingDependencyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """ALFWorld's rules for objects and receptacles, with ALFRED's names, such as ``"ButterKnife"``.

    Attributes:
        holds: The objects that each receptacle may hold.
        cleanable: Objects that a sink cleans.
        heatable: Objects that a microwave heats.
        coolable: Objects that a fridge cools.
        toggleable: Objects that can be switched on, the lamps.
        sliceable: Objects that a knife slices.
        openable: Receptacles with a door or a lid, closed at the start of a game.
        rooms: The kinds of room, such as ``"Kitchen"``, of each task type.
    """

    holds: Mapping[str, frozenset[str]]
    cleanable: frozenset[str]
    heatable: frozenset[str]
    coolable: frozenset[str]
    toggleable: frozenset[str]
    sliceable: frozenset[str]
    openable: frozenset[str]
    rooms: Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal of a task type.

    Attributes:
        pddl: The goal in PDDL, with the fields ``{obj}``, ``{recep}`` and ``{toggle}``.
        sentences: Its wordings, with the same fields.
    """

    pddl: str
    sentences: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """The content of the wheel's files.

    Attributes:
        domain: The actions, in PDDL.
        grammar: The game's texts, in TextWorld's format, with ``UNKNOWN GOAL`` in place of the task.
        goals: The goal of each task type.
        rules: The places and the abilities of things.
    """

    domain: str
    grammar: str
    goals: Mapping[str, Goal]
    rules: Rules


@functools.cache
def shipped() -> Shipped:
    """Read the wheel's files, once.

    Raises:
        MissingDependencyError: ``alfworld`` is not installed.
        ConfigError: The installed version lacks these files or tables.
    """
    folder = _folder()
    try:
        domain, grammar = ((folder / "data" / name).read_text("utf-8") for name in ("alfred.pddl", "alfred.twl2"))
        constants, library = (_module_of(folder / "gen" / name) for name in ("constants.py", "goal_library.py"))
        goals = {
            name: Goal(pddl=goal["pddl"].replace("#", "-"), sentences=tuple(goal["templates"]))  # "#" stands for "-"
            for name, goal in library["gdict"].items()
        }
        return Shipped(domain=domain, grammar=grammar, goals=goals, rules=_rules(constants))
    except (OSError, KeyError) as error:
        raise ConfigError(
            f"the installed alfworld in {folder} lacks the files for households ({error}); alfworld>=0.4.2 has them"
        ) from error


def _module_of(file: Path) -> dict[str, Any]:
    """Import only one file of the wheel, since importing the package would create a folder in the user's home."""
    spec = importlib.util.spec_from_file_location(f"alfworld_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise KeyError(file.name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def _folder() -> Path:
    try:
        found = importlib.util.find_spec("alfworld")
    except ValueError:  # the module was hidden: sys.modules holds None for it
        found = None
    if found is None or not found.origin:
        raise MissingDependencyError("alfworld", SPEC.extra)
    return Path(found.origin).parent


def _rules(constants: Mapping[str, Any]) -> Rules:
    actions = {name: frozenset(objects) for name, objects in constants["VAL_ACTION_OBJECTS"].items()}
    return Rules(
        holds={name: frozenset(objects) for name, objects in constants["VAL_RECEPTACLE_OBJECTS"].items()},
        cleanable=actions["Cleanable"],
        heatable=actions["Heatable"],
        coolable=actions["Coolable"],
        toggleable=actions["Toggleable"],
        sliceable=actions["Sliceable"],
        openable=frozenset(constants["OPENABLE_CLASS_LIST"]),
        rooms={name: frozenset(kinds) for name, kinds in constants["GOALS_VALID"].items()},
    )
