"""``agentsgym new``: create the files of a new environment."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentsgym.cli.console import FailureError, UsageError, cell, out, reported

_TEMPLATES = Path(__file__).parent.parent / "templates"

_IMPORTS_FOR_FUNCTIONS = """\
import random
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from agentsgym import Action, Agent, Message, ToolCall, TurnRequest
from agentsgym.envs.Tools import ToolEnv

__TOOLS__"""
_IMPORTS_FOR_SERVER = """\
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


def class_and_module_names(name: str) -> tuple[str, str]:
    """Return the names of the class and of the module.

    >>> class_and_module_names("GuessAWord"), class_and_module_names("guess-a-word")
    (('GuessAWord', 'guess_a_word'), ('GuessAWord', 'guess_a_word'))
    """
    words = [
        word for part in re.split(r"[\s_-]+", name) for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", part)
    ]
    if "".join(words) != re.sub(r"[\s_-]+", "", name) or not words or not words[0][0].isalpha():
        raise UsageError(
            f"NAME must consist of letters and digits and begin with a letter, such as GuessAWord; got {name!r}"
        )
    class_name = "".join(word[0].upper() + word[1:] for word in words)
    module = "_".join(word.lower() for word in words)
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or module == "agentsgym":
        raise UsageError(f"{module!r} is a Python keyword or the name of an existing module: choose another name")
    return class_name, module


def file_contents(class_name: str, module: str, *, has_tools: bool, has_server: bool) -> dict[str, str]:
    """Return the contents of the files, by file name.

    The agent may call tools instead of only replying in text, and an MCP server, in a separate file, may provide them.
    """
    prefix = "tool_" if has_tools else ""
    parts = {  # in this order: a part may contain a later placeholder
        "__HEAD__": _IMPORTS_FOR_SERVER if has_server else _IMPORTS_FOR_FUNCTIONS,
        "__SOURCE__": "McpServer(command=[sys.executable, str(SERVER)])" if has_server else "[price, stock]",
        "__TOOLS__": (_TEMPLATES / "tool_functions.txt").read_text(encoding="utf-8"),
        "__CLASS__": class_name,
        "__MODULE__": module,
    }
    templates = {
        f"{module}.py": f"{prefix}environment",
        f"test_{module}.py": f"{prefix}test",
        f"{module}.yaml": f"{prefix}train",
    }
    if has_server:
        templates[f"{module}_server.py"] = "tool_server"
    files: dict[str, str] = {}
    for file, template in templates.items():
        text = (_TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
        for placeholder, part in parts.items():
            text = text.replace(placeholder, part)
        files[file] = text
    return files


@reported
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Class name, such as GuessAWord.", show_default=False)],
    folder: Annotated[Path, typer.Option("--folder", metavar="FOLDER", help="Folder to write the files to.")] = Path(),
    tools: Annotated[bool, typer.Option("--tools", help="Create an environment whose agent calls tools.")] = False,
    mcp: Annotated[
        bool, typer.Option("--mcp", help="With --tools: serve the tools from an MCP server, in a separate file.")
    ] = False,
) -> None:
    """Create a working environment, a test for it, and a training configuration.

    Existing files are not overwritten.
    """
    if mcp and not tools:
        raise UsageError("--mcp requires --tools")
    class_name, module = class_and_module_names(name)
    contents = file_contents(class_name, module, has_tools=tools, has_server=mcp)
    files = {folder / file_name: text for file_name, text in contents.items()}
    existing = [str(path) for path in files if path.exists()]
    if existing:
        raise FailureError(f"these files already exist, so nothing was written: {', '.join(existing)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise FailureError(f"cannot write to {folder}: {error}") from error
    for path in files:
        out().print(cell(f"wrote {path}"))
    source, _, training = list(files)[:3]
    out().print("\nTry it:")
    for command in (
        f"agentsgym check {source}:{class_name}",
        f"agentsgym play {source}:{class_name}",
        f"agentsgym eval {source}:{class_name} --agent random",
        f"agentsgym train {training}",
    ):
        out().print(cell(f"  {command}", "bold"), soft_wrap=True)
