"""Read the knowledge base: ``knowledge.csv`` (objects and facts) and ``properties.csv`` (wordings of questions).

Both files are meant to be edited by hand; ``python -m tools.check_knowledge`` checks them. A value describes a typical
instance of the object, and is ``sometimes`` if instances vary or people would disagree.
"""

from __future__ import annotations

import csv
import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
OBJECTS_FILE = FOLDER / "knowledge.csv"
PROPERTIES_FILE = FOLDER / "properties.csv"
CATEGORIES_FILE = FOLDER / "categories.txt"

OBJECT_COLUMNS = ("object", "article", "plural", "aliases", "hard")
PHRASE_KINDS = ("is", "does", "can", "people_do", "people_can")
VALUES = ("yes", "no", "sometimes")

#: A subset for very small models: the questions are short and differ only in their last word, and the properties
#: distinguish all objects.
DEMO_OBJECTS = (
    "airplane", "apple", "backpack", "ball", "banana", "bed", "bee", "candle", "car", "carrot", "cat",
    "chicken", "clock", "computer", "cow", "dog", "fish", "hat", "knife", "lamp", "mirror", "newspaper",
    "octopus", "oven", "pencil", "piano", "rose", "skateboard", "snake", "telescope", "television", "tree",
)  # fmt: skip
DEMO_PROPERTIES = (
    "alive", "animal", "plant", "man_made", "electric", "fur", "wings", "fly", "swim", "eggs",
    "jump", "noise", "round", "soft", "sharp", "tool", "wheels", "fruit", "wood", "vehicle",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownObject:
    """One row of ``knowledge.csv``.

    Attributes:
        name: The object, in the singular if it has one.
        article: ``"a"``, ``"an"`` or ``""`` (bread, scissors).
        plural: The plural.
        aliases: Other names of the same object.
        hard: Whether the object is marked as hard.
        values: The value of each property: ``"yes"``, ``"no"`` or ``"sometimes"``.
    """

    name: str
    article: str
    plural: str
    aliases: tuple[str, ...]
    hard: bool
    values: Mapping[str, str]

    @property
    def guess(self) -> str:
        """The guess in canonical wording, such as ``"Is it a clock?"``."""
        return f"Is it {self.article} {self.name}?" if self.article else f"Is it {self.name}?"

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the object, plurals included."""
        return (self.name, self.plural, *self.aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """One row of ``properties.csv``.

    Attributes:
        key: The property's name in configurations and in ``knowledge.csv``.
        question: The question in canonical wording.
        phrases: The phrases for the property, by kind: the text after "is it", "does it", "can it", "do you" and "can
            you", with ``_`` in place of the object after the last two. A leading ``!`` marks a negation.
    """

    key: str
    question: str
    phrases: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnowledgeBase:
    """Objects by name, properties by key, and every name of every object."""

    objects: Mapping[str, KnownObject]
    properties: Mapping[str, Property]
    names: Mapping[str, str]
    categories: frozenset[str]

    def value(self, name: str, key: str) -> str | None:
        """Look up a property of an object; None if the knowledge base lacks the object or the property."""
        known = self.objects.get(name)
        return None if known is None else known.values.get(key)


def expand(phrase: str) -> list[str]:
    """Expand the alternatives of a phrase, with the phrase's leading ``!`` (negation), if any, on each.

    >>> expand("made (of/from) wood"), expand("!alive")
    (['made of wood', 'made from wood'], ['!alive'])
    """
    mark = "!" if phrase.startswith("!") else ""
    parts = re.split(r"\(([^()]*)\)", phrase.removeprefix("!"))
    choices = [part.split("/") if i % 2 else [part] for i, part in enumerate(parts)]
    return [mark + " ".join("".join(choice).split()) for choice in itertools.product(*choices)]


def split_list(cell: str) -> tuple[str, ...]:
    """Return the entries of a cell, which are separated by semicolons."""
    return tuple(entry.strip() for entry in cell.split(";") if entry.strip())


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file; row ``i`` is line ``i + 2``."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def object_of(row: Mapping[str, str]) -> KnownObject:
    """Convert a row of ``knowledge.csv``."""
    return KnownObject(
        name=row["object"],
        article=row["article"],
        plural=row["plural"],
        aliases=split_list(row["aliases"]),
        hard=row["hard"] == "yes",
        values={key: value for key, value in row.items() if key not in OBJECT_COLUMNS},
    )


def property_of(row: Mapping[str, str]) -> Property:
    """Convert a row of ``properties.csv``, and expand its alternatives."""
    phrases = {kind: tuple(text for entry in split_list(row[kind]) for text in expand(entry)) for kind in PHRASE_KINDS}
    return Property(key=row["property"], question=row["question"], phrases=phrases)


def read_knowledge(objects_path: Path = OBJECTS_FILE, properties_path: Path = PROPERTIES_FILE) -> KnowledgeBase:
    """Read the files without validation, which ``tools.check_knowledge`` does."""
    objects = [object_of(row) for row in read_rows(objects_path)]
    properties = [property_of(row) for row in read_rows(properties_path)]
    return KnowledgeBase(
        objects={known.name: known for known in objects},
        properties={entry.key: entry for entry in properties},
        names={name: known.name for known in objects for name in known.names},
        categories=frozenset(CATEGORIES_FILE.read_text(encoding="utf-8").split()),
    )


@functools.cache
def load_knowledge() -> KnowledgeBase:
    """Read the bundled knowledge base, once per process."""
    return read_knowledge()
