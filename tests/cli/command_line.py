"""Run the command line in this process, as a shell would, for the tests of its commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner

from agentsgym.cli.app import app

ROOT = Path(__file__).parent.parent.parent

GAME = '''
from agentsgym import MultistepEnv
from agentsgym.agents.scripted import RandomAgent


class Guess(MultistepEnv):
    """Guess a number."""

    task_fields = ("secret",)

    def _initialize_episode(self, session_id, task_data):
        secret = task_data.get("secret") or self.rng(session_id).randint(1, 4)
        return {"done": False, "secret": secret, "says": "Guess: 1 to 4."}

    def _format_prompt(self, state, step):
        return state["says"]

    def _step_episode(self, session_id, state, action):
        won = action == str(state["secret"])
        return {**state, "says": "No."}, float(won), won, {"success": won}

    def random_player(self, seed):
        return RandomAgent(["1", "2", "3", "4"], seed=seed)
'''


def game_file(folder: Path, module: str) -> str:
    """Write the game to a module that nothing has imported, and name it as the command line does."""
    (folder / f"{module}.py").write_text(GAME)
    sys.modules.pop(module, None)
    return f"{folder / module}.py:Guess"


class Ran(NamedTuple):
    """What a command did: its exit code, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Both, in one line, however they were wrapped."""
        return " ".join((self.out + self.err).split())

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def ran(*arguments: str | Path, typed: str | bytes = "", columns: int = 80) -> Ran:
    """Run a command; whatever it raises is raised."""
    variables = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    result = CliRunner().invoke(
        app, list(map(str, arguments)), input=typed, env=variables, prog_name="agentsgym", terminal_width=columns
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


def shell(*arguments: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "agentsgym.cli.app", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment,
    )
