"""Short functions for tasks about programs: right, with a plausible bug, and with arguments to test them."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The source of these functions is part of the tasks, and all of them take and return plain JSON values.


def median(numbers: list[int]) -> float:  # noqa: D103
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def is_palindrome(text: str) -> bool:  # noqa: D103
    letters = [letter.lower() for letter in text if letter.isalpha()]
    return letters == letters[::-1]


def run_lengths(text: str) -> list[list[Any]]:  # noqa: D103
    runs: list[list[Any]] = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1])
    return runs


def chunks(items: list[int], size: int) -> list[list[int]]:  # noqa: D103
    return [items[start : start + size] for start in range(0, len(items), size)]


def shift_letters(text: str, shift: int) -> str:  # noqa: D103
    shifted = ""
    for letter in text:
        shifted += chr((ord(letter) - ord("a") + shift) % 26 + ord("a")) if letter.isalpha() else letter
    return shifted


def word_counts(text: str) -> dict[str, int]:  # noqa: D103
    counts: dict[str, int] = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def transpose(rows: list[list[int]]) -> list[list[int]]:  # noqa: D103
    return [[row[column] for row in rows] for column in range(len(rows[0]))]


def longest_rise(numbers: list[int]) -> int:  # noqa: D103
    longest = current = 1
    for place in range(1, len(numbers)):
        current = current + 1 if numbers[place] > numbers[place - 1] else 1
        longest = max(longest, current)
    return longest


def merge_intervals(intervals: list[list[int]]) -> list[list[int]]:  # noqa: D103
    merged: list[list[int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def second_largest(numbers: list[int]) -> int | None:  # noqa: D103
    distinct = sorted(set(numbers))
    return distinct[-2] if len(distinct) > 1 else None


def is_balanced(text: str) -> bool:  # noqa: D103
    depth = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            return False
    return depth == 0


def to_base(number: int, base: int) -> str:  # noqa: D103
    digits = ""
    while number >= base:
        number, digit = divmod(number, base)
        digits = str(digit) + digits
    return str(number) + digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A function that a task is about.

    Attributes:
        function: The right function.
        sentence: What it returns, as the rest of a sentence.
        right: A part of its source.
        wrong: What replaces the part in the version with a bug.
        arguments: Function that draws the arguments of a call.
    """

    function: Callable[..., Any]
    sentence: str
    right: str
    wrong: str
    arguments: Callable[[random.Random], list[Any]]

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def parameters(self) -> list[str]:
        """The names of the function's parameters."""
        return [*inspect.signature(self.function).parameters]

    def source(self, *, has_bug: bool = False) -> str:
        """Return the source of the function, without annotations and comments for tools."""
        lines = [line.partition("  # noqa")[0] for line in inspect.getsource(self.function).splitlines()]
        text = "\n".join([f"def {self.name}({', '.join(self.parameters)}):", *lines[1:]]) + "\n"
        text = text.replace(": list[list[Any]] =", " =").replace(": list[list[int]] =", " =")
        text = text.replace(": dict[str, int] =", " =")
        return text.replace(self.right, self.wrong) if has_bug else text


def _numbers(stream: random.Random, low: int = 2, high: int = 7) -> list[int]:
    return [stream.randint(-9, 9) for _ in range(stream.randint(low, high))]


def _text(stream: random.Random, letters: str, length: int = 8) -> str:
    return "".join(stream.choice(letters) for _ in range(stream.randint(1, length)))


def _mirrored(stream: random.Random) -> str:
    half = _text(stream, "abC ", 4)
    return half + (half[::-1].swapcase() if stream.random() < 0.6 else _text(stream, "abC,", 4))


def _rows(stream: random.Random) -> list[list[int]]:
    width = stream.randint(1, 4)
    return [_numbers(stream, width, width) for _ in range(stream.randint(1, 4))]


def _intervals(stream: random.Random) -> list[list[int]]:
    starts = [stream.randint(0, 20) for _ in range(stream.randint(1, 5))]
    return [[start, start + stream.randint(1, 8)] for start in starts]


#: Programs of training tasks.
TRAINING = (
    Program(
        function=median,
        sentence="the median of a list of numbers (the mean of the two middle ones if their count is even)",
        right="ordered[middle - 1] + ordered[middle]",
        wrong="ordered[middle] + ordered[middle + 1 - len(ordered)]",
        arguments=lambda stream: [_numbers(stream)],
    ),
    Program(
        function=is_palindrome,
        sentence="whether the letters of a text read the same in both directions, ignoring case and everything "
        "that is not a letter",
        right="letter.lower() for letter in text if letter.isalpha()",
        wrong="letter for letter in text",
        arguments=lambda stream: [_mirrored(stream)],
    ),
    Program(
        function=run_lengths,
        sentence="a list of [character, length] for each run of equal characters in a text, in order",
        right="runs[-1][1] += 1",
        wrong="runs[-1][1] = 2",
        arguments=lambda stream: [_text(stream, "ab", 9) + "aaab"],
    ),
    Program(
        function=chunks,
        sentence="a list cut into lists of the given size, the last of which may be shorter",
        right="range(0, len(items), size)",
        wrong="range(0, len(items) - size, size)",
        arguments=lambda stream: [_numbers(stream, 1, 9), stream.randint(1, 4)],
    ),
    Program(
        function=shift_letters,
        sentence="a text in which each letter from a to z is replaced by the one that follows it in the alphabet "
        "after the given number of places, with a after z; other characters stay",
        right=") % 26 +",
        wrong=") +",
        arguments=lambda stream: [_text(stream, "axyz -") + "y", stream.randint(2, 30)],
    ),
    Program(
        function=word_counts,
        sentence="a dict from each word of a text, in lower case, to the number of times it occurs; words are "
        "separated by white space",
        right="text.lower().split()",
        wrong="text.split()",
        arguments=lambda stream: [" ".join(stream.choice(["Tea", "tea", "milk", "Milk"]) for _ in range(6))],
    ),
    Program(
        function=transpose,
        sentence="the columns of a list of rows, as a list of lists; all rows are equally long",
        right="range(len(rows[0]))",
        wrong="range(len(rows))",
        arguments=lambda stream: [_rows(stream)],
    ),
    Program(
        function=longest_rise,
        sentence="the length of the longest run of neighbors in a non-empty list of numbers in which each number is "
        "greater than the one before it",
        right="] > numbers",
        wrong="] >= numbers",
        arguments=lambda stream: [[number // 4 for number in _numbers(stream, 4, 9)]],
    ),
)
#: Programs of evaluation tasks.
EVALUATION = (
    Program(
        function=merge_intervals,
        sentence="a sorted list of intervals [start, end] in which those that overlap or touch are merged",
        right="max(merged[-1][1], end)",
        wrong="end",
        arguments=lambda stream: [_intervals(stream)],
    ),
    Program(
        function=second_largest,
        sentence="the second largest of the different numbers in a list, or None if there are fewer than two",
        right="sorted(set(numbers))",
        wrong="sorted(numbers)",
        arguments=lambda stream: [[stream.randint(1, 4) for _ in range(stream.randint(1, 5))]],
    ),
    Program(
        function=is_balanced,
        sentence="whether every closing parenthesis in a text closes an open one, and none is left open",
        right="depth < 0",
        wrong="depth < -1",
        arguments=lambda stream: [stream.choice(["", ")(", "(", "()"]) + _text(stream, "()", 3)],
    ),
    Program(
        function=to_base,
        sentence="the digits of a non-negative int in a base from 2 to 9, as a text",
        right="number >= base",
        wrong="number > base",
        arguments=lambda stream: [stream.randint(0, 40), stream.choice([2, 3, 5])],
    ),
)
