"""Measure progress toward a household's goal by the number of conditions of its PDDL goal that hold.

The goal of "put a hot apple in the fridge" is that a fridge and an apple exist for which two conditions hold::

    (and (exists (?r - receptacle) (exists (?o - object) (and
        (heatable ?o) (objectType ?o AppleType) (receptacleType ?r FridgeType)   fixed conditions select the objects
        (isHot ?o) (inReceptacle ?o ?r)))))                                      conditions that can change count: 2

If several objects qualify, those that meet the most conditions are used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

Fact = tuple[str, ...]
_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(r";[^\n]*")


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal, or a part of one, whose conditions can be counted: either a single condition or a combination of parts.

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
