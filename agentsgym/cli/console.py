"""Print output for people, with or without color, and for programs; report failures in one sentence.

Text from environments and agents is untrusted: :func:`plain` escapes it, so that a terminal interprets none of it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from agentsgym.errors import AgentsGymError, ConfigError, TaskError
from agentsgym.interruptions import Interruption, Terminated
from agentsgym.texts import sentence_of, shortened, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

TERMINATED = 143  # the exit code after SIGTERM, as in a shell
_MAX_BYTES = 20_000  # length of a printed text
_MAX_CELL = 200
_COLUMNS = re.compile(r"\S {2,}\S")
P = ParamSpec("P")


class UsageError(Exception):
    """The command line is invalid."""

    code = 2


class FailureError(Exception):
    """The command failed.

    Attributes:
        code: The exit code.
    """

    def __init__(self, sentence: object, code: int = 1) -> None:
        super().__init__(sentence)
        self.code = code


class ReaderLeft(Interruption):  # not an error
    """The process that read the output has ended, as with ``| head``."""


@functools.cache
def _console(*, stderr: bool) -> Console:
    from rich.console import Console  # noqa: PLC0415  # not needed for --help

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise ReaderLeft

    return Ours(stderr=stderr, markup=False, highlight=False, emoji=False)


def out() -> Console:
    """Return the console for results."""
    return _console(stderr=False)


def err() -> Console:
    """Return the console for errors, progress and remarks."""
    return _console(stderr=True)


def plain(text: str, max_bytes: int = _MAX_BYTES, style: str = "") -> Text:
    """Escape the control characters of an untrusted text, and cut the middle out of a long one."""
    from rich.text import Text  # noqa: PLC0415

    return Text(visible(shortened(text, max_bytes)).expandtabs(8), style=style)


def cell(text: str, style: str = "") -> Text:
    """Escape an untrusted text and shorten it to one line, for a table."""
    return plain(" ".join(text[: 2 * _MAX_CELL].split()), _MAX_CELL, style)


def print_text(text: str, style: str = "") -> None:
    """Print an untrusted text: prose is wrapped between words; lines of boards and tables are left unchanged."""
    for line in plain(text).split("\n", allow_blank=True):
        line.style = style
        out().print(line, soft_wrap=not is_prose(line.plain))


def is_prose(line: str) -> bool:
    """Return whether a line is prose, which may be wrapped, rather than part of a board or a table.

    >>> is_prose("What is left is yours: take it."), is_prose("| X | . | O |"), is_prose("egg   3")
    (True, False, False)
    """
    marks = [mark for mark in line if not mark.isspace()]
    return not _COLUMNS.search(line) and 2 * sum(mark.isalpha() for mark in marks) >= len(marks)


def new_table(**options: Any) -> Table:
    """Return an empty table without borders."""
    from rich.table import Table  # noqa: PLC0415

    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), **options)


def remark(text: str, style: str = "") -> None:
    """Print a remark to standard error."""
    err().print(plain(text, style=style), soft_wrap=not err().is_terminal)


def print_json(value: Any) -> None:
    """Print a value as JSON in ASCII, so that a terminal interprets none of it."""
    typer.echo(json.dumps(value, indent=2, allow_nan=True, default=str))


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """Report a command's failure in one sentence, with an exit code: 2 for invalid usage, 1 for anything else."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with _set_up():
            try:
                command(*args, **kwargs)
            except (UsageError, FailureError) as error:
                _end(sentence_of(error), error.code)
            except AgentsGymError as error:
                _end(sentence_of(error), 1)
            except KeyboardInterrupt:
                _end("stopped", 1)
            except Terminated:
                _end("stopped by SIGTERM", TERMINATED)
            except (ReaderLeft, BrokenPipeError):  # discard the output that is still buffered
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(1) from None
            except OSError as error:  # a path that cannot be used, or a full disk
                _end(sentence_of(error), 1)

    return run


@contextmanager
def usage_errors() -> Generator[None]:
    """Report configuration and task errors raised in the ``with`` block as invalid usage."""
    try:
        yield
    except (ConfigError, TaskError) as error:
        raise UsageError(sentence_of(error)) from error


def _end(sentence: str, code: int) -> None:
    from rich.text import Text  # noqa: PLC0415

    err().print(Text.assemble(("error: ", "bold red"), plain(sentence)), soft_wrap=not err().is_terminal)
    raise typer.Exit(code) from None


@contextmanager
def _set_up() -> Generator[None]:
    """Escape characters that the terminal cannot encode, and print the library's log records as remarks."""
    _console.cache_clear()  # tests replace the streams
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Callable[..., None] | None = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    logger = logging.getLogger("agentsgym")
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [_Remarks()], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before


class _Remarks(logging.Handler):
    """Prints the library's log records, each text once: a command may open the same store several times."""

    def __init__(self) -> None:
        super().__init__()
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        is_info = record.levelno <= logging.INFO
        text = record.getMessage() if is_info else f"{record.levelname.lower()}: {record.getMessage()}"
        if text not in self._printed:
            self._printed.add(text)
            remark(text, "" if is_info else "yellow")
