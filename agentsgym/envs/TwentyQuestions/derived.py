"""Answer questions that an object's name or size answers: "Does it start with b?", "Is it bigger than a cat?".

Such a question has a key like ``"bigger_than:cat"``, which is used like the key of a property.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

#: The properties that say how big an object is, from the smallest size to the largest.
SIZES = ("fist", "shoebox", "bigger", "car", "house")

#: The kind of key that compares the object with another one.
COMPARISON = "bigger_than"

_NUMBERS = {
    word: str(n)
    for n, word in enumerate(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"])
} | {"single": "1"}
_NAME = r"(?:it|its name|the name|the name of it|the word|its spelling)"
_COUNT = r"\d{1,2}|" + "|".join(_NUMBERS)
#: The group that takes part in the match is the kind of key, and its text is the argument.
_QUESTION = re.compile(
    rf"(?:does {_NAME} (?:start|begin|starts|begins) (?:with|in)|is the first letter(?: of {_NAME})?)"
    r" (?:an? |the )?(?:letter )?(?P<first_letter>[a-z]|vowel|consonant)"
    rf"|does {_NAME} have (?:more than (?P<letters_over>{_COUNT})|(?:fewer|less) than (?P<letters_under>{_COUNT})"
    rf"|(?:exactly )?(?P<letters>{_COUNT})) letters"
    rf"|(?:does {_NAME} (?:have|contain|include)|is there) (?:(?:an? |the )?letter |an? )(?P<letter>[a-z])"
    rf"(?: in {_NAME})?"
    rf"|(?:is {_NAME}|does {_NAME} (?:have|consist of)) (?:just |only )?(?:a )?(?P<words>{_COUNT}) words?"
)
_COMPARISON = re.compile(r"(?:is it )?(?P<how>bigger|larger|smaller)(?: in size)? than (?:an? |the )?(?P<what>.+)")
_VALUES: Mapping[str, Callable[[str, str], bool]] = {
    "first_letter": lambda name, letter: (
        (name[0] in "aeiou") is (letter == "vowel") if len(letter) > 1 else name[0] == letter
    ),
    "letters_over": lambda name, count: sum(map(str.isalpha, name)) > int(count),
    "letters_under": lambda name, count: sum(map(str.isalpha, name)) < int(count),
    "letters": lambda name, count: sum(map(str.isalpha, name)) == int(count),
    "letter": lambda name, letter: letter in name,
    "words": lambda name, count: len(name.split()) == int(count),
}


def derived_key(text: str, names: Mapping[str, str]) -> tuple[str, bool] | None:
    """Return the key that a normalized question is about, and whether it is negated; None if there is none.

    Args:
        text: The question, such as "does it start with b".
        names: The objects by all their names.
    """
    match = _QUESTION.fullmatch(text)
    if match and match.lastgroup:
        argument = match[match.lastgroup]
        return f"{match.lastgroup}:{_NUMBERS.get(argument, argument)}", False
    match = _COMPARISON.fullmatch(text)
    if match and match["what"] in names:
        return f"{COMPARISON}:{names[match['what']]}", match["how"] == "smaller"
    return None


def derived_value(key: str, name: str, sizes: Callable[[str], tuple[str | None, ...]]) -> str | None:
    """Return the answer to a question for an object, ``"yes"`` or ``"no"``; None if it is unclear.

    Args:
        key: The key from :func:`derived_key`.
        name: The object.
        sizes: Returns the values of :data:`SIZES` for an object.
    """
    kind, _, argument = key.partition(":")
    if kind != COMPARISON:
        return "yes" if _VALUES[kind](name.lower(), argument) else "no"
    own, other = sizes(name), sizes(argument)
    if None in own or None in other:
        return None
    least, most = own.count("yes"), len(own) - own.count("no")
    other_least, other_most = other.count("yes"), len(other) - other.count("no")
    if name == argument or most < other_least:
        return "no"
    return "yes" if least > other_most else None
