"""The part files of a rollout store, which are written atomically and recognized by their names.

A part is written under a temporary name, synced to disk, and renamed. If the writing process dies before the rename, it
leaves a file whose name ends in ``.unfinished``, which is never read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from agentsgym.cached_folders import sync_folder
from agentsgym.errors import StoreError
from agentsgym.store.schema import ADDED_LATER, DICTIONARY, SCHEMA, SPLIT, VERSION, VERSION_KEY
from agentsgym.texts import sentence_of, shown

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)

SUFFIX: Final = ".parquet"
UNFINISHED: Final = ".unfinished"
ROWS_PER_GROUP: Final = 128  # reading one rollout reads its entire row group
_NUM_READERS: Final = 8
_PART_NAME: Final = re.compile(rf"part-v{VERSION}-\d{{8}}T\d{{6}}\.\d{{9}}-\w+-\d+-([1-9]\d*)\{SUFFIX}")
_MAGIC: Final = b"PAR1"  # the first and last bytes of a parquet file
_TAIL: Final = struct.Struct("<I4s")  # the end of a parquet file: the size of its footer, and the magic
_MAX_NAMED: Final = 5  # files listed in a warning
_REMEDY: Final = "move it out of the folder to read the other files"


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a store.

    Attributes:
        path: The file.
        row_groups: The number of rows in each of its row groups.
    """

    path: Path
    row_groups: tuple[int, ...]


def part_name(writer: str, number: int, num_rollouts: int) -> str:
    """Return the name of a part, which contains the time (for the order), the writer (for uniqueness) and the size.

    Thanks to these names, a folder of thousands of parts can be opened without reading their footers.
    """
    moment = time.time_ns()
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(moment // 10**9))
    return f"part-v{VERSION}-{stamp}.{moment % 10**9:09d}-{writer}-{number:06d}-{num_rollouts}"


def encode(table: pa.Table) -> pa.Buffer:
    """Serialize a table as a parquet file in memory."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=ROWS_PER_GROUP,
        compression="zstd",
        use_dictionary=[*DICTIONARY, "token_ids.list.element"],  # column names are accepted
        column_encoding=dict.fromkeys(SPLIT, "BYTE_STREAM_SPLIT"),
        write_statistics=False,
        write_page_checksum=True,
    )
    return sink.getvalue()


def write_part(folder: Path, name: str, data: pa.Buffer) -> None:
    """Write a file atomically.

    Raises:
        OSError: The file cannot be written; no partial file remains.
        FileExistsError: A complete or unfinished file with this name already exists.
    """
    path = folder / f"{name}{SUFFIX}"
    unfinished = folder / f"{name}{SUFFIX}{UNFINISHED}"
    with unfinished.open("xb") as file:  # exclusive creation reserves the name
        try:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # the file system may not support locks
                    fcntl.flock(file, fcntl.LOCK_EX)  # held until the file is closed: it shows that the writer is alive
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if path.exists():  # no race: the unfinished file reserves the name
                raise FileExistsError(f"{path} already exists")  # noqa: TRY301  # the file is removed below
            unfinished.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
    sync_folder(folder)


def scan(folder: Path) -> tuple[list[Part], dict[Path, str]]:
    """Find the parts in a folder, by their names or, for files with other names, by their footers.

    Returns:
        The readable parts, in the order in which writing them began, and the reason why each other parquet file cannot
        be read.
    """
    try:
        what = None if folder.is_dir() else "a file" if folder.exists() else "nothing"
        names = [] if what else [*folder.iterdir()]
    except OSError as error:
        raise StoreError(f"the rollout store {shown(str(folder))} cannot be read: {error.strerror}") from error
    if what:
        raise StoreError(f"there is no rollout store at {folder}: expected a folder of parquet files, found {what}")
    files = sorted(file for file in names if file.name.endswith(SUFFIX) and not file.name.startswith("."))
    found: dict[Path, Part | str] = {file: part for file in files if (part := _by_name(file)) is not None}
    others = [file for file in files if file not in found]
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        found |= zip(others, pool.map(_open, others), strict=True)
    parts = [part for file in files if isinstance(part := found[file], Part)]
    skipped = {file: why for file, why in found.items() if isinstance(why, str)}
    if skipped:
        logger.warning(
            "%s: %d of %d parquet files cannot be read and are skipped: %s",
            *(folder, len(skipped), len(files), _named(f"{file.name} ({why})" for file, why in skipped.items())),
        )
    return parts, skipped


def warn_of_unfinished(folder: Path) -> None:
    """Warn about files left behind by writers that died, but not about files that are still being written."""
    leftovers = [file for file in sorted(folder.glob(f"[!.]*{UNFINISHED}")) if file.is_file() and not _is_locked(file)]
    if leftovers:
        logger.warning(
            "%s contains %d unfinished parts of processes that ended while writing: %s. Their rollouts are lost, and "
            "the files can be deleted",
            *(folder, len(leftovers), _named(file.name for file in leftovers)),
        )


def _by_name(file: Path) -> Part | None:
    """Recognize a complete part by its name; None for any other file."""
    match = _PART_NAME.fullmatch(file.name)
    if match is None or not file.is_file():
        return None
    try:
        with file.open("rb", buffering=0) as opened:
            size = opened.seek(-_TAIL.size, os.SEEK_END) + _TAIL.size
            footer_bytes, magic = _TAIL.unpack(opened.read())
    except OSError:
        return None
    # A footer has kilobytes per 128 rollouts: an implausible number is rejected before so much memory is allocated.
    if magic != _MAGIC or int(match[1]) > min(footer_bytes, size):
        return None
    groups, rest = divmod(int(match[1]), ROWS_PER_GROUP)
    return Part(file, (*[ROWS_PER_GROUP] * groups, *([rest] if rest else [])))


def _open(file: Path) -> Part | str:
    """Read a file's footer, or return why it cannot be read.

    Raises:
        StoreError: The number of rollouts is not the one in the file's name.
    """
    if not file.is_file():  # opening a named pipe would wait for ever
        return "not a file"
    try:
        metadata = pq.read_metadata(file)
    except (OSError, pa.ArrowException, ValueError) as error:
        return f"not a complete parquet file: {sentence_of(error, 200)}"
    version = (metadata.metadata or dict[bytes, Any]()).get(VERSION_KEY)
    if version is None:
        return "a parquet file, but not one of a rollout store"
    if version != str(VERSION).encode():
        found = version.decode(errors="replace")
        return f"format version {found}, but this version of agentsgym reads format {VERSION}: update agentsgym"
    named = _PART_NAME.fullmatch(file.name)
    if named is not None and int(named[1]) != metadata.num_rows:
        _raise_wrong_size(file, metadata.num_rows, int(named[1]))
    return Part(file, _row_groups(metadata))


def _row_groups(metadata: pq.FileMetaData) -> tuple[int, ...]:
    return tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))


def _raise_wrong_size(file: Path, actual: int, expected: int) -> NoReturn:
    raise StoreError(
        f"{file} contains {actual} rollouts, but its name implies {expected}: restore its original name, or {_REMEDY}"
    )


def read_row_group(part: Part, index: int, columns: Sequence[str] | None = None) -> pa.Table:
    """Read one row group of a part."""
    try:
        with pq.ParquetFile(part.path, page_checksum_verification=True) as file:
            row_groups = _row_groups(file.metadata)
            if row_groups != part.row_groups:
                _raise_wrong_size(part.path, sum(row_groups), sum(part.row_groups))
            table = file.read_row_group(index, columns=None if columns is None else [*columns])
            for name in ADDED_LATER:
                if name not in table.column_names:
                    field = SCHEMA.field(name)
                    table = table.append_column(field, pa.nulls(len(table), field.type))
            table = _as_declared(table.select(SCHEMA.names if columns is None else columns), part.path)
            table.validate(full=True)  # texts that are not UTF-8 would raise only where they are used
            return table
    except StoreError:  # which is also an OSError
        raise
    except KeyError as error:
        raise StoreError(f"{part.path} lacks a required column: {error}; {_REMEDY}") from error
    except (OSError, pa.ArrowException, ValueError, IndexError) as error:
        raise StoreError(f"{part.path} can no longer be read: {sentence_of(error, 300).rstrip()}; {_REMEDY}") from error


def _as_declared(table: pa.Table, path: Path) -> pa.Table:
    """Convert columns that another tool wrote with other types, such as ``large_string``."""
    for index, name in enumerate(table.column_names):
        field, column = SCHEMA.field(name), table.column(index)
        if column.type != field.type:
            try:
                table = table.set_column(index, field, column.cast(field.type))
            except (pa.ArrowException, ValueError) as error:
                types = f"must be of type {shown(field.type)}, got {shown(column.type)}"
                raise StoreError(f"{path}: the column {name!r} {types}; {_REMEDY}") from error
    return table


def _named(names: Iterator[str]) -> str:
    listed = list(names)
    more = len(listed) - _MAX_NAMED
    return ", ".join(listed[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _is_locked(path: Path) -> bool:
    if fcntl is None:
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:  # its writer has renamed it
        return True
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
