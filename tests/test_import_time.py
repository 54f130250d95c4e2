"""``import agentsgym`` loads nothing heavy; how long it takes is measured by ``benchmarks/import_time.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {
    "accelerate",
    "bm25s",
    "datasets",
    "gymnasium",
    "math_verify",
    "matplotlib",
    "mcp",
    "nltk",
    "numpy",
    "openai",
    "openskill",
    "starlette",
    "uvicorn",
    "pandas",
    "peft",
    "pyarrow",
    "reasoning_gym",
    "textarena",
    "torch",
    "transformers",
    "trl",
    "vllm",
}


def modules_after(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import agentsgym",
        "from agentsgym import Action, Agent, ConfigError, Message, StopReason, Trajectory, Turn, TurnRequest",
        "from agentsgym import MultistepEnv, RandomAgent, ScriptedAgent, EnvThreadPool, audit, make, register",
        "from agentsgym.envs import MultistepEnv, TwentyQuestionsEnv, make, register",
        "from agentsgym.envs import OpenEnvEnv, PriceListEnv, ReasoningEvalsEnv, SearchEnv, TextArenaEnv, ToolEnv",
        "from agentsgym.envs import McpServer, SessionTools, ToolResult, TwentyQuestionsEnv, register_tools",
        "from agentsgym.envs.datasets.naming import completions; completions(''); completions('Gymnasium:')",
        "from agentsgym.cli.catalogue import entries; entries()",
        "from agentsgym.agents import Agent, AsyncAgent, DirectOutputAgent, OpenAIAgent, RandomAgent, ScriptedAgent",
        "import agentsgym; dir(agentsgym)",
    ],
)
def test_the_import_loads_nothing_heavy(statement: str) -> None:
    loaded = modules_after(statement)
    assert "agentsgym" in loaded
    assert loaded & HEAVY == set()
