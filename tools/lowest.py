"""Print the lower bound of every dependency as a constraint for pip.

    python tools/lowest.py core dev > lowest.txt

``core`` stands for the dependencies without extras.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

_BOUND = re.compile(r"(?P<name>[\w.-]+)(\[[\w,]+\])?>=(?P<version>[\w.]+)")


def constraints(extras: Sequence[str]) -> Iterator[str]:
    """Yield a line per dependency, as in ``torch==2.10``.

    Raises:
        ValueError: A dependency has no lower bound.
    """
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    groups = {"core": project["dependencies"], **project["optional-dependencies"]}
    for requirement in sorted({one for extra in extras for one in groups[extra]}):
        bound = _BOUND.match(requirement)
        if bound is None:
            raise ValueError(f"{requirement!r} in pyproject.toml must have a lower bound, as in 'name>=1.2'")
        yield f"{bound['name']}=={bound['version']}"


if __name__ == "__main__":
    print("\n".join(constraints(sys.argv[1:])))
