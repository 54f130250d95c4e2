"""Parse an agent's text as one move: a question, a guess, or an invalid action.

Words and sentences are matched as a whole, never as substrings.
"""

from __future__ import annotations

import functools
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
_MARKED = re.compile(
    r"\$*\\boxed\{(?:\\text\{)?([^{}]*)\}+\$*|<((?:final ?)?(?:answer|guess))>([^<>]*)</\2>"  # in place of brackets
)
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
AUXILIARY = "is|are|was|were|does|do|did|has|have|had|can|ca|could|would|wo|will|should|might"
PRONOUN = r"(?:it|they|you|we|i|one|people|there|someone|anyone|most people)"
_FILLER = re.compile(
    r"(?:ok|okay|so|well|hmm|aha|ah|oh|got it|i know|now|then|alright|great|good|thanks|thank you|and|please|sure|first"
    rf"|next)\b[ ,:]*|(?:yes|no)\b(?: *[,:.!]+ *| (?=(?:{AUXILIARY}|it)\b))"
    r"|(?:my |the )?(?:first |next |last |final )?question(?: number)?(?: \d+)?"
    rf"(?:(?: is)? ?[:,]+ *| (?:is )?(?=(?:{AUXILIARY}) ))"
    r"|q?\d+ *[):]+ *|[ ,:;>#]+"
)
_EDGES = " ?!.,:;'\n"
_QUESTION_OPENING = re.compile(
    rf"(?:(?:{AUXILIARY}|may)(?:n'?t)?|if|am i|what|who|whose|which|where|when|why|how"
    r"|tell me|i want to know|i would like to know|i wonder)\b"
)
#: The end of a sentence that makes it a question; "would you have it" does not end in one
TAG = re.compile(
    rf"[ ,]+(?:(?!have )(?:{AUXILIARY})(?:n'?t| not)? {PRONOUN}(?: not)?|right|correct|true|so|yes|no|yeah|huh|eh|innit"
    r"|(?:yes|yeah|true|right) or (?:no|nah|false|wrong)|or (?:no|nah|nope|what)|am i right)$"
)
_ASKING = re.compile(r"\b(?:whether|wonder|wondering|ask|tell me|know if)\b")
_STATEMENT = re.compile(r"\b(?:it|its|they|that|this|there) (?:is|are|was|has|can|does)?\b|^let us\b")
_DANGLING = re.compile(r"(?:is|could|might) it(?: be)?(?: an?| the)?")
_ARTICLE = re.compile(r"^(?:a|an|the|some)\s+")

#: Names that are adjectives or materials without an article
_ADJECTIVE = re.compile(
    r"auto|cedar|coral|cork|emerald|home|iron|jersey|jet|lavender|lime|maple|marble|mint|mobile|oak|orange|pine|plaster"
    r"|plum|remote|ruby|semi|stone|violet|well|wire"
)
_MAX_GUESS = 100  # characters of a sentence that names an object
_HEDGE = (
    r"[ ,]*(?:(?:perhaps|possibly|maybe|by (?:any )?chance|simply|just|actually|really|probably|definitely|likely"
    r"|certainly|surely|then|called)[ ,]+)*"
)
_IT = r"(?:it|they|that|these|those|you|he|she|its name)"
_MODAL = r"(?:could|can|might|may|would|will|must|should)"
_BE = (
    r"(?:(?:are you|were you|you are) thinking (?:of|about)|are we talking about|(?:do|did) you mean"
    rf"|(?:is|are|was|were)(?:n'?t| not)? {_IT}|{_MODAL}(?:n'?t)? {_IT}{_HEDGE}be|(?:does|do) {_IT} happen to be"
    rf"|(?:{_IT} {_HEDGE})?(?:(?:{_MODAL}|has to|(?:(?:is|has) )?(?:got to|gotta)){_HEDGE}be|is|are|was)|its)\b"
)
_I_GUESS = (
    r"(?:(?:(?:(?:i|we) (?:(?:am|will|would|am going to|am gonna|have to|want to|would like to) )?(?:now )?"
    r"(?:(?:pretty|quite|fairly|very|almost|\d+ ?%) )?|let (?:me|us) |(?:would|do) you |going to |gonna )?(?:think"
    r"|thinking|believe|say|sure|certain|convinced|guess|guessing|bet|betting|reckon|suspect|wonder|suppose|pick|choose"
    r"|try|(?:go|going) (?:with|for))(?: that| if| whether)?|(?:how|what) about|tell me(?: if| whether)?)\b[ ,:]*)"
)
_SURE_GUESS = re.compile(
    r"(?:(?:(?:my|the) )?(?:(?:final|last|best|first|next) )?(?:guess|answer)(?: for it)?(?: is| would be| ?[:,])"
    r"|(?:my )?(?:final|last) (?:guess|answer) )(?: that)?[ ,:]*(?:it is |is it )?(.+)"
)
_GUESS = re.compile(rf"{_HEDGE}(?:{_I_GUESS}?{_BE}|{_I_GUESS}|){_HEDGE}(.+)")
_KIND_OF = re.compile(r"(?:(?:an?|some|any) )?(?:kind|type|sort|form) of (.+)")
#: What may follow the name in a guess
_GUESS_ENDING = re.compile(
    r"(?:[ ,.!;]+(?:please|by (?:any )?chance|perhaps|possibly|maybe|then|though|instead|for sure"
    r"|i (?:think|guess|bet|wonder)|(?:(?:that |it )?is )?(?:my |it )?(?:final |last )?(?:answer|guess)|is it))+[ .!]*$"
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
        knowledge: Provides the names of objects and of other things; any other noun may be a kind ("a mammal").
        read: Returns the properties that a normalized question is about; several if it contains several questions.
    """

    def __init__(self, knowledge: KnowledgeBase, read: Callable[[str], Sized]) -> None:
        self._read = read
        self._names = {normalize(name): target for name, target in knowledge.names.items()}
        nouns = (entry.question for entry in knowledge.properties.values() if entry.question.startswith("Is it a"))
        questions = (normalize(question).replace("a kind of ", "") for question in nouns)
        guesses = (normalize(known.guess) for known in knowledge.objects.values() if not known.article)
        kinds = (*questions, *(guess for guess in guesses if len(read(core(guess))) == 1))  # "Is it paper?"
        self._kinds = frozenset(self._known(core(kind).removeprefix("is it "), "") for kind in kinds) - {None}
        for name, target in [*self._names.items(), *zip(knowledge.other_names, knowledge.other_names, strict=True)]:
            for form in (name, *_plurals(name)):
                self._names.setdefault(form, target)
        self._others = knowledge.other_names

    def canonical(self, name: str) -> str:
        """Return an object's canonical name: its name in the knowledge base, otherwise its normalized words."""
        words = _ARTICLE.sub("", core(normalize(name)))
        return self._names.get(words, words)

    def parse(self, action: str, solution: str = "") -> Move:
        """Parse the move in an action.

        Args:
            action: The agent's text.
            solution: The canonical name of the secret, which need not be in the knowledge base.
        """
        text = _MARKED.sub(r"[\1\3]", normalize(action))
        if not core(text):
            return Fault.EMPTY
        bare = self._known(core(_GUESS_ENDING.sub("", text[:_MAX_GUESS])), solution)
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
        if sure and core(sure[1]):
            return [self._named(core(sure[1]), solution)]
        if TAG.fullmatch(f" {sentence}") or (" " not in sentence and self._known(sentence, solution) is None):
            return []  # "Is it a clock? Yes or no?", "metal?"
        if "?" in end or _QUESTION_OPENING.match(sentence) or self._is_question(sentence, end):
            return self._question(sentence, solution)
        name = self._guessed(sentence, solution) if _guess_words(sentence) != sentence else None
        return [] if name is None else [Guess(name=name)]

    def _is_question(self, sentence: str, end: str) -> bool:
        """Return whether a sentence without a question mark is a question, such as "it's soft, right" or "has legs"."""
        is_statement = "." in end or "!" in end or _STATEMENT.search(sentence)
        is_asked = not is_statement or TAG.search(sentence) or _ASKING.search(sentence)
        return bool(is_asked) and len(self._read(sentence)) == 1

    def _question(self, sentence: str, solution: str) -> list[Question | Guess]:
        """Return the question or the guess in a sentence, or two questions if there are several."""
        num_properties = len(self._read(sentence))
        name = self._guessed(sentence, solution)
        if name is not None and not (num_properties == 1 and self._is_kind(name, solution)):
            return [Guess(name=name)]
        is_several = num_properties > 1 or (not num_properties and self._is_choice(sentence, solution))
        return [Question(text=sentence, name=name or "")] * (2 if is_several else 1)

    def _is_kind(self, name: str, solution: str) -> bool:
        """Return whether a name stands for a kind of object, as in "Is it a fish?", and not for the secret."""
        return name != solution and name in self._kinds

    def _is_choice(self, sentence: str, solution: str) -> bool:
        names = _guess_words(sentence).split(" or ") if " or " in sentence else ()
        return len(names) > 1 and all(self._known(name, solution) for name in names)

    def _guessed(self, sentence: str, solution: str) -> str | None:
        """Return the object that a sentence guesses, such as "I bet it is a clock"; None for a description."""
        words = _guess_words(sentence)
        kind = _KIND_OF.fullmatch(words)
        if kind:  # may be true of another object: a helmet is some kind of hat
            name = self._known(kind[1], solution)
            return name if name and name == solution and name not in self._kinds else None
        name = None if _ADJECTIVE.fullmatch(words) else self._known(words, solution)
        is_description = name in self._others and name != solution and words == name and self._read(words)
        # "Is it mint?", or true of the secret: a bowling ball is a ball
        return None if is_description or solution.endswith(f" {name}") else name

    def _named(self, words: str, solution: str) -> Guess:
        """Return the guess in words that are marked as a guess, even if the object is unknown."""
        return Guess(name=self._known(words, solution) or _ARTICLE.sub("", words))

    def _known(self, words: str, solution: str) -> str | None:
        """Return the object with a name, in which two neighboring letters may be exchanged; None if there is none."""
        bare = _ARTICLE.sub("", words)
        places = range(len(bare) - 1) if 6 <= len(bare) <= 20 and bare.count(" ") < 2 else ()
        own = (solution, *_plurals(solution)) if solution else ()
        for name in (bare, *(f"{bare[:i]}{bare[i + 1]}{bare[i]}{bare[i + 2 :]}" for i in places)):
            found = self._names.get(name, solution if name in own else None)
            if found is not None and (name == bare or not self._read(bare)):
                return found
        return None


@functools.lru_cache(maxsize=8192)
def _guess_words(sentence: str) -> str:
    """Return what a sentence names if it is a guess; empty if it is too long to be one."""
    short = sentence if len(sentence) <= _MAX_GUESS else ""
    match = _GUESS.fullmatch(_GUESS_ENDING.sub("", TAG.sub("", short)))
    return core(match[1]) if match else ""


def _plurals(name: str) -> tuple[str, ...]:
    plurals = (name + "s", name + "es")
    return (*plurals, name[:-1] + "ies") if name.endswith("y") else plurals
