"""Make tasks of a user's own questions: read from any table, split between training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentsgym.envs.datasets.options import COMMON_OPTIONS, Part, part_of
from agentsgym.envs.datasets.sources import Column, is_source, read_columns, read_rows
from agentsgym.fields import Field, is_str, or_none

#: Options of a dataset that is made of a table, in addition to the environment's own.
OPTIONS: Mapping[str, Field] = {
    **COMMON_OPTIONS,
    "data": Field(default=None, expected="what rows can be read from, or None", valid=or_none(is_source)),
    "columns": Field(
        default=None,
        expected="a dict from our name of a column to the data's, or None",
        valid=or_none(lambda value: isinstance(value, Mapping)),
    ),
}


def is_text(value: Any) -> bool:
    """Accept strings of more than white space."""
    return is_str(value) and bool(value.strip())


QUESTION = Column(default="question", valid=is_text, expected="a string")


def read(settings: Mapping[str, Any], columns: Mapping[str, Column]) -> list[dict[str, Any]]:
    """Read the table in ``settings["data"]``: one dict per row, with the names of ``columns``, in its order.

    Raises:
        ConfigError: The table cannot be read, lacks a column, or holds a value that is not valid.
    """
    return read_columns(read_rows(settings["data"], "data"), columns, settings["columns"], "data")


def of_part(tasks: list[dict[str, Any]], part: Part, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Keep the tasks whose ``"question"`` belongs to training, or to evaluation.

    Raises:
        ConfigError: There are too few different questions to split.
    """
    chosen = set(part_of([str(task["question"]) for task in tasks], part, settings, "questions"))
    return [task for task in tasks if str(task["question"]) in chosen]
