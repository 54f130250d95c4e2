"""Nothing is left on stderr by a process that ends with agents, connections and coroutines still open."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BEGIN = """
import asyncio, gc, threading, time
from http_server import chat, serving
from agentsgym.agents.base import AsyncAgent
from agentsgym.event_loop import agents_loop
from agentsgym.agents.openai import OpenAIAgent
from agentsgym.types import TurnRequest

request = TurnRequest(session_id="a", messages=[{"role": "user", "content": "hi"}], token_ids=[])
agents = []
with serving(lambda asked: chat("fine")) as served:
    for _ in range(8):
        agent = OpenAIAgent("tiny", base_url=served.url)
        assert agent.act([request])[0].text == "fine"
        agent.itself = agent  # collected when nobody expects it
        agents.append(agent)
"""
ENDS = {
    "agents that are held": "",
    # While the loop is busy, all that is handed to it waits: the connections are to close as it is made to stop.
    "agents that are collected at the last moment": """
agents_loop().call_soon_threadsafe(time.sleep, 0.1)
del agent, agents
gc.collect()
""",
    "agents that were closed": "[agent.close() for agent in agents]",
    "a coroutine that nobody waits for": "asyncio.run_coroutine_threadsafe(asyncio.sleep(60), agents_loop())",
    "a thread that waits for an answer": """
class Silent(AsyncAgent):
    async def aact(self, request):
        called.set()
        await asyncio.Future()

called = threading.Event()
threading.Thread(target=Silent().act, args=([request],), daemon=True).start()
called.wait()
""",
}


#: Imports the SDK once, which takes two seconds, and lets a fork of itself end in each way.
IN_FORKS = """
import json, os, signal, sys
import openai, http_server, agentsgym.agents.openai

codes = []
for number, source in enumerate(json.load(sys.stdin)):
    child = os.fork()
    if not child:
        signal.alarm(60)
        os.dup2(os.open(f"errors-{number}", os.O_CREAT | os.O_WRONLY, 0o600), 2)
        exec(source)
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code and what is on stderr, for each end of a process."""
    folder = tmp_path_factory.mktemp("ends")
    ran = subprocess.run(
        [sys.executable, "-c", IN_FORKS],
        input=json.dumps([f"{BEGIN}\n{end}" for end in ENDS.values()]),
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={"PYTHONPATH": f"{HERE.parent.parent}:{HERE}"},
    )
    assert ran.stderr == ""
    errors = [(folder / f"errors-{number}").read_text() for number in range(len(ENDS))]
    return dict(zip(ENDS, zip(json.loads(ran.stdout), errors, strict=True), strict=True))


@pytest.mark.parametrize("end", ENDS)
def test_a_process_exits_without_a_word(end: str, ended: dict[str, tuple[int, str]]) -> None:
    assert ended[end] == (0, "")
