"""Imports go one way, as the line of layers states, and no files or folders import each other in a circle."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "docs/architecture.md")  # which show the drawing
# The three rings: what a reader of the training loop holds in mind; the environments, which plug in; what drives runs
# or looks at them. A layer imports what stands before it in its own ring, and in the rings above; "(training)" marks
# which layers may not import the core's last one, since they stand before it.
DRAWING = """\
core    removed → _lazy → texts → errors → versions → cached_folders → interruptions → event_loop → supervisor
        → processes → types → seeding → fields → failures → ranks → tokens → {credit, rollouts, agents}
        → batch → envs → statistics → training
worlds  envs/shared → envs/NAME
around  {judging, store, record_audit, recorded} → evaluation → {tiny, testing} → reports → interop → (training)
        → observers → export → {recipes, viewer, serving} → cli
"""


def rings_of(drawing: str) -> dict[str, list[list[str]]]:
    """Read the drawing: by ring, the layers of each step."""
    lines = drawing.replace("\n        ", " ").splitlines()
    parts = [line.split(maxsplit=1) for line in lines]
    return {ring: [names.strip("{}").split(", ") for names in line.split(" → ")] for ring, line in parts}


RINGS = rings_of(DRAWING)
_STEPS = [*RINGS["core"][:-1], *RINGS["worlds"], *RINGS["around"]]
RANK = {name.strip("()"): rank for rank, names in enumerate(_STEPS) for name in names}
RING = {name: ring for ring, names in RINGS.items() for step in names for name in step}
# Who may name what stands to its right, which draws it in a notebook or makes it of a recording, and what it is:
# `_lazy.deferred`.
NAMED_BY = {
    "store/reader.py": {"agentsgym.reports.html.rollouts_html"},
    "types.py": {
        "agentsgym.batch.views.rollout_dict",
        "agentsgym.credit.components.role_components",
        "agentsgym.recorded.messages.trajectory_from_messages",
        "agentsgym.reports.frames.rollouts_frame",
        "agentsgym.reports.html.trajectory_html",
    },
    "training/observing.py": {
        "agentsgym.observers.shown.ShownConversations",
        "agentsgym.observers.stored.TrainingStore",
    },
    "statistics/metrics.py": {"agentsgym.reports.html.evaluation_html", "agentsgym.reports.frames.rollouts_frame"},
}
_DRIVERS = ("recipes/from_values.py", "recipes/run.py", "recipes/scripts.py")
# A heavy package, the places that may import it, and those that may do so only inside a function or for types.
HEAVY = {
    "trl": (("training", *_DRIVERS), ("agents/vllm/policy.py", "agents/vllm/lockstep.py")),
    "vllm": ((), ()),
    "torch": (
        ("training", "agents/policy", "agents/vllm", "ranks.py", "tiny.py", *_DRIVERS),
        ("agents/direct.py", "envs", "testing.py", "interop", "observers"),
    ),
    "openai": ((), ("agents/openai.py", "agents/openai_client.py")),
    "peft": ((), ("training", "recipes", "agents")),
    "gguf": ((), ("agents/policy/packaged.py",)),
    "bm25s": ((), ("envs/Search/corpus.py",)),
    "math_verify": ((), ("envs/ReasoningEvals/grader_main.py",)),
    "reasoning_gym": ((), ("envs/ReasoningEvals/generated.py",)),
    "gymnasium": ((), ("envs/Gymnasium",)),
    "textarena": ((), ("envs/TextArena",)),
    "nltk": ((), ("envs/TextArena",)),
    "mcp": ((), ("envs/Tools/mcp_client.py",)),
    "openskill": ((), ("training/selection/league.py",)),
    "starlette": ((), ("envs/AgentProgram/server.py",)),
    "uvicorn": (("envs/AgentProgram/connections.py",), ("envs/AgentProgram/server.py",)),
    "websockets": ((), ("envs/OpenEnv/wire.py", "serving/server.py")),
    "matplotlib": ((), ("reports/plots.py",)),
    "typer": (("cli",), ()),
    "rich": ((), ("cli", "observers")),
    "trackio": ((), ("observers",)),
    "wandb": ((), ("observers",)),
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


def layer_of(module: str) -> str:
    """The layer of a module below ``agentsgym``, in which the environments are one."""
    first, inner, *_ = f"{module}..".split(".")
    if first == "envs" and (inner == "shared" or inner[:1].isupper()):
        return "envs/shared" if inner == "shared" else "envs/NAME"
    return first


def complaint_of_layer(own: str, other: str) -> str | None:
    """Say why the layer ``own`` may not import the layer ``other``, or None if it may."""
    if other not in RANK:
        return f"agentsgym.{other} is no layer: {list(RANK)}"
    if RANK[other] > RANK[own]:
        return f"{own} stands before {other}"
    if RING[own] == "core" != RING[other]:
        return f"{own} is core, and {other} is not"
    if other in {"tiny", "testing"} and own not in {other, "recipes", "cli"}:
        return f"only recipes and cli may use {other}"
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
    own, other = layer_of(path.removesuffix(".py").replace("/", ".")), layer_of(inner)
    if (own, other, found.deferred) == ("errors", "types", True):
        return None
    return complaint_of_layer(own, other)


def complaints(path: str, source: str) -> list[str]:
    """Every import of a file that goes the wrong way, as ``file:line: why``."""
    found = [(one.line, complaint(path, one)) for one in imports_of(ast.parse(source))]
    return [f"agentsgym/{path}:{line}: {why}" for line, why in found if why]


def test_imports_go_one_way() -> None:
    package = ROOT / "agentsgym"
    faces = {package / folder / "__init__.py" for folder in ("", "envs", "training")}  # hand names on when used
    files = [file for file in package.rglob("*.py") if file not in faces]
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
        ("agents/policy/agent.py", "from trl.models import unwrap_model_for_generation"),
        ("envs/base.py", "from agentsgym import MultistepEnv"),
        ("envs/play.py", "from agentsgym.judging.judge import Judge"),
        ("envs/base.py", "from agentsgym.envs.Tools.env import ToolEnv"),
        ("envs/shared/numbers.py", "from agentsgym.envs.Tools.env import ToolEnv"),
        ("envs/TwentyQuestions/env.py", "from agentsgym.judging import judge"),
        ("training/trainer.py", "from agentsgym.store import reader"),
        ("interop/grpo.py", "from agentsgym.training import trainer"),
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
        ("agents/policy/agent.py", "import torch"),
        ("training/trainer.py", "from trl import GRPOTrainer"),
        ("tiny.py", "from agentsgym.evaluation.run import evaluate"),
        ("cli/main.py", "from agentsgym import tiny"),
        ("errors.py", "if TYPE_CHECKING:\n    from agentsgym.types import Turn"),
        ("envs/Search/env.py", "from agentsgym.envs.Tools.env import ToolEnv"),
        ("envs/Tools/env.py", "from agentsgym.envs.shared import numbers"),
        ("observers/stored.py", "from agentsgym.training import trainer"),
        ("judging/judge.py", "from agentsgym.envs import finished"),
    ],
)
def test_a_right_import_passes(path: str, source: str) -> None:
    assert complaints(path, source) == []


def test_the_drawing_has_every_layer_and_stands_on_the_pages() -> None:
    package = {file.stem for file in (ROOT / "agentsgym").iterdir() if file.suffix in {"", ".py"}}
    drawn = {name.partition("/")[0] for name in RING} - {"(training)"}
    assert drawn == {name for name in package if not name.startswith("__")}
    assert [page for page in PAGES if f"```text\n{DRAWING}```\n" not in (ROOT / page).read_text()] == []


def named_later(source: str) -> set[str]:
    """What a file imports by name when it is called."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    later = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "deferred"]
    return {".".join(ast.literal_eval(argument) for argument in call.args) for call in later}


def test_only_what_draws_or_makes_a_value_is_named_ahead_of_its_layer() -> None:
    package = ROOT / "agentsgym"
    found = {file.relative_to(package).as_posix(): named_later(file.read_text()) for file in package.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == NAMED_BY
    for target in set().union(*NAMED_BY.values()):
        module, _, name = target.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def files_of_package() -> dict[str, str]:
    """Each module of the package by its dotted name, with its source."""
    package = ROOT / "agentsgym"
    names = {
        file: file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for file in package.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): file.read_text() for file, name in names.items() if name.count(".") > 0}


def imported_files(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports, inside functions and for types included."""
    graph: dict[str, set[str]] = {name: set() for name in sources}
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= {one for one in (inner & graph.keys()) or {node.module} if one in graph}
            elif isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names if alias.name in graph}
    return {name: others - {name} for name, others in graph.items()}


def rooms(graph: Mapping[str, set[str]], folder: str) -> dict[str, set[str]]:
    """The same arrows between what lies directly in a folder: its files, and its folders as one room each."""

    def room(name: str) -> str | None:
        inner = name.removeprefix(f"{folder}.")
        return inner.partition(".")[0] if inner != name else None

    merged: dict[str, set[str]] = {}
    for name, others in graph.items():
        own = room(name)
        if own is not None and not (name.count(".") == folder.count(".") + 1 and is_face(graph, name)):
            merged.setdefault(own, set()).update(filter(None, map(room, others)))
    return {name: others - {name} for name, others in merged.items()}


def is_face(graph: Mapping[str, set[str]], name: str) -> bool:
    """Whether a module is a folder's ``__init__``, which hands names on."""
    return any(other.startswith(f"{name}.") for other in graph)


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """A circle of the graph; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """The modules that each module of the package imports."""
    return imported_files(files_of_package())


def test_no_files_import_each_other_in_a_circle(graph: Mapping[str, set[str]]) -> None:
    assert len(graph) > 60
    faces = {name for name in graph if is_face(graph, name)}
    assert circle({name: others - faces for name, others in graph.items() if name not in faces}) == []


def ring(name: str) -> str:
    """Which of the three rings a module belongs to."""
    return RING.get(layer_of(name.removeprefix("agentsgym").removeprefix(".")), "core")


def test_the_core_imports_no_world_and_nothing_around_it(graph: Mapping[str, set[str]]) -> None:
    core = {name: others for name, others in graph.items() if ring(name) == "core" and not is_face(graph, name)}
    assert {"agentsgym.training.trainer", "agentsgym.training.observing", "agentsgym.envs.base"} <= core.keys()
    outward = {(name, other) for name, others in core.items() for other in others if ring(other) != "core"}
    assert outward == set()
    inside = {name for name in graph if is_face(graph, name) and ring(name) == "core"}
    faces = {name for name in inside if any(ring(other) != "core" for other in graph[name])}
    assert faces == {"agentsgym", "agentsgym.envs", "agentsgym.training"}  # which hand names on when these are used


@pytest.mark.parametrize("folder", ["", ".training", ".agents", ".rollouts", ".envs", ".credit", ".tokens"])
def test_no_folders_import_each_other_in_a_circle(graph: Mapping[str, set[str]], folder: str) -> None:
    found = rooms(graph, f"agentsgym{folder}")
    assert len(found) > 2
    assert circle(found) == []


def test_a_circle_is_found_wherever_it_is_closed() -> None:
    sources = {
        "agentsgym.a.one": "from agentsgym.b import two",
        "agentsgym.b.two": "def f():\n    from agentsgym.a.three import g",
        "agentsgym.a.three": "if TYPE_CHECKING:\n    import agentsgym.c",
        "agentsgym.c": "",
    }
    graph = imported_files(sources)
    assert graph["agentsgym.a.three"] == {"agentsgym.c"}
    assert circle(graph) == []  # no file imports itself
    assert set(circle(rooms(graph, "agentsgym"))) == {"a", "b"}  # but the folders import each other
    assert circle({"x": {"y"}, "y": {"x"}})
