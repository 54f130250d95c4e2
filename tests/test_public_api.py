"""The names that users write. A change here is a change of the library's promise: say it in the changelog."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import agentsgym

ROOT = Path(__file__).parent.parent
PUBLIC = {
    "Action",
    "Agent",
    "AgentFault",
    "AgentsGymError",
    "AsyncAgent",
    "AuditReport",
    "ConfigError",
    "DirectOutputAgent",
    "EnvironmentFault",
    "EpisodeFault",
    "GRPOEnvConfig",
    "GRPOEnvTrainer",
    "Message",
    "MissingDependency",
    "MultistepEnv",
    "OpenAIAgent",
    "PolicyAgent",
    "ProcessPool",
    "RandomAgent",
    "Sampling",
    "ScriptedAgent",
    "StopReason",
    "TaskError",
    "TemplateError",
    "ThreadPool",
    "Trajectory",
    "Turn",
    "TurnRequest",
    "__version__",
    "audit",
    "evaluate",
    "make",
    "register",
}


def test_the_exported_names_are_these() -> None:
    assert set(agentsgym.__all__) == PUBLIC
    assert set(dir(agentsgym)) >= PUBLIC


@pytest.mark.filterwarnings("default")  # the trainer imports TRL
@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_an_exported_name_resolves(name: str) -> None:
    value = getattr(agentsgym, name)
    assert getattr(agentsgym, name) is value
    if name != "__version__":
        assert value.__name__ == name
        assert value.__module__.startswith("agentsgym.")
        assert value.__doc__


def test_what_a_type_checker_sees_is_what_runs() -> None:
    tree = ast.parse((ROOT / "agentsgym" / "__init__.py").read_text())
    (checking,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module for node in checking.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == {name: f"agentsgym.{module}" for name, module in agentsgym._HOME_OF.items()}
    assert seen.keys() == PUBLIC - {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'agentsgym' has no attribute 'Environment'"):
        _ = agentsgym.Environment


def test_the_version_is_that_of_the_project_file() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(rf'^version = "{re.escape(agentsgym.__version__)}"$', project, re.MULTILINE)
