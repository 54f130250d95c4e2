"""Generate a small world from a seed, with encyclopedia passages and multi-hop questions about it.

People work for firms and were born in towns; firms are based in towns, towns lie on rivers, rivers flow into seas. All
names are random syllables, so no language model can know an answer beforehand. No two names share a word.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import is_int, require
from agentsgym.seeding import derive_seed

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
    if not numbers or not numbers <= known:
        raise ConfigError(f"hops must be a subset of {sorted(known)}, got {sorted(numbers)}")
    return [path for path in QUESTIONS if len(path) in numbers]


def check_options(options: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for an unknown or invalid option of a world."""
    known = ("num_people", "num_firms", "num_towns", "num_rivers", "num_seas", "seed")
    for key in options:
        if key not in known:
            raise ConfigError(f"env_config['world'] has the unknown key {key!r}{did_you_mean(str(key), known)}")


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
