"""Imports go one way: each module of the package may use what stands above it in ``ORDER``, and nothing below."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
ORDER = (
    "errors",
    "types",
    "seeding",
    "credit agents rollouts",  # side by side
    "batch",
    "envs",
    "evaluation",
    "tiny testing",  # side by side, and for the command line and the examples alone
    "reports",
    "training",
    "cli",
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names.split()}
POLICY = tuple(f"agents/{name}.py" for name in ("policy", "sampling", "decoding", "attention", "kv_cache", "probing"))
# A heavy package, the places that may import it, and those that may do so only inside a function or for types.
HEAVY = {
    "trl": (("training",), ()),
    "vllm": ((), ()),
    "torch": (("training", *POLICY, "tiny.py"), ("agents/direct.py", "envs", "testing.py")),
    "openai": ((), ("agents/openai.py", "agents/openai_client.py")),
    "peft": ((), ("training",)),
}


class Import(NamedTuple):
    """One imported module, where it is imported, and whether only a function or a type checker does so."""

    module: str
    line: int
    deferred: bool


def names_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that the statement imports; the empty name for a relative import."""
    if isinstance(node, ast.ImportFrom) and node.module != "agentsgym":
        return ["" if node.level else str(node.module)]
    prefix = "agentsgym." if isinstance(node, ast.ImportFrom) else ""  # `from agentsgym import types` names a module
    return [prefix + alias.name for alias in node.names]


def imports_of(node: ast.AST, *, deferred: bool = False) -> Iterator[Import]:
    """Walk the tree and give each import with the place it stands at."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield from (Import(name, child.lineno, deferred) for name in names_of(child))
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            checking = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from imports_of(child, deferred=deferred or function or checking)


def within(path: str, places: tuple[str, ...]) -> bool:
    """Whether the path is one of the places or lies in one."""
    return any(path == place or path.startswith(f"{place}/") for place in places)


def complaint_of_heavy(path: str, package: str, *, deferred: bool) -> str | None:
    """Say why the file at ``path`` may not import a heavy package, or None if it may."""
    anywhere, in_functions = HEAVY[package]
    if within(path, anywhere) or (deferred and within(path, in_functions)):
        return None
    return f"{package} may be imported in {anywhere}, and inside functions in {in_functions}"


def complaint_of_layer(own: str, other: str) -> str | None:
    """Say why the layer ``own`` may not import the layer ``other``, or None if it may."""
    if other not in RANK:
        return f"agentsgym.{other} is no layer: {list(RANK)}"
    if RANK[other] > RANK[own]:
        return f"{own} stands before {other}"
    if other in {"tiny", "testing"} and own not in {other, "cli"}:
        return f"only cli may use {other}"
    return None


def complaint(path: str, found: Import) -> str | None:
    """Say what is wrong with an import of the file at ``path`` (below ``agentsgym/``), or None."""
    package, _, inner = found.module.partition(".")
    if not package:
        return "relative imports hide which layer they reach"
    if package in HEAVY:
        return complaint_of_heavy(path, package, deferred=found.deferred)
    if package != "agentsgym":
        return None
    own, other = path.partition("/")[0].removesuffix(".py"), inner.partition(".")[0]
    if (own, other, found.deferred) == ("errors", "types", True):
        return None
    return complaint_of_layer(own, other)


def complaints(path: str, source: str) -> list[str]:
    """Every import of a file that goes the wrong way, as ``file:line: why``."""
    found = [(one.line, complaint(path, one)) for one in imports_of(ast.parse(source))]
    return [f"agentsgym/{path}:{line}: {why}" for line, why in found if why]


def test_imports_go_one_way() -> None:
    package = ROOT / "agentsgym"
    files = [file for file in package.rglob("*.py") if file != package / "__init__.py"]
    assert len(files) > 10
    wrong = [line for file in files for line in complaints(file.relative_to(package).as_posix(), file.read_text())]
    assert not wrong, "\n".join(["imports that go the wrong way:", *wrong])


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("types.py", "from agentsgym.envs.base import MultistepEnv"),
        ("credit/rewards.py", "import agentsgym.batch"),
        ("credit/rewards.py", "from agentsgym import envs"),
        ("envs/base.py", "def f():\n    from agentsgym.training import trainer"),
        ("envs/base.py", "if TYPE_CHECKING:\n    from agentsgym.evaluation import run"),
        ("training/trainer.py", "from agentsgym import tiny"),
        ("envs/base.py", "from . import config"),
        ("envs/base.py", "import torch"),
        ("credit/weights.py", "def f():\n    import torch"),
        ("agents/policy.py", "from trl.models import unwrap_model_for_generation"),
        ("envs/base.py", "from agentsgym import MultistepEnv"),
    ],
)
def test_a_wrong_import_is_named_with_its_line(path: str, source: str) -> None:
    (found,) = complaints(path, source)
    assert found.startswith(f"agentsgym/{path}:{source.count(chr(10)) + 1}: ")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("envs/base.py", "from agentsgym.credit import rewards"),
        ("envs/base.py", "from agentsgym.envs.config import validate"),
        ("envs/base.py", "def f():\n    import torch"),
        ("agents/direct.py", "if TYPE_CHECKING:\n    import torch"),
        ("agents/policy.py", "import torch"),
        ("training/trainer.py", "from trl import GRPOTrainer"),
        ("tiny.py", "from agentsgym.evaluation.run import evaluate"),
        ("cli/main.py", "from agentsgym import tiny"),
        ("errors.py", "if TYPE_CHECKING:\n    from agentsgym.types import Turn"),
    ],
)
def test_a_right_import_passes(path: str, source: str) -> None:
    assert complaints(path, source) == []
