"""Find the commands that solve a household from the places of things, since a planner would take minutes per game."""

from __future__ import annotations

from tools.households.plans import LOOK, TREATMENTS, Household, Thing
from tools.households.rooms import LAMP, LAMP_STANDS_ON, Receptacle
from tools.households.shipped import Rules


def walkthrough(household: Household, rules: Rules, *, searching: bool = False) -> list[str]:
    """Return the commands that solve the game from its start; the last one wins.

    Args:
        household: The game.
        rules: The places that things may have.
        searching: Whether to search the room without knowledge of the places: the receptacles that may hold the object,
            in the room's order, each once. Otherwise the walkthrough goes straight to the objects, like those of
            ALFWorld's own games, although a player cannot know their places.
    """
    walk = _Walk(household, rules, searching=searching)
    task = household.task
    for pick in household.picks:
        thing, place = walk.find(pick, without=task.receptacle)
        walk.take(thing, place)
        if task.task_type == LOOK:
            lamp, stand = walk.find((LAMP, 1), without="")
            walk.use(lamp, stand)
            continue
        if task.task_type in TREATMENTS:
            verb, appliance = TREATMENTS[task.task_type]
            walk.treat(verb, thing, (appliance, 1))
        # A goal of two objects needs one receptacle that holds both: the first of its kind.
        walk.move(thing, (task.receptacle, 1))
    return walk.commands


def called(thing: Thing | Receptacle) -> str:
    """Return the game's name for a thing.

    >>> called(("ButterKnife", 2))
    'butterknife 2'
    """
    return f"{thing[0].lower()} {thing[1]}"


class _Walk:
    """The player's position, opened and seen receptacles, the places of untouched things, and the commands so far."""

    def __init__(self, household: Household, rules: Rules, *, searching: bool) -> None:
        self.commands: list[str] = []
        self._room = household.room
        self._rules = rules
        self._searching = searching
        self._lies = dict(household.things)
        self._at: Receptacle | None = None
        self._opened: set[Receptacle] = set()
        self._seen: set[Receptacle] = set()

    def find(self, wanted: Thing, *, without: str) -> tuple[Thing, Receptacle]:
        """Find a thing. A search ends at the first of its kind, and skips receptacles of the kind ``without``."""
        if not self._searching:
            return wanted, self._lies[wanted]
        holders = (
            LAMP_STANDS_ON if wanted[0] == LAMP else {name for name, of in self._rules.holds.items() if wanted[0] in of}
        )
        places = [one for one in self._room.receptacles if one[0] in holders and one[0] != without]
        for place in sorted(places, key=lambda one: one not in self._seen):  # seen ones first
            if place not in self._seen:
                self._reach(place)
            there = [thing for thing, lies in self._lies.items() if lies == place and thing[0] == wanted[0]]
            if there:
                return there[0], place
        raise AssertionError(f"{called(wanted)} has no place in {self._room}")  # the planner gives it one

    def take(self, thing: Thing, place: Receptacle) -> None:
        self._reach(place)
        self.commands.append(f"take {called(thing)} from {called(place)}")
        del self._lies[thing]

    def move(self, thing: Thing, place: Receptacle) -> None:
        self._reach(place)
        self.commands.append(f"move {called(thing)} to {called(place)}")

    def treat(self, verb: str, thing: Thing, appliance: Receptacle) -> None:
        self._go(appliance)  # its door may stay closed
        self.commands.append(f"{verb} {called(thing)} with {called(appliance)}")

    def use(self, lamp: Thing, place: Receptacle) -> None:
        self._go(place)
        self.commands.append(f"use {called(lamp)}")

    def _go(self, place: Receptacle) -> None:
        if self._at != place:
            self.commands.append(f"go to {called(place)}")
            self._at = place

    def _reach(self, place: Receptacle) -> None:
        self._go(place)
        if place[0] in self._rules.openable and place not in self._opened:
            self.commands.append(f"open {called(place)}")
            self._opened.add(place)
        self._seen.add(place)
