"""OpenEnv's own package makes a training trace, checks it, and this library reads it.

The package lives in an environment of its own: ``$AGENTSGYM_OPENENV_PYTHON``, which ``make test-worlds`` sets.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentsgym import ConfigError, Trajectory, audit

PYTHON = os.environ.get("AGENTSGYM_OPENENV_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="AGENTSGYM_OPENENV_PYTHON names no interpreter that has openenv")
MAKE = """
import json, sys
from openenv.core.harness.training import TrainingTrace, TrainingTurn

def call(node_id, prompt, completion, mask, asked, said):
    return TrainingTurn(
        node_id=node_id,
        prompt_token_ids=prompt,
        completion_token_ids=completion,
        per_token_logps=[-0.25] * len(completion),
        loss_mask=[0] * len(prompt) + mask,
        request={"messages": asked, "tools": None},
        response={"choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]},
        metadata={"index": 0},
    )

def ask(text):
    return {"role": "user", "content": text}

def answer(text):
    return {"role": "assistant", "content": text}

trace = TrainingTrace(turns=[
    call("n1", [1, 2], [3, 4], [1, 1], [ask("q")], "one"),
    call("n2", [1, 2, 3, 4, 5], [6, 7], [0, 1], [ask("q"), answer("one"), ask("on")], "two"),
    call("aux", [9], [9], [0], [ask("a title")], "Title"),
    call("n3", [1, 2, 8], [3], [1], [ask("q"), answer("one"), ask("on"), answer("two"), ask("so")], "three"),
])
open(sys.argv[1], "w").write(trace.model_dump_json())
"""
READ = """
import json, sys
from openenv.core.harness.training import TrainingTrace

def takes(value):
    try:
        TrainingTrace.model_validate(value)
    except ValueError:
        return False
    return True

print(json.dumps([takes(value) for value in json.load(open(sys.argv[1]))]))
"""
CHANGES: list[dict[str, Any]] = [
    {"per_token_logps": [-0.25]},
    {"loss_mask": [0, 0, 1]},
    {"loss_mask": [0, 1, 1, 1]},
    {"prompt_token_ids": []},
    {"per_token_logps": [-0.25, 0.5]},
    {"node_id": "n2"},
    {"reward": 1.0},
]


def run(code: str, argument: object) -> subprocess.CompletedProcess[str]:
    command = [str(PYTHON), "-c", code, str(argument)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("openenv") / "trace.json"
    done = run(MAKE, file)
    assert done.returncode == 0, done.stderr
    return file


def test_a_trace_of_the_package_is_read(trace: Path) -> None:
    made = Trajectory.from_training_trace(trace, [0.0, 0.5, 0.0, 1.0])
    assert made.token_ids == [1, 2, 3, 4, 5, 6, 7, 1, 2, 8, 3]
    assert made.agent_token_mask == [0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1]
    assert made.segments == [range(0, 7), range(7, 11)]
    assert made.logprobs == [0.0, 0.0, -0.25, -0.25, 0.0, 0.0, -0.25, 0.0, 0.0, 0.0, -0.25]
    assert [message["content"] for message in made.messages] == ["q", "one", "on", "two", "so", "three"]
    assert made.turn_rewards == [0.0, 0.5, 1.0]
    assert made.exact
    assert audit([made]).ok


def test_what_the_package_refuses_is_refused(trace: Path, tmp_path: Path) -> None:
    value = json.loads(trace.read_text())
    first, *others = value["turns"]
    changed = [{**value, "turns": [{**first, **change}, *others]} for change in [{}, *CHANGES]]
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(changed))
    done = run(READ, file)  # one start: the package takes seconds to import
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, *[False] * len(CHANGES)]
    for refused in changed[1:]:
        with pytest.raises(ConfigError):
            Trajectory.from_training_trace(refused, 1.0)
