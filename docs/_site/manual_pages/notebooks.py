"""Conversion of a notebook to a page with its text and code, without running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def notebook_page(notebook: Path) -> str:
    """Return the Markdown of a notebook.

    Args:
        notebook: An ``.ipynb`` of format 4.
    """
    cells: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = [_markdown(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    note = (
        f'This page is a notebook: <a href="{notebook.name}" download>download it</a> to run it on a CPU. The tests '
        "run its code; its outputs are not shown here."
    )
    return "\n\n".join([texts[0], note, *texts[1:]]) + "\n"


def _markdown(kind: str, source: str) -> str:
    return f"```python\n{source}\n```" if kind == "code" else source
