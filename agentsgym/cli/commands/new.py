"""``agentsgym new``: the files of an environment of your own."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agentsgym.cli.console import FailureError, UsageError, cell, out, reported

_TEMPLATES = Path(__file__).parent.parent / "templates"

_FUNCTIONS_BESIDE = """\
import random
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from agentsgym import Action, Agent, Message, ToolCall, TurnRequest
from agentsgym.envs.Tools import ToolEnv

__TOOLS__"""
_SERVER_BESIDE = """\
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentsgym import Action, Agent, Message, ToolCall, TurnRequest
from agentsgym.envs.Tools import McpServer, ToolEnv

from __MODULE___server import DAYS, ITEMS, PRICES, STOCK, price, stock

SERVER = Path(__file__).with_name("__MODULE___server.py")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewNames:
    """The names that follow from one.

    Attributes:
        class_name: In capitals: ``GuessAWord``.
        module: With underscores: ``guess_a_word``.
    """

    class_name: str
    module: str


def names_from(name: str) -> NewNames:
    """Find the names of class and module.

    Raises:
        UsageError: No names can be made of it.

    >>> names_from("GuessAWord"), names_from("guess-a-word").module
    (NewNames(class_name='GuessAWord', module='guess_a_word'), 'guess_a_word')
    """
    words = [
        word for part in re.split(r"[\s_-]+", name) for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", part)
    ]
    if "".join(words) != re.sub(r"[\s_-]+", "", name) or not words or not words[0][0].isalpha():
        raise UsageError(
            f"a name must consist of letters and digits and begin with a letter, as in GuessAWord; got {name!r}"
        )
    class_name = "".join(word[0].upper() + word[1:] for word in words)
    module = "_".join(word.lower() for word in words)
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or module == "agentsgym":
        raise UsageError(f"{module}.py would shadow Python's own module {module!r}: choose another name")
    return NewNames(class_name=class_name, module=module)


class Kind(StrEnum):
    """What the new environment is."""

    TEXT = "text"  # answers in text
    TOOLS = "tools"  # Python functions that the agent calls
    MCP = "mcp"  # tools of a server, a program beside the environment


def files_of(names: NewNames, kind: Kind = Kind.TEXT) -> Mapping[str, str]:
    """Return the texts of the files, by their names."""
    prefix = "" if kind is Kind.TEXT else "tool_"
    parts = {
        "__HEAD__": _FUNCTIONS_BESIDE if kind is Kind.TOOLS else _SERVER_BESIDE,
        "__SOURCE__": "[price, stock]" if kind is Kind.TOOLS else "McpServer(command=[sys.executable, str(SERVER)])",
        "__TOOLS__": _template("tool_functions"),
        "__CLASS__": names.class_name,
        "__MODULE__": names.module,
    }
    templates = {
        f"{names.module}.py": f"{prefix}environment",
        f"test_{names.module}.py": f"{prefix}test",
        f"{names.module}.yaml": f"{prefix}train",
    }
    if kind is Kind.MCP:
        templates[f"{names.module}_server.py"] = "tool_server"
    return {file: _filled(_template(template), parts) for file, template in templates.items()}


def write_files(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write files where there are none of these names yet.

    Raises:
        FailureError: One is there, or the folder cannot be written; nothing is overwritten.
    """
    paths = [folder / name for name in files]
    there = [str(path) for path in paths if path.exists()]
    if there:
        raise FailureError(f"existing files are not overwritten: {', '.join(there)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, files.values(), strict=True):
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise FailureError(f"{folder} cannot be written: {error}") from error
    return paths


def _template(name: str) -> str:
    return (_TEMPLATES / f"{name}.txt").read_text(encoding="utf-8")


def _filled(text: str, parts: Mapping[str, str]) -> str:
    """Replace each part in turn; what replaces one may contain the next."""
    for placeholder, part in parts.items():
        text = text.replace(placeholder, part)
    return text


@reported
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Class name, as in GuessAWord.", show_default=False)],
    folder: Annotated[Path, typer.Option("--folder", metavar="FOLDER", help="Folder to write the files to.")] = Path(),
    tools: Annotated[bool, typer.Option("--tools", help="Create an environment whose agent calls tools.")] = False,
    mcp: Annotated[
        bool,
        typer.Option("--mcp", help="With --tools: provide the tools by an MCP server, in a file of the same folder."),
    ] = False,
) -> None:
    """Create an environment that runs, its test, and a training configuration.

    Existing files are never overwritten.
    """
    if mcp and not tools:
        raise UsageError("--mcp is for an environment of tools: give --tools --mcp")
    names = names_from(name)
    paths = write_files(folder, files_of(names, Kind.MCP if mcp else Kind.TOOLS if tools else Kind.TEXT))
    for path in paths:
        out().print(cell(f"wrote {path}"))
    source = paths[0]
    out().print("\nTry it:")
    for command in (
        f"agentsgym check {source}:{names.class_name}",
        f"agentsgym play {source}:{names.class_name}",
        f"agentsgym eval {source}:{names.class_name} --agent random",
        f"agentsgym train {paths[2]}",
    ):
        out().print(cell(f"  {command}", "bold"), soft_wrap=True)
