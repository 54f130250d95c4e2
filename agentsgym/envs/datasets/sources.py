"""Read rows of user data (a JSONL file, rows in memory, anything that ``datasets`` can load), such as questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agentsgym.envs.datasets.options import COMMON_OPTIONS, Part, names_in_part
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Field, is_dict, is_text, or_none, require
from agentsgym.texts import sentence_of, shown

Row = Mapping[str, Any]
EXPECTED_SOURCE = (
    "the path to a JSONL file, a list of dicts, a datasets.Dataset, or a dict of arguments for datasets.load_dataset"
)
_OTHER_FORMATS = (
    " (a path names a JSONL file; for another format, pass data={{'path': '{}', 'data_files': '{}', 'split': 'train'}})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column to read from the data.

    Attributes:
        default: Name of the column unless the user sets another.
        valid: Predicate for valid values.
        expected: Description of a valid value that completes "must be …".
        is_optional: Whether rows may lack the column.
    """

    default: str
    valid: Callable[[Any], bool]
    expected: str
    is_optional: bool = False


def is_source(value: Any) -> bool:
    """Whether a value has a type from which rows can be read; its content is not checked."""
    return isinstance(value, str | Path | list | tuple) or is_load_arguments(value) or hasattr(value, "column_names")


def is_load_arguments(value: Any) -> bool:
    """Whether a value is a dict of arguments for ``datasets.load_dataset``."""
    return isinstance(value, Mapping) and "path" in cast("Mapping[Any, Any]", value)


def read_rows(source: Any, name: str) -> Sequence[Row]:
    """Read all rows.

    Args:
        source: The path to a JSONL file, rows, a ``datasets.Dataset``, or a dict of keyword arguments for
            ``datasets.load_dataset``, including ``path`` and ``split``.
        name: Name of the source in error messages.
    """
    rows = source
    if isinstance(source, str | Path):
        rows = [*_json_lines(Path(source).expanduser(), name)]
    elif is_load_arguments(source):
        if source["path"] == "pandas":
            raise ConfigError(
                f"{name} uses the builder 'pandas', which is not allowed because it unpickles files: convert them "
                "to Parquet or JSONL"
            )
        import datasets  # noqa: PLC0415  # the import takes half a second, and other sources do not need it

        untyped: Any = datasets
        try:
            rows = untyped.load_dataset(**source)
        except Exception as error:  # a dataset's files or a server may cause any error
            raise ConfigError(f"{name} cannot be loaded with {shown(source)}: {sentence_of(error)}") from error
    if not is_source(rows) or isinstance(rows, str):
        raise ConfigError(f"{name} must be {EXPECTED_SOURCE}, got {shown(source)}")
    if isinstance(rows, Mapping):
        splits = cast("Mapping[str, Any]", rows)
        raise ConfigError(
            f"{name} has several splits, {[*splits]}: choose one, as in split={shown(next(iter(splits), 'train'))}"
        )
    if not len(rows):
        raise ConfigError(f"{name} must contain at least one row, got none in {shown(source)}")
    return rows


def read_columns(
    rows: Sequence[Row], columns: Mapping[str, Column], names: Mapping[str, str] | None, name: str
) -> list[dict[str, Any]]:
    """Read columns of each row, and rename them to their keys in ``columns``.

    Args:
        rows: Rows of the data.
        columns: The columns to read, by key.
        names: Names of columns in the data, by key, if they differ from the defaults.
        name: Name of the data in error messages.

    Returns:
        One dict per row, without the optional values that a row lacks.
    """
    given = dict(names or {})
    if unknown := [key for key in given if key not in columns]:
        raise ConfigError(f"columns has the unknown key {shown(unknown[0])}{did_you_mean(unknown[0], columns)}")
    read: list[dict[str, Any]] = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"{name}[{index}] must be a dict, got {shown(row)}")
        own: dict[str, Any] = {}
        for key, column in columns.items():
            place = given.get(key, column.default)
            value = row.get(place)
            if value is None and column.is_optional and (key not in given or place in row):
                continue
            if place not in row:
                hint = did_you_mean(place, map(str, row))
                raise ConfigError(
                    f"{name}[{index}] has no column {place!r}, from which {key!r} is read{hint} (to read a "
                    f"different column, set columns={{{key!r}: '…'}})"
                )
            require(f"{name}[{index}][{place!r}]", value, column.valid, column.expected)
            own[key] = value
        read.append(own)
    return read


def _json_lines(path: Path, name: str) -> Iterator[Row]:
    hint = "" if path.suffix == ".jsonl" else _OTHER_FORMATS.format(path.suffix[1:] or "json", path)
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    value: Any = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{path}:{number} must be a JSON object: {sentence_of(error)}{hint}") from error
                if not isinstance(value, dict):
                    raise ConfigError(f"{path}:{number} must be a JSON object, got {shown(value)}{hint}")
                yield cast("Row", value)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read from {shown(str(path))}: {sentence_of(error)}") from error


#: Options of a dataset that is made from a table, in addition to those of the environment.
QUESTION_OPTIONS: Mapping[str, Field] = {
    **COMMON_OPTIONS,
    "data": Field(default=None, expected=f"{EXPECTED_SOURCE}, or None", valid=or_none(is_source)),
    "columns": Field(
        default=None, expected="a dict from a task's key to a column of the data, or None", valid=or_none(is_dict)
    ),
}


QUESTION = Column(default="question", valid=is_text, expected="a string")


def read_questions(settings: Mapping[str, Any], columns: Mapping[str, Column]) -> list[dict[str, Any]]:
    """Read the table ``settings["data"]``: one dict per row, in order, with the keys of ``columns``.

    Raises:
        ConfigError: The table cannot be read, lacks a column, or contains an invalid value.
    """
    return read_columns(read_rows(settings["data"], "data"), columns, settings["columns"], "data")


def questions_of_part(tasks: list[dict[str, Any]], part: Part, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tasks whose ``"question"`` belongs to a split.

    Raises:
        ConfigError: There are too few different questions to split.
    """
    chosen = set(names_in_part([str(task["question"]) for task in tasks], part, settings, "questions"))
    return [task for task in tasks if str(task["question"]) in chosen]
