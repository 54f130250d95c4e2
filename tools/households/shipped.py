"""What the ``alfworld`` wheel ships for its games: domain, grammar, goals, and what may lie where.

The files are found and read without importing ``alfworld``: when it is imported it makes a folder in the user's home.
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
    """What ALFWorld says of objects and receptacles; all names are ALFRED's, as ``"ButterKnife"`` is.

    Attributes:
        holds: The objects that each receptacle may hold.
        cleanable: Objects that a sink cleans.
        heatable: Objects that a microwave heats.
        coolable: Objects that a fridge cools.
        toggleable: Objects that are switched on, the lamps.
        sliceable: Objects that a knife slices.
        openable: Receptacles with a door or a lid; they are closed when a game begins.
        rooms: The kinds of room, as ``"Kitchen"``, in which each task type is played.
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
    """How the goal of a task type is written.

    Attributes:
        pddl: The goal in PDDL, with the fields ``{obj}``, ``{recep}`` and ``{toggle}``.
        sentences: Ways to say it, with the same fields.
    """

    pddl: str
    sentences: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """All that is read from the wheel.

    Attributes:
        domain: The actions, in PDDL.
        grammar: How the game speaks, in TextWorld's own format; the task stands in it as ``UNKNOWN GOAL``.
        goals: By task type.
        rules: What may lie where, and what can be done to it.
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
        ConfigError: It is installed in a version that has not these files, or not these tables.
    """
    folder = _folder()
    try:
        domain, grammar = ((folder / "data" / name).read_text("utf-8") for name in ("alfred.pddl", "alfred.twl2"))
        constants, library = (_module_of(folder / "gen" / name) for name in ("constants.py", "goal_library.py"))
        return Shipped(domain=domain, grammar=grammar, goals=_goals(library["gdict"]), rules=_rules(constants))
    except (OSError, KeyError) as error:
        raise ConfigError(
            f"the installed alfworld in {folder} lacks what households are made from ({error}); alfworld>=0.4.2 has it"
        ) from error


def _module_of(file: Path) -> dict[str, Any]:
    """Import one file of the wheel by itself: the package would make a folder in the user's home."""
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


def _goals(library: Mapping[str, Any]) -> Mapping[str, Goal]:
    """Take the library's goals; it writes ``#`` where PDDL has ``-``."""
    return {
        name: Goal(pddl=goal["pddl"].replace("#", "-"), sentences=tuple(goal["templates"]))
        for name, goal in library.items()
    }
