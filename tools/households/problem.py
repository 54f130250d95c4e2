"""Format a household as a PDDL problem for the domain that the ``alfworld`` wheel ships."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tools.households.plans import LOOK, Household, Thing
from tools.households.rooms import LAMP, Receptacle
from tools.households.shipped import Goal, Rules

# The engine names a basin by two parts of its id, everything else by the first.
_BASINS = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}
# The domain's actions name these types, which must exist even if no such thing does.
_NAMED_RECEPTACLES = ("FridgeType", "MicrowaveType", "SinkBasinType")
_NAMED_OBJECTS = ("ButterKnifeType", "KnifeType")


def problem(household: Household, goal: Goal, rules: Rules, *, name: str) -> str:
    """Write the problem: the objects, the facts at the start, and the goal.

    Args:
        household: The household.
        goal: The goal of its task type.
        rules: The places and the abilities of things.
        name: The problem's name.
    """
    objects = "\n".join(f"        {one}" for one in _objects(household))
    facts = "\n".join(f"        ({one})" for one in _facts(household, rules))
    # The goals that ALFWorld ships close the whole problem: no parenthesis is missing at the end.
    return (
        f"(define (problem {name})\n    (:domain alfred)\n    (:objects\n{objects}\n    )\n"
        f"    (:init\n{facts}\n    )\n{goal.pddl.format(**words(household))}\n"
    )


def words(household: Household) -> Mapping[str, str]:
    """Return the values of the fields of goals and their sentences, in ALFRED's spelling."""
    look = household.task.task_type == LOOK
    return {
        "obj": household.task.target,
        "recep": "" if look else household.task.receptacle,
        "toggle": LAMP if look else "",
        "mrecep": "",
    }


def _id(thing: Thing | Receptacle) -> str:
    """Return the PDDL id for which the game shows the thing's own number: the engine counts a kind's ids backwards.

    >>> _id(("Mug", 1)), _id(("SinkBasin", 1))
    ('Mug_bar_99', 'Sink_bar_99_bar_SinkBasin')
    """
    name, number = thing
    before = _BASINS.get(name)
    return f"{before}_bar_{100 - number:02}_bar_{name}" if before else f"{name}_bar_{100 - number:02}"


def _objects(household: Household) -> Iterator[str]:
    things = [thing for thing, _ in household.things]
    receptacles = household.room.receptacles
    holder_types = {f"{name}Type" for name, _ in receptacles}.union(_NAMED_RECEPTACLES)
    thing_types = {f"{name}Type" for name, _ in things}.union(_NAMED_OBJECTS)
    yield "agent1 - agent"
    yield from (f"{_id(one)} - object" for one in things)
    yield from (f"{_id(one)} - receptacle" for one in receptacles)
    yield from (f"loc_bar_{index} - location" for index in range(len(receptacles) + 1))
    yield from (f"{one} - rtype" for one in sorted(holder_types))
    yield from (f"{one} - otype" for one in sorted(thing_types))


def _facts(household: Household, rules: Rules) -> Iterator[str]:
    """Return the facts at the start. The player begins in the middle of the room, at no receptacle."""
    locations = {one: f"loc_bar_{index}" for index, one in enumerate(household.room.receptacles, start=1)}
    yield "= (total-cost) 0"
    yield "atLocation agent1 loc_bar_0"
    for receptacle, location in locations.items():
        yield f"receptacleType {_id(receptacle)} {receptacle[0]}Type"
        yield f"receptacleAtLocation {_id(receptacle)} {location}"
        if receptacle[0] in rules.openable:
            yield f"openable {_id(receptacle)}"
    for thing, place in household.things:
        yield f"objectType {_id(thing)} {thing[0]}Type"
        yield f"inReceptacle {_id(thing)} {_id(place)}"
        yield f"objectAtLocation {_id(thing)} {locations[place]}"
        if thing[0] != LAMP:
            yield f"pickupable {_id(thing)}"
        for ability in ("cleanable", "heatable", "coolable", "toggleable", "sliceable"):
            if thing[0] in getattr(rules, ability):
                yield f"{ability} {_id(thing)}"
    kinds = sorted({name for (name, _), _ in household.things})
    for holder in sorted({name for name, _ in household.room.receptacles}):
        yield from (f"canContain {holder}Type {name}Type" for name in kinds if name in rules.holds[holder])
