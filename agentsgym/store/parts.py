"""The files of a rollout store: each written atomically, and recognized by its name.

A part is written under a temporary name, synced to the disk, and renamed. A writer that dies in between leaves a file
whose name ends in ``.unfinished``, which is never read.
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
from typing import Final, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from agentsgym.errors import StoreError
from agentsgym.store.schema import DICTIONARY, LATER, SCHEMA, SPLIT, VERSION, VERSION_KEY
from agentsgym.texts import sentence_of

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)

SUFFIX: Final = ".parquet"
UNFINISHED: Final = ".unfinished"
ROWS_PER_GROUP: Final = 128  # read together for one rollout
_NUM_READERS: Final = 8
_OWN_NAME: Final = re.compile(rf"part-v{VERSION}-\d{{8}}T\d{{6}}\.\d{{9}}-\w+-\d+-([1-9]\d*)\{SUFFIX}")
_MAGIC: Final = b"PAR1"  # begins and ends a parquet file
_TAIL: Final = struct.Struct("<I4s")  # the end of a parquet file: the size of its footer, and the magic
_MOST_NAMED: Final = 5  # files, named in a warning
_REMEDY: Final = "move it out of the folder to read the others"


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a store.

    Attributes:
        path: The file.
        row_groups: The number of rows of each of its row groups.
    """

    path: Path
    row_groups: tuple[int, ...]


def part_name(writer: str, number: int, num_rollouts: int) -> str:
    """Name a part: by time, so that names sort in order, by its writer, so that names are unique, and by its size.

    A folder of thousands of parts is opened by their names, without reading their footers.
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
        use_dictionary=[*DICTIONARY, "token_ids.list.element"],  # pyright: ignore[reportArgumentType]  # it takes names
        column_encoding=dict.fromkeys(SPLIT, "BYTE_STREAM_SPLIT"),
        write_statistics=False,
        write_page_checksum=True,
    )
    return sink.getvalue()


def write_part(folder: Path, name: str, data: pa.Buffer) -> None:
    """Write a file atomically.

    Raises:
        OSError: The file cannot be written; no partial file is left.
        FileExistsError: Another writer has a file of this name, complete or not.
    """
    path = folder / f"{name}{SUFFIX}"
    unfinished = folder / f"{name}{SUFFIX}{UNFINISHED}"
    with unfinished.open("xb") as file:  # exclusive creation claims the name
        try:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)  # ends with this process, which shows whether it is alive
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            _rename(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
    with contextlib.suppress(OSError):  # sync the new name, on systems where folders can be synced
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def scan(folder: Path) -> tuple[list[Part], dict[Path, str]]:
    """Find the parts in a folder: by their names, and by their footers for foreign names.

    Returns:
        The readable parts, in the order in which they were started, and why each other parquet file is unreadable.

    Raises:
        StoreError: The folder does not exist, or a part's number of rollouts differs from its name.
    """
    if not folder.is_dir():
        what = "a file" if folder.exists() else "nothing"
        raise StoreError(f"there is no rollout store at {folder}: it must be a folder of parquet files, found {what}")
    files = sorted(file for file in folder.iterdir() if file.name.endswith(SUFFIX) and not file.name.startswith("."))
    found: dict[Path, Part | str] = {file: part for file in files if (part := _by_name(file)) is not None}
    others = [file for file in files if file not in found]
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        found |= zip(others, pool.map(_open, others), strict=True)
    parts = [one for file in files if isinstance(one := found[file], Part)]
    skipped = {file: one for file, one in found.items() if isinstance(one, str)}
    if skipped:
        logger.warning(
            "%s: %d of %d parquet files cannot be read and are skipped: %s",
            *(folder, len(skipped), len(files), _named(f"{file.name} ({why})" for file, why in skipped.items())),
        )
    return parts, skipped


def warn_of_unfinished(folder: Path) -> None:
    """Warn of the files left behind by writers that died, but not of those that are being written."""
    left = [file for file in sorted(folder.glob(f"*{UNFINISHED}")) if not _is_locked(file)]
    if left:
        logger.warning(
            "%s contains %d unfinished parts of processes that ended while writing: %s; their rollouts are lost, and "
            "the files can be deleted",
            *(folder, len(left), _named(file.name for file in left)),
        )


def _by_name(file: Path) -> Part | None:
    """Recognize a complete part by its name; None for any other file."""
    match = _OWN_NAME.fullmatch(file.name)
    if match is None:
        return None
    try:
        with file.open("rb", buffering=0) as opened:
            size = opened.seek(-_TAIL.size, os.SEEK_END) + _TAIL.size
            footer_bytes, magic = _TAIL.unpack(opened.read())
    except OSError:
        return None
    # A footer takes kilobytes per 128 rollouts: a larger number is rejected, and nothing of its size is allocated.
    if magic != _MAGIC or int(match[1]) > min(footer_bytes, size):
        return None
    groups, rest = divmod(int(match[1]), ROWS_PER_GROUP)
    return Part(file, (*[ROWS_PER_GROUP] * groups, *([rest] if rest else [])))


def _open(file: Path) -> Part | str:
    """Read a footer, or return why it is unreadable.

    Raises:
        StoreError: The number of rollouts differs from the file's name.
    """
    try:
        metadata = pq.read_metadata(file)
    except (OSError, pa.ArrowException, ValueError) as error:
        return f"not a complete parquet file: {sentence_of(error, 200)}"
    version = (metadata.metadata or {}).get(VERSION_KEY)
    if version is None:
        return "a parquet file, but not part of a rollout store"
    if version != str(VERSION).encode():
        return f"format version {version.decode(errors='replace')}, but this library reads {VERSION}: update it"
    named = _OWN_NAME.fullmatch(file.name)
    if named is not None and int(named[1]) != metadata.num_rows:
        _refuse_size(file, metadata.num_rows, int(named[1]))
    return Part(file, _row_groups(metadata))


def _row_groups(metadata: pq.FileMetaData) -> tuple[int, ...]:
    return tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))


def _refuse_size(file: Path, held: int, expected: int) -> NoReturn:
    raise StoreError(
        f"{file} contains {held} rollouts, but should contain {expected} according to its name: rename it back, "
        f"or {_REMEDY}"
    )


def read_row_group(part: Part, index: int, columns: Sequence[str] | None = None) -> pa.Table:
    """Read one row group of a part.

    Raises:
        StoreError: The file is missing, damaged, lacks a column, or its number of rollouts differs from its name.
    """
    try:
        with pq.ParquetFile(part.path, page_checksum_verification=True) as file:
            held = _row_groups(file.metadata)
            if held != part.row_groups:
                _refuse_size(part.path, sum(held), sum(part.row_groups))
            table = file.read_row_group(index, columns=None if columns is None else [*columns])
            for name in LATER:
                if name not in table.column_names:
                    field = SCHEMA.field(name)
                    table = table.append_column(field, pa.nulls(len(table), field.type))
            return table.select(SCHEMA.names if columns is None else columns)
    except StoreError:  # also an OSError
        raise
    except KeyError as error:
        raise StoreError(f"{part.path} lacks a column that a part must have: {error}; {_REMEDY}") from error
    except (OSError, pa.ArrowException, ValueError, IndexError) as error:
        raise StoreError(f"{part.path} can no longer be read: {sentence_of(error, 300).rstrip()}; {_REMEDY}") from error


def _rename(unfinished: Path, path: Path) -> None:
    if path.exists():  # no race: the name is claimed by the unfinished file
        raise FileExistsError(f"{path} already exists")
    unfinished.rename(path)


def _named(names: Iterator[str]) -> str:
    every = list(names)
    more = len(every) - _MOST_NAMED
    return ", ".join(every[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _is_locked(path: Path) -> bool:
    if fcntl is None:
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:  # it has been renamed
        return True
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
