"""The commands that solve a household, worked out from where things lie: no planner, which takes minutes a game."""

from __future__ import annotations

from tools.households.plans import LOOK, TREATMENTS, Household, Thing
from tools.households.rooms import LAMP, LAMP_STANDS_ON, Receptacle
from tools.households.shipped import Rules


def walkthrough(household: Household, rules: Rules, *, searching: bool = False) -> list[str]:
    """List the commands that solve the game from its beginning; the last one wins.

    Args:
        household: The game.
        rules: What may lie where.
        searching: Look through the room as somebody does who does not know where things lie: through whatever may hold
            the object, in the room's order, and never twice. By default the walkthrough goes straight to what it needs,
            as those of ALFWorld's own games do, though a player cannot know yet where that is.
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
        # The goal of two objects asks for one receptacle that holds both: the first of its kind is as good as any.
        walk.move(thing, (task.receptacle, 1))
    return walk.commands


def called(thing: Thing | Receptacle) -> str:
    """Call it as the game does.

    >>> called(("ButterKnife", 2))
    'butterknife 2'
    """
    return f"{thing[0].lower()} {thing[1]}"


class _Walk:
    """Where the player stands, what was opened and seen, what still lies where it did, and the commands so far."""

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
        """Find a thing. A search ends at the first of its kind, and leaves out receptacles of the kind ``without``."""
        if not self._searching:
            return wanted, self._lies[wanted]
        holders = (
            LAMP_STANDS_ON if wanted[0] == LAMP else {name for name, of in self._rules.holds.items() if wanted[0] in of}
        )
        places = [one for one in self._room.receptacles if one[0] in holders and one[0] != without]
        for place in sorted(places, key=lambda one: one not in self._seen):  # what was seen is remembered
            if place not in self._seen:
                self._reach(place)
            there = [thing for thing, lies in self._lies.items() if lies == place and thing[0] == wanted[0]]
            if there:
                return there[0], place
        raise AssertionError(f"{called(wanted)} lies nowhere in {self._room}")  # the planner puts it into one of them

    def take(self, thing: Thing, place: Receptacle) -> None:
        self._reach(place)
        self.commands.append(f"take {called(thing)} from {called(place)}")
        del self._lies[thing]

    def move(self, thing: Thing, place: Receptacle) -> None:
        self._reach(place)
        self.commands.append(f"move {called(thing)} to {called(place)}")

    def treat(self, verb: str, thing: Thing, appliance: Receptacle) -> None:
        self._go(appliance)  # its door may stay shut
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
