"""Run ALFWorld's text engine, one game at a time; used in an engine's process."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

from agentsgym.envs.ALFWorld.patches import cache_commands, patch_engine
from agentsgym.fields import is_strings
from agentsgym.texts import sentence_of

_REQUIRED_FIELDS = ("pddl_domain", "grammar", "pddl_problem")
_NEGATED = "not_"
_GRAMMAR_PREDICATE = re.compile(r"(\w+)\(")


Fact = tuple[str, ...]
_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(r";[^\n]*")


class HouseholdEngine:
    """Runs ``game.tw-pddl`` files one after another; it loads the planner's library, but never runs the planner."""

    def __init__(self) -> None:
        patch_engine()
        textworld: Any = importlib.import_module("textworld")
        self._planner: Any = importlib.import_module("fast_downward")
        alfworld: Any = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
        pddl: Any = importlib.import_module("textworld.envs.pddl")
        self._game: Any = alfworld.AlfredDemangler(pddl.PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
        self._goal: Goal | None = None
        self._text_predicates: frozenset[str] = frozenset()
        self._world_predicates: frozenset[str] = frozenset()

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        """Load a game and start it.

        Args:
            game: ``{"file": path}``, or ``{"game": {…}}`` with the content of such a file.

        Returns:
            The response described in :class:`~agentsgym.envs.shared.text_worlds.TextWorldBase`. ``walkthrough`` is
            empty if the file has none. ``progress`` is the fraction of the goal's conditions that hold, or None if they
            cannot be counted. ``state_key`` and ``key`` are hashes of the position: equal state keys imply equal output
            from then on, equal keys imply that all objects are in the same places and states.
        """
        fields = game["game"] if "game" in game else _read_game(Path(game["file"]))
        try:
            self._game.load(fields)
            cache_commands(self._game.unwrapped)
            state = self._game.reset()
        except (Exception, SystemExit) as error:  # the planner's translator exits on unreadable input
            reason = f"{type(error).__name__}: {sentence_of(error)}"
            name = f"the game {game['file']}" if "file" in game else "this game"
            raise ValueError(f"the engine cannot load {name}: {reason}") from error
        inner = self._game.unwrapped
        task = inner._pddl_state.task
        changing = {effect.literal.predicate for action in task.actions for effect in action.effects}
        self._text_predicates, self._world_predicates = _relevant_predicates(
            task, changing, inner._game_data["grammar"]
        )
        self._goal = None
        with suppress(ValueError, IndexError, TypeError, KeyError):  # an unsupported goal leaves the progress unknown
            objects = {item.name: item.type_name for item in task.objects}
            self._goal = parse_goal(inner._game_data["pddl_problem"], objects, self._facts(), changing)
        walkthrough = fields.get("walkthrough")
        return {"walkthrough": walkthrough if is_strings(walkthrough) else [], **self._common_response(state)}

    def step(self, command: str) -> dict[str, Any]:
        """Run a command; ``understood`` in the response is whether the engine accepted it."""
        state, _, _ = self._game.step(command)
        return {"understood": state["_last_action"] is not None, **self._common_response(state)}

    def close(self) -> None:
        """Release this engine's copy of the planner's library, which occupies a file as long as it is mapped."""
        library, self._game.unwrapped.downward_lib = self._game.unwrapped.downward_lib, None
        if library is not None:
            self._planner.close_lib(library)

    def _common_response(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a response that ``start`` and ``step`` share."""
        facts = self._facts()
        num_met, num_conditions = (0, 0) if self._goal is None else self._goal.met(facts)
        return {
            "text": state["feedback"].strip(),
            "admissible": state["admissible_commands"],
            "won": bool(state["won"]),
            "lost": False,
            "progress": None if self._goal is None else num_met / max(num_conditions, 1),
            "key": _digest(fact for fact in facts if fact[0] in self._world_predicates),
            "state_key": _digest(fact for fact in facts if fact[0] in self._text_predicates),
        }

    def _facts(self) -> set[Fact]:
        facts = self._game.unwrapped._pddl_state.facts
        return {(fact.name, *(argument.name for argument in fact.arguments)) for fact in facts}


def _read_game(path: Path) -> dict[str, Any]:
    try:
        game: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the game file {path} cannot be read: {error}") from error
    fields: dict[str, Any] = cast("dict[str, Any]", game) if isinstance(game, dict) else {}
    missing = [name for name in _REQUIRED_FIELDS if not isinstance(fields.get(name), str)]
    if missing:
        raise ValueError(
            f"the game file {path} must be a JSON object with the string fields {', '.join(_REQUIRED_FIELDS)}; it "
            f"lacks {', '.join(missing)}"
        )
    return fields


def _digest(facts: Iterable[Fact]) -> str:
    return hashlib.blake2b(json.dumps(sorted(facts)).encode(), digest_size=12).hexdigest()


def _relevant_predicates(task: Any, changing: set[str], grammar: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the changing predicates that texts or rules depend on, and the subset that describes the world.

    Predicates that only record history (``checked``, ``wasInReceptacle``) are omitted. The engine records some facts
    that no longer hold as ``not_…``; texts depend on these, but they describe the path so far rather than the world.
    """
    needed = set(_GRAMMAR_PREDICATE.findall(grammar.lower()))
    conditions = [task.goal, *(axiom.condition for axiom in task.axioms)]
    for action in task.actions:
        conditions += [action.precondition, *(effect.condition for effect in action.effects)]
    while conditions:
        condition = conditions.pop()
        conditions += getattr(condition, "parts", ())
        needed |= {condition.predicate} if hasattr(condition, "predicate") else set()
    plain = frozenset(name for name in changing if name in needed or _NEGATED + name in needed)
    return plain | {_NEGATED + name for name in changing if _NEGATED + name in needed}, plain


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal, or a part of one, whose conditions can be counted: either a single condition or a combination of parts.

    The goal of "put a hot apple in the fridge" is that a fridge and an apple exist for which two conditions hold::

        (and (exists (?r - receptacle) (exists (?o - object) (and
            (heatable ?o) (objectType ?o AppleType) (receptacleType ?r FridgeType)   fixed conditions select the objects
            (isHot ?o) (inReceptacle ?o ?r)))))                                      conditions that can change count: 2

    If several objects qualify, those that meet the most conditions are used.

    Attributes:
        parts: The parts; all of them are counted, or only the best one.
        takes_best: Whether only the best part is counted.
        fact: The fact of a single condition; None for a combination of parts.
        is_true: The truth value that the condition requires of the fact.
    """

    parts: tuple[Goal, ...] = ()
    takes_best: bool = False
    fact: Fact | None = None
    is_true: bool = True

    def met(self, facts: Collection[Fact]) -> tuple[int, int]:
        """Count the conditions that hold, and all conditions.

        Args:
            facts: The true facts, such as ``("inreceptacle", "apple_bar_01", "fridge_bar_01")``, in lower case.
        """
        if self.fact is not None:
            return int((self.fact in facts) == self.is_true), 1
        counts = [part.met(facts) for part in self.parts]
        if self.takes_best:
            return max(counts, key=lambda count: (count[0] / max(count[1], 1), count[1]))
        return sum(count for count, _ in counts), sum(total for _, total in counts)


_ALWAYS = Goal()


def parse_expression(text: str) -> list[Any]:
    r"""Parse the first parenthesized expression of a PDDL text into nested lists, in lower case.

    >>> parse_expression("(define (Goal ; a comment\n (at ?x)))")
    ['define', ['goal', ['at', '?x']]]
    """
    stack: list[list[Any]] = [[]]
    for token in _TOKEN.findall(_COMMENT.sub("", text).lower()):
        if token == "(":
            stack.append([])
        elif token != ")":
            stack[-1].append(token)
        elif len(stack) == 1:
            break
        else:
            closed = stack.pop()
            stack[-1].append(closed)
            if len(stack) == 1:
                return closed
    raise ValueError("the parentheses of a PDDL text do not match")


def parse_goal(problem: str, objects: Mapping[str, str], facts: Collection[Fact], changing: Collection[str]) -> Goal:
    """Parse the goal of a PDDL problem, for one household."""
    goals: list[Any] = [part for part in parse_expression(problem) if part[0] == ":goal"]
    if not goals:
        raise ValueError("the PDDL problem has no (:goal …)")

    def parse(node: Sequence[Any], bound: Mapping[str, str], *, is_true: bool) -> Goal | None:
        """Parse one expression; None if it can never have the required truth value."""
        head = node[0]
        if head == "not":
            return parse(node[1], bound, is_true=not is_true)
        if head in ("and", "or", "exists", "forall"):
            inner = (
                [(part, bound) for part in node[1:]]
                if head in ("and", "or")
                else [(node[2], {**bound, **choice}) for choice in _choices(node[1], objects)]
            )
            parts = [parse(part, names, is_true=is_true) for part, names in inner]
            return _combined(parts, takes_best=(head in ("or", "exists")) == is_true)
        if not all(isinstance(name, str) for name in node):
            raise ValueError(f"the goal of the PDDL problem contains {head!r}, which is not supported")
        fact = (head, *(bound.get(name, name) for name in node[1:]))
        if head in changing:
            return Goal(fact=fact, is_true=is_true)
        holds = fact[1] == fact[2] if head == "=" else fact in facts
        return _ALWAYS if holds == is_true else None

    goal = parse(goals[0][1], {}, is_true=True)
    if goal is None:
        raise ValueError("the goal of the PDDL problem cannot be satisfied with the objects in the game")
    return goal


def _choices(typed: Sequence[str], objects: Mapping[str, str]) -> Iterable[dict[str, str]]:
    """Return each assignment of objects to typed variables such as ``?o1 ?o2 - object ?r - receptacle``."""
    names: list[str] = []
    choices: dict[str, list[str]] = {}
    for index, word in enumerate(typed):
        if word == "-":
            kind = typed[index + 1]
            choices |= {variable: [name for name, type_ in objects.items() if type_ == kind] for variable in names}
            names = []
        elif word.startswith("?"):
            names.append(word)
    return (dict(zip(choices, choice, strict=True)) for choice in product(*choices.values()))


def _combined(parts: Sequence[Goal | None], *, takes_best: bool) -> Goal | None:
    possible = tuple(part for part in parts if part is not None)
    if takes_best:
        possible = tuple(dict.fromkeys(possible))
        if _ALWAYS in possible or not possible:
            return _ALWAYS if possible else None
    elif len(possible) < len(parts):
        return None
    else:
        possible = tuple(part for part in possible if part != _ALWAYS)
    return possible[0] if len(possible) == 1 else Goal(parts=possible, takes_best=takes_best)
