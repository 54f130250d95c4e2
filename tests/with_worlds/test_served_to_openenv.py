"""`agentsgym serve` is played by the real OpenEnv package's client, and by TRL's trainer over it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("AGENTSGYM_OPENENV_PYTHON")
ROOT = Path(__file__).parent.parent.parent
PLAYERS = Path(__file__).parent / "openenv_players.py"
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="AGENTSGYM_OPENENV_PYTHON names no Python that has OpenEnv: run `make test-worlds`"
)
GAME = '''
from agentsgym import MultistepEnv


class Guess(MultistepEnv):
    """Guess a number from 1 to 4."""

    def _initialize_episode(self, session_id, task_data):
        return {"done": False, "secret": self.rng(session_id).randint(1, 4), "says": "Guess: 1 to 4."}

    def _format_prompt(self, state, step):
        return state["says"]

    def _step_episode(self, session_id, state, action):
        won = action == str(state["secret"])
        return {**state, "says": f"No, says {self.rng(session_id).random()}."}, float(won), won, {"success": won}

    def _last_message(self, state):
        return "It is over."
'''


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("served") / "games.py"
    path.write_text(GAME)
    command = [sys.executable, "-m", "agentsgym.cli.app", "serve", str(path), "PriceList", "-n", "8", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1].removesuffix("/Guess")
        finally:
            process.terminate()


def printed(*arguments: str | Path) -> dict[str, Any]:
    """What the players print."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(PYTHON), str(PLAYERS), *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_openenvs_client_plays_many_sessions_by_their_seeds_and_calls_tools(url: str) -> None:
    played = printed("client", url)
    episodes = played["episodes"]
    assert len({one.pop("episode_id") for one in episodes}) == len(episodes)
    assert episodes[::2] == episodes[1::2]  # equal seeds
    assert len({one["texts"][-2] for one in episodes}) > 2
    for one in episodes:
        assert one["texts"][0] == "Guess: 1 to 4."
        assert one["texts"][-1] == "It is over."
        assert one["rewards"] == [0.0] * (one["step_count"] - 1) + [1.0]
        assert one["success"] is True
    tools = played["tools"]
    assert tools["tools"] == ["price", "add", "multiply", "answer"]
    assert "answer questions about a price list" in tools["first"]
    assert tools["called"]["tool_name"] == "price"
    assert tools["done"] is True
    assert "did you mean 'seed'" in tools["refusals"][0]
    assert '{"message": TEXT}' in tools["refusals"][1]


def test_trls_environments_are_clients_and_a_step_is_trained(url: str, tmp_path: Path) -> None:
    result = printed("trl", url, tmp_path, sysconfig.get_path("purelib"))
    assert result["reward"] == 0.5  # half of the rollouts guess 1, 2, 3 and 4; the others always 9
    assert result["moved"] is True
    assert result["calls"] > 1.0
