"""A household as a problem in PDDL, in the vocabulary of the domain that the ``alfworld`` wheel ships."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tools.households.plans import LOOK, Household, Thing
from tools.households.rooms import LAMP, Receptacle
from tools.households.shipped import Goal, Rules

# The engine's own name for a basin is made of two parts; everything else is called by the first part of its id.
_BASINS = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}
# The domain's actions name these types, so that they must be known even where no such thing is.
_NAMED_RECEPTACLES = ("FridgeType", "MicrowaveType", "SinkBasinType")
_NAMED_OBJECTS = ("ButterKnifeType", "KnifeType")


def problem(household: Household, goal: Goal, rules: Rules, *, name: str) -> str:
    """Write the problem: what there is, how everything stands at the beginning, and the goal.

    Args:
        household: What to write.
        goal: The goal of its task type.
        rules: What may lie where, and what can be done to it.
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
    """Give what stands for the fields of goals and their sentences, in ALFRED's own spelling."""
    look = household.task.task_type == LOOK
    return {
        "obj": household.task.target,
        "recep": "" if look else household.task.receptacle,
        "toggle": LAMP if look else "",
        "mrecep": "",
    }


def _id(thing: Thing | Receptacle) -> str:
    """Name it in PDDL, so that the game calls it by its own number: the engine counts the ids of a kind backwards.

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
    """Say how everything stands. The player begins in the middle of the room, at no receptacle."""
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
        yield from (f"{one} {_id(thing)}" for one in _abilities(thing[0], rules))
    kinds = sorted({name for (name, _), _ in household.things})
    for holder in sorted({name for name, _ in household.room.receptacles}):
        yield from (f"canContain {holder}Type {name}Type" for name in kinds if name in rules.holds[holder])


def _abilities(name: str, rules: Rules) -> Iterator[str]:
    if name != LAMP:
        yield "pickupable"
    for ability in ("cleanable", "heatable", "coolable", "toggleable", "sliceable"):
        if name in getattr(rules, ability):
            yield ability
