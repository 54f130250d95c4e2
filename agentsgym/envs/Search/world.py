"""Generate a small world from a seed, with encyclopedia passages and questions about it; and make tasks of questions.

People work for firms and were born in towns; firms are based in towns, towns lie on rivers, rivers flow into seas. All
names are random syllables, so no language model can know an answer beforehand. No two names share a word.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from agentsgym.envs.datasets.options import CommonOptions, Part, checked_options, names_in_part, row_env, rows_of
from agentsgym.envs.datasets.sources import QUESTION, QUESTION_OPTIONS, Column, questions_of_part, read_questions
from agentsgym.errors import ConfigError
from agentsgym.fields import Field, check_choice, is_int, is_strings, is_text, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset


GENERATED = "generated"
"""The value of ``env_config["corpus"]``."""
_ONSETS, _VOWELS, _CODAS = "bdfgklmnprstvz", "aeiou", "lmnrsk"
_KINDS = ("Works", "Mills", "Foundry", "Brewery", "Press", "Tannery")
_PRODUCTS = ("bells", "paper", "glass", "rope", "clocks", "boats", "tiles", "cloth")
_PROFESSIONS = ("weaver", "miller", "engraver", "smith", "clerk", "joiner", "dyer", "cooper")

Path = tuple[str, ...]

#: The pattern of the sentence that states each relation, in the passage about its subject.
FACTS: Mapping[str, re.Pattern[str]] = {
    "works for": re.compile(r"works for (?P<value>[A-Z]\w+ [A-Z]\w+)\."),
    "born in": re.compile(r"was born in (?P<value>[A-Z]\w+)\."),
    "based in": re.compile(r"is based in (?P<value>[A-Z]\w+)\."),
    "on river": re.compile(r"on the river (?P<value>[A-Z]\w+)\."),
    "flows into": re.compile(r"flows into the (?P<value>[A-Z]\w+ Sea)\."),
}

#: The wording of the question for each chain of relations, which begins with a person.
QUESTIONS: Mapping[Path, str] = {
    ("works for",): "Which firm does {} work for?",
    ("born in",): "In which town was {} born?",
    ("works for", "based in"): "In which town is the firm based that {} works for?",
    ("born in", "on river"): "On which river lies the town where {} was born?",
    ("works for", "based in", "on river"): "On which river lies the town where the employer of {} is based?",
    ("born in", "on river", "flows into"): "Into which sea flows the river of the town where {} was born?",
    (
        "works for",
        "based in",
        "on river",
        "flows into",
    ): "Into which sea flows the river of the town where the employer of {} is based?",
}


class World:
    """A generated world: its entities, and the facts that relate them.

    Args:
        num_people: The number of people, about whom questions are asked.
        num_firms: The number of firms.
        num_towns: The number of towns.
        num_rivers: The number of rivers.
        num_seas: The number of seas.
        seed: The seed of names and facts.

    Attributes:
        facts: The related entity for each entity and relation.
        passages: One passage per entity (seas have none), as ``{"title", "text"}``.
        people: The names of the people.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(  # one keyword for each kind of entity
        self,
        *,
        num_people: int = 200,
        num_firms: int = 60,
        num_towns: int = 40,
        num_rivers: int = 16,
        num_seas: int = 6,
        seed: int = 0,
    ) -> None:
        require("seed", seed, is_int(0), "an int >= 0")
        sizes = {"people": num_people, "firms": num_firms, "towns": num_towns, "rivers": num_rivers, "seas": num_seas}
        for kind, size in sizes.items():
            require(f"num_{kind}", size, lambda one: is_int(1)(one) and one <= 10_000, "an int from 1 to 10,000")
        generator = random.Random(derive_seed("search world", seed))
        words = _words(generator)
        self.people: Sequence[str] = [f"{next(words)} {next(words)}" for _ in range(num_people)]
        firms = [f"{next(words)} {generator.choice(_KINDS)}" for _ in range(num_firms)]
        towns, rivers = ([next(words) for _ in range(size)] for size in (num_towns, num_rivers))
        seas = [f"{next(words)} Sea" for _ in range(num_seas)]
        choice = generator.choice
        self.facts: Mapping[str, Mapping[str, str]] = {
            **{one: {"works for": choice(firms), "born in": choice(towns)} for one in self.people},
            **{one: {"based in": choice(towns)} for one in firms},
            **{one: {"on river": choice(rivers)} for one in towns},
            **{one: {"flows into": choice(seas)} for one in rivers},
        }
        passages = [{"title": one, "text": _text(one, facts, generator)} for one, facts in self.facts.items()]
        generator.shuffle(passages)
        self.passages: Sequence[Mapping[str, str]] = passages

    def task(self, person: str, path: Path) -> dict[str, Any]:
        """Make a task whose question follows the relations in ``path``, starting from a person.

        Returns:
            ``question``; ``answers``, the accepted forms of the answer, beginning with the plain one; and ``evidence``,
            the titles of the passages that lead to the answer, in order.
        """
        evidence: list[str] = []
        entity = person
        for relation in path:
            evidence.append(entity)
            entity = self.facts[entity][relation]
        answers = [entity, f"river {entity}", f"{entity} river"] if path[-1] == "on river" else [entity]
        return {"question": QUESTIONS[path].format(person), "answers": answers, "evidence": evidence}


def paths_of(hops: Iterable[int]) -> list[Path]:
    """Return the chains of relations with the given numbers of hops."""
    numbers = set(hops)
    known = {len(path) for path in QUESTIONS}
    require("hops", sorted(numbers), lambda _: bool(numbers) and numbers <= known, f"a subset of {sorted(known)}")
    return [path for path in QUESTIONS if len(path) in numbers]


def check_options(options: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for an unknown or invalid option of a world."""
    known = ("num_people", "num_firms", "num_towns", "num_rivers", "num_seas", "seed")
    for key in options:
        check_choice("a key of env_config['world']", key, known)


def path_of_question(text: str) -> tuple[str, Path] | None:
    """Parse the person and the chain of relations from a question; None for any other text."""
    for path, template in QUESTIONS.items():
        before, after = template.split("{}")
        if text.startswith(before) and text.endswith(after):
            person = text[len(before) : len(text) - len(after)]
            if re.fullmatch(r"[A-Z]\w+ [A-Z]\w+", person):
                return person, path
    return None


def _text(entity: str, facts: Mapping[str, str], generator: random.Random) -> str:
    if "works for" in facts:
        profession = generator.choice(_PROFESSIONS)
        return (
            f"{entity} is a {profession} and was born in {facts['born in']}. {entity} works for {facts['works for']}."
        )
    if "based in" in facts:
        return f"{entity} makes {generator.choice(_PRODUCTS)}. The firm is based in {facts['based in']}."
    if "on river" in facts:
        return f"{entity} is a town of {generator.randint(2, 90)} thousand people on the river {facts['on river']}."
    return f"The {entity} is a river of {generator.randint(40, 900)} km. It flows into the {facts['flows into']}."


def _words(generator: random.Random) -> Iterator[str]:
    """Draw words without repetition."""
    drawn: set[str] = set()
    num_syllables = 2
    while True:
        syllables = [generator.choice(_ONSETS) + generator.choice(_VOWELS) for _ in range(num_syllables)]
        word = "".join(syllables) + generator.choice(_CODAS)
        if word in drawn:
            num_syllables = 3  # two syllables do not yield enough words for the largest worlds
            continue
        drawn.add(word)
        num_syllables = 2
        yield word.capitalize()


_OPTIONS: Mapping[str, Field] = {
    **QUESTION_OPTIONS,
    "hops": Field(
        default=(1, 2, 3, 4),
        expected="a list of positive ints",
        valid=lambda value: isinstance(value, Sequence) and all(map(is_int(1), cast("Sequence[Any]", value))),
    ),
}


class DatasetOptions(CommonOptions, total=False):
    """Options of the generated rows, in addition to those of :class:`~.CommonOptions`.

    Attributes:
        data: A custom table of questions: the path to a JSONL file, a list of dicts, a ``datasets.Dataset``, or a dict
            of arguments for ``datasets.load_dataset``. None for questions about the generated world.
        columns: The data's columns for ``question``, ``answers`` and ``evidence`` (optional). ``answers`` is a list of
            texts, or one text.
        hops: The numbers of facts that lead to an answer in the generated world; a subset of 1 to 4.
        split: ``"disjoint"`` if training and evaluation share no people (generated world) or questions (custom data),
            ``"all"`` if each gets all of them.
    """

    data: Any
    columns: Mapping[str, str] | None
    hops: Sequence[int]


def are_texts(value: Any) -> bool:
    """Whether a value is a list of at least one text."""
    return bool(is_strings(value) and value and all(map(is_text, value)))


_COLUMNS = {
    "question": QUESTION,
    "answers": Column(
        default="answers",
        valid=lambda value: is_text(value) or are_texts(value),
        expected="a string or a list of at least one string",
    ),
    "evidence": Column(default="evidence", valid=is_strings, expected="a list of titles", is_optional=True),
}


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Make the rows of a split, with ``env_config`` unchanged."""
    config = row_env(env_class, env_config, "retriever").env_config
    settings = checked_options(options, _OPTIONS)
    if settings["data"] is not None and "hops" in options:
        raise ConfigError("hops has no effect with data: it selects questions about the generated world")
    if settings["data"] is not None:
        rows = read_questions(settings, _COLUMNS)
        for row in rows:
            row["answers"] = [row["answers"]] if isinstance(row["answers"], str) else [*row["answers"]]
        tasks = questions_of_part(rows, part, settings)
    elif config["corpus"] == GENERATED:
        world = World(**config["world"])
        tasks = [
            world.task(person, path)
            for person in names_in_part(world.people, part, settings, "people")
            for path in paths_of(settings["hops"])
        ]
    else:
        raise ConfigError(f"the corpus {shown(config['corpus'])} has no built-in questions: pass questions as data=…")
    return rows_of(tasks, env_class, env_config, part, settings)
