"""The names that users write. A change here is a change of the library's promise: say it in the changelog."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import agentsgym
import agentsgym.agents
import agentsgym.envs

ROOT = Path(__file__).parent.parent
PUBLIC = {
    "Action",
    "Agent",
    "AgentError",
    "AgentsGymError",
    "AsyncAgent",
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "CopiedPolicyAgent",
    "Criterion",
    "Curriculum",
    "Demonstrations",
    "DirectOutputAgent",
    "Distillation",
    "EnvError",
    "EnvProcessPool",
    "EnvThreadPool",
    "EpisodeError",
    "ExploringAgent",
    "FailurePolicy",
    "Field",
    "GRPOEnvConfig",
    "GRPOEnvTrainer",
    "Judge",
    "JudgeError",
    "League",
    "LearningCurve",
    "Message",
    "MissingDependencyError",
    "MultistepEnv",
    "NonFiniteError",
    "OpenAIAgent",
    "PolicyAgent",
    "Preempted",
    "RandomAgent",
    "Recipe",
    "RolloutStore",
    "SamplingParams",
    "ScoredRollout",
    "ScriptedAgent",
    "StopReason",
    "StoreError",
    "TaskError",
    "TemplateError",
    "TooManyFailuresError",
    "ToolCall",
    "TrainingRun",
    "Trajectory",
    "Turn",
    "TurnRequest",
    "__version__",
    "audit",
    "check_env",
    "estimator_traits",
    "evaluate",
    "evaluate_mixed",
    "imitate",
    "logprob_gap",
    "make",
    "mix",
    "packaged_model",
    "register",
    "serve_policy",
    "tiny_policy",
    "train",
    "trajectories_from_messages",
}
ENVIRONMENTS = {
    "ALFWorldEnv",
    "AgentProgramEnv",
    "EnvSpec",
    "GymnasiumEnv",
    "McpServer",
    "MultistepEnv",
    "OpenEnvEnv",
    "OpenEnvServer",
    "PriceListEnv",
    "ReasoningEvalsEnv",
    "ScienceWorldEnv",
    "SearchEnv",
    "SessionTools",
    "TerminalEnv",
    "TextArenaEnv",
    "TextWorldEnv",
    "ToolEnv",
    "ToolResult",
    "TwentyQuestionsEnv",
    "check_env",
    "make",
    "register",
    "register_server",
    "register_tools",
}


def test_the_exported_names_are_these() -> None:
    assert set(agentsgym.__all__) == PUBLIC
    assert set(dir(agentsgym)) >= PUBLIC
    assert set(agentsgym.envs.__all__) == ENVIRONMENTS


@pytest.mark.filterwarnings("default")  # the trainer imports TRL
@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_an_exported_name_resolves(name: str) -> None:
    value = getattr(agentsgym, name)
    assert getattr(agentsgym, name) is value
    if name != "__version__":
        assert value.__name__ == name
        assert value.__module__.startswith("agentsgym.")
        assert value.__doc__


@pytest.mark.filterwarnings("default")  # the trainer imports TRL
@pytest.mark.parametrize("package", [agentsgym, agentsgym.agents, agentsgym.envs], ids=lambda package: package.__name__)
def test_what_a_type_checker_sees_is_what_runs(package: Any) -> None:
    tree = ast.parse(Path(package.__file__).read_text())
    (checking,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module for node in checking.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen.keys() == {*package.__all__} - {"__version__"}
    for name in seen:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Environment'"):
        _ = package.Environment


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'agentsgym' has no attribute 'Environment'"):
        _ = agentsgym.Environment


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS - PUBLIC))
def test_what_is_in_envs_alone_says_where_it_is(name: str) -> None:
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
