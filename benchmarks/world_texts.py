"""Shorten the texts of text worlds without losing information: a turn of a small policy costs its tokens.

Words stand apart, a space before each, so that the name of a thing is the same tokens wherever it stands, in what the
environment's texts and in commands.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

NOTHING: Final = "Nothing happens."  # a text of ALFWorld
_TITLE = re.compile(r"-= (.*?) =-")
_TASK = re.compile(r"Your task is to: (.*?)\.?$")
_SEEN = re.compile(r"(?:you see|carrying:) ([^.]*)")
_THING = re.compile(r"\w+ \d+")
_SMALL_WORDS = re.compile(r"\b(?:an?|some|the|it|them) ")
_WAYS = re.compile(r"\b(north|east|south|west)\b")
_RECIPE = re.compile(r"Ingredients: (.*?) Directions: (.*?) prepare meal")
_LIES = re.compile(r"take (.*) from (.*)")


def of_household(text: str) -> str:
    """Shorten a text of ALFWorld to the objects and the task, without articles and full stops.

    >>> of_household("You arrive at shelf 1. On the shelf 1, you see a mug 1, and a pen 2.")
    ' mug 1 pen 2 ;'
    >>> of_household("You arrive at safe 1. The safe 1 is closed."), of_household("You open the safe 1.")
    (' closed ;', ' done ;')
    """
    if text == NOTHING:
        return " no ;"
    task = _TASK.search(text)
    seen = _SEEN.search(text)
    if seen:
        what = " ".join(_THING.findall(seen[1])) or "nothing"
    else:
        what = "closed" if text.endswith("is closed.") else "done"
    return f" {what} ; {_SMALL_WORDS.sub('', task[1])} ;" if task else f" {what} ;"


def of_maze(text: str) -> str:
    """Say a room of a coin collector by its name, its ways out and its coin.

    What is left out is the objective, which spells the way to the coin.
    """
    title = _TITLE.search(text)
    if not title:
        return " ".join(text.split())
    ways = ", ".join(dict.fromkeys(_WAYS.findall(text[title.end() :])))
    coin = " A coin!" if "coin" in text[title.end() :] else ""
    return f"{title[1]}: {ways}.{coin}"


def of_kitchen(text: str, commands: Sequence[str]) -> str:
    """Shorten a text of TextWorld's kitchens to what can be taken from where, or what the cookbook requires.

    Args:
        text: The text of the game.
        commands: What it would take next; what can be taken is as it calls it.

    >>> of_kitchen("-= Kitchen =- You see a fridge. It contains a carrot.", ["look", "take carrot from fridge"])
    ' carrot fridge ;'
    >>> of_kitchen("Ingredients: carrot Directions: chop the carrot fry the carrot prepare meal", [])
    ' carrot ; chop carrot fry carrot ;'
    """
    recipe = _RECIPE.search(" ".join(text.split()))
    if recipe:
        return f" {recipe[1]} ; {_SMALL_WORDS.sub('', recipe[2])} ;"
    if not _TITLE.search(text):
        return " done ;"
    lies = [" ".join(found.groups()) for found in map(_LIES.fullmatch, commands) if found]
    return f" {' '.join(lies) or 'nothing'} ;"
