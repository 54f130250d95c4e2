"""Make tasks from a user's questions: read them from a table, and split them between training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentsgym.envs.datasets.options import COMMON_OPTIONS, Part, names_in_part
from agentsgym.envs.datasets.sources import EXPECTED_SOURCE, Column, is_source, read_columns, read_rows
from agentsgym.fields import Field, is_dict, is_text, or_none

#: Options of a dataset that is made from a table, in addition to those of the environment.
OPTIONS: Mapping[str, Field] = {
    **COMMON_OPTIONS,
    "data": Field(default=None, expected=f"{EXPECTED_SOURCE}, or None", valid=or_none(is_source)),
    "columns": Field(
        default=None, expected="a dict from a task's key to a column of the data, or None", valid=or_none(is_dict)
    ),
}


QUESTION = Column(default="question", valid=is_text, expected="a string")


def read(settings: Mapping[str, Any], columns: Mapping[str, Column]) -> list[dict[str, Any]]:
    """Read the table ``settings["data"]``: one dict per row, in order, with the keys of ``columns``.

    Raises:
        ConfigError: The table cannot be read, lacks a column, or contains an invalid value.
    """
    return read_columns(read_rows(settings["data"], "data"), columns, settings["columns"], "data")


def of_part(tasks: list[dict[str, Any]], part: Part, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tasks whose ``"question"`` belongs to a split.

    Raises:
        ConfigError: There are too few different questions to split.
    """
    chosen = set(names_in_part([str(task["question"]) for task in tasks], part, settings, "questions"))
    return [task for task in tasks if str(task["question"]) in chosen]
