"""What the pages state holds: links lead somewhere, and code blocks run or at least name what exists."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from trl import ModelConfig

from agentsgym.envs.config import COMMON_FIELDS
from agentsgym.envs.datasets.environments import find
from agentsgym.recipes.from_values import training_settings
from agentsgym.recipes.recipe import read_recipe
from agentsgym.training.config import GRPOEnvConfig

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{index}")
    for page in PAGES
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
]


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings make, or the lines of a file of code."""
    if page.suffix == ".py":
        return {f"L{line}" for line in range(1, len(page.read_text().splitlines()) + 1)}
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in target]
    for target in targets:
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.filterwarnings("default")  # the trainer imports TRL
@pytest.mark.parametrize("block", BLOCKS)
def test_code_imports_what_exists(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("agentsgym"):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_the_first_environment_of_the_readme_plays() -> None:
    block = next(param.values[0] for param in BLOCKS if param.id == "README.md-0")
    ran = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.startswith("Estimate(mean=1.0, low=0.963783")  # every game won: 0.025 ** (1 / 100 tasks)


@pytest.mark.parametrize(("page", "printed"), [("search.md", ["1.0 4.0 0.0", ""]), ("reasoning.md", ["1.0 1.0 1.0"])])
def test_the_examples_of_search_and_reasoning_run(
    page: str, printed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = [param.values[0] for param in BLOCKS if str(param.id).startswith(f"docs/{page}-")]
    for block, expected in zip(blocks, printed, strict=True):
        exec(compile(str(block), page, "exec"), {})
        assert capsys.readouterr().out.strip() == expected


@pytest.mark.filterwarnings("default")  # some of the code imports TRL
@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("looking-at-rollouts.md", ["scripted"]),
        ("choosing-an-estimator.md", []),
        ("settings-that-work.md", []),
        ("coming-from.md", []),
        ("contract.md", []),
        ("scaling.md", []),
    ],
)
def test_a_page_prints_what_it_states(
    name: str, files: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the store goes to outputs/
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block, printed in re.findall(
        r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", page, re.MULTILINE | re.DOTALL
    ):
        exec(compile(block, name, "exec"), names)
        assert capsys.readouterr().out == printed
    assert sorted(file.name for file in Path("outputs").glob("*")) == files


@pytest.mark.filterwarnings("default")  # TRL's settings
def test_the_configuration_of_the_page_about_settings_is_valid() -> None:
    page = (ROOT / "docs" / "settings-that-work.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    recipe = read_recipe(yaml.safe_load(text))
    args = training_settings(recipe.training, output_dir="outputs")
    assert cast("int", args.generation_batch_size) // args.num_generations == 8
    assert ModelConfig(**recipe.model_settings).lora_target_modules == "all-linear"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_refuses_a_python_that_is_too_old(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    command = ["make", "PYTHON=false", f"VENV={environment}", f"{environment}/bin/python"]  # `false` fails every test
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode != 0
    assert "agentsgym needs Python 3.11 or newer, and false is not" in ran.stderr
    assert not environment.exists()


def documented(page: str) -> dict[str, Any]:
    """The defaults that the page's tables give, by name; the first row of a name counts."""
    rows = re.findall(r"^\| `(\w+)` \| `?(.+?)`? \| ", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    values: dict[str, Any] = {}
    for name, default in rows:
        with contextlib.suppress(ValueError, SyntaxError):  # a row of another kind of table
            values.setdefault(name, ast.literal_eval(default))
    return values


def test_every_common_key_of_env_config_is_documented_with_its_default() -> None:
    defaults = {key: field.default for key, field in COMMON_FIELDS.items()}
    page = documented("environments.md")
    assert {key: page.get(key, "missing") for key in defaults} == defaults


def test_every_option_of_tools_is_documented_with_its_default() -> None:
    defaults = {key: field.default for key, field in find("agentsgym.envs.Tools.ToolEnv").config_fields.items()}
    page = documented("tools.md")
    assert {key: page.get(key, "missing") for key in defaults} == defaults


def test_every_setting_that_the_page_explains_has_its_default() -> None:
    """The generated page of all settings is checked in ``tests/test_site.py``."""
    defaults = {field.name: field.default for field in fields(GRPOEnvConfig)}
    explained = {name: value for name, value in documented("training.md").items() if name in defaults}
    assert len(explained) >= 20
    assert explained == {name: defaults[name] for name in explained}
