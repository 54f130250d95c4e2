"""Measure progress toward a household's goal: the number of conditions of its PDDL goal that hold.

The goal of "put a hot apple in the fridge" is that a fridge and an apple exist for which two conditions hold::

    (and (exists (?r - receptacle) (exists (?o - object) (and
        (heatable ?o) (objectType ?o AppleType) (receptacleType ?r FridgeType)   what never changes picks the objects
        (isHot ?o) (inReceptacle ?o ?r)))))                                      what can change is counted: 2

If several objects qualify, the ones with the most conditions met count.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

Fact = tuple[str, ...]
_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(r";[^\n]*")


class Goal(Protocol):
    """A part of a goal whose conditions can be counted."""

    def met(self, facts: Collection[Fact]) -> tuple[int, int]:
        """Count the conditions that hold, and all conditions.

        Args:
            facts: The true facts, such as ``("inreceptacle", "apple_bar_01", "fridge_bar_01")``, in lower case.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Holds:
    fact: Fact
    is_true: bool

    def met(self, facts: Collection[Fact]) -> tuple[int, int]:
        return int((self.fact in facts) == self.is_true), 1


@dataclass(frozen=True, slots=True)
class _All:
    parts: tuple[Goal, ...]

    def met(self, facts: Collection[Fact]) -> tuple[int, int]:
        counts = [part.met(facts) for part in self.parts]
        return sum(count for count, _ in counts), sum(total for _, total in counts)


@dataclass(frozen=True, slots=True)
class _Best:
    parts: tuple[Goal, ...]

    def met(self, facts: Collection[Fact]) -> tuple[int, int]:
        return max((part.met(facts) for part in self.parts), key=lambda one: (one[0] / max(one[1], 1), one[1]))


def nested(text: str) -> list[Any]:
    r"""Parse the first expression in parentheses of a PDDL text as nested lists, in lower case.

    Raises:
        ValueError: The text has no such expression, or its parentheses do not match.

    >>> nested("(define (Goal ; a comment\n (at ?x)))")
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


def read_goal(problem: str, objects: Mapping[str, str], facts: Collection[Fact], changing: Collection[str]) -> Goal:
    """Read the goal of a PDDL problem, for one household.

    Args:
        problem: The text of the problem.
        objects: The type of each object, names in lower case.
        facts: The facts that are true at the start.
        changing: The predicates that actions can change.

    Raises:
        ValueError: The problem has no goal, or one with constructs other than ``and``, ``or``, ``not``, ``exists``,
            ``=`` and facts, or one that no objects can satisfy.
    """
    goals: list[Any] = [part for part in nested(problem) if part[0] == ":goal"]
    if not goals:
        raise ValueError("the PDDL problem has no (:goal …)")
    goal = _Reader(objects, facts, changing).read(goals[0][1], {}, is_true=True)
    if goal is None:
        raise ValueError("the goal of the PDDL problem cannot be reached with the objects in the game")
    return goal


@dataclass(frozen=True, slots=True)
class _Reader:
    objects: Mapping[str, str]
    facts: Collection[Fact]
    changing: Collection[str]

    def read(self, node: Sequence[Any], bound: Mapping[str, str], *, is_true: bool) -> Goal | None:
        """Read one expression; None if it can never have the required truth value."""
        head = node[0]
        if head == "not":
            return self.read(node[1], bound, is_true=not is_true)
        if head in ("and", "or"):
            parts = [self.read(part, bound, is_true=is_true) for part in node[1:]]
            return _every(parts) if (head == "and") == is_true else _any(parts)
        if head in ("exists", "forall"):
            parts = [self.read(node[2], {**bound, **one}, is_true=is_true) for one in self._choices(node[1])]
            return _any(parts) if (head == "exists") == is_true else _every(parts)
        if not all(isinstance(name, str) for name in node):
            raise ValueError(f"the goal of the PDDL problem contains {head!r}, which is not supported")
        fact = (head, *(bound.get(name, name) for name in node[1:]))
        if head in self.changing:
            return _Holds(fact, is_true)
        holds = fact[1] == fact[2] if head == "=" else fact in self.facts
        return _All(()) if holds == is_true else None

    def _choices(self, typed: Sequence[str]) -> Iterable[dict[str, str]]:
        """Return each assignment of objects for ``?o1 ?o2 - object ?r - receptacle``."""
        names: list[str] = []
        choices: dict[str, list[str]] = {}
        for index, word in enumerate(typed):
            if word == "-":
                kind = typed[index + 1]
                choices |= {name: [one for one, of in self.objects.items() if of == kind] for name in names}
                names = []
            elif word.startswith("?"):
                names.append(word)
        return (dict(zip(choices, one, strict=True)) for one in product(*choices.values()))


def _every(parts: Sequence[Goal | None]) -> Goal | None:
    possible = tuple(part for part in parts if part is not None)
    if len(possible) < len(parts):
        return None
    needed = tuple(part for part in possible if part != _All(()))
    return needed[0] if len(needed) == 1 else _All(needed)


def _any(parts: Sequence[Goal | None]) -> Goal | None:
    possible = tuple(dict.fromkeys(part for part in parts if part is not None))
    if _All(()) in possible:
        return _All(())
    return _Best(possible) if len(possible) > 1 else (possible[0] if possible else None)
