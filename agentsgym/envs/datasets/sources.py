"""Read the rows of a user's data: a JSONL file, rows in memory, or whatever ``datasets`` loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.texts import sentence_of, shown

Row = Mapping[str, Any]
EXPECTED_SOURCE = (
    "a path of a JSONL file, a list of dicts, a datasets.Dataset, or a dict of arguments of datasets.load_dataset"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column to read from the data.

    Attributes:
        default: The column's name if the user sets none.
        valid: Whether a value is valid.
        expected: What a valid value is, as the end of "must be …".
        is_optional: Whether rows may do without it.
    """

    default: str
    valid: Callable[[Any], bool]
    expected: str
    is_optional: bool = False


def is_source(value: Any) -> bool:
    """Whether rows could be read from it: its form, not its content."""
    return isinstance(value, str | Path | list | tuple) or is_load_arguments(value) or hasattr(value, "column_names")


def is_load_arguments(value: Any) -> bool:
    """Whether it holds arguments of ``datasets.load_dataset``."""
    return isinstance(value, Mapping) and "path" in cast("Mapping[Any, Any]", value)


def read_rows(source: Any, name: str) -> Sequence[Row]:
    """Read all rows.

    Args:
        source: A path of a JSONL file, rows, a ``datasets.Dataset``, or a dict of arguments of
            ``datasets.load_dataset``, ``path`` and ``split`` among them.
        name: Its name in errors.

    Raises:
        ConfigError: The source cannot be read, a line is not a JSON object, or there is no row.
    """
    rows: Any
    if isinstance(source, str | Path):
        rows = [*_json_lines(Path(source).expanduser(), name)]
    elif is_load_arguments(source):
        rows = _loaded(source, name)
    else:
        rows = source
    if not is_source(rows) or isinstance(rows, str):
        raise ConfigError(f"{name} must be {EXPECTED_SOURCE}, got {shown(source)}")
    if isinstance(rows, Mapping):
        splits = cast("Mapping[str, Any]", rows)
        raise ConfigError(f"{name} must name one split, as in split={shown(next(iter(splits), 'train'))}: {[*splits]}")
    if not len(rows):
        raise ConfigError(f"{name} must hold at least one row, got none in {shown(source)}")
    return rows


def read_columns(
    rows: Sequence[Row], columns: Mapping[str, Column], names: Mapping[str, str] | None, name: str
) -> list[dict[str, Any]]:
    """Take what is needed of each row, under our own names.

    Args:
        rows: The data.
        columns: The needed columns, by our names.
        names: The data's name of a column by our name, where it is not the default.
        name: Name of the data in errors.

    Returns:
        One dict a row; an optional value that a row does not have is left out.

    Raises:
        ConfigError: ``names`` has a key that is not needed, a column is missing, or a value is not valid.
    """
    given = dict(names or {})
    for key in given:
        if key not in columns:
            raise ConfigError(f"columns[{shown(key)}] is unknown{did_you_mean(str(key), columns)}")
    places = {key: (given.get(key, column.default), column, key in given) for key, column in columns.items()}
    return [_read_row(row, index, places, name) for index, row in enumerate(rows)]


def _read_row(row: Any, index: int, places: Mapping[str, tuple[str, Column, bool]], name: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{name}[{index}] must be a dict, got {shown(row)}")
    fields = cast("Row", row)
    read: dict[str, Any] = {}
    for key, (place, column, is_named) in places.items():
        value = fields.get(place)
        if value is None and column.is_optional and not (is_named and place not in fields):
            continue
        if place not in fields:
            hint = did_you_mean(place, map(str, fields))
            raise ConfigError(
                f"{name}[{index}] has no column {place!r}, from which {key!r} is read{hint} (to read another column, "
                f"set columns={{{key!r}: '…'}})"
            )
        if not column.valid(value):
            raise ConfigError(f"{name}[{index}][{place!r}] must be {column.expected}, got {shown(value)}")
        read[key] = value
    return read


def _json_lines(path: Path, name: str) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _json_object(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read from {shown(str(path))}: {sentence_of(error)}") from error


def _json_object(line: str, place: str) -> Row:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} must be a JSON object: {sentence_of(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{place} must be a JSON object, got {shown(value)}")
    return cast("Row", value)


def _loaded(arguments: Mapping[str, Any], name: str) -> Any:
    if arguments["path"] == "pandas":
        raise ConfigError(f"{name} names the builder 'pandas', which unpickles files: convert them to Parquet or JSONL")
    import datasets  # noqa: PLC0415  # half a second that other sources do not need

    untyped: Any = datasets
    try:
        return untyped.load_dataset(**arguments)
    except Exception as error:  # whatever a data set's files or a server bring about
        raise ConfigError(f"{name} cannot be loaded with {shown(arguments)}: {sentence_of(error)}") from error
