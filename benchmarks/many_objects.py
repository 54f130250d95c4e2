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
    """Run the example; options that are not listed here go to it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", type=int, choices=range(33, 333), metavar="objects", help="their number, 33 to 332")
    parser.add_argument("--max_steps_per_episode", default="9", help="turns of a game")
    parser.add_argument("--num_demonstrations", default="30000", help="imitated games")
    parser.add_argument("--warm_start_steps", default="6000", help="steps of imitation")
    parser.add_argument("--max_steps", default="4500", help="steps of reinforcement learning")
    options, others = parser.parse_known_args()
    objects = chosen_objects(vars(options).pop("objects"))
    settings = [word for key, value in vars(options).items() for word in (f"--{key}", value)]
    choice = ["--objects", *objects, "--properties", *chosen_properties(objects)]
    sys.argv = [sys.argv[0], *choice, *settings, *others]
    twenty_questions.main()


if __name__ == "__main__":
    main()
