"""The rooms of households: numbered like ALFRED's, each with the same receptacles in every game."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentsgym.seeding import derive_seed

Receptacle = tuple[str, int]
"""The kind of a thing and its number, from 1, as in the game: ``("Drawer", 2)`` is *drawer 2*."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomKind:
    """A kind of room.

    Attributes:
        first: One less than the number of the first room.
        appliances: The receptacles with a function, at most one each; the largest rooms have all of them.
        receptacles: The other receptacles, with their maximum numbers in a room.
        objects: The objects that it may contain.
    """

    first: int
    appliances: tuple[str, ...]
    receptacles: Mapping[str, int]
    objects: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of rooms.

    Attributes:
        receptacles: The minimum and maximum number in a room.
        same: The maximum number of one kind.
        appliances: The minimum and maximum number in a room.
        objects: The number of objects, including a lamp.
    """

    receptacles: tuple[int, int]
    same: int
    appliances: tuple[int, int]
    objects: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A room, which is the same in all of its games.

    Attributes:
        kind: A key of :data:`KINDS`.
        number: The number of the floor plan, as in ALFRED.
        receptacles: Its receptacles, in alphabetical order.
        lamp_on: The receptacle on which the desk lamp stands; None without a lamp.
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
            "Cabinet": 8, "CoffeeMachine": 1, "CounterTop": 3, "DiningTable": 1, "Drawer": 6, "GarbageCan": 1,
            "Shelf": 3, "SideTable": 1, "StoveBurner": 4,
        },
        objects=(
            "Apple", "Bowl", "Bread", "ButterKnife", "Cup", "DishSponge", "Egg", "Fork", "Kettle", "Knife", "Ladle",
            "Lettuce", "Mug", "Pan", "PepperShaker", "Plate", "Pot", "Potato", "SaltShaker", "SoapBottle",
            "Spatula", "Spoon", "Tomato", "WineBottle",
        ),
    ),
    "LivingRoom": RoomKind(
        first=200,
        appliances=(),
        receptacles={
            "ArmChair": 2, "Cabinet": 4, "CoffeeTable": 2, "DiningTable": 1, "Drawer": 6, "Dresser": 1,
            "GarbageCan": 1, "Ottoman": 1, "Safe": 1, "Shelf": 5, "SideTable": 3, "Sofa": 2,
        },
        objects=(
            "Book", "CellPhone", "CreditCard", "KeyChain", "Laptop", "Newspaper", "Pillow", "RemoteControl",
            "Statue", "TissueBox", "Vase", "Watch", "WateringCan",
        ),
    ),
    "Bedroom": RoomKind(
        first=300,
        appliances=(),
        receptacles={
            "ArmChair": 1, "Bed": 1, "Cabinet": 4, "Desk": 2, "Drawer": 6, "Dresser": 1, "GarbageCan": 1,
            "LaundryHamper": 1, "Safe": 1, "Shelf": 6, "SideTable": 2,
        },
        objects=(
            "AlarmClock", "BasketBall", "Book", "CD", "CellPhone", "Cloth", "CreditCard", "KeyChain", "Laptop",
            "Mug", "Pen", "Pencil", "Pillow", "TennisRacket", "TissueBox", "Watch",
        ),
    ),
    "Bathroom": RoomKind(
        first=400,
        appliances=("SinkBasin",),
        receptacles={
            "BathtubBasin": 1, "Cabinet": 6, "Cart": 1, "CounterTop": 2, "Drawer": 6, "GarbageCan": 1,
            "HandTowelHolder": 1, "Shelf": 4, "SideTable": 1, "Toilet": 1, "ToiletPaperHanger": 1,
        },
        objects=(
            "Candle", "Cloth", "DishSponge", "HandTowel", "SoapBar", "SoapBottle", "SprayBottle", "TissueBox",
            "ToiletPaper",
        ),
    ),
}  # fmt: skip

#: The sizes by name: the smallest are for training on a laptop, the largest are like ALFWorld's own rooms.
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
    """Return the rooms of a size: 24 of each kind for training, or 6 of each kind that are held out.

    A room is the same in every set of games, whatever its seed. Seen and unseen rooms of a kind never have the same
    numbers of all receptacles.
    """
    numbers = range(1, _NUM_UNSEEN + 1) if unseen else range(_NUM_UNSEEN + 1, _NUM_ROOMS + 1)
    return tuple(_room(kind, number, size, unseen=unseen) for kind in KINDS for number in numbers)


def _room(kind: str, number: int, size: str, *, unseen: bool) -> Room:
    generator = random.Random(derive_seed("household room", size, kind, number))
    layouts = (_layout(KINDS[kind], SIZES[size], generator) for _ in itertools.count())
    layout = next(
        one for one in layouts if (derive_seed("layout of an unseen household room", kind, *one) % 4 == 0) == unseen
    )
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
    """Draw the number of each receptacle."""
    most = min(size.appliances[1], len(kind.appliances))
    appliances = generator.sample(kind.appliances, generator.randint(min(size.appliances[0], most), most))
    others = [name for name, most in kind.receptacles.items() for _ in range(min(most, size.same))]
    total = min(generator.randint(*size.receptacles), len(appliances) + len(others))
    drawn = generator.sample(others, total - len(appliances))
    return sorted(Counter([*appliances, *drawn]).items())
