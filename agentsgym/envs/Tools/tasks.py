"""Make tool-use tasks from any table of questions and answers, and compare an answer with the expected one."""

from __future__ import annotations

import logging
import math
import string
from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

from agentsgym.envs.datasets.options import CommonOptions, Part, checked_options, rows_of
from agentsgym.envs.datasets.sources import QUESTION_OPTIONS, Column, questions_of_part, read_columns, read_rows
from agentsgym.envs.shared.numbers import as_number
from agentsgym.errors import ConfigError
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

_LEADING = "\"'`([{<*_~\\" + string.whitespace  # leading characters to ignore
_TRAILING = "\"'`)]}>*_~\\.,;:!?" + string.whitespace  # never the end of a number, unit or name, such as 5%, C# or .5
_RELATIVE_TOLERANCE = Fraction(1, 10**9)  # relative tolerance, for numbers with decimals
_ABSOLUTE_TOLERANCE = Fraction(1, 10**12)


class DatasetOptions(CommonOptions, total=False):
    """Options of the generated rows, in addition to those of :class:`~.CommonOptions`.

    Attributes:
        data: The table: the path to a JSONL file, a list of dicts, a ``datasets.Dataset``, or a dict of arguments for
            ``datasets.load_dataset``.
        columns: The table column for each key of a task; see :func:`tasks_from`.
    """

    data: Any
    columns: Mapping[str, str] | None


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Make the rows of a split, with ``env_config`` unchanged.

    Raises:
        ConfigError: There is no table, the table lacks a column or has no rows, or an option is invalid.
    """
    settings = checked_options(options, QUESTION_OPTIONS)
    if settings["data"] is None:
        raise ConfigError(f"{env_class.__name__} has no built-in tasks: pass data=…, a table of questions and answers")
    table = tasks_from(settings["data"], settings["columns"], env_class.task_fields)
    tasks = questions_of_part(table, part, settings)
    return rows_of(tasks, env_class, env_config, part, settings)


def tasks_from(
    data: Any, columns: Mapping[str, str] | None = None, task_fields: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Read tasks from a table, in row order.

    Args:
        data: Any table that :func:`~agentsgym.envs.datasets.sources.read_rows` accepts.
        columns: The table column for each key of a task, such as ``{"question": "prompt", "answer": "gold"}``; further
            keys and columns may follow. None for the columns that ``task_fields`` names, ``question`` and ``answer``.
        task_fields: The keys of a task; None for all columns.

    Returns:
        One ``task_data`` per row.

    Raises:
        ConfigError: The data is not a table, has no rows, or lacks a column.
    """
    chosen = {"question": "question"} if columns is None else dict(columns)
    if "question" not in chosen:
        raise ConfigError(f"columns must name the column of the 'question', got {shown(chosen)}")
    wanted = {key: Column(default=key, valid=lambda _: True, expected="anything") for key in chosen}
    rows = read_rows(data, "data")
    tasks = read_columns(rows, wanted, chosen, "data")
    if columns is not None:
        return tasks
    given = dict.fromkeys(key for row in rows for key in row)
    kept = given if task_fields is None else {"question", "answer", *task_fields}
    if left_out := [key for key in given if key not in kept]:
        logger.warning("the columns %s are left out: they are not in task_fields", ", ".join(map(repr, left_out)))
    if "answer" not in given:
        logger.warning("the data has no column 'answer', so answers are not compared (columns={…} names another one)")
    return [
        task | {key: value for key, value in row.items() if key in kept} for task, row in zip(tasks, rows, strict=True)
    ]


def normalized(text: str) -> str:
    """Normalize case, surrounding quotes and punctuation, and runs of whitespace.

    >>> normalized('  "The  Cat." '), normalized("C#"), normalized(".5")
    ('the cat', 'c#', '.5')
    """
    return " ".join(text.casefold().split()).lstrip(_LEADING).rstrip(_TRAILING)


def is_exact(text: str, expected: Any) -> bool:
    """Whether an answer equals the expected one, character for character, except for outer whitespace."""
    return text.strip() == str(expected).strip()


def is_same(text: str, expected: Any) -> bool:
    """Whether an answer equals the expected one after normalization; numbers are compared by value, integers exactly.

    >>> is_same("1,200.0", 1200), is_same("The cat!", "the cat"), is_same("12", "1 2"), is_same("10", 11)
    (True, True, False, False)
    """
    if is_exact(text, expected):
        return True
    one, other = _number(text), _number(str(expected))
    if one is not None and other is not None:
        distance = abs(one - other)
        if isinstance(expected, float) and abs(one - Fraction(expected)) <= Fraction(math.ulp(expected)) / 2:
            return True
        if one.denominator == other.denominator == 1:
            return distance == 0
        return distance <= max(_RELATIVE_TOLERANCE * max(abs(one), abs(other)), _ABSOLUTE_TOLERANCE)
    given, wanted = normalized(text), normalized(str(expected))
    return bool(given) and given == wanted


MATCHES: dict[str, Callable[[str, Any], bool]] = {"normalized": is_same, "exact": is_exact}


def matches(text: str, expected: Any, how: str) -> bool:
    """Whether an answer matches the expected one, or any of several expected ones.

    Args:
        text: The answer.
        expected: A text, a number, or a list of accepted texts and numbers.
        how: A key of :data:`MATCHES`.
    """
    is_list = isinstance(expected, list | tuple)
    wanted = cast("Iterable[Any]", expected) if is_list else [expected]
    return any(MATCHES[how](text, one) for one in wanted)


def _number(text: str) -> Fraction | None:
    """Parse an answer that is a single number, exactly; None for any other answer."""
    number = as_number(normalized(text).strip(" $€£%"))
    return None if number is None else number.value
