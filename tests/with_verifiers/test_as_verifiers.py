"""verifiers plays our environments: through `as_verifiers`, and through its own taskset for OpenEnv's servers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

vf: Any = pytest.importorskip("verifiers.v1", reason="run `make test-verifiers`")

import guess_in_verifiers  # noqa: E402
from verifiers.v1.utils.loaders import resolve_env_config  # noqa: E402

from agentsgym import ConfigError, ScriptedAgent, TaskError  # noqa: E402
from agentsgym.envs import PriceListEnv  # noqa: E402
from agentsgym.interop import as_verifiers  # noqa: E402

ROOT = Path(__file__).parent.parent.parent


class Model(BaseHTTPRequestHandler):
    """A model that states 1, 2, 3, …"""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = sum(message["role"] == "assistant" for message in request["messages"]) + 1
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": str(number)}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def played(model: str, taskset: dict[str, Any], num_rollouts: int = 1, **player: Any) -> list[Any]:
    """Play a taskset's tasks as `vf-eval` does."""
    seat = {"harness": {"id": "direct_harness"}, "runtime": {"type": "subprocess"}, **player}
    env = vf.load_environment(resolve_env_config({"taskset": taskset, "player": seat}))
    context = vf.ModelContext(model="m", client=vf.EvalClientConfig(base_url=model))

    async def run() -> list[Any]:
        async with env.serving():
            slots = [slot for task in env.taskset for slot in env.slots(task, num_rollouts)]
            return [await env.run_slot(slot, context) for slot in slots]

    return asyncio.run(run())


def texts(episode: Any) -> list[tuple[str, str]]:
    [trace] = episode.traces
    [branch] = trace.branches
    return [(message.role, message.content) for message in branch.messages]


def test_the_conversation_and_reward_are_those_of_a_rollout(model: str) -> None:
    first, second, broken, drawn, again = (
        played(model, {"id": "guess_in_verifiers"}, 1) + played(model, {"id": "guess_in_verifiers"}, 1)[3:]
    )
    expected = guess_in_verifiers.ENV.rollout(guess_in_verifiers.TASKS[:2], ScriptedAgent(["1", "2", "3"]))
    for episode, rollout in zip((first, second), expected, strict=True):
        assert episode.ok, episode.errors
        assert texts(episode) == [(message["role"], message["content"]) for message in rollout.messages]
        [trace] = episode.traces
        assert trace.rewards["episode"].score == rollout.final_reward
        assert trace.metrics == {"success": 1.0, "num_turns": float(len(rollout.turns))}
    assert (first.traces[0].reward, second.traces[0].reward) == (1.0, 0.5)
    assert not broken.ok
    assert "the game broke" in broken.errors[0].message
    assert drawn.ok
    assert texts(drawn) == texts(again)  # a task without a seed gets the same one
    assert guess_in_verifiers.ENV.active_states == {}


def test_an_agent_that_is_stopped_early_gets_what_it_has_earned(model: str) -> None:
    episodes = played(model, {"id": "guess_in_verifiers"}, max_turns=2)
    [trace] = episodes[1].traces
    assert trace.rewards["episode"].score == -0.5
    assert guess_in_verifiers.ENV.active_states == {}


def test_its_own_taskset_plays_a_served_environment(model: str) -> None:
    command = [
        sys.executable,
        "-m",
        "agentsgym.cli.app",
        "serve",
        f"{guess_in_verifiers.__file__}:Guess",
        "--port",
        "0",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            resets = [{"task": task} for task in guess_in_verifiers.TASKS[:2]]
            episodes = played(model, {"id": "openenv", "base_url": url, "resets": resets})
        finally:
            process.terminate()
    assert [episode.traces[0].reward for episode in episodes] == [1.0, 0.5]
    assert json.loads(texts(episodes[0])[0][1])["observation"] == {"text": "Play.\n\nGuess: 1 to 4."}


def test_what_verifiers_cannot_play_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="env must be a MultistepEnv, got 3"):
        as_verifiers(3, [{}])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"requires an environment without tools .* got PriceListEnv"):
        as_verifiers(PriceListEnv(), [{}])
    with pytest.raises(ConfigError, match="one episode per trial, got Guess"):
        as_verifiers(guess_in_verifiers.Guess(None, {"episodes_per_trial": 2}), [{}])
    with pytest.raises(TaskError, match="tasks must contain at least one task"):
        as_verifiers(guess_in_verifiers.ENV, [])
