"""Households before they are written: rooms, tasks, where things lie, walkthroughs; none of it needs the engine.

The rules are an excerpt of what the ``alfworld`` wheel ships; tests/with_worlds plays whole games by its own.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentsgym.errors import ConfigError, MissingDependencyError
from tools.households import SIZES, TASK_TYPES, generate_households
from tools.households.__main__ import main
from tools.households.plans import TREATMENTS, Household, Planner, Task
from tools.households.problem import problem
from tools.households.rooms import KINDS, LAMP, LAMP_STANDS_ON, Room, rooms
from tools.households.shipped import Goal, Rules
from tools.households.walkthrough import walkthrough

FOOD = frozenset({"Apple", "Bread", "Egg", "Mug", "Plate", "Potato", "Tomato"})
SMALL = frozenset({"Book", "CellPhone", "CreditCard", "KeyChain", "Pen", "SoapBar", "Cloth", "Watch"})
SURFACES = ("CoffeeTable", "CounterTop", "Desk", "DiningTable", "Dresser", "Shelf", "SideTable")
RULES = Rules(
    holds={
        **{name: frozenset[str]() for kind in KINDS.values() for name in (*kind.receptacles, *kind.appliances)},
        **dict.fromkeys(SURFACES, FOOD | SMALL),
        **dict.fromkeys(("Cabinet", "Drawer"), SMALL | {"Mug", "Plate"}),
        **dict.fromkeys(("Fridge", "Microwave"), FOOD),
        **dict.fromkeys(("Sofa", "Bed", "ArmChair"), frozenset({"Book", "CellPhone"})),
        "SinkBasin": FOOD | {"SoapBar", "Cloth"},
        "Toilet": frozenset({"SoapBar", "Cloth"}),
    },
    cleanable=FOOD | {"SoapBar", "Cloth"},
    heatable=FOOD,
    coolable=FOOD,
    toggleable=frozenset({LAMP}),
    sliceable=frozenset({"Apple", "Bread"}),
    openable=frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"}),
    rooms={
        **dict.fromkeys(TASK_TYPES, frozenset({"Kitchen"})),
        "pick_and_place_simple": frozenset(KINDS),
        "pick_two_obj_and_place": frozenset(KINDS),
        "look_at_obj_in_light": frozenset({"LivingRoom", "Bedroom"}),
        "pick_clean_then_place_in_recep": frozenset({"Kitchen", "Bathroom"}),
    },
)
PLANNERS = {(size, unseen): Planner(RULES, size, unseen=unseen) for size in SIZES for unseen in (False, True)}


@pytest.mark.parametrize("size", SIZES)
def test_rooms_have_what_their_size_states_and_unseen_ones_other_receptacles(size: str) -> None:
    seen, unseen = rooms(size, unseen=False), rooms(size, unseen=True)
    assert (len(seen), len(unseen)) == (24 * 4, 6 * 4)
    low, high = SIZES[size].receptacles
    for room in (*seen, *unseen):
        assert low <= len(room.receptacles) <= high
        assert room.lamp_on is None or (room.lamp_on in room.receptacles and room.lamp_on[0] in LAMP_STANDS_ON)
    assert not {(one.kind, one.receptacles) for one in seen} & {(one.kind, one.receptacles) for one in unseen}
    assert {room.number for room in unseen} == {first + n for first in (0, 200, 300, 400) for n in range(1, 7)}


class Game:
    """What ALFWorld's domain states of commands, written a second time, to hold walkthroughs against."""

    def __init__(self, household: Household) -> None:
        self.task = household.task
        self.lies: dict[str, str] = {name(thing): name(place) for thing, place in household.things}
        self.closed = {name(one) for one in household.room.receptacles if one[0] in RULES.openable}
        self.done: set[tuple[str, str]] = set()
        self.at, self.held, self.lit = "", "", False

    def step(self, command: str) -> None:
        words = command.split()
        first, last = " ".join(words[1:3]), " ".join(words[-2:])
        assert command.startswith("go to ") or words[0] == "use" or last == self.at, command
        if command.startswith("go to "):
            assert last != self.at
            self.at = last
        elif words[0] == "open":
            self.closed.remove(last)
        elif words[0] == "take":
            assert not self.held
            assert self.at not in self.closed
            assert self.lies.pop(first) == self.at
            self.held = first
        elif words[0] == "move":
            assert self.at not in self.closed
            assert self.held == first
            self.lies[first], self.held = self.at, ""
        elif words[0] == "use":
            assert self.lies[first] == self.at
            self.lit = True
        else:
            assert self.held == first
            self.done.add((words[0], first))

    @property
    def won(self) -> bool:
        target, goal = self.task.target.lower(), self.task.receptacle.lower()
        if self.task.task_type == "look_at_obj_in_light":
            return self.held.startswith(f"{target} ") and self.lit and self.lies["desklamp 1"] == self.at
        verb = TREATMENTS.get(self.task.task_type, ("", ""))[0]
        arrived = [
            place
            for thing, place in self.lies.items()
            if thing.split()[0] == target and place.split()[0] == goal and (not verb or (verb, thing) in self.done)
        ]
        wanted = 2 if self.task.task_type == "pick_two_obj_and_place" else 1
        return any(arrived.count(place) >= wanted for place in arrived)


def name(thing: tuple[str, int]) -> str:
    return f"{thing[0].lower()} {thing[1]}"


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    task_type=st.sampled_from(TASK_TYPES),
    size=st.sampled_from(list(SIZES)),
    unseen=st.booleans(),
    searching=st.booleans(),
)
def test_walkthroughs_obey_the_rules_and_win_with_the_last_command(
    seed: int, task_type: str, size: str, unseen: bool, searching: bool
) -> None:
    planner = PLANNERS[size, unseen]
    if not planner.possible(task_type):  # the excerpt of the rules leaves some of the smallest rooms without
        with pytest.raises(ConfigError, match=f"no room of size '{size}' allows '{task_type}'"):
            planner.draw(task_type, random.Random(seed))
        return
    household = planner.draw(task_type, random.Random(seed))
    assert household == planner.draw(task_type, random.Random(seed))
    assert all(thing[0] == LAMP or thing[0] in RULES.holds[place[0]] for thing, place in household.things)
    game = Game(household)
    for command in walkthrough(household, RULES, searching=searching):
        assert not game.won
        game.step(command)
    assert game.won


KITCHEN = Room(
    kind="Kitchen",
    number=7,
    receptacles=(("Drawer", 1), ("Drawer", 2), ("SinkBasin", 1), ("SideTable", 1)),
    lamp_on=None,
)
HOUSEHOLD = Household(
    room=KITCHEN,
    task=Task(task_type="pick_clean_then_place_in_recep", target="Mug", receptacle="SideTable"),
    things=((("Apple", 1), ("SinkBasin", 1)), (("Mug", 1), ("Drawer", 2))),
    picks=(("Mug", 1),),
    sentence=0,
)


def test_a_walkthrough_goes_straight_to_the_object_or_looks_for_it() -> None:
    end = [
        "take mug 1 from drawer 2",
        "go to sinkbasin 1",
        "clean mug 1 with sinkbasin 1",
        "go to sidetable 1",
        "move mug 1 to sidetable 1",
    ]
    assert walkthrough(HOUSEHOLD, RULES) == ["go to drawer 2", "open drawer 2", *end]
    looked = ["go to drawer 1", "open drawer 1", "go to drawer 2", "open drawer 2"]
    assert walkthrough(HOUSEHOLD, RULES, searching=True) == [*looked, *end]


def test_the_problem_names_what_there_is() -> None:
    goal = Goal(pddl="    (:goal ({obj}Type {recep}Type))\n)", sentences=("clean a {obj}",))
    text = problem(HOUSEHOLD, goal, RULES, name="one")
    assert text.startswith("(define (problem one)\n    (:domain alfred)")
    assert text.count("(") == text.count(")")
    facts = [line.strip() for line in text.split("(:init")[1].split("(:goal")[0].splitlines()]
    assert {fact for fact in facts if "Mug_bar_99" in fact} == {
        "(objectType Mug_bar_99 MugType)",
        "(inReceptacle Mug_bar_99 Drawer_bar_98)",
        "(objectAtLocation Mug_bar_99 loc_bar_2)",
        "(pickupable Mug_bar_99)",
        "(cleanable Mug_bar_99)",
        "(heatable Mug_bar_99)",
        "(coolable Mug_bar_99)",
    }
    assert "(canContain DrawerType MugType)" in facts
    assert "(canContain DrawerType AppleType)" not in facts
    assert "(openable Drawer_bar_99)" in facts
    assert "(openable Sink_bar_99_bar_SinkBasin)" not in facts
    assert "(:goal (MugType SideTableType))" in text


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"split_sizes": {}}, "split_sizes is empty: pass numbers of games"),
        ({"split_sizes": {"train": 0}}, r"split_sizes\['train'\] must be a positive int \(or omit that split\), got 0"),
        ({"split_sizes": {"train": True}}, r"split_sizes\['train'\] must be a positive int .*, got True"),
        ({"split_sizes": {"valid": 3}}, "split_sizes has no split 'valid'; did you mean 'valid_seen'"),
        ({"size": "large"}, "size must be one of 'tiny', 'small', 'medium', got 'large'"),
        ({"seed": -1}, "seed must be an int >= 0, got -1"),
        ({"searching": "yes"}, "searching must be True or False, got 'yes'"),
        ({"task_types": []}, r"task_types must be a list of some of .*, got \[\]"),
        ({"task_types": "pick_and_place_simple"}, "task_types must be a list of some of"),
        ({"task_types": ["pick_and_place"]}, "unknown type 'pick_and_place'; did you mean 'pick_and_place_simple'"),
    ],
)
def test_bad_arguments_name_what_is_wrong(tmp_path: Path, given: dict[str, Any], reported: str) -> None:
    options: dict[str, Any] = {"split_sizes": {"train": 1}, **given}
    with pytest.raises(ConfigError, match=reported):
        generate_households(tmp_path / "new", options.pop("split_sizes"), **options)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(ConfigError, match=r"is not empty \(it contains mine.txt\)"):
        generate_households(tmp_path, {"train": 1})
    with pytest.raises(ConfigError, match="is a file; households are written into a folder"):
        generate_households(tmp_path / "mine.txt", {"train": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_without_the_wheel_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"'alfworld' is not installed.*agentsgym\[alfworld\]"):
        generate_households(tmp_path, {"train": 1})
    assert main([str(tmp_path), "--train", "1"]) == 1
    assert "pip install 'agentsgym[alfworld]'" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "split_sizes is empty" in capsys.readouterr().err
