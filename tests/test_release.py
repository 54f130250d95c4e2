"""What is published is whole: every file of the package, a description that works on PyPI, one version."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import agentsgym
from tools.release import ROOT, ReleaseError, Report, check_wheel, run, stated_version

DATA = (
    "py.typed",
    "cli/templates/environment.txt",
    "envs/TextArena/catalogue.json",
    "envs/TwentyQuestions/knowledge.csv",
    "viewer/static/90-main.js",
    "viewer/static/viewer.css",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the working tree."""
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    return folder / f"agentsgym-{agentsgym.__version__}-py3-none-any.whl"


def test_the_wheel_has_every_file_of_the_package_and_an_absolute_description(wheel: Path) -> None:
    assert check_wheel(wheel, ROOT) == []
    assert wheel.stat().st_size <= 1_500_000
    with zipfile.ZipFile(wheel) as archive:
        assert {f"agentsgym/{name}" for name in DATA} <= set(archive.namelist())


def test_the_description_of_pypi_is_the_readme(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"agentsgym-{agentsgym.__version__}.dist-info/METADATA").decode()
    repository = f"https://github.com/agentsgym/agentsgym/blob/v{agentsgym.__version__}"
    assert f"[Changelog]({repository}/CHANGELOG.md)" in metadata
    assert f"(https://raw.githubusercontent.com/agentsgym/agentsgym/v{agentsgym.__version__}/docs/viewer" in metadata
    assert "\npip install agentsgym   # Python 3.11 or newer, no GPU needed\n" in metadata
    assert "pip install agentsgym[peft]" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


def test_what_a_wheel_lacks_or_has_too_much_is_named(tmp_path: Path) -> None:
    (tmp_path / "agentsgym").mkdir()
    (tmp_path / "agentsgym" / "data.csv").touch()
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("outputs/model.bin", "")
        archive.writestr("a.dist-info/METADATA", "Name: a\n\n[page](docs/x.md) [web](https://x.org) pip install -e .")
    assert check_wheel(tmp_path / "a.whl", tmp_path) == [
        "agentsgym/data.csv is missing",
        "outputs/model.bin does not belong in the wheel",
        "the description links to docs/x.md, which is relative",
        "the description contains 'pip install -e'",
    ]


def test_the_version_needs_a_dated_section_in_the_changelog(tmp_path: Path) -> None:
    assert stated_version(ROOT) == agentsgym.__version__
    (tmp_path / "agentsgym").mkdir()
    shutil.copy(ROOT / "agentsgym/__init__.py", tmp_path / "agentsgym")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [9.9.9] - unreleased\n")
    with pytest.raises(ReleaseError, match=r"'\[[\d.]+\] - YYYY-MM-DD', got '\[9\.9\.9\] - unreleased'"):
        stated_version(tmp_path)


def test_a_failed_command_shows_the_end_of_its_output_and_no_step_passes(tmp_path: Path) -> None:
    report = Report()
    with pytest.raises(ReleaseError, match=r"exit code 3:\n(\d+\n){39}99$"), report.step("it fails"):
        run(sys.executable, "-c", "for i in range(100): print(i)\nraise SystemExit(3)", cwd=tmp_path)
    with report.step("it works") as remarks:
        remarks += ["a", "b"]
    assert [(name, output) for name, _, output in report.rows] == [("it works", "a, b")]
    assert report.table().endswith(" s  a, b")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_release_uploads_nothing() -> None:
    ran = subprocess.run(
        ["make", "--dry-run", "release"], capture_output=True, text=True, check=True, cwd=ROOT, stdin=subprocess.DEVNULL
    )
    assert "-m tools.release" in ran.stdout
    assert "upload" not in ran.stdout
