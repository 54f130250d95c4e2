"""mini-swe-agent, as a command and as a function: it solves a task with a real shell in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted import calls, play

from agentsgym.envs.AgentProgram import AgentProgramEnv, ProgramOutcome

TASK = {"task": "Fix the sum in calculator.py.", "seed": 1}
BROKEN = "def add(a, b):\n    return a - b\n"
ANSWERS = [
    calls("bash", command="cat calculator.py"),
    calls(
        "bash",
        command="sed -i 's/a - b/a + b/' calculator.py && python3 -c 'import calculator as c; print(c.add(2, 3))'",
    ),
    calls("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
]


class Repair(AgentProgramEnv):
    """A repository with a bug, and a check that it is gone."""

    def _prepare_folder(self, folder: Path, task_data: dict[str, Any]) -> None:
        (folder / "calculator.py").write_text(BROKEN, encoding="utf-8")

    def _grade(self, task_data: dict[str, Any], outcome: ProgramOutcome) -> Any:
        check = [sys.executable, "-c", "import calculator; assert calculator.add(2, 3) == 5"]
        is_fixed = subprocess.run(check, cwd=outcome.folder, capture_output=True, check=False).returncode == 0
        return float(is_fixed), {"success": is_fixed, "exit_code": outcome.exit_code}


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path),
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }.items():
        monkeypatch.setenv(name, value)


def test_the_command_fixes_a_bug() -> None:
    mini = str(Path(sys.executable).parent / "mini")
    command = [mini, "--yolo", "--exit-immediately", "-m", "openai/policy", "-t", "{task}", "-o", "trajectory.json"]
    one = play(command, TASK, *ANSWERS, env_class=Repair)
    assert one.info["num_conversations"] == 1
    assert (one.final_reward, one.info["success"], one.info["exit_code"]) == (1.0, True, 0)
    roles = [message["role"] for message in one.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert "return a - b" in one.messages[3]["content"]
    assert '"output": "5' in one.messages[5]["content"]
