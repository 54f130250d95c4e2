"""``agentsgym new``: the files of an environment of your own."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from agentsgym.cli.console import FailureError, UsageError, cell, out, reported

_TEMPLATES = Path(__file__).parent.parent / "templates"


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
        raise UsageError(f"a name has letters and digits, and begins with a letter, as in GuessAWord; got {name!r}")
    class_name = "".join(word[0].upper() + word[1:] for word in words)
    module = "_".join(word.lower() for word in words)
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or module == "agentsgym":
        raise UsageError(f"{module}.py would stand in the way of Python's own {module!r}: choose another name")
    return NewNames(class_name=class_name, module=module)


def files_of(names: NewNames) -> Mapping[str, str]:
    """The texts of the files, by their names."""
    return {
        f"{names.module}.py": _filled("environment", names),
        f"test_{names.module}.py": _filled("test", names),
        f"{names.module}.yaml": _filled("train", names),
    }


def write_files(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write files where there are none of these names yet.

    Raises:
        FailureError: One is there, or the folder cannot be written; nothing is overwritten.
    """
    paths = [folder / name for name in files]
    there = [str(path) for path in paths if path.exists()]
    if there:
        raise FailureError(f"nothing is overwritten, and there is already {', '.join(there)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, files.values(), strict=True):
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise FailureError(f"{folder} cannot be written: {error}") from error
    return paths


def _filled(template: str, names: NewNames) -> str:
    text = (_TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
    return text.replace("__CLASS__", names.class_name).replace("__MODULE__", names.module)


@reported
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Class name, as in GuessAWord.", show_default=False)],
    folder: Annotated[Path, typer.Option("--folder", metavar="FOLDER", help="Folder to write the files to.")] = Path(),
) -> None:
    """Create an environment that runs, its test, and a training configuration.

    Existing files are never overwritten.
    """
    names = names_from(name)
    paths = write_files(folder, files_of(names))
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
