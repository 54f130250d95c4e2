"""The code of the pages on environments of one's own and on mixing runs, and prints what they show."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


LOGGED = ("{'loss': ", "{'eval_", "{'train_runtime': ")  # what training prints
# A page that trains for longer than a test should: what is replaced in its code.
SHORTER = {"embedded-policy.md": ("max_steps=60,", "max_steps=20,")}


@pytest.mark.parametrize("name", ["your-environment.md", "mixing.md", "embedded-policy.md"])
def test_a_page_prints_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    code, shown = ("".join(re.findall(rf"^```{kind}\n(.*?)^```", page, re.M | re.S)) for kind in ("python", "text"))
    given, shorter = SHORTER.get(name, ("", ""))
    assert given in code
    code = code.replace(given, shorter) if given else code
    module = f"page_{Path(name).stem.replace('-', '_')}"  # of its own name, so that its classes can be pickled
    (tmp_path / f"{module}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    importlib.import_module(module)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if not line.startswith(LOGGED)] == shown.splitlines()


def test_the_two_environments_of_the_guide_have_fewer_than_forty_lines() -> None:
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("your-environment.md", "tools.md"))
    blocks = re.findall(r"^```python\n(.*?)^```", pages, re.M | re.S)
    built = [block for block in blocks if "class GuessTheNumber(" in block or "class Shop(" in block]
    assert [len(block.splitlines()) < 40 for block in built] == [True, True]
