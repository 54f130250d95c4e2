"""The built-in gamemaster, which matches a question to a property and answers it.

A question is understood if its normalized text as a whole is one of the frames below, filled with a phrase of a
property. Any other question is answered "I don't know.", since no answer is better than a wrong one.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from agentsgym.envs.TwentyQuestions.knowledge import KnowledgeBase, Property, load_knowledge
from agentsgym.envs.TwentyQuestions.parsing import Reader, core, normalize

YES, NO, SOMETIMES, UNKNOWN = "Yes.", "No.", "Sometimes.", "I don't know."
REPLIES = (YES, NO, SOMETIMES, UNKNOWN)
_REPLY_OF_VALUE = {"yes": YES, "no": NO, "sometimes": SOMETIMES}
_OPPOSITE = {YES: NO, NO: YES}

# Alternatives are tried in order, so the empty one is last.
_BLOCKS: dict[str, tuple[str, ...]] = {
    "adverb": ("usually ", "normally ", "typically ", "generally ", "commonly ", ""),
    "thing": ("something ", "a thing ", "an object ", "an item "),
    "that": ("that ", "which "),
    "maybe_that": ("that ", "which ", ""),
    "you": ("you ", "people ", "someone ", "somebody ", "one ", "we ", "humans ", "a person "),
    "ask": tuple(
        opening + link
        for opening in (
            "would you say ", "do you think ", "tell me ", "can you tell me ", "could you tell me ",
            "i want to know ", "i would like to know ", "i wonder ", "is it true ", "is it fair to say ",
        )
        for link in ("if ", "whether ", "that ", "")
    ),
}  # fmt: skip
# (the form of the phrase, the text around it)
_FRAMES: tuple[tuple[str, str], ...] = (
    ("is", "is it {adverb}{phrase}"),
    ("is", "is it {thing}{adverb}{phrase}"),
    ("is", "is it {thing}{that}is {adverb}{phrase}"),
    ("is", "{ask}it is {adverb}{phrase}"),
    ("is", "would you call it {phrase}"),
    ("is", "would you consider it {phrase}"),
    ("is", "would you consider it to be {phrase}"),
    ("is", "would you describe it as {phrase}"),
    ("is", "does it count as {phrase}"),
    ("does", "does it {adverb}{phrase}"),
    ("third", "is it {thing}{that}{adverb}{phrase}"),
    ("third", "{ask}it {adverb}{phrase}"),
    ("can", "can it {phrase}"),
    ("can", "could it {phrase}"),
    ("can", "is it able to {phrase}"),
    ("can", "does it have the ability to {phrase}"),
    ("can", "is it {thing}{that}can {phrase}"),
    ("can", "{ask}it can {phrase}"),
    ("people_do", "do {you}{adverb}{phrase}"),
    ("people_do", "would {you}{phrase}"),
    ("people_do", "{ask}{you}{adverb}{phrase}"),
    ("do_gap", "is it {thing}{maybe_that}{you}{adverb}{phrase}"),
    ("do_gap", "is it {thing}{maybe_that}{you}would {phrase}"),
    ("people_can", "can {you}{phrase}"),
    ("people_can", "could {you}{phrase}"),
    ("people_can", "is it possible to {phrase}"),
    ("people_can", "{ask}{you}can {phrase}"),
    ("can_gap", "is it {thing}{maybe_that}{you}can {phrase}"),
    ("can_gap", "is it {thing}{maybe_that}{you}could {phrase}"),
)
_GAP_FORMS = {"people_do": "do_gap", "people_can": "can_gap"}  # the same phrases without the object
_KIND_OF = re.compile(r"(?:a|some) (?:kind|type|sort|form) of (?:an? )?(?P<what>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The property that a question is about, and whether it is negated."""

    key: str
    opposite: bool = False


class Language:
    """Understands questions about the properties of a knowledge base."""

    def __init__(self, knowledge: KnowledgeBase) -> None:
        blocks = {name: "(?:" + "|".join(choices) + ")" for name, choices in _BLOCKS.items()}
        self._frames = [(form, re.compile(text.format(**blocks, phrase="(?P<phrase>.+)"))) for form, text in _FRAMES]
        self._meanings: dict[tuple[str, str], set[Meaning]] = {}
        for entry in knowledge.properties.values():
            for form, phrase, opposite in phrases(entry):
                meaning = Meaning(key=entry.key, opposite=opposite)
                self._meanings.setdefault((form, phrase), set()).add(meaning)
        self.understand = functools.lru_cache(maxsize=8192)(self._understand)

    def meanings(self, question: str) -> set[Meaning]:
        """Return every property that the question may be about; more than one is a defect in the data files."""
        text = core(normalize(question))
        found: set[Meaning] = set()
        for form, pattern in self._frames:
            match = pattern.fullmatch(text)
            if match is None:
                continue
            phrase = match["phrase"]
            meant = self._meanings.get((form, phrase))
            kind = _KIND_OF.fullmatch(phrase) if form == "is" else None
            if not meant and kind:  # "a kind of animal"
                meant = self._meanings.get((form, f"a {kind['what']}")) or self._meanings.get(
                    (form, f"an {kind['what']}")
                )
            found |= meant or set()
        return found

    def _understand(self, question: str) -> Meaning | None:
        found = self.meanings(question)
        return found.pop() if len(found) == 1 else None


@functools.cache
def load_language() -> Language:
    """Create the language of the bundled knowledge base."""
    return Language(load_knowledge())


@functools.cache
def load_reader() -> Reader:
    """Create the action parser for the bundled knowledge base."""
    language = load_language()
    return Reader(load_knowledge(), lambda question: language.understand(question) is not None)


class Gamemaster:
    """Answers questions from the knowledge base."""

    def __init__(self, knowledge: KnowledgeBase, language: Language, properties: Collection[str]) -> None:
        self._knowledge = knowledge
        self._language = language
        self._properties = frozenset(properties)

    def __call__(self, solution: str, question: str) -> str:
        """Answer with one of :data:`REPLIES`; the knowledge base need not contain the object named ``solution``."""
        meaning = self._language.understand(question)
        if meaning is None or meaning.key not in self._properties:
            return UNKNOWN
        value = self._knowledge.value(solution, meaning.key)
        reply = UNKNOWN if value is None else _REPLY_OF_VALUE[value]
        return _OPPOSITE.get(reply, reply) if meaning.opposite else reply


def phrases(entry: Property) -> Iterator[tuple[str, str, bool]]:
    """Yield every phrase of a property in each form that a frame uses, as (form, phrase, whether it is negated)."""
    for kind, texts in entry.phrases.items():
        for marked in texts:
            phrase, opposite = normalize(marked.removeprefix("!").replace("_", "%")), marked.startswith("!")
            yield kind, phrase.replace("%", "it"), opposite
            if kind == "does":
                yield "third", _third_person(phrase), opposite
            elif kind in _GAP_FORMS:
                yield _GAP_FORMS[kind], " ".join(phrase.replace("%", "").split()), opposite


def paraphrases(entry: Property) -> Iterator[tuple[str, bool]]:
    """Yield every question that is understood as this property, frame by frame, and whether it is negated."""
    by_form: dict[str, list[tuple[str, bool]]] = {}
    for form, phrase, opposite in phrases(entry):
        by_form.setdefault(form, []).append((phrase, opposite))
    for form, template in _FRAMES:
        names = re.findall(r"{(\w+)}", template)[:-1]
        for blocks in itertools.product(*(_BLOCKS[name] for name in names)):
            frame = template.format(**dict(zip(names, blocks, strict=True)), phrase="%")
            for phrase, opposite in by_form.get(form, []):
                yield frame.replace("%", phrase) + "?", opposite


def _third_person(phrase: str) -> str:
    verb, space, rest = phrase.partition(" ")
    if verb == "have":
        return "has" + space + rest
    if verb.endswith(("s", "sh", "ch", "x", "o")):
        return verb + "es" + space + rest
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies" + space + rest
    return verb + "s" + space + rest
