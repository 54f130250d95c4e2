"""An environment whose package is not installed names which extra brings it; all others play without it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({hidden!r}))  # a None there says that there is no such package
import agentsgym, agentsgym.envs
from agentsgym import ScriptedAgent
from agentsgym.envs import McpServer, ToolEnv
try:
    {statement}
except agentsgym.MissingDependencyError as error:
    print(error)
"""
PACKAGES = ("bm25s", "gymnasium", "math_verify", "mcp", "nltk", "reasoning_gym", "textarena", "websockets")


def output(statement: str, *hidden: str) -> str:
    """What a fresh interpreter prints that has not these packages."""
    code = WITHOUT.format(hidden=hidden, statement=statement)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize(
    ("statement", "hidden", "extra"),
    [
        ("agentsgym.envs.ALFWorldEnv()", "alfworld", "alfworld"),
        ("agentsgym.envs.SearchEnv()", "bm25s", "search"),
        ("agentsgym.envs.GymnasiumEnv()", "gymnasium", "gymnasium"),
        ("agentsgym.envs.OpenEnvEnv(server='http://localhost:1')", "websockets", "openenv"),
        ("agentsgym.envs.ReasoningEvalsEnv()", "math_verify", "reasoning"),
        (
            "agentsgym.envs.ReasoningEvalsEnv.get_train_dataset({'grader': 'text'}, size=2)",
            "reasoning_gym",
            "reasoning",
        ),
        ("agentsgym.envs.TextArenaEnv(env_config={'game': 'Wordle-v0'})", "textarena", "textarena"),
        ("agentsgym.envs.ScienceWorldEnv()", "scienceworld", "scienceworld"),
        ("agentsgym.envs.TextWorldEnv()", "textworld", "textworld"),
        ("ToolEnv(tools=McpServer(command=['server'])).tool_schemas", "mcp", "mcp"),
    ],
)
def test_the_extra_is_named(statement: str, hidden: str, extra: str) -> None:
    reported = output(statement, hidden)
    assert reported.endswith(f"is not installed; install it with: pip install 'agentsgym[{extra}]'"), reported
    assert hidden.replace("_", "-") in reported


def test_what_needs_no_extra_plays_without_any() -> None:
    statement = "; ".join(
        [
            "env = agentsgym.envs.PriceListEnv()",
            "print(*[one.error for one in env.rollout(env.tasks(2), ScriptedAgent(['3']))])",
            "questions = [{'question': '1 + 1?', 'answer': '2'}]",
            "rows = agentsgym.envs.ReasoningEvalsEnv.get_eval_dataset({'grader': 'text'}, split='all', data=questions)",
            "env = agentsgym.envs.ReasoningEvalsEnv(None, {'grader': 'text'})",
            "print(env.rollout(rows, ScriptedAgent(['2']))[0].success)",
            "env = agentsgym.envs.SearchEnv(None, {'retriever': lambda query, k: ['x']})",
            "print(env.rollout([{'question': '?', 'answers': ['x']}], ScriptedAgent(['x']))[0].success)",
        ]
    )
    assert output(statement, *PACKAGES).split() == ["None", "None", "True", "True"]
