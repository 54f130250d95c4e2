"""The size of the project has a bound: nothing enters before something of its size leaves."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from trl import GRPOConfig

import agentsgym
import agentsgym.envs
from agentsgym.training.config import GRPOEnvConfig

ROOT = Path(__file__).parent.parent
# Nothing enters before something of its size leaves. A change that raises a number names here, beside it, what left.
AT_MOST = {
    # Entered: what user code returns is checked at one boundary, a folder has one run, any environment has opponents,
    # new users' mistakes are answered in a sentence.
    # Left: TextArena's own opponents, the search for objects in a judge's answer, checks of rewards over HTTP, help
    # texts beside docstrings, protocols and classes for one caller, the second walk through each request's body.
    # Entered: one reading of every answer (thoughts, repairs, native forms of calls), history="last".
    # Left: strip_reasoning and its fifteen uses, the second readings of ToolEnv, OpenEnv and judges, the manual's
    # last_nine.
    # Entered: contexts end episodes, RoPE that changes with the length and losses that leave logits' changes out are
    # found before anything is played, two more kinds of cache are kept; models of images and text stay whole.
    # Entered: rows that begin alike are computed once; the caches of sampled conversations are aligned at once.
    # Entered: merged adapters for sampling, adapters alone for vLLM servers, packed rows on GPUs and in hybrids.
    # Left: the viewer's what-if, with 357 lines of JavaScript; the command judge, with the agreement that it computed.
    # Entered: Twenty Questions' protocols, its shares of replies, all usual forms of a guess. Left: its divisions of a
    # question into phrases and context words, the categories, TextArena's hard mode.
    # Left since: bare generators as trials, checkpoints without manifests, four functions that import an extra.
    "lines of agentsgym": 72_870,
    # Entered: a case for each new user's mistake; 34 public families, their round trips and the other parser's reading.
    # Entered: every causal family of transformers is played and trained, from a table of facts.
    # Entered: adapters on real and scripted vLLM servers. Left: the tests of what left (judges' agreement).
    # Entered: Twenty Questions' protocols and neighbors. Left: its frames around phrases.
    # Left since: several servers and smallest games of tests, functions that differed in one value.
    "lines of tests": 85_205,
    # Entered: adapters on vLLM servers, a whole step beside TRL's. Left: judges, questions asked, and GPU rows for two.
    # Entered: rows of Twenty Questions' protocols.
    "lines of benchmarks": 11_850,
    # Entered: shared_prefix, on by default, since packed rows round otherwise and a bonus per micro-batch sees others.
    # Entered: merge_adapters_for_sampling. Left, in its place: the command judge with its four options.
    "settings beyond TRL's": 29,
    "public names": 86,
    "pages": 52,
}


def lines_of(folder: str) -> int:
    """Count the lines of Python files, as ``git ls-files 'FOLDER/*.py' | xargs cat | wc -l`` does in a clean clone."""
    return sum(path.read_bytes().count(b"\n") for path in (ROOT / folder).rglob("*.py"))


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    ours, theirs = ({field.name for field in fields(config)} for config in (GRPOEnvConfig, GRPOConfig))
    return {f"lines of {folder}": lines_of(folder) for folder in ("agentsgym", "tests", "benchmarks")} | {
        "settings beyond TRL's": len(ours - theirs),
        "public names": len({*agentsgym.__all__, *agentsgym.envs.__all__}),
        "pages": len([*(ROOT / "docs").glob("*.md")]),
    }


@pytest.mark.filterwarnings("default")  # TRL's settings
@pytest.mark.parametrize("what", AT_MOST)
def test_nothing_entered_before_something_of_its_size_left(what: str, sizes: dict[str, int]) -> None:
    assert sizes[what] <= AT_MOST[what], f"{what}: {sizes[what]}; remove something of the size, or write here what left"
