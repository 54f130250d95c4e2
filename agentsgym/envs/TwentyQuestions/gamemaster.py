"""The built-in gamemaster, which answers a question that it understands from the knowledge base.

The words of a question are reduced to a short sequence of terms by the shared ``wordings.csv``: words that add nothing
are dropped, synonyms are unified. A question is understood as a property if the phrases of that property in
``properties.csv`` account for every remaining term, and as nothing otherwise, since no answer is better than a wrong
one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentsgym.envs.TwentyQuestions.knowledge import (
    COMPARISON,
    SIZES,
    KnowledgeBase,
    Property,
    load_knowledge,
    load_wordings,
)
from agentsgym.envs.TwentyQuestions.parsing import AUXILIARY, PRONOUN, TAG, Reader, core, normalize

YES, NO, SOMETIMES, UNKNOWN = "Yes.", "No.", "Sometimes.", "I don't know."
REPLIES = (YES, NO, SOMETIMES, UNKNOWN)
_REPLY_OF_VALUE = {"yes": YES, "no": NO, "sometimes": SOMETIMES}
_OPPOSITE = {YES: NO, NO: YES}


_MAX_CHARACTERS = 400  # a longer text is never understood
_MAX_TAG = 30  # characters of a tag such as ", isn't it"; a longer search would be quadratic

# "What is it?", what the object does itself ("Does it drink?" is not about whether people drink it), and what it was
# once, such as alive
_UNANSWERED = re.compile(
    r"(?:what|who|whose|which|where|why|how|when(?! (?:i|you|we|people)\b))\b(?! about\b)"
    r"|(?:does|do|can|could|will|would|did) (?:it|they|animals)"
    r" (?:drink|wear|hear|read|ride|drive|steer|plant|pet|watch)\b"
    r"|(?:was it|has it) (?:ever|once)\b"
)
# "Isn't it alive?"
_INVERTED = re.compile(rf"({AUXILIARY})n'?t (?={PRONOUN}\b)")
# "Would a car be smaller than it?"
_SWAPPED = re.compile(
    r"(?:(?:is|are|would) )?(?!it\b)(?P<what>.+?) (?:(?:is|be|are) )?(?P<how>bigger|larger|smaller) than it"
)
# "Is it bigger or smaller than a car?"
_EITHER = re.compile(r"\b(bigger|larger|smaller) or (bigger|larger|smaller) than (.+)")
_AND_OR = re.compile(r",? (?:and|or) ")
# The beginning of a second question: "Is it alive, and does it have legs?"
_SECOND = re.compile(rf",? (?:and|or),? (?=(?:{AUXILIARY}) {PRONOUN}\b)")
# An illustration or a reason at the end, which a question is also understood without
_ASIDE = re.compile(
    r"(?:,? (?:such as|for example|for instance)|, (?:like|say|because|since|so|assuming|as)| like(?=.* or ))\b.*"
)
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
    rf"|does {_NAME} have (?:more than (?P<letters_over>{_COUNT})|(?:fewer|less) than (?P<letters_under>{_COUNT})"
    rf"|(?:exactly )?(?P<letters>{_COUNT})) letters"
    rf"|(?:does {_NAME} (?:have|contain|include)|is there) (?:(?:an? |the )?letter |an? )(?P<letter>[a-z])"
    rf"(?: in {_NAME})?"
    rf"|(?:is {_NAME}|does {_NAME} (?:have|consist of)) (?:just |only )?(?:a )?(?P<words>{_COUNT}) words?"
)
_COMPARISON = re.compile(r"(?:is it )?(?P<how>bigger|larger|smaller)(?: in size)? than (?:an? |the )?(?P<what>.+)")
_WORD = re.compile(r"[a-z0-9']+|[^\s\w.,:;!?()/\[\]'\"&-]|\w+")
_LISTING = frozenset(("or", "and"))
# Terms that may stand between the phrases of a property
_CONNECTIVES = _LISTING | {"not", "but", "thing", "as", "of"}
_LATE = "-"  # marks the meanings of words that are replaced only once phrases with them are recognized
_NOTHING: dict[str, Any] = {}


@functools.cache
def load_language() -> Language:
    """Create the language of the bundled knowledge base."""
    return Language(load_knowledge())


@functools.cache
def load_reader() -> Reader:
    """Create the action parser for the bundled knowledge base."""
    return Reader(load_knowledge(), load_language().read)


class Gamemaster:
    """Answers questions about some properties of the bundled knowledge base."""

    def __init__(self, properties: Collection[str]) -> None:
        self._properties = frozenset(properties)

    def __call__(self, solution: str, question: str) -> str:
        """Answer with one of :data:`REPLIES`; the knowledge base need not contain the object named ``solution``."""
        meaning = load_language().understand(question)
        if meaning is None:
            return UNKNOWN
        key = meaning.key
        # Sizes are compared if the game has all sizes, names in any game.
        needed = SIZES if key.startswith(COMPARISON) else () if ":" in key else (key,)
        value = load_knowledge().value(solution, key) if self._properties.issuperset(needed) else None
        reply = UNKNOWN if value is None else _REPLY_OF_VALUE[value]
        return _OPPOSITE.get(reply, reply) if meaning.opposite else reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The property that a question is about, and whether "Yes." means that it does not hold."""

    key: str
    opposite: bool = False


@dataclass(slots=True)
class _Phrases:
    """What a sequence of terms means.

    Attributes:
        negates: Whether it denies a property, by property.
        keys: The properties that it suffices to name; to the others it is context.
    """

    negates: dict[str, bool] = field(default_factory=dict[str, bool])
    keys: set[str] = field(default_factory=set[str])


class Language:
    """Understands questions about the properties of a knowledge base."""

    def __init__(self, knowledge: KnowledgeBase) -> None:
        self._names = {normalize(name): target for name, target in knowledge.names.items()}
        wordings = load_wordings()
        self._lists = {name: texts for name, texts in wordings.items() if name.startswith("@")}
        self._uninflected = frozenset(wordings["@uninflected"])
        self._rewrites: dict[str, Any] = {}
        self._prepositions = frozenset(map(_stem, wordings["@prepositions"]))
        shared = [(means, text) for means, texts in wordings.items() if means not in self._lists for text in texts]
        self._synonyms = {text: means for means, text in shared if " " not in text and _LATE not in means}
        self._terms_of = functools.lru_cache(maxsize=8192)(self._canonical)
        for means, text in shared:
            if " " in text or _LATE in means:
                _insert(self._rewrites, self._words(text), means.replace(_LATE, "").split())
        self._phrases: dict[str, Any] = {}
        for entry in knowledge.properties.values():
            for text, negates, is_key in self.phrases(entry):
                phrases: _Phrases = _insert(self._phrases, self._terms(text), _Phrases())
                if is_key:
                    phrases.keys.add(entry.key)
                if is_key or entry.key not in phrases.negates:
                    phrases.negates[entry.key] = negates
        self.read = functools.lru_cache(maxsize=8192)(self._read)

    def understand(self, question: str) -> Meaning | None:
        """Return the property that a question is about; None if there is none, or more than one."""
        found = self.read(question)
        return found[0] if len(found) == 1 else None

    def phrases(self, entry: Property) -> Iterator[tuple[str, bool, bool]]:
        """Yield every phrase of a property as (text, whether it negates, whether it suffices for a question)."""
        for texts, is_key in ((entry.phrases, True), (entry.context, False)):
            for text in texts:
                for phrase in self._lists.get(text, (text,)):
                    yield phrase.removeprefix("!"), phrase.startswith("!"), is_key

    def _read(self, question: str) -> tuple[Meaning, ...]:
        """Return the property that a question is about, or all properties if it contains several questions."""
        text = self.simplify(question)
        derived = self._derived(text)
        if derived and not derived[0].key.startswith(COMPARISON):  # a comparison may be a property
            return derived
        clauses = _SECOND.split(text)
        if len(clauses) > 1:
            listed = {meaning: None for clause in clauses for meaning in self._meanings(self._terms(clause))}
            if len({meaning.key for meaning in listed}) > 1:
                return tuple(listed)
        terms = self._terms(text)
        found = self._meanings(terms)
        if not found and (bare := _ASIDE.sub("", text)) != text:
            found = self._meanings(self._terms(bare))
        return found or derived or self._listed(text, terms)

    def simplify(self, question: str) -> str:
        """Return a question in its plainest form; empty if it is too long or no property can answer it.

        Fillers, the negation of "Isn't it alive?" and the tag of "It's alive, isn't it?" are removed, and comparisons
        are written as "is it bigger than a car".
        """
        text = core(normalize(question)) if len(question) <= _MAX_CHARACTERS else ""
        if _UNANSWERED.match(text):
            return ""
        tag = TAG.search(text, max(0, len(text) - _MAX_TAG))
        text = text[: tag.start()] if tag else text
        inverted = _INVERTED.match(text)
        text = f"{inverted[1]} {text[inverted.end() :]}" if inverted else text
        swapped = _SWAPPED.fullmatch(text) if text.endswith(" than it") else None
        if swapped:
            return f"is it {'bigger' if swapped['how'] == 'smaller' else 'smaller'} than {swapped['what']}"
        return _EITHER.sub(r"\1 than \3 or \2 than \3", text) if " or " in text else text

    def _derived(self, text: str) -> tuple[Meaning, ...]:
        """Return the meaning of a question about the name or of a comparison with an object; empty if it is neither."""
        match = _DERIVED.fullmatch(text)
        if match and match.lastgroup:
            argument = match[match.lastgroup]
            return (Meaning(key=f"{match.lastgroup}:{_NUMBERS.get(argument, argument)}"),)
        match = _COMPARISON.fullmatch(text)
        if match and match["what"] in self._names:
            return (Meaning(key=f"{COMPARISON}:{self._names[match['what']]}", opposite=match["how"] == "smaller"),)
        return ()

    def _meanings(self, terms: Sequence[str]) -> tuple[Meaning, ...]:
        """Return the meaning whose phrases account for all terms; the one with the longest phrases if there are more.

        A property that is both affirmed and denied, as in "soft or hard", is two meanings.
        """
        matches = [_matches(self._phrases, terms, start) for start in range(len(terms))]
        keys = {key: None for found in matches for _, phrases in found for key in phrases.keys}
        readings = [(key, *_signs(key, terms, matches)) for key in keys]
        best = max((weight for _, weight, signs in readings if signs), default=0)
        found = [(key, signs) for key, weight, signs in readings if signs and weight == best]
        if len(found) != 1:
            return ()
        [(key, signs)] = found
        return tuple(Meaning(key=key, opposite=sign) for sign in sorted(signs))

    def _listed(self, text: str, terms: Sequence[str]) -> tuple[Meaning, ...]:
        """Return the properties that a question names one after the other, if there are several."""
        if _LISTING.isdisjoint(terms):
            return ()
        found = {meaning: None for clause in _AND_OR.split(text) for meaning in self._derived(clause)}
        start = 0
        while start < len(terms):
            parts = _matches(self._phrases, terms, start)
            named = [(end, key, phrases.negates[key]) for end, phrases in parts for key in phrases.keys]
            start, key, negates = named[-1] if named else (start + 1, "", False)
            if key:
                found[Meaning(key=key, opposite=negates)] = None
        return tuple(found) if len(found) > 1 else ()

    def _terms(self, text: str) -> list[str]:
        """Reduce a text to the terms that carry its meaning."""
        words = self._words(text)
        for _ in range(2):  # a replacement may complete another phrase
            terms: list[str] = []
            start = 0
            while start < len(words):
                found = _matches(self._rewrites, words, start)
                start, replacement = found[-1] if found else (start + 1, words[start : start + 1])
                terms += replacement
            if terms == words:
                break
            words = terms
        return words

    def _words(self, text: str) -> list[str]:
        """Return the canonical words of a text; "on it" becomes one word, and any other "it" is dropped."""
        words: list[str] = []
        for word in _WORD.findall(text):
            for term in self._terms_of(word):
                if term != "it":
                    words.append(term)
                elif words and words[-1] in self._prepositions:
                    words[-1] += "it"
        return words

    def _canonical(self, word: str) -> tuple[str, ...]:
        """Return the terms that a word means: mostly one, none if it adds nothing, several as in "beakless"."""
        word = word.removesuffix("'s")
        if word.endswith("less") and len(word) > 7 and word not in self._uninflected:
            return ("not", "have", *self._canonical(word.removesuffix("less")))
        stem = word if word in self._uninflected else _stem(word)
        return tuple(self._synonyms.get(word, self._synonyms.get(stem, stem)).split())


def _signs(key: str, terms: Sequence[str], matches: Sequence[Sequence[tuple[int, _Phrases]]]) -> tuple[int, set[bool]]:
    """Return how many terms name the property, and whether they deny it; no signs if a term remains unexplained."""
    # The best division of the terms from each position on: (terms that name it, end of the first part, sign, is_key)
    best: list[tuple[int, int, bool, bool] | None] = [*[None] * len(terms), (0, 0, False, False)]
    for start in range(len(terms) - 1, -1, -1):
        parts = [(end, it.negates[key], key in it.keys) for end, it in matches[start] if key in it.negates]
        if terms[start] in _CONNECTIVES:
            parts.append((start + 1, terms[start] == "not", False))
        divisions = [
            (rest[0] + (end - start) * is_key, end, negates, is_key)
            for end, negates, is_key in parts
            if (rest := best[end])
        ]
        best[start] = max(divisions, default=None)
    return (0, set()) if best[0] is None else (best[0][0], _divided_signs(terms, best))


def _divided_signs(terms: Sequence[str], best: Sequence[tuple[int, int, bool, bool] | None]) -> set[bool]:
    """Return whether the parts of the best division deny the property, for each part that names it."""
    signs: set[bool] = set()
    negated = spent = is_last = False
    start = 0
    while start < len(terms) and (part := best[start]):
        _, end, negates, is_key = part
        if is_key:
            signs.add(negated != negates)
            spent = True
        elif negates:
            is_last = len(signs) == 1 and end < len(terms) and terms[start - 1] not in _LISTING
            negated = spent or not negated
            spent = False
        elif terms[start] == "but":
            negated = False
        start = end
    if is_last and not spent:  # "A kitchen isn't where you find it" denies what comes before
        return {not sign for sign in signs}
    return signs if spent else set()


def _insert(trie: dict[str, Any], words: Iterable[str], payload: Any) -> Any:
    """Return the payload at some words, after adding it if there is none."""
    for word in words:
        trie = trie.setdefault(word, {})
    return trie.setdefault("", payload)


def _matches(trie: dict[str, Any], words: Sequence[str], start: int) -> list[tuple[int, Any]]:
    """Return (end, payload) of every entry that the words from ``start`` on begin with, the longest last."""
    found: list[tuple[int, Any]] = []
    for end in range(start, len(words)):
        trie = trie.get(words[end], _NOTHING)
        if not trie:
            break
        if "" in trie:
            found.append((end + 1, trie[""]))
    return found


def _stem(word: str) -> str:
    """Remove the endings of plurals, of the third person, and "-ing".

    >>> [_stem(word) for word in ("legs", "boxes", "swimming", "makes", "making")]
    ['leg', 'box', 'swim', 'mak', 'mak']
    """
    if len(word) < 4:
        return word
    if word.endswith("ies"):
        word = word[:-3] + "y"
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    if word.endswith("ing") and len(word) > 5:
        word = word[:-3]
        word = word[:-1] if word[-1] == word[-2] and word[-1] not in "lsze" else word
    return word[:-1] if word.endswith("e") and len(word) > 3 else word
