"""Read the knowledge base: ``knowledge.csv`` (objects and facts) and ``properties.csv`` (wordings of questions).

Both files are meant to be edited by hand; ``python -m tools.check_knowledge`` checks them. A row of ``knowledge.csv``
lists the properties that are true of a typical instance of the object ("yes"), and those that vary between instances or
on which people disagree ("sometimes"); all others are "no".
"""

from __future__ import annotations

import csv
import functools
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentsgym.errors import ConfigError

#: The properties that say how big an object is, from the smallest size to the largest.
SIZES = ("fist", "shoebox", "bigger", "car", "house")

#: The kinds of keys that compare the object with another one.
COMPARISONS = ("bigger_than", "smaller_than")

_VALUES: Mapping[str, Callable[[str, str], bool]] = {
    "first_letter": lambda name, letter: (
        (name[0] in "aeiou") is (letter == "vowel") if len(letter) > 1 else name[0] == letter
    ),
    "last_letter": lambda name, letter: (
        (name[-1] in "aeiou") is (letter == "vowel") if len(letter) > 1 else name[-1] == letter
    ),
    "letters_over": lambda name, count: sum(map(str.isalpha, name)) > int(count),
    "letters_under": lambda name, count: sum(map(str.isalpha, name)) < int(count),
    "letters": lambda name, count: sum(map(str.isalpha, name)) == int(count),
    "letter": lambda name, letter: letter in name,
    "words": lambda name, count: len(name.split()) == int(count),
    "name": lambda name, other: name.replace("-", " ") == other,
}

FOLDER = Path(__file__).parent
OBJECTS_FILE = FOLDER / "knowledge.csv"
PROPERTIES_FILE = FOLDER / "properties.csv"
WORDINGS_FILE = FOLDER / "wordings.csv"
OTHER_NAMES_FILE = FOLDER / "other_names.txt"

OBJECT_COLUMNS = ("object", "article", "plural", "aliases", "category", "hard", "yes", "sometimes")
PROPERTY_COLUMNS = ("property", "question", "phrases", "not")
VALUES = ("yes", "no", "sometimes")

_INNERMOST = re.compile(r"\(([^()]*)\)")

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
        article: ``"a"``, ``"an"``, ``"the"`` (sun) or ``""`` (bread, scissors).
        plural: The plural.
        aliases: Other names of the same object.
        category: The group that the object belongs to, such as ``"tool"``.
        hard: Whether the object is one of the rarer ones, which ``hardcore`` selects.
        values: The value of each property: ``"yes"``, ``"no"`` or ``"sometimes"``.
    """

    name: str
    article: str
    plural: str
    aliases: tuple[str, ...]
    category: str
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
        phrases: Further questions about the property, normalized. A leading ``!`` marks one that denies it.
        neighbors: Questions that sound alike and have another answer for some object; none of them is the property's.
    """

    key: str
    question: str
    phrases: tuple[str, ...]
    neighbors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnowledgeBase:
    """Objects by name, properties by key, every name of every object, and names of other common things."""

    objects: Mapping[str, KnownObject]
    properties: Mapping[str, Property]
    names: Mapping[str, str]
    other_names: frozenset[str]

    def value(self, name: str, key: str) -> str | None:
        """Look up a property of an object, or derive it from names or sizes; None if it is unknown or unclear."""
        if ":" not in key:
            known = self.objects.get(name)
            return None if known is None else known.values.get(key)
        kind, _, argument = key.partition(":")
        if kind not in COMPARISONS:
            return "yes" if _VALUES[kind](name.lower(), argument) else "no"
        if kind == "smaller_than":
            name, argument = argument, name
        own, other = ([self.value(which, size) for size in SIZES] for which in (name, argument))
        if None in own or None in other:
            return None
        least, most = own.count("yes"), len(own) - own.count("no")
        other_least, other_most = other.count("yes"), len(other) - other.count("no")
        if name == argument or most < other_least:
            return "no"
        return "yes" if least > other_most else None


def expand(phrase: str) -> list[str]:
    """Expand the alternatives of a phrase, with the phrase's leading ``!`` (negation), if any, on each.

    >>> expand("made (of/from) wood"), expand("!alive")
    (['made of wood', 'made from wood'], ['!alive'])
    """
    mark = "!" if phrase.startswith("!") else ""
    texts = [phrase.removeprefix("!")]
    done: list[str] = []
    while texts:
        text = texts.pop()
        inner = _INNERMOST.search(text)
        if inner:
            texts += [f"{text[: inner.start()]}{choice}{text[inner.end() :]}" for choice in inner[1].split("/")]
        else:
            done.append(mark + " ".join(text.split()))
    return done[::-1]


def split_list(cell: str) -> tuple[str, ...]:
    """Return the entries of a cell, which are separated by semicolons."""
    return tuple(entry.strip() for entry in cell.split(";") if entry.strip())


def expand_list(cell: str) -> tuple[str, ...]:
    """Return the entries of a cell with their alternatives written out."""
    return tuple(text for entry in split_list(cell) for text in expand(entry))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file; row ``i`` is line ``i + 2``."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def table_faults(path: Path, columns: Sequence[str], choices: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield what is wrong with the form of a CSV file, each fault with its file and line.

    Args:
        path: The file.
        columns: The columns that it must have; the first one names the row.
        choices: The values that are allowed, by column.
    """
    data = path.read_bytes()
    try:
        rows = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        yield f"{path.name}:{line}: the file must be UTF-8"
        return
    head = next(rows, list[str]())
    odd = sorted(set(head) ^ set(columns))
    if odd or len(head) != len(columns):
        yield f"{path.name}:1: the columns differ from the expected ones in {odd or 'their number'}"
        return
    names: set[str] = set()
    for line, row in enumerate(rows, 2):
        if rows.line_num > line:
            yield f"{path.name}:{line}: a cell must not contain a line break; is a quotation mark missing?"
            return
        yield from (f"{path.name}:{line}: {fault}" for fault in _row_faults(row, head, choices, names))


def _row_faults(
    row: Sequence[str], head: Sequence[str], choices: Mapping[str, Sequence[str]], names: set[str]
) -> Iterator[str]:
    """Yield what is wrong with the cells of a row, and add its name to those of earlier rows."""
    if len(row) != len(head):
        lacking = f": that of {head[len(row)]} is missing" if len(row) < len(head) else ""
        yield f"the row must have {len(head)} cells, got {len(row)}{lacking}"
        return
    if not row[0].strip() or row[0] in names:
        yield f"{head[0]} must be a name that no other row has, got {row[0]!r}"
    names.add(row[0])
    for column, cell in zip(head, row, strict=True):
        if cell not in choices.get(column, (cell,)):
            yield f"{column} must be one of {', '.join(choices[column])}, got {cell!r}"


def form_faults(objects_path: Path, properties_path: Path) -> Iterator[str]:
    """Yield what is wrong with the form of the two files."""
    yield from table_faults(properties_path, PROPERTY_COLUMNS, {})
    faults = [*table_faults(objects_path, OBJECT_COLUMNS, {"hard": ("yes", "no"), "article": ("a", "an", "the", "")})]
    yield from faults
    keys = {row.get("property") for row in read_rows(properties_path)}
    for line, row in enumerate([] if faults else read_rows(objects_path), 2):
        listed = [(column, key) for column in ("yes", "sometimes") for key in row[column].split()]
        for column, key in listed:
            if key not in keys:
                yield f"{objects_path.name}:{line}: {column} contains the unknown property {key!r}"
        twice = [key for key, count in Counter(key for _, key in listed).items() if count > 1]
        if twice:
            yield f"{objects_path.name}:{line}: yes and sometimes contain {twice[0]!r} twice"


def read_knowledge(objects_path: Path = OBJECTS_FILE, properties_path: Path = PROPERTIES_FILE) -> KnowledgeBase:
    """Read the files; ``tools.check_knowledge`` checks what they say.

    Raises:
        ConfigError: The form of a file is wrong, such as a row with too few cells.
    """
    for fault in form_faults(objects_path, properties_path):
        raise ConfigError(fault)
    properties = {
        row["property"]: Property(
            key=row["property"],
            question=row["question"],
            phrases=expand_list(row["phrases"]),
            neighbors=expand_list(row["not"]),
        )
        for row in read_rows(properties_path)
    }
    objects: dict[str, KnownObject] = {}
    for row in read_rows(objects_path):
        listed = {key: value for value in ("yes", "sometimes") for key in row[value].split()}
        objects[row["object"]] = KnownObject(
            name=row["object"],
            article=row["article"],
            plural=row["plural"],
            aliases=split_list(row["aliases"]),
            category=row["category"],
            hard=row["hard"] == "yes",
            values={key: listed.get(key, "no") for key in properties},
        )
    return KnowledgeBase(
        objects=objects,
        properties=properties,
        names={name: known.name for known in objects.values() for name in known.names},
        other_names=frozenset(OTHER_NAMES_FILE.read_text(encoding="utf-8").splitlines()),
    )


#: Reads the bundled knowledge base, once per process.
load_knowledge: Callable[[], KnowledgeBase] = functools.cache(read_knowledge)


@functools.cache
def load_wordings() -> Mapping[str, tuple[str, ...]]:
    """Read the words and phrases that mean the same ("" for nothing), or that form a list ("@…").

    A phrase with ``^`` in front is replaced only at the beginning of a question, one with ``$`` behind only at its end.
    Phrases have words as earlier rows leave them: no articles, "is" for "are" and "am", "do" for any other auxiliary.
    """
    wordings: dict[str, tuple[str, ...]] = {}
    for row in read_rows(WORDINGS_FILE):
        wordings[row["means"]] = (*wordings.get(row["means"], ()), *expand_list(row["phrases"]))
    return wordings


class Candidates:
    """The objects and properties of one game as bit masks."""

    def __init__(self, knowledge: KnowledgeBase, objects: Sequence[str], properties: Sequence[str]) -> None:
        self.objects = tuple(objects)
        self.properties = tuple(properties)
        self.all = (1 << len(self.objects)) - 1
        self.bit = {name: 1 << i for i, name in enumerate(self.objects)}
        self.mask_by_value = {key: self._masks(knowledge, key) for key in self.properties}

    def mask(self, knowledge: KnowledgeBase, key: str, value: str) -> int:
        """Return the objects with a value of a property, or of a question that is derived from names or sizes."""
        if key not in self.mask_by_value:
            self.mask_by_value[key] = self._masks(knowledge, key)
        return self.mask_by_value[key][value]

    def _masks(self, knowledge: KnowledgeBase, key: str) -> dict[str, int]:
        masks: dict[str, int] = dict.fromkeys(VALUES, 0)
        for name, bit in self.bit.items():
            value = knowledge.value(name, key)
            if value is not None:
                masks[value] |= bit
        return masks

    def names(self, mask: int) -> list[str]:
        """Return the objects of a mask, in order."""
        return [name for name in self.objects if mask & self.bit[name]]

    def indistinguishable_pair(self) -> tuple[str, str] | None:
        """Return two objects with the same properties; None if all differ."""
        seen: dict[tuple[bool, ...], str] = {}
        for name in self.objects:
            row = tuple(
                bool(self.mask_by_value[key][value] & self.bit[name]) for key in self.properties for value in VALUES
            )
            if row in seen:
                return seen[row], name
            seen[row] = name
        return None
