"""Read the answer of a judge: one JSON object with a value for every criterion."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from agentsgym.agents.calls import UnreadableError
from agentsgym.fields import is_number
from agentsgym.judging.rubric import Criterion
from agentsgym.texts import shown

_MAX_CHARACTERS: Final = 20_000  # at the end of an answer, in which the object is looked for
_MAX_REASON: Final = 4000
_WORDS: Final = {"yes": True, "true": True, "no": False, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of a judge.

    Attributes:
        values: By criterion, a number in [0, 1] for each thing that was judged: one, or each candidate of a group.
        reason: The judge's reason, shortened if it is very long.
    """

    values: Mapping[str, Sequence[float]]
    reason: str


def read_verdict(text: str, criteria: Sequence[Criterion], num_candidates: int | None = None) -> Verdict:
    """Parse an answer.

    Reasoning before ``</think>`` is skipped. An answer with two different objects that could be the verdict is
    rejected, since one of them may quote what was judged.

    Args:
        text: The answer.
        criteria: The criteria that it must contain.
        num_candidates: The number of ranked candidates; None for grades.

    Raises:
        UnreadableError: The answer has no such object or several, or a value is missing or invalid.

    >>> criteria = [Criterion("polite", "Polite?"), Criterion("clear", "Clear?", scale=(0, 10))]
    >>> read_verdict('Well: {"reason": "Short.", "polite": true, "clear": 4}', criteria)
    Verdict(values={'polite': [1.0], 'clear': [0.4]}, reason='Short.')
    >>> read_verdict('{"best": [3, [1, 2]]}', [Criterion("best", "Which is best?")], 3).values
    {'best': [0.25, 0.25, 1.0]}
    """
    found = _verdict_object(text, [one.name for one in criteria])
    values: dict[str, Sequence[float]] = {}
    for one in criteria:
        given = found[one.name]
        values[one.name] = [_grade(one, given)] if num_candidates is None else _ranks(one.name, given, num_candidates)
    reason: Any = found.get("reason", "")
    return Verdict(values=values, reason=reason[:_MAX_REASON] if isinstance(reason, str) else "")


def ranked_values(places: Sequence[Sequence[int]], num_candidates: int) -> list[float]:
    """Convert a ranking to numbers in [0, 1]: 1 for the best, 0 for the worst, evenly spaced; ties share their mean.

    Args:
        places: The indices of the candidates, best first; equally good ones together.
        num_candidates: The number n of candidates; a single one gets 0.5, since there is nothing to compare.

    >>> ranked_values([[2], [0, 1]], 3)
    [0.25, 0.25, 1.0]
    """
    values = [0.5] * num_candidates
    better = 0
    for place in places:
        for index in place:
            if num_candidates > 1:
                values[index] = 1 - (better + (len(place) - 1) / 2) / (num_candidates - 1)
        better += len(place)
    return values


def _verdict_object(text: str, names: Sequence[str]) -> dict[str, Any]:
    _, is_closed, answer = text.rpartition("</think>")
    if not is_closed and "<think>" in text:
        raise UnreadableError("its reasoning is unfinished, so it has no verdict")
    answer = answer[-_MAX_CHARACTERS:]
    objects = [*_objects(answer)]
    verdicts: list[dict[str, Any]] = []
    for one in objects:
        if all(name in one for name in names) and one not in verdicts:
            verdicts.append(one)
    if len(verdicts) == 1:
        return verdicts[0]
    if verdicts:
        raise UnreadableError(f"it has {len(verdicts)} different JSON objects with all criteria, and must have one")
    if not objects:
        raise UnreadableError("it has no valid JSON object")
    missing = [name for name in names if all(name not in one for one in objects)] or names
    raise UnreadableError(f"its JSON object lacks {', '.join(map(repr, missing))}")


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the outermost JSON objects in a text."""
    decoder = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_refused)
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            yield cast("dict[str, Any]", value)
        at = text.find("{", end)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def _grade(criterion: Criterion, given: Any) -> float:
    if criterion.scale is None:
        answer = _WORDS.get(given.strip().lower()) if isinstance(given, str) else given
        if not isinstance(answer, bool):
            raise UnreadableError(f"{criterion.name!r} must be true or false, got {shown(given, 60)}")
        return criterion.value_of(answer)
    low, high = criterion.scale
    if not is_number(low)(given) or given > high:
        raise UnreadableError(f"{criterion.name!r} must be a number from {low:g} to {high:g}, got {shown(given, 60)}")
    return criterion.value_of(given)


def _ranks(name: str, given: Any, num_candidates: int) -> list[float]:
    places: list[list[Any]] = []
    listed = cast("list[Any]", given) if isinstance(given, list) else []
    for place in listed:
        places.append([*cast("list[Any]", place)] if isinstance(place, list) else [place])
    numbers = [one for place in places for one in place]
    is_complete = all(type(one) is int for one in numbers) and sorted(numbers) == [*range(1, num_candidates + 1)]
    if not is_complete:
        wrong = shown(cast("object", given), 60)
        raise UnreadableError(f"{name!r} must list each number from 1 to {num_candidates} once, got {wrong}")
    return ranked_values([[one - 1 for one in place] for place in places], num_candidates)
