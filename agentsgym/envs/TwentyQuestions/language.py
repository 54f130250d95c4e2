"""Understand questions: one means a property if its plainest form is that of a question listed for the property.

The plainest form is a short sequence of words. ``wordings.csv`` unifies words, drops fillers, and replaces the
beginning by a word that keeps who does what: ``is``, ``have``, ``do`` (what the object does), ``people`` (what is done
with it) or ``in``::

    Would I usually find it in the kitchen?   people find it in kitchen   in kitchen
    Is it something that you could wear?      is thing people wear        people wear
    Does it wear out?                         do wear out                 (no property)

Nothing else is dropped and the order of words counts, since no answer is better than a wrong one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentsgym.envs.TwentyQuestions.knowledge import KnowledgeBase, Property, load_knowledge, load_wordings
from agentsgym.envs.TwentyQuestions.parsing import AUXILIARY, PRONOUN, TAG, core, normalize

_MAX_CHARACTERS: Final = 400  # a longer text is never understood
_MAX_TAG: Final = 30  # characters of a tag such as ", isn't it"; a longer search would be quadratic
_MAX_STARTS: Final = 12  # replacements at the beginning of one question

# "Isn't it alive?"
_INVERTED = re.compile(rf"({AUXILIARY})(?:n'?t| not) (?={PRONOUN}\b)")
# "Would a car be smaller than it?"
_SWAPPED = re.compile(
    r"(?:(?:is|are|would) )?(?!it\b)(?P<what>.+?) (?:(?:is|be|are) )?(?P<how>bigger|larger|smaller) than it"
)
# "Is it bigger or smaller than a car?"
_EITHER = re.compile(r"\b(bigger|larger|smaller) or (bigger|larger|smaller) than (.+)")
# "Is the animal a mammal?"
_KIND = re.compile(
    r"(is (?=the|your)|does |can |could |has )(?:the|it|your) (?:animal|creature|plant|food|device|product) "
)
# "Can it smell?" is not "Does it smell?", and "Can it be red?" not "Is it red?"; "not" does not deny the property in
# "if you are not careful"
_UNANSWERED = re.compile(
    r"^(?:can|could) it (?:see|hear|smell|taste|feel)\b|\bnot (?:only|just)\b|\bif (?:i|you|we|people) (?:are|do) not"
    r"|^(?:can|could|may|might) it be (?:made|red|green|yellow|brown|white|black|gr[ae]y|orange|blue|hot|cold|hard|soft"
    r"|round|square|long|heavy|dangerous|expensive|poisonous)\b"
)
_MONEY = re.compile(r"\$ ?(\d+)|(\d+) ?\$")
# "Can you put it in your pocket?", which is not "Do you keep it in your pocket?"
_FITS = re.compile(
    r"(?:can|could) (?:i|you|we|one|people|someone|a person) (?:easily )?(?:put|fit|carry|slip|stick|store) it "
    r"(?=(?:in|into|inside)\b(?!.*\bhands?\b))"
)
_AND_OR = re.compile(r",? (?:and|or|but) ")
# An illustration at the end, which a question is also understood without
_ASIDE = re.compile(r"(?:,? (?:such as|for example|for instance)|, (?:like|say)(?= an? )| like(?=.* or ))\b.*")
_NUMBERS = {
    word: str(n)
    for n, word in enumerate(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"])
} | {"single": "1"}
_NAME = r"(?:it|its name|the name|the name of it|the word|its spelling)"
_COUNT = r"\d{1,2}|" + "|".join(_NUMBERS)
#: The group that takes part in the match is the kind of key, and its text is the argument.
_DERIVED = re.compile(
    rf"(?:does {_NAME} (?:start|begin|starts|begins) (?:with|in)|is the first letter(?: of {_NAME})?)"
    r" (?:an? |the )?(?:letter )?(?P<first_letter>[a-z]|vowel|consonant)"
    rf"|(?:does {_NAME} (?:end|ends) (?:with|in)|is the last letter(?: of {_NAME})?)"
    r" (?:an? |the )?(?:letter )?(?P<last_letter>[a-z]|vowel|consonant)"
    rf"|does {_NAME} have (?:more than (?P<letters_over>{_COUNT})|(?:fewer|less) than (?P<letters_under>{_COUNT})"
    rf"|(?:exactly )?(?P<letters>{_COUNT})) letters"
    rf"|(?:does {_NAME} (?:have|contain|include)|is there) (?:(?:an? |the )?letter |an? )(?P<letter>[a-z])"
    rf"(?: in {_NAME})?"
    rf"|(?:is {_NAME}|does {_NAME} (?:have|consist of)) (?:just |only )?(?:a )?(?P<words>{_COUNT}) words?(?: name)?"
    r"|is its name \[(?P<name>[^\]]+)\]"  # written by the style "textarena"
)
_COMPARISON = re.compile(r"(?:is it )?(?P<how>bigger|larger|smaller)(?: in size)? than (?:an? |the )?(?P<what>.+)")
_WORD = re.compile(r"[a-z0-9']+|[^\s\w.,:;!?()/\[\]'\"&-]|\w+")
#: Words with which "mainly" matters
_MAINLY: Final = frozenset(
    [
        *(
            "child",
            "woman",
            "female",
            "girl",
            "lady",
            "winter",
            "cold",
            "part",
            "outdoor",
            "indoor",
            "outside",
            "inside",
        ),
        *("red", "green", "yellow", "brown", "white", "black", "gray", "orange", "blue"),
    ]
)
_LISTING: Final = frozenset(("and", "or", "but"))
_PRONOUNS: Final = ("it", "that")
_NOTHING: Final[Trie] = {}

Form = tuple[str, ...]
Trie = dict[str, Any]  # by word; "" has the replacement of the words up to there


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The property that a question is about, and whether "Yes." means that it does not hold."""

    key: str
    opposite: bool = False


@functools.cache
def load_language() -> Language:
    """Create the language of the bundled knowledge base."""
    return Language(load_knowledge())


class Language:
    """Understands questions about the properties of a knowledge base."""

    def __init__(self, knowledge: KnowledgeBase) -> None:
        self._names = {normalize(name): target for name, target in knowledge.names.items()}
        wordings = load_wordings()
        self._uninflected = frozenset(wordings["@uninflected"])
        shared = [(means, text) for means, texts in wordings.items() if means[:1] != "@" for text in texts]
        self._words = {text: means for means, text in shared if re.fullmatch(r"[\w']+", text)}
        self._known: set[str] = set()  # words of the listed questions
        self._plain_word = functools.lru_cache(maxsize=8192)(self._plainest)
        self._anywhere: Trie = {}
        self._starts: Trie = {}
        self._ends: Trie = {}
        self._tails: Trie = {}
        for means, text in shared:
            if text in self._words:
                continue
            trie = self._starts if text[0] == "^" else self._ends if text[-1] == "$" else self._anywhere
            words = self._plain(text.strip("^$"))
            _insert(trie, words[::-1] if text[-1] == "$" else words, self._plain(means))
        for text in wordings["@tails"]:  # "is there a screen on it"
            _insert(self._tails, self._plain(text)[::-1], [])
        self._meanings: dict[Form, Meaning] = {}
        for entry in knowledge.properties.values():
            for text, negates in self.phrases(entry):
                self._known.update(_WORD.findall(text))
                form, sign = self.form(text)
                if form:
                    self._meanings.setdefault(form, Meaning(key=entry.key, opposite=sign != negates))
        self.read = functools.lru_cache(maxsize=8192)(self._read)

    def understand(self, question: str) -> Meaning | None:
        """Return the property that a question is about; None if there is none, or more than one."""
        found = self.read(question)
        return found[0] if len(found) == 1 else None

    def phrases(self, entry: Property) -> Iterator[tuple[str, bool]]:
        """Yield every question that is listed for a property, and whether "yes" denies the property."""
        yield core(normalize(entry.question)), False
        for text in entry.phrases:
            yield text.removeprefix("!"), text.startswith("!")

    def _read(self, question: str) -> tuple[Meaning, ...]:
        """Return the property that a question is about, or all properties if it contains several questions."""
        text = self.simplify(question)
        found = self._derived(text) or self._meaning(text) or self._compared(text)
        if not found and (bare := _ASIDE.sub("", text)) != text:
            found = self._meaning(bare)
        return found or self._listed(text)

    def simplify(self, question: str) -> str:
        """Return a question in one of few forms; empty if it is too long, or a kind that no property answers.

        Fillers, the negation of "Isn't it alive?" and the tag of "It's alive, isn't it?" are removed, and comparisons
        are written as "is it bigger than a car".
        """
        text = core(normalize(question)) if len(question) <= _MAX_CHARACTERS else ""
        if _UNANSWERED.search(text):
            return ""
        text = _MONEY.sub(r"\1\2 dollars", text.replace(",000", "000"))
        tag = TAG.search(text, max(0, len(text) - _MAX_TAG))
        text = text[: tag.start()] if tag else text
        inverted = _INVERTED.match(text)
        text = f"{inverted[1]} {text[inverted.end() :]}" if inverted else text
        text = text.removesuffix(" or not").rstrip(" ,")
        kind = _KIND.match(text)
        text = f"{kind[1]}it {text[kind.end() :]}" if kind else text
        text = _FITS.sub("does it fit ", text)
        swapped = _SWAPPED.fullmatch(text) if text.endswith(" than it") else None
        if swapped:
            return f"is it {'bigger' if swapped['how'] == 'smaller' else 'smaller'} than {swapped['what']}"
        return _EITHER.sub(r"\1 than \3 or \2 than \3", text) if " or " in text else text

    def _derived(self, text: str) -> tuple[Meaning, ...]:
        """Return the meaning of a question about the name; empty if it is none."""
        match = _DERIVED.fullmatch(text)
        if not match or not match.lastgroup:
            return ()
        argument = match[match.lastgroup]
        return (Meaning(key=f"{match.lastgroup}:{_NUMBERS.get(argument, argument)}"),)

    def _compared(self, text: str) -> tuple[Meaning, ...]:
        """Return the meaning of a comparison with an object; empty if it is none."""
        match = _COMPARISON.fullmatch(text)
        if not match or match["what"] not in self._names:
            return ()
        kind = "smaller_than" if match["how"] == "smaller" else "bigger_than"
        return (Meaning(key=f"{kind}:{self._names[match['what']]}"),)

    def _meaning(self, text: str) -> tuple[Meaning, ...]:
        """Return the meaning whose listed questions have the form of this one; empty if there is none."""
        if " " not in text:  # a single word is not a question
            return ()
        # "made of metal?", "fits in a pocket?", "four legs?"
        for whole in (text, f"is it {text}", f"does it {text}", f"does it have {text}"):
            form, negates = self.form(whole)
            if found := self._meanings.get(form):
                return (Meaning(key=found.key, opposite=found.opposite != negates),)
        return ()

    def _listed(self, text: str) -> tuple[Meaning, ...]:
        """Return the properties that the parts of a question joined by "and" or "or" name, if each names one."""
        first, *others = _AND_OR.split(text)
        found = dict.fromkeys(self._derived(first) or self._meaning(first) or self._compared(first))
        words = first.split()
        for other in others if found else ():
            starts = (" ".join(words[:size]) for size in range(len(words)))  # "is it made of (metal or) wood"
            texts = [other, *(f"{start} {other}" for start in starts if start)]
            parts = (self._derived(one) or self._meaning(one) or self._compared(one) for one in texts)
            part = next(filter(None, parts), None)
            if part is None:
                return ()
            found |= dict.fromkeys(part)
        return tuple(found)

    def form(self, text: str) -> tuple[Form, bool]:
        """Return the plainest form of a normalized question, and whether it contains an odd number of negations."""
        words: list[str] = []
        given, start = self._plain(text), 0
        while start < len(given):
            end, means = _longest(self._anywhere, given, start)
            words += given[start : start + 1] if end == start else means
            start = max(end, start + 1)
        negates = words.count("not") % 2 == 1
        if words.count("not") > 1 and not _LISTING.isdisjoint(words):  # "no horns and no antlers"
            return (), False
        drops = ("not",) if _MAINLY.intersection(words) else ("not", "mainly")
        words = [one for one in words if one not in drops]
        words = [one for n, one in enumerate(words) if one != "that" or words[n - 1 : n] == ["thing"]]
        for _ in range(_MAX_STARTS):
            end, means = _longest(self._starts, words, 0)
            if not end:
                break
            words[:end] = means
        end, means = _longest(self._tails if words[:1] == ["have"] else self._ends, words[::-1], 0)
        words[len(words) - end :] = means
        return tuple(word for word in words if word not in _PRONOUNS), negates

    def _plain(self, text: str) -> list[str]:
        """Return the words of a text, each in its plainest form; words that mean nothing are dropped."""
        return [plain for word in _WORD.findall(text) for plain in self._plain_word(word).split()]

    def _plainest(self, word: str) -> str:
        """Return the plainest form of a word, in which two neighboring letters may be exchanged ("anmial")."""
        word = word.removesuffix("'s")
        places = range(len(word) - 1) if 6 <= len(word) <= 20 and word not in self._known else ()
        meant = self._known.intersection(f"{word[:i]}{word[i + 1]}{word[i]}{word[i + 2 :]}" for i in places)
        word = meant.pop() if len(meant) == 1 else word
        singular = word if word in self._uninflected else _singular(word)
        return self._words.get(word, self._words.get(singular, singular))


def _insert(trie: Trie, words: Iterable[str], means: Sequence[str]) -> None:
    for word in words:
        trie = trie.setdefault(word, {})
    trie[""] = means


def _longest(trie: Trie, words: Sequence[str], start: int) -> tuple[int, Sequence[str]]:
    """Return where the longest entry that begins at ``start`` ends, and its replacement; ``start`` if there is none."""
    found: tuple[int, Sequence[str]] = start, ()
    for end in range(start, len(words)):
        trie = trie.get(words[end], _NOTHING)
        if not trie:
            break
        if "" in trie:
            found = end + 1, trie[""]
    return found


def _singular(word: str) -> str:
    """Remove the ending of a plural or of the third person.

    >>> [_singular(word) for word in ("legs", "boxes", "flies", "glass", "spines")]
    ['leg', 'box', 'fly', 'glass', 'spine']
    """
    if len(word) < 4 or not word.endswith("s") or word.endswith(("ss", "us", "is")):
        return word
    if word.endswith("ies"):
        return word[:-3] + "y"
    return word[:-2] if word.endswith(("xes", "ches", "shes", "sses", "zes")) else word[:-1]
