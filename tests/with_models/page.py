"""The tables of families in docs/real-models.md, as they are and as they must be.

PYTHONPATH=. python tests/with_models/page.py [FAMILY …]    plays and trains the families and writes their rows
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import transformers
from exactness import outcome
from zoo import FAMILIES, LEFT_OUT

PAGE = Path(__file__).parents[2] / "docs" / "real-models.md"
_BEGIN, _END = "<!-- families: written by tests/with_models/page.py -->\n", "<!-- end of families -->"
_VERSION = "Version of transformers: {}.\n\n"
_HEADER = "| families | records within | training | with LoRA | cache |\n| --- | --- | --- | --- | --- |\n"
_LEFT_OUT_HEADER = "\n| not played | why |\n| --- | --- |\n"


def section() -> str:
    """The part of the page that is written by this module."""
    return PAGE.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]


def written() -> dict[str, tuple[str, ...]]:
    """The cells of each family in the page."""
    lines = section().partition(_HEADER)[2].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {family: tuple(others) for names, *others in cells for family in re.findall(r"`([^`]+)`", names)}


def version() -> str:
    """The version of transformers with which the rows were found."""
    return section().partition(": ")[2].partition(".\n")[0]


def rendered(outcomes: Mapping[str, tuple[str, ...]], version: str) -> str:
    """The section, with one row for each outcome."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for family in sorted(outcomes):
        rows.setdefault(outcomes[family], []).append(f"`{family}`")
    lines = [f"| {', '.join(names)} | {' | '.join(cells)} |\n" for cells, names in sorted(rows.items())]
    others = [f"| {', '.join(f'`{name}`' for name in names)} | {why} |\n" for why, names in LEFT_OUT.items()]
    return "".join([_VERSION.format(version), _HEADER, *lines, _LEFT_OUT_HEADER, *others])


def write(outcomes: Mapping[str, tuple[str, ...]]) -> None:
    """Write the section."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    PAGE.write_text(before + begin + rendered(outcomes, transformers.__version__) + end + after, encoding="utf-8")


if __name__ == "__main__":
    found = {family: cells for family, cells in written().items() if family in FAMILIES}
    for name in sys.argv[1:] or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = outcome(name, Path(folder))
        write(found)
