"""Draw a household: a room, a task that can be done in it, and where things lie."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from agentsgym.errors import ConfigError
from agentsgym.seeding import derive_seed
from tools.households.rooms import KINDS, LAMP, SIZES, Receptacle, Room, rooms
from tools.households.shipped import Rules

#: The task types, in ALFWorld's own order: its numbers are 1 to 6.
TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
LOOK, TWO = TASK_TYPES[1], TASK_TYPES[5]
#: What a task type does to the object, and the receptacle that does it.
TREATMENTS = {
    "pick_clean_then_place_in_recep": ("clean", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge"),
}
_HELD_OUT = 5  # every so many combinations of task type, object and receptacle is one that nobody trains on

Thing = tuple[str, int]
"""What it is and which of its kind, from 1 on, as the game calls it: ``("Mug", 2)`` is *mug 2*."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be done.

    Attributes:
        task_type: One of :data:`TASK_TYPES`.
        target: The object, as ``"Mug"``.
        receptacle: Where it goes, as ``"Shelf"``; the lamp, where it is looked at.
    """

    task_type: str
    target: str
    receptacle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Household:
    """One game before it is written.

    Attributes:
        room: Where it is played.
        task: What is to be done.
        things: What lies where.
        picks: The things that the walkthrough takes, one, or two in their order.
        sentence: Which of the ways to say the task is used, from 0 on; both of ALFWorld's are.
    """

    room: Room
    task: Task
    things: tuple[tuple[Thing, Receptacle], ...]
    picks: tuple[Thing, ...]
    sentence: int

    @property
    def game(self) -> tuple[Room, Task, tuple[tuple[Thing, Receptacle], ...]]:
        """What makes it a game of its own: neither how the task is said nor how it can be solved."""
        return self.room, self.task, self.things


class Planner:
    """Draws households of one size, for seen or for unseen rooms.

    Args:
        rules: What may lie where.
        size: A key of :data:`~tools.households.rooms.SIZES`.
        unseen: Whether for the rooms, and the combinations of task type, object and receptacle, that nobody trains on.
    """

    def __init__(self, rules: Rules, size: str, *, unseen: bool) -> None:
        self._rules = rules
        self._size = size
        self._unseen = unseen
        self._places = functools.cache(self._places_for)
        self._possible: dict[str, Sequence[tuple[Room, Sequence[Task]]]] = {}

    def possible(self, task_type: str) -> Sequence[tuple[Room, Sequence[Task]]]:
        """List the rooms in which a task type can be played, each with the tasks that it allows."""
        if task_type not in self._possible:
            with_tasks = ((room, self.tasks(room, task_type)) for room in rooms(self._size, unseen=self._unseen))
            self._possible[task_type] = [(room, tasks) for room, tasks in with_tasks if tasks]
        return self._possible[task_type]

    def tasks(self, room: Room, task_type: str) -> Sequence[Task]:
        """List what can be done in a room: all that the rules allow, and that needs the object to be carried."""
        if room.kind not in self._rules.rooms[task_type]:
            return []
        objects = [one for one in KINDS[room.kind].objects if self._can_be_treated(one, room, task_type)]
        if task_type == LOOK:
            ends = [LAMP] if room.lamp_on else []
        else:
            _, appliance = TREATMENTS.get(task_type, ("", ""))
            ends = sorted({name for name, _ in room.receptacles if name != appliance})
        possible = (Task(task_type=task_type, target=target, receptacle=end) for target in objects for end in ends)
        return [task for task in possible if _is_held_out(task) == self._unseen and self._has_places(room, task)]

    def _can_be_treated(self, target: str, room: Room, task_type: str) -> bool:
        if task_type not in TREATMENTS:
            return True
        verb, appliance = TREATMENTS[task_type]
        fit = {"clean": self._rules.cleanable, "heat": self._rules.heatable, "cool": self._rules.coolable}
        return target in fit[verb] and (appliance, 1) in room.receptacles

    def _has_places(self, room: Room, task: Task) -> bool:
        ends = task.task_type == LOOK or task.target in self._rules.holds[task.receptacle]
        return ends and bool(self._places(room, task.target, task.receptacle))

    def _places_for(self, room: Room, thing: str, without: str) -> Sequence[Receptacle]:
        """Where a thing may lie at the beginning."""
        return [one for one in room.receptacles if one[0] != without and thing in self._rules.holds[one[0]]]

    def draw(self, task_type: str, generator: random.Random) -> Household:
        """Draw a household for a task type.

        Raises:
            ConfigError: No room of this size allows it.
        """
        possible = self.possible(task_type)
        if not possible:
            raise ConfigError(f"no room of size {self._size!r} allows {task_type!r}")
        room, tasks = generator.choice(possible)
        task = generator.choice(tasks)
        num_targets = 2 if task_type == TWO else 1
        names = [task.target] * num_targets + self._others(room, num_targets, generator)
        held = [(name, generator.choice(self._places(room, name, self._kept_from(name, task)))) for name in names]
        order = generator.sample(range(len(held)), len(held))  # so that the target is not always the first of its kind
        numbered: dict[int, Thing] = {}
        counts: dict[str, int] = {}
        for index in order:
            name = held[index][0]
            counts[name] = counts.get(name, 0) + 1
            numbered[index] = (name, counts[name])
        things = [(numbered[index], place) for index, (_, place) in enumerate(held)]
        lamp = [((LAMP, 1), room.lamp_on)] if room.lamp_on else []
        return Household(
            room=room,
            task=task,
            things=tuple(sorted([*things, *lamp])),
            picks=tuple(numbered[index] for index in range(num_targets)),
            sentence=generator.randrange(2),
        )

    def _others(self, room: Room, num_targets: int, generator: random.Random) -> list[str]:
        """Draw what else lies in the room, at most three of a kind."""
        known = [name for name in KINDS[room.kind].objects if self._places(room, name, "")]
        wanted = SIZES[self._size].objects - num_targets - (room.lamp_on is not None)
        return generator.sample(known * 2, min(wanted, len(known) * 2))

    @staticmethod
    def _kept_from(name: str, task: Task) -> str:
        """Give the kind of receptacle that a thing must not lie in, or the task would be done, at least in part."""
        return task.receptacle if name == task.target else ""


def _is_held_out(task: Task) -> bool:
    parts = (task.task_type, task.target, task.receptacle)
    return derive_seed("held-out household task", *parts) % _HELD_OUT == 0
