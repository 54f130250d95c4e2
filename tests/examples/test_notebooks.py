"""The notebooks run from top to bottom, show what they promise, and are stored clean."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
STEPS = 4  # of training, instead of enough to learn
MOST_SECONDS = 300  # of a cell, on a machine that is busy


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for the sockets of a kernel."""
    path = Path(tempfile.mkdtemp(prefix="nb"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def executed(notebook: Path, folder: Path) -> Any:
    """Run a notebook in a kernel of its own, without a port on the network, and give it with its outputs."""
    book: Any = nbformat.read(notebook, as_version=4)  # pyright: ignore
    config = Config({"KernelManager": {"transport": "ipc", "connection_file": str(folder / "kernel.json")}})
    environment = {
        **os.environ,
        "AGENTSGYM_NOTEBOOK_STEPS": str(STEPS),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    client = NotebookClient(
        book, config=config, kernel_name="python3", timeout=MOST_SECONDS, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment)
    assert client.km is None  # nothing of it is left running
    return book


def outputs(book: Any) -> Iterator[tuple[Any, Any]]:
    for cell in book.cells:
        for output in cell.get("outputs", []):
            yield cell, output


def test_there_are_two() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == ["quickstart", "your-environment"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_claims(notebook: Path, folder: Path) -> None:
    book = executed(notebook, folder)
    shown = [(cell, output) for cell, output in outputs(book) if "data" in output]
    pages = [output["data"]["text/html"] for _, output in shown if "text/html" in output["data"]]
    assert sum('<div class="agentsgym">' in page for page in pages) >= 2
    assert not any(output.get("name") == "stderr" and "Error" in output["text"] for _, output in outputs(book))
    # The curve was drawn when training ended at the latest, in one place, and not as text.
    [curve] = [output for cell, output in shown if "trainer.train()" in cell.source]
    assert curve["output_type"] == "display_data"
    assert "image/png" in curve["data"]
    assert any("to_pandas(by=" in cell.source and "text/html" in output["data"] for cell, output in shown)
    assert list(folder.glob("outputs/*/*.png")) == []  # without a path the curve is written nowhere


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_its_links_lead_somewhere(notebook: Path) -> None:
    book: Any = nbformat.read(notebook, as_version=4)  # pyright: ignore
    nbformat.validate(book)  # pyright: ignore
    assert list(outputs(book)) == []
    assert all(cell.get("execution_count") is None for cell in book.cells)
    assert "/tmp" not in notebook.read_text()
    assert "/home" not in notebook.read_text()
    for cell in book.cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", cell.source):
                assert (notebook.parent / target).exists(), target
