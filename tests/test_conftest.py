"""The suite itself: what becomes of a shared fixture's death, in one process and in two workers; a random order."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
DYING = """
import pytest

@pytest.fixture(scope="module")
def script():
    assert 0, "the script's output"

@pytest.fixture(scope="module")
def ranks(script):
    return []

@pytest.mark.parametrize("name", "abcd")
def test_of_the_ranks(name, ranks):
    raise SystemExit("is never run")

def test_of_the_script(script):
    raise SystemExit("is never run")

def test_of_neither():
    pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with our conftest and a file whose shared fixture dies; in the order of the files, unless one is set."""
    monkeypatch.delenv("ORDER_SEED", raising=False)
    shutil.copy(Path(__file__).parent / "conftest.py", pytester.path)
    pytester.makepyfile(test_dying=DYING, test_living="def test_of_its_own(): pass")
    return pytester


@pytest.mark.parametrize("options", [[], ["-n", "2", "--dist", "loadfile"]], ids=["alone", "two_workers"])
def test_the_death_of_a_fixture_is_one_error_and_names_where_it_is(suite: pytest.Pytester, options: list[str]) -> None:
    ran = suite.runpytest_subprocess("-rs", *options)
    assert ran.ret == pytest.ExitCode.TESTS_FAILED
    ran.assert_outcomes(errors=1, skipped=4, passed=2)
    ran.stdout.fnmatch_lines(["*AssertionError: the script's output*"])
    ran.stdout.fnmatch_lines(["SKIPPED [[]4] * 'script' died, see the error at test_dying.py::test_of_the_ranks?a?"])


def test_a_seed_orders_files_and_the_tests_within_them(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    def order(seed: int, *options: str) -> list[str]:
        monkeypatch.setenv("ORDER_SEED", str(seed))
        return [line for line in suite.runpytest_inprocess("--collect-only", *options).outlines if "::" in line]

    orders = [order(seed, "--quiet") for seed in range(8)]
    assert len({tuple(sorted(names)) for names in orders}) == 1
    assert len({tuple(names) for names in orders}) > 4
    for names in orders:
        files = [name.partition("::")[0] for name in names]
        assert files in (sorted(files), sorted(files, reverse=True))  # one file after the other
    assert order(0, "--quiet", "-k", "not script") == [name for name in orders[0] if "script" not in name]
    suite.runpytest_inprocess("--collect-only").stdout.fnmatch_lines(["random order: SEED=0"])
