"""Nothing is left on stderr by a process that ends with agents, connections and coroutines still open."""

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


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_a_process_exits_without_a_word(end: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"{BEGIN}\n{end}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PYTHONPATH": f"{HERE.parent.parent}:{HERE}"},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
