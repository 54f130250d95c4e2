"""The commands that solve a household, worked out from where things lie: no planner, which takes minutes a game."""

from __future__ import annotations

from agentsgym.envs.ALFWorld.households.plans import LOOK, TREATMENTS, Household, Thing
from agentsgym.envs.ALFWorld.households.rooms import LAMP, Receptacle
from agentsgym.envs.ALFWorld.households.shipped import Rules


def walkthrough(household: Household, rules: Rules) -> list[str]:
    """List the commands that solve the game from its beginning; the last one wins.

    It goes straight to what it needs, as the walkthroughs of ALFWorld's own games do, though a player cannot know yet
    where that is.
    """
    walk = _Walk(rules)
    task, places = household.task, dict(household.things)
    for thing in household.picks:
        walk.take(thing, places[thing])
        if task.task_type == LOOK:
            walk.use((LAMP, 1), places[LAMP, 1])
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
    """Where the player stands, what was opened, and the commands so far."""

    def __init__(self, rules: Rules) -> None:
        self.commands: list[str] = []
        self._rules = rules
        self._at: Receptacle | None = None
        self._opened: set[Receptacle] = set()

    def take(self, thing: Thing, place: Receptacle) -> None:
        self._reach(place)
        self.commands.append(f"take {called(thing)} from {called(place)}")

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
