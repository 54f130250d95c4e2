"""The household engine for a worker process: ALFWorld's own text engine, one game at a time."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from agentsgym.envs.ALFWorld.goals import Fact, Goal, read_goal
from agentsgym.envs.ALFWorld.patches import cache_commands, patch_engine
from agentsgym.fields import is_strings
from agentsgym.texts import sentence_of

_PARTS = ("pddl_domain", "grammar", "pddl_problem")
_NEGATED = "not_"
_IN_GRAMMAR = re.compile(r"(\w+)\(")


class HouseholdEngine:
    """Runs ``game.tw-pddl`` files, one after the other, with one copy of the planner's library.

    The planner itself is never run.
    """

    def __init__(self) -> None:
        patch_engine()
        textworld: Any = importlib.import_module("textworld")
        self._planner: Any = importlib.import_module("fast_downward")
        alfworld: Any = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
        pddl: Any = importlib.import_module("textworld.envs.pddl")
        self._game: Any = alfworld.AlfredDemangler(pddl.PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
        self._goal: Goal | None = None
        self._in_texts: frozenset[str] = frozenset()
        self._in_world: frozenset[str] = frozenset()

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        """Load a game and start it.

        Args:
            game: ``{"file": path}``, or ``{"game": {…}}`` with the content of such a file.

        Returns:
            See :class:`~agentsgym.envs.shared.text_worlds.env.TextWorldBase`. ``walkthrough`` is empty if the file has
            none; ``progress`` is the share of the goal's conditions that hold, None if they cannot be counted.
            ``state_key`` and ``key`` are digests of the position: equal state keys imply equal output from there on,
            equal keys imply that all objects are in the same places and states.

        Raises:
            ValueError: The file is not a game, or not one that the engine supports.
        """
        parts = game["game"] if "game" in game else _read_game(Path(game["file"]))
        try:
            self._game.load(parts)
            cache_commands(self._game.unwrapped)
            state = self._game.reset()
        except (Exception, SystemExit) as error:  # the planner's translator exits on unreadable input
            why = f"{type(error).__name__}: {sentence_of(error)}"
            raise ValueError(f"the engine cannot play the game {game.get('file', 'given')}: {why}") from error
        inner = self._game.unwrapped
        task = inner._pddl_state.task
        changing = {effect.literal.predicate for action in task.actions for effect in action.effects}
        self._in_texts, self._in_world = _seen_predicates(task, changing, inner._game_data["grammar"])
        self._goal = None
        with suppress(ValueError, IndexError, TypeError, KeyError):  # progress is then unknown
            objects = {one.name: one.type_name for one in task.objects}
            self._goal = read_goal(inner._game_data["pddl_problem"], objects, self._facts(), changing)
        walkthrough = parts.get("walkthrough")
        return {"walkthrough": walkthrough if is_strings(walkthrough) else [], **self._seen(state)}

    def step(self, command: str) -> dict[str, Any]:
        """Run a command; ``understood`` is whether the engine accepted it."""
        state, _, _ = self._game.step(command)
        return {"understood": state["_last_action"] is not None, **self._seen(state)}

    def close(self) -> None:
        """Release the copy of the library, a separate file for as long as it is mapped."""
        library, self._game.unwrapped.downward_lib = self._game.unwrapped.downward_lib, None
        if library is not None:
            self._planner.close_lib(library)

    def _seen(self, state: Mapping[str, Any]) -> dict[str, Any]:
        facts = self._facts()
        num_met, num_conditions = (0, 0) if self._goal is None else self._goal.met(facts)
        return {
            "text": state["feedback"].strip(),
            "admissible": state["admissible_commands"],
            "won": bool(state["won"]),
            "lost": False,
            "progress": None if self._goal is None else num_met / max(num_conditions, 1),
            "key": _digest(fact for fact in facts if fact[0] in self._in_world),
            "state_key": _digest(fact for fact in facts if fact[0] in self._in_texts),
        }

    def _facts(self) -> set[Fact]:
        facts = self._game.unwrapped._pddl_state.facts
        return {(fact.name, *(one.name for one in fact.arguments)) for fact in facts}


def _read_game(path: Path) -> dict[str, Any]:
    try:
        game: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the game file {path} cannot be read: {error}") from error
    parts: dict[str, Any] = cast("dict[str, Any]", game) if isinstance(game, dict) else {}
    missing = [part for part in _PARTS if not isinstance(parts.get(part), str)]
    if missing:
        raise ValueError(
            f"the game file {path} must be a JSON object with the string fields {', '.join(_PARTS)}; it lacks "
            f"{', '.join(missing)}"
        )
    return parts


def _digest(facts: Iterable[Fact]) -> str:
    return hashlib.blake2b(json.dumps(sorted(facts)).encode(), digest_size=12).hexdigest()


def _seen_predicates(task: Any, changing: set[str], grammar: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the predicates that change and matter: those in texts or rules, and those of the world alone.

    Predicates that only record history (``checked``, ``wasInReceptacle``) are left out. The engine keeps some facts
    that no longer hold as ``not_…``, which texts depend on; they describe the path so far, and are not part of the
    world.
    """
    needed = set(_IN_GRAMMAR.findall(grammar.lower()))
    conditions = [task.goal, *(axiom.condition for axiom in task.axioms)]
    for action in task.actions:
        conditions += [action.precondition, *(effect.condition for effect in action.effects)]
    while conditions:
        condition = conditions.pop()
        conditions += getattr(condition, "parts", ())
        needed |= {condition.predicate} if hasattr(condition, "predicate") else set()
    plain = frozenset(name for name in changing if name in needed or _NEGATED + name in needed)
    return plain | {_NEGATED + name for name in changing if _NEGATED + name in needed}, plain
