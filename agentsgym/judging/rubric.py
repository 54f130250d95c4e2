"""The criteria of a judge, each of which becomes a named reward."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, cast

from agentsgym.credit.components import UNNAMED
from agentsgym.errors import ConfigError
from agentsgym.fields import is_number, is_text, require

Scope = Literal["turn", "episode", "group"]
"""What is judged at once: one turn, one rollout, or all rollouts of a task, which are ranked."""

_NAME = re.compile(r"[A-Za-z_][\w-]{0,59}")
_RESERVED = frozenset((UNNAMED, "reason"))


@dataclass(frozen=True, slots=True)
class Criterion:
    """One question about what is judged; its answer, as a number in [0, 1], times ``weight`` is a named reward.

    >>> Criterion("polite", "Is the agent polite?").value_of(True)
    1.0
    >>> Criterion("clear", "How clear is the explanation?", scale=(1, 5)).value_of(4)
    0.75

    Attributes:
        name: The name of the reward: letters, digits, ``_`` and ``-``.
        question: The question, as the judge reads it.
        scale: The lowest and the highest grade; None for a question that is answered by yes or no. For a judge of task
            groups None, since it ranks the rollouts.
        weight: The reward for the best answer; negative for a fault.
    """

    name: str
    question: str
    _: KW_ONLY
    scale: tuple[float, float] | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        name, others = self.name, " and ".join(map(repr, sorted(_RESERVED)))
        is_name = is_text(name) and _NAME.fullmatch(name) and name not in _RESERVED
        wanted = f"a word of letters, digits, '_' and '-' other than {others}"
        require("the name of a criterion", name, lambda _: bool(is_name), wanted)
        require(f"the question of criterion {name!r}", self.question, is_text, "a text that is not empty")
        require(f"the weight of criterion {name!r}", self.weight, is_number(), "a finite number")
        scale: Any = self.scale
        require(f"the scale of criterion {name!r}", scale, _is_scale, "a pair (lowest, highest) of numbers, or None")

    def value_of(self, grade: float | bool) -> float:
        """Convert an answer, a bool or a grade on the scale, to a number in [0, 1]."""
        if self.scale is None:
            return float(grade)
        low, high = self.scale
        return (grade - low) / (high - low)


def as_rubric(given: Any, scope: Scope) -> tuple[Criterion, ...]:
    """Return the criteria of a rubric.

    Args:
        given: A text (one criterion named ``"judge"``, graded from 0 to 10), a dict from names to yes-or-no questions,
            a criterion, or a list of criteria.
        scope: What is judged at once; task groups are ranked, so their criteria have no scale.

    Raises:
        ConfigError: It is none of these, has no criterion, two criteria have the same name, or a criterion of task
            groups has a scale.
    """
    criteria: tuple[Any, ...] = ()
    if isinstance(given, str):
        criteria = (Criterion("judge", given, scale=None if scope == "group" else (0, 10)),)
    elif isinstance(given, Criterion):
        criteria = (given,)
    elif isinstance(given, Mapping):
        criteria = tuple(Criterion(name, question) for name, question in cast("Mapping[Any, Any]", given).items())
    elif isinstance(given, Sequence):
        criteria = tuple(cast("Sequence[Any]", given))
    is_rubric, wanted = all(isinstance(one, Criterion) for one in criteria), "or a list of at least one Criterion"
    require("rubric", given, lambda _: bool(criteria) and is_rubric, f"a text, a dict of questions by name, {wanted}")
    counts = Counter(one.name for one in criteria)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(f"the criteria of a rubric must have different names, got {twice[0]!r} {counts[twice[0]]}x")
    if scope == "group" and (graded := [one.name for one in criteria if one.scale is not None]):
        raise ConfigError(
            f"a judge of scope 'group' ranks rollouts, so its criteria have no scale, but criterion {graded[0]!r} has "
            "one: omit it, or use scope='episode'"
        )
    return criteria


def _is_scale(value: Any) -> bool:
    if value is None:
        return True
    pair = cast("Sequence[Any]", value) if isinstance(value, tuple | list) else ()
    return len(pair) == 2 and all(map(is_number(), pair)) and pair[0] < pair[1]
