"""The walks of ``docs/architecture.md`` lead to the lines that they name; run as a script, this corrects them."""

from __future__ import annotations

import ast
import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
from games import trainer_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\(\.\./(?P<path>agentsgym/[\w/]+\.py)#L(?P<line>\d+)\)")
MAX_STOPS = 10
OURS = (str(ROOT / "agentsgym"), str(ROOT / "tests"))


def line_of(name: str, source: str) -> int | None:
    """The line on which a function, a class or a method (``Class.method``) is defined; None if there is none."""
    scope: list[ast.stmt] = ast.parse(source).body
    line = None
    for part in name.split("."):
        found = [
            node
            for node in scope
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == part
        ]
        if not found:
            return None
        line, scope = found[0].lineno, found[0].body
    return line


def walks(page: str) -> dict[str, list[re.Match[str]]]:
    """The stops of each section that is a walk, by its heading."""
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    stops = {section.partition("\n")[0]: list(LINK.finditer(section)) for section in sections}
    return {heading: links for heading, links in stops.items() if links}


def corrected(page: str) -> str:
    """The page with every link at the line of what it names."""

    def correct(link: re.Match[str]) -> str:
        line = line_of(link["name"], (ROOT / link["path"]).read_text())
        return link[0] if line is None else link[0].replace(f"#L{link['line']}", f"#L{line}")

    return LINK.sub(correct, page)


def test_there_are_three_walks_of_at_most_ten_stops() -> None:
    found = walks(PAGE.read_text())
    assert len(found) == 3
    assert all(0 < len(stops) <= MAX_STOPS for stops in found.values())


@pytest.mark.parametrize("stop", LINK.findall(PAGE.read_text()), ids=lambda stop: f"{stop[1]}:{stop[0]}")
def test_a_stop_is_where_the_page_shows_it(stop: tuple[str, str, str]) -> None:
    name, path, line = stop
    found = line_of(name, (ROOT / path).read_text())
    assert found is not None, f"{path} defines no {name}"
    assert int(line) == found, "run `python tests/test_architecture.py`, which corrects the line numbers of the page"


def functions_named(section: str) -> set[str]:
    """The functions and methods of ours that a text names in backticks."""
    named = set(re.findall(r"`([\w.]+)`", section))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    files = [ast.parse(file.read_text()) for file in (ROOT / "agentsgym").rglob("*.py")]
    defined = {node.name for file in files for node in ast.walk(file) if isinstance(node, functions)}
    return {name for name in named if name.rpartition(".")[2] in defined}


@pytest.mark.filterwarnings("default")  # TRL trains
def test_every_function_on_the_walks_is_called_by_a_training_step(tmp_path: Path) -> None:
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            called.add(frame.f_code.co_qualname)

    trainer = trainer_of(tmp_path, max_steps=1)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        trainer.close()
    page = PAGE.read_text().replace("MultistepEnv.", "GuessNumber.")  # the environment that was played
    named = functions_named(page[page.index("## From a task row to the loss") :])
    assert len(named) > 25
    assert sorted(name for name in named if not any(f".{one}".endswith(f".{name}") for one in called)) == []


def test_lines_of_methods_and_functions_are_found() -> None:
    source = "x = 1\nclass A:\n    def f(self): ...\n\n    async def g(self): ...\ndef f(): ...\n"
    assert [line_of(name, source) for name in ("A", "A.f", "A.g", "f", "A.h", "h")] == [2, 3, 5, 6, None, None]


if __name__ == "__main__":
    PAGE.write_text(corrected(PAGE.read_text()))
