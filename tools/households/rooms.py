"""The rooms that households are played in: numbered as ALFRED's are, each with the same receptacles in every game."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentsgym.seeding import derive_seed

Receptacle = tuple[str, int]
"""What it is and which of its kind, from 1 on, as the game calls it: ``("Drawer", 2)`` is *drawer 2*."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomKind:
    """What rooms of a kind may hold.

    Attributes:
        first: One less than the number of the first room.
        appliances: Receptacles that do something, at most one each, except in the largest rooms there all of them.
        receptacles: The others, with the most there are in a room.
        objects: What may lie in it.
    """

    first: int
    appliances: tuple[str, ...]
    receptacles: Mapping[str, int]
    objects: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the rooms are.

    Attributes:
        receptacles: Fewest and most in a room.
        same: The most of one kind.
        appliances: Fewest and most in a room.
        objects: How many lie in it, a lamp included.
    """

    receptacles: tuple[int, int]
    same: int
    appliances: tuple[int, int]
    objects: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A room: what never changes between the games that are played in it.

    Attributes:
        kind: A key of :data:`KINDS`.
        number: As ALFRED numbers floor plans.
        receptacles: What is in it, in alphabetical order.
        lamp_on: On which of them the desk lamp stands; None without a lamp.
    """

    kind: str
    number: int
    receptacles: tuple[Receptacle, ...]
    lamp_on: Receptacle | None


#: The kinds of room, with ALFRED's names and numbers.
KINDS: Mapping[str, RoomKind] = {
    "Kitchen": RoomKind(
        first=0,
        appliances=("Fridge", "Microwave", "SinkBasin"),
        receptacles={
            "Cabinet": 8,
            "CoffeeMachine": 1,
            "CounterTop": 3,
            "DiningTable": 1,
            "Drawer": 6,
            "GarbageCan": 1,
            "Shelf": 3,
            "SideTable": 1,
            "StoveBurner": 4,
        },
        objects=(
            *("Apple", "Bowl", "Bread", "ButterKnife", "Cup", "DishSponge", "Egg", "Fork", "Kettle", "Knife", "Ladle"),
            *("Lettuce", "Mug", "Pan", "PepperShaker", "Plate", "Pot", "Potato", "SaltShaker", "SoapBottle"),
            *("Spatula", "Spoon", "Tomato", "WineBottle"),
        ),
    ),
    "LivingRoom": RoomKind(
        first=200,
        appliances=(),
        receptacles={
            "ArmChair": 2,
            "Cabinet": 4,
            "CoffeeTable": 2,
            "DiningTable": 1,
            "Drawer": 6,
            "Dresser": 1,
            "GarbageCan": 1,
            "Ottoman": 1,
            "Safe": 1,
            "Shelf": 5,
            "SideTable": 3,
            "Sofa": 2,
        },
        objects=(
            *("Book", "CellPhone", "CreditCard", "KeyChain", "Laptop", "Newspaper", "Pillow", "RemoteControl"),
            *("Statue", "TissueBox", "Vase", "Watch", "WateringCan"),
        ),
    ),
    "Bedroom": RoomKind(
        first=300,
        appliances=(),
        receptacles={
            "ArmChair": 1,
            "Bed": 1,
            "Cabinet": 4,
            "Desk": 2,
            "Drawer": 6,
            "Dresser": 1,
            "GarbageCan": 1,
            "LaundryHamper": 1,
            "Safe": 1,
            "Shelf": 6,
            "SideTable": 2,
        },
        objects=(
            *("AlarmClock", "BasketBall", "Book", "CD", "CellPhone", "Cloth", "CreditCard", "KeyChain", "Laptop"),
            *("Mug", "Pen", "Pencil", "Pillow", "TennisRacket", "TissueBox", "Watch"),
        ),
    ),
    "Bathroom": RoomKind(
        first=400,
        appliances=("SinkBasin",),
        receptacles={
            "BathtubBasin": 1,
            "Cabinet": 6,
            "Cart": 1,
            "CounterTop": 2,
            "Drawer": 6,
            "GarbageCan": 1,
            "HandTowelHolder": 1,
            "Shelf": 4,
            "SideTable": 1,
            "Toilet": 1,
            "ToiletPaperHanger": 1,
        },
        objects=(
            *("Candle", "Cloth", "DishSponge", "HandTowel", "SoapBar", "SoapBottle", "SprayBottle", "TissueBox"),
            "ToiletPaper",
        ),
    ),
}

#: The sizes by name: the smallest train on a laptop, the largest are what ALFWorld's own rooms are like.
SIZES: Mapping[str, Size] = {
    "tiny": Size(receptacles=(4, 4), same=1, appliances=(1, 2), objects=4),
    "small": Size(receptacles=(6, 6), same=2, appliances=(2, 3), objects=7),
    "medium": Size(receptacles=(16, 27), same=8, appliances=(3, 3), objects=14),
}

LAMP = "DeskLamp"
LAMP_STANDS_ON = frozenset({"CoffeeTable", "Desk", "DiningTable", "Dresser", "Shelf", "SideTable"})
_NUM_UNSEEN = 6  # of the 30 rooms of a kind, the first, as in ALFRED
_NUM_ROOMS = 30


@functools.cache
def rooms(size: str, *, unseen: bool) -> tuple[Room, ...]:
    """List the rooms of a size: 24 of each kind to train in, or 6 of each kind that nobody trains in.

    Room 7 of a size is the same in every set of games, whatever its seed. Which receptacles, and how many of each, are
    together in a room tells seen and unseen rooms apart: no unseen room has those of any seen one of its kind.
    """
    numbers = range(1, _NUM_UNSEEN + 1) if unseen else range(_NUM_UNSEEN + 1, _NUM_ROOMS + 1)
    return tuple(_room(kind, number, size, unseen=unseen) for kind in KINDS for number in numbers)


def _room(kind: str, number: int, size: str, *, unseen: bool) -> Room:
    generator = random.Random(derive_seed("household room", size, kind, number))
    layouts = (_layout(KINDS[kind], SIZES[size], generator) for _ in itertools.count())
    layout = next(one for one in layouts if _for_unseen_rooms(kind, one) == unseen)
    receptacles = tuple((name, n) for name, count in layout for n in range(1, count + 1))
    stands = [one for one in receptacles if one[0] in LAMP_STANDS_ON]
    has_lamp = kind in ("LivingRoom", "Bedroom") and stands
    return Room(
        kind=kind,
        number=KINDS[kind].first + number,
        receptacles=receptacles,
        lamp_on=generator.choice(stands) if has_lamp else None,
    )


def _layout(kind: RoomKind, size: Size, generator: random.Random) -> Sequence[tuple[str, int]]:
    """Draw how many of each receptacle there are."""
    most = min(size.appliances[1], len(kind.appliances))
    appliances = generator.sample(kind.appliances, generator.randint(min(size.appliances[0], most), most))
    others = [name for name, most in kind.receptacles.items() for _ in range(min(most, size.same))]
    total = min(generator.randint(*size.receptacles), len(appliances) + len(others))
    drawn = generator.sample(others, total - len(appliances))
    return sorted(Counter([*appliances, *drawn]).items())


def _for_unseen_rooms(kind: str, layout: Sequence[tuple[str, int]]) -> bool:
    return derive_seed("layout of an unseen household room", kind, *layout) % 4 == 0
