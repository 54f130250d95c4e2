"""Draw a household: a room, a task that can be done in it, and the initial places of things."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from agentsgym.envs.ALFWorld.env import TASK_TYPES
from agentsgym.errors import ConfigError
from agentsgym.seeding import derive_seed
from tools.households.rooms import KINDS, LAMP, SIZES, Receptacle, Room, rooms
from tools.households.shipped import Rules

LOOK, TWO = TASK_TYPES[1], TASK_TYPES[5]
#: The treatment of the object in a task type, and the receptacle for it.
TREATMENTS = {
    "pick_clean_then_place_in_recep": ("clean", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge"),
}
_HELD_OUT = 5  # one in five combinations of task type, object and receptacle is reserved for unseen rooms

Thing = tuple[str, int]
"""The kind of a thing and its number, from 1, as in the game: ``("Mug", 2)`` is *mug 2*."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of a game.

    Attributes:
        task_type: One of :data:`TASK_TYPES`.
        target: The object, such as ``"Mug"``.
        receptacle: Its destination, such as ``"Shelf"``; the lamp, if it is to be examined.
    """

    task_type: str
    target: str
    receptacle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Household:
    """One game before it is written.

    Attributes:
        room: The room.
        task: The task.
        things: The things and their places.
        picks: The things that the walkthrough takes, one or two, in order.
        sentence: The index of the wording of the task, of which ALFWorld has two.
    """

    room: Room
    task: Task
    things: tuple[tuple[Thing, Receptacle], ...]
    picks: tuple[Thing, ...]
    sentence: int

    @property
    def game(self) -> tuple[Room, Task, tuple[tuple[Thing, Receptacle], ...]]:
        """The parts that distinguish games, which exclude the wording of the task and its solution."""
        return self.room, self.task, self.things


class Planner:
    """Draws households of one size, for seen or for unseen rooms.

    Args:
        rules: The places that things may have.
        size: A key of :data:`~tools.households.rooms.SIZES`.
        unseen: Whether to use the held-out rooms and combinations of task type, object and receptacle.
    """

    def __init__(self, rules: Rules, size: str, *, unseen: bool) -> None:
        self._rules = rules
        self._size = size
        self._unseen = unseen
        self._places = functools.cache(self.places)
        self._possible: dict[str, Sequence[tuple[Room, Sequence[Task]]]] = {}

    def possible(self, task_type: str) -> Sequence[tuple[Room, Sequence[Task]]]:
        """Return the rooms that allow a task type, each with its tasks."""
        if task_type not in self._possible:
            with_tasks = ((room, self.tasks(room, task_type)) for room in rooms(self._size, unseen=self._unseen))
            self._possible[task_type] = [(room, tasks) for room, tasks in with_tasks if tasks]
        return self._possible[task_type]

    def tasks(self, room: Room, task_type: str) -> Sequence[Task]:
        """Return the tasks of a type in a room: all that the rules allow and that need the object to be carried."""
        if room.kind not in self._rules.rooms[task_type]:
            return []
        objects: Sequence[str] = KINDS[room.kind].objects
        verb, appliance = TREATMENTS.get(task_type, ("", ""))
        if verb:
            fit = {"clean": self._rules.cleanable, "heat": self._rules.heatable, "cool": self._rules.coolable}[verb]
            objects = [one for one in objects if one in fit and (appliance, 1) in room.receptacles]
        if task_type == LOOK:
            ends = [LAMP] if room.lamp_on else []
        else:
            ends = sorted({name for name, _ in room.receptacles if name != appliance})
        found: list[Task] = []
        for target, end in itertools.product(objects, ends):
            is_held_out = derive_seed("held-out household task", task_type, target, end) % _HELD_OUT == 0
            has_end = task_type == LOOK or target in self._rules.holds[end]
            if is_held_out == self._unseen and has_end and self._places(room, target, end):
                found.append(Task(task_type=task_type, target=target, receptacle=end))
        return found

    def places(self, room: Room, thing: str, without: str) -> Sequence[Receptacle]:
        """Return the possible places of a thing at the start, leaving out receptacles of the kind ``without``."""
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
        others = [name for name in KINDS[room.kind].objects if self._places(room, name, "")]
        num_others = min(SIZES[self._size].objects - num_targets - (room.lamp_on is not None), len(others) * 2)
        names = [task.target] * num_targets + generator.sample(others * 2, num_others)  # at most three of a kind
        held: list[tuple[str, Receptacle]] = []
        for name in names:
            done = task.receptacle if name == task.target else ""  # there the task would be done, at least in part
            held.append((name, generator.choice(self._places(room, name, done))))
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
