"""Parse an agent's text as one move: a question, a guess, or an invalid action.

Words and sentences are matched as a whole, never as substrings.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sized
from dataclasses import dataclass
from enum import StrEnum

from agentsgym.envs.TwentyQuestions.knowledge import KnowledgeBase


class Fault(StrEnum):
    """The reason why an action is invalid, as a message to the agent."""

    EMPTY = "You said nothing: ask one yes-or-no question."
    SEVERAL = "One question at a time: ask one yes-or-no question."
    NO_QUESTION = "That was no question: ask one yes-or-no question, or guess the object."


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about the object.

    Attributes:
        text: A normalized sentence without filler words.
        name: The object that the question names too, if the name is also a kind of object, as in "Is it a fish?".
    """

    text: str
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """A guess of an object, by its name in the knowledge base or, if it is unknown, in the agent's words."""

    name: str


Move = Question | Guess | Fault

_CONTRACTIONS = {
    "it's": "it is",
    "that's": "that is",
    "there's": "there is",
    "what's": "what is",
    "let's": "let us",
    "ain't": "is not",
}
_ENDINGS = {"d": "would", "ll": "will", "m": "am", "re": "are", "ve": "have"}
_MARKUP = dict.fromkeys('"\u201c\u201d`*_')
_DASHES = dict.fromkeys("-\u2010\u2011\u2012\u2013\u2014", " ")
_CHARACTERS = str.maketrans({**_MARKUP, **_DASHES, "\u2018": "'", "\u2019": "'"})
_CONTRACTION = re.compile(r"\b(?:" + "|".join(_CONTRACTIONS) + r")\b|\b(\w+)'(" + "|".join(_ENDINGS) + r")\b")
_SUBJECT = re.compile(
    r"\b(?:(?:the|this|your) (?:secret |mystery |hidden )?(?:object|thing|item|answer|word)"
    r"(?: (?:that )?(?:you are thinking (?:of|about)|you have in mind|in question))?|this)\b(?!')"
)
_SENTENCE = re.compile(r"([^.!?\n]+)([.!?\n]*)")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
AUXILIARY = "is|are|was|were|does|do|did|has|have|had|can|ca|could|would|wo|will|should|might"
PRONOUN = r"(?:it|they|you|we|i|one|people|there|someone|anyone|most people)"
_FILLER = re.compile(
    r"(?:ok|okay|so|well|hmm|now|then|alright|great|good|thanks|thank you|and|please|sure|first|next)\b[ ,:]*"
    rf"|(?:yes|no)\b(?: *[,:.!]+ *| (?=(?:{AUXILIARY}|it)\b))"
    r"|(?:my |the )?(?:first |next |last |final )?question(?: number)?(?: \d+)?"
    rf"(?:(?: is)? ?[:,]+ *| (?:is )?(?=(?:{AUXILIARY}) ))"
    r"|q?\d+ *[):]+ *|[ ,:;>#]+"
)
_EDGES = " ?!.,:;'\n"
_QUESTION_OPENING = re.compile(
    rf"(?:{AUXILIARY}|may|if|am i|what|who|whose|which|where|when|why|how"
    r"|tell me|i want to know|i would like to know|i wonder)\b"
)
#: The end of a sentence that makes it a question; "would you have it" does not end in one
TAG = re.compile(
    rf"[ ,]+(?:(?!have )(?:{AUXILIARY})(?:n'?t| not)? {PRONOUN}(?: not)?|right|correct|true|so|yes|no|yeah|huh|eh|innit"
    r"|(?:yes|yeah|true|right) or (?:no|nah|false|wrong)|or (?:no|nah|nope|what))$"
)
_ASKING = re.compile(r"\b(?:whether|wonder|wondering|ask|tell me|know if)\b")
_STATEMENT = re.compile(r"\b(?:it|its|they|that|this|there) (?:is|are|was|has|can|does)?\b")
_DANGLING = re.compile(r"(?:is|could|might) it(?: be)?(?: an?| the)?")
_ARTICLE = re.compile(r"(?:a|an|the|some)\s+")

_HEDGE = r"(?:(?:perhaps|possibly|maybe|by any chance|simply|just|actually|really) )?"
_SURE_GUESS = re.compile(
    r"(?:(?:my|the) )?(?:(?:(?:final|last|best|first|next) )?(?:guess|answer)(?: is| would be| ?[:,])"
    r"|(?:final|last) (?:guess|answer) )(?: that)?[ ,:]*(?:it is |is it )?(.+)"
)
_MILD_GUESS = re.compile(
    r"(?:i (?:think|believe|say|am sure|would say|guess|will guess)(?: that)? )?it (?:is|must be|has to be) "
    r"(.+)"
    r"|i (?:(?:will|would) )?(?:now )?guess[ ,:]+(.+)"
    r"|you are thinking of (.+)"
)
_ASKED_GUESS = re.compile(
    rf"(?:is it|are they) {_HEDGE}(.+)"
    rf"|(?:could|might|can|would) it {_HEDGE}be {_HEDGE}(.+)"
    r"|are you thinking of (.+)"
)


def normalize(text: str) -> str:
    """Convert to lower case, remove markup and extra spaces, expand contractions, and replace "the object" with "it".

    >>> normalize("Is the object you're thinking of  *man-made*?")
    'is it man made?'
    """
    text = text if text.isascii() else unicodedata.normalize("NFKC", text)
    text = text.lower().replace("i.e.", "that is").replace("e.g.", "such as").translate(_CHARACTERS)
    text = "\n".join(" ".join(line.split()) for line in text.split("\n")).strip()
    if "'" in text:
        text = _CONTRACTION.sub(lambda it: f"{it[1]} {_ENDINGS[it[2]]}" if it[1] else _CONTRACTIONS[it.group()], text)
    return _SUBJECT.sub("it", text)


def core(sentence: str) -> str:
    """Strip the text before the question ("Okay, next question: …") and punctuation from a normalized sentence.

    >>> core("okay, my next question is: is it alive?")
    'is it alive'
    """
    text = sentence.strip(_EDGES)
    while (filler := _FILLER.match(text)) and filler.end() < len(text):  # a filler alone may be a name, such as "well"
        text = text[filler.end() :].strip(_EDGES)
    return text


class Reader:
    """Parses actions, using the names in a knowledge base.

    Args:
        knowledge: Provides the names of objects, and category words, which are not guesses ("a mammal").
        read: Returns the properties that a normalized question is about; several if it contains several questions.
    """

    def __init__(self, knowledge: KnowledgeBase, read: Callable[[str], Sized]) -> None:
        self._categories = knowledge.categories
        self._read = read
        self._names = {normalize(name): target for name, target in knowledge.names.items()}
        questions = (normalize(entry.question).replace("a kind of ", "") for entry in knowledge.properties.values())
        kinds = (_ASKED_GUESS.fullmatch(core(question)) for question in questions)
        self._kinds = frozenset(self._names.get(_without_article(_group(match))) for match in kinds if match)
        for name, target in list(self._names.items()):
            for plural in _plurals(name):
                self._names.setdefault(plural, target)

    def canonical(self, name: str) -> str:
        """Return an object's canonical name: its name in the knowledge base, otherwise its normalized words."""
        words = _without_article(core(normalize(name)))
        return self._names.get(words, words)

    def parse(self, action: str, solution: str = "") -> Move:
        """Parse the move in an action.

        Args:
            action: The agent's text.
            solution: The canonical name of the secret, which need not be in the knowledge base.
        """
        text = normalize(action)
        if not core(text):
            return Fault.EMPTY
        bare = self._known(core(text), solution)
        if bare is not None and not (text.endswith("?") and self._is_kind(bare, solution)):
            return Guess(name=bare)
        bracketed = [core(inner) for inner in _BRACKETS.findall(text) if core(inner)]
        found: list[Question | Guess] = []
        for inner in bracketed:
            is_question = _QUESTION_OPENING.match(inner) is not None
            found += self._question(inner, solution) if is_question else [self._named(inner, solution)]
        for match in _SENTENCE.finditer(_BRACKETS.sub(" ", text)):
            sentence = core(match[1])
            if sentence and not (bracketed and _DANGLING.fullmatch(sentence)):
                found += self._sentence(sentence, solution, end=match[2])
        guesses = [move for move in found if isinstance(move, Guess)]
        is_one_guess = len(guesses) == len(found) and len(set(guesses)) == 1  # "Is it a clock? [clock]"
        moves = found[:1] if is_one_guess else found
        if len(moves) == 1:
            return moves[0]
        return Fault.SEVERAL if moves else Fault.NO_QUESTION

    def _sentence(self, sentence: str, solution: str, *, end: str) -> list[Question | Guess]:
        sure = _SURE_GUESS.fullmatch(sentence)
        if sure and _group(sure):
            return [self._named(_group(sure), solution)]
        if "?" in end or _QUESTION_OPENING.match(sentence) or self._is_question(sentence, end):
            return self._question(sentence, solution)
        mild = _MILD_GUESS.fullmatch(sentence)
        words = _group(mild) if mild else ""
        name = self._known(words, solution)
        if name is None and words and len(self._read(f"is it {words}")) != 1:
            name = self._object(words, solution)
        return [] if name is None else [Guess(name=name)]

    def _is_question(self, sentence: str, end: str) -> bool:
        """Return whether a sentence without a question mark is a question, such as "it's soft, right" or "bladed"."""
        is_statement = "." in end or _STATEMENT.search(sentence)
        is_asked = not is_statement or TAG.search(sentence) or _ASKING.search(sentence)
        return bool(is_asked) and len(self._read(sentence)) == 1

    def _question(self, sentence: str, solution: str) -> list[Question | Guess]:
        """Return the question or the guess in a sentence, or two questions if there are several."""
        question = Question(text=sentence)
        is_property = len(self._read(sentence)) == 1
        asked = _ASKED_GUESS.fullmatch(sentence)
        words = _group(asked) if asked else sentence.removeprefix("is ")  # "Is a dog?"
        name = self._known(words, solution)
        if name is not None and is_property and self._is_kind(name, solution):
            return [Question(text=sentence, name=name)]
        if name is not None and not (is_property and words == "orange"):  # without an article, the color
            return [Guess(name=name)]
        if is_property:
            return [question]
        if len(self._read(sentence)) > 1 or self._is_choice(words, solution):
            return [question, question]
        name = self._object(words, solution) if asked else None
        return [question if name is None else Guess(name=name)]

    def _is_kind(self, name: str, solution: str) -> bool:
        """Return whether a name stands for a kind of object, as in "Is it a fish?", and not for the secret."""
        return name != solution and name in self._kinds

    def _is_choice(self, words: str, solution: str) -> bool:
        names = words.split(" or ")
        return len(names) > 1 and all(self._known(name, solution) for name in names)

    def _object(self, words: str, solution: str) -> str | None:
        """Return the object meant by "a clock"; None for a possible description ("a clock radio", "a mammal")."""
        known = self._known(words, solution)
        if known is not None:
            return known
        bare = _without_article(words)
        is_one_thing = bare != words and " " not in bare and bare.isalpha()
        return bare if is_one_thing and bare not in self._categories else None

    def _named(self, words: str, solution: str) -> Guess:
        """Return the guess in words that are marked as a guess, even if the object is unknown."""
        return Guess(name=self._known(words, solution) or _without_article(words))

    def _known(self, words: str, solution: str) -> str | None:
        bare = _without_article(words)
        if bare in self._names:
            return self._names[bare]
        return solution if solution and (bare == solution or bare in _plurals(solution)) else None


def _group(match: re.Match[str]) -> str:
    """Return the text of the one group that took part in a match."""
    return core(next(filter(None, match.groups())))


def _without_article(words: str) -> str:
    return _ARTICLE.sub("", words, count=1) if _ARTICLE.match(words) else words


def _plurals(name: str) -> tuple[str, ...]:
    plurals = (name + "s", name + "es")
    return (*plurals, name[:-1] + "ies") if name.endswith("y") else plurals
