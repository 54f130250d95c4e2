"""How many objects of Twenty Questions the tiny policy learns in 15 minutes.

    python benchmarks/many_objects.py 64 --seed 1    # from the repository's root

It runs ``examples/twenty_questions.py`` with the demo objects, evenly spaced others of the everyday objects, and the
demo properties, to which it adds others until no two objects have all answers in common.
"""

from __future__ import annotations

import argparse
import sys

from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES
from agentsgym.envs.TwentyQuestions.knowledge import load_knowledge
from examples import twenty_questions

DEFAULTS = [
    *("--max_steps_per_episode", "9"),
    *("--num_demonstrations", "30000"),
    *("--warm_start_steps", "6000"),
    *("--max_steps", "4500"),
]


def chosen_objects(count: int) -> list[str]:
    """Return the demo objects and evenly spaced everyday objects."""
    known = load_knowledge().objects
    others = [name for name, item in known.items() if not item.hard and name not in DEMO_OBJECTS]
    more = count - len(DEMO_OBJECTS)
    return [*DEMO_OBJECTS, *(others[index * len(others) // more] for index in range(more))]


def chosen_properties(objects: list[str]) -> list[str]:
    """Return the demo properties and those that distinguish the most objects, until all are distinguished."""
    knowledge = load_knowledge()

    def distinguished(keys: list[str]) -> int:
        return len({tuple(knowledge.value(name, key) for key in keys) for name in objects})

    properties: list[str] = [*DEMO_PROPERTIES]
    while distinguished(properties) < len(objects):
        others = [key for key in knowledge.properties if key not in properties]
        properties.append(max(others, key=lambda key: distinguished([*properties, key])))
    return properties


def main() -> None:
    """Run the example; any further options go to it, and replace ``DEFAULTS``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", type=int, choices=range(33, 333), metavar="objects", help="their number, 33 to 332")
    options, others = parser.parse_known_args()
    objects = chosen_objects(options.objects)
    choice = ["--objects", *objects, "--properties", *chosen_properties(objects)]
    sys.argv = [sys.argv[0], *choice, *DEFAULTS, *others]
    twenty_questions.main()


if __name__ == "__main__":
    main()
