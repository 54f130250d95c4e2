"""Compare the initial states of two plays of the same task, which may differ even if the episodes are equal."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from agentsgym.agents.base import Agent
from agentsgym.texts import shown

_MAX_PARTS = 2000  # compared values per state; the deepest ones are skipped
_PLAIN = (bool, int, float, str, bytes, type(None))


class Start(NamedTuple):
    """The initial state of an episode.

    Attributes:
        name: The session's id, which a state may contain and which differs between plays.
        parts: The plain values in the state, by the path to them.
    """

    name: str
    parts: Mapping[str, Any]


def start_of(session_id: str, state: Any) -> Start:
    """Copy the comparable parts of a state: plain values and generators, in containers and objects.

    Agents are skipped, since sessions share them.
    """
    parts: dict[str, Any] = {}
    seen = set[int]()  # ids of visited objects, since references may be circular
    waiting = deque([("state", state)])
    while waiting and len(parts) < _MAX_PARTS:
        place, value = waiting.popleft()
        if isinstance(value, str):
            parts[place] = value.replace(session_id, "")
        elif isinstance(value, _PLAIN):
            parts[place] = value
        elif isinstance(value, random.Random):
            parts[f"the generator {place}"] = hash(value.getstate())
        elif isinstance(value, set | frozenset):
            parts[place] = sorted(repr(one) for one in cast("set[Any]", value) if isinstance(one, _PLAIN))
        elif id(value) not in seen and not isinstance(value, Agent | type):
            seen.add(id(value))
            waiting.extend(_inside(place, value))
    return Start(session_id, parts)


def _inside(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, one in cast("Mapping[Any, Any]", value).items():
            if isinstance(key, _PLAIN):
                yield f"{place}[{shown(key)}]", one
    elif isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        yield f"the length of {place}", len(items)
        for index, one in enumerate(items[:_MAX_PARTS]):
            yield f"{place}[{index}]", one
    elif hasattr(value, "__dict__"):
        for name, one in cast("dict[str, Any]", vars(value)).items():
            yield f"{place}.{name}", one


def first_changed_value(before: Sequence[Start], after: Sequence[Start]) -> str | None:
    """Describe the first difference between the initial states of two plays; None if there is none."""
    for one, other in zip(before, after, strict=False):
        for place, value in one.parts.items():
            now = other.parts.get(place, value)
            are_nan = value != value and now != now  # noqa: PLR0124
            if now != value and not are_nan:
                return f"{place} was {shown(value, 60)} and then {shown(now, 60)}"
    return None
