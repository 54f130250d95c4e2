"""The names that users write: each resolves, type checkers read the same ones, and the version is stated once."""

from __future__ import annotations

import ast
import compileall
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import agentsgym
import agentsgym.agents
import agentsgym.envs

ROOT = Path(__file__).parent.parent
LAZY = [
    importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
    for path in sorted((ROOT / "agentsgym").rglob("__init__.py"))
    if "= lazy(" in path.read_text(encoding="utf-8")
]


@pytest.mark.filterwarnings("default")  # the trainer imports TRL
@pytest.mark.parametrize("name", agentsgym.__all__)
def test_an_exported_name_resolves(name: str) -> None:
    value = getattr(agentsgym, name)
    assert getattr(agentsgym, name) is value
    assert name in dir(agentsgym)
    assert value.__name__ == name
    assert value.__module__.startswith("agentsgym.")
    assert value.__doc__


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
def test_a_type_checker_reads_the_names_and_modules_that_are_imported(package: Any) -> None:
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    eager = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    (checking,) = [node for node in tree.body if isinstance(node, ast.If)]
    read = {
        alias.name: node.module
        for node in (*eager, *checking.body)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name  # which exports it
    }
    calls = [node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    (table,) = [ast.literal_eval(call.args[1]) for call in calls if ast.unparse(call.func) == "lazy"]
    modules = {importlib.util.resolve_name(module, package.__name__): names for module, names in table.items()}
    assert read == {name: module for module, names in modules.items() for name in names}
    assert package.__all__ == sorted(read)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Environment'"):
        _ = package.Environment


@pytest.mark.parametrize("package", [agentsgym.agents, agentsgym.envs], ids=lambda package: package.__name__)
def test_the_names_of_a_package_resolve(package: Any) -> None:
    assert [getattr(package, name).__name__ for name in package.__all__] == package.__all__


@pytest.mark.parametrize("form", ["zip", "byte code"])
def test_names_are_imported_from_a_package_without_source_files(form: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "agentsgym", tmp_path / "agentsgym", ignore=shutil.ignore_patterns("__pycache__"))
    place = tmp_path
    if form == "zip":
        place = Path(shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path, "agentsgym"))
    else:
        assert compileall.compile_dir(tmp_path / "agentsgym", quiet=2, legacy=True)
    for path in tmp_path.rglob("*.py"):
        path.unlink()
    code = "import agentsgym as a; from agentsgym.envs import PriceListEnv as e; print(a.MultistepEnv, e, a.__file__)"
    python, env = [sys.executable, "-P", "-c", code], {**os.environ, "PYTHONPATH": str(place)}
    printed = subprocess.run(python, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout
    assert "<class 'agentsgym.envs.base.MultistepEnv'> <class 'agentsgym.envs.PriceList.env.PriceListEnv'>" in printed
    assert str(place / "agentsgym") in printed


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'agentsgym' has no attribute 'Environment'"):
        _ = agentsgym.Environment


@pytest.mark.parametrize("name", sorted({*agentsgym.envs.__all__} - {*agentsgym.__all__}))
def test_what_is_in_envs_alone_names_where_it_is(name: str) -> None:
    assert getattr(agentsgym.envs, name).__name__ == name
    with pytest.raises(AttributeError, match=rf"'agentsgym' has no attribute '{name}': it is agentsgym\.envs\.{name}$"):
        getattr(agentsgym, name)


def test_the_version_is_stated_once_and_is_the_newest_of_the_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "agentsgym/__init__.py"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    assert releases[0] == agentsgym.__version__
