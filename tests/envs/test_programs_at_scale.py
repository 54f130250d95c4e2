"""Programs in number: whatever they send back, every call is recorded token by token; and nothing of them is left."""

import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from program_client import Client, RecordingAgent, converse, user
from test_tool_calls import ONE_CALL_A_TURN
from tool_chat import tool_family

from agentsgym import Action, EnvProcessPool, EnvThreadPool, StopReason, TurnRequest
from agentsgym.envs.AgentProgram import AgentProgramEnv
from agentsgym.envs.AgentProgram.server import current_endpoint
from agentsgym.envs.AgentProgram.session import ProgramCall, Session
from agentsgym.event_loop import run_coroutine
from agentsgym.processes import ProcessGroup
from agentsgym.testing import chat_tokenizer
from agentsgym.tokens.chat_format import ChatFormat

ROOT = Path(__file__).parents[2]
TOKENIZER = chat_tokenizer()
LONG = ["chatml", "qwen3", "qwen3_5_nothink", "llama3_1", "gptoss", "gemma4", "glm4moe", "lfm2_v2"]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}, "for_s": {"type": "number"}}},
    },
}
OTHER = {"type": "function", "function": {**TOOL["function"], "name": "listen"}}


class CallingAgent(RecordingAgent):
    """Calls a tool in a part of its answers, in the form of the chat template, and thinks in some of them."""

    def __init__(self, tokenizer: Any, numbers: Sequence[int]) -> None:
        super().__init__(tokenizer)
        self.numbers = numbers  # of calls in an answer
        self.chat_format = ChatFormat.of(tokenizer, tools=[TOOL])

    def _answer(self, request: TurnRequest) -> Action:
        action, rng = super()._answer(request), self.generator
        if request.tools and rng.random() < 0.5:
            arguments = {"at": f"the {rng.choice(['door', 'ünter', 'a b'])} ", "for_s": rng.choice([1, 2.5])}
            calls = [
                {"type": "function", "id": f"call{k:05d}", "function": {"name": "look", "arguments": arguments}}
                for k in range(rng.choice(self.numbers))
            ]
            output = self._output(calls)
            session, prompt, ids, logprobs = self.answers[-1]
            ids, logprobs = [*ids, *output], [*logprobs, *[-1.0] * len(output)]
            self.answers[-1] = session, prompt, ids, logprobs
            action = Action(text=self.tokenizer.decode(ids), token_ids=ids, logprobs=logprobs)
        return action

    def _output(self, calls: list[dict[str, Any]]) -> list[int]:
        """The tokens of calls in the form of the template, or in that of text if it has none."""
        if self.chat_format.prints_calls:
            return self.chat_format.answer({"role": "assistant", "content": "", "tool_calls": calls})[0]
        text = "".join(f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in calls)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def rewritten(answer: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """An answer as another client would send it back."""
    message: dict[str, Any] = {"role": "assistant", "content": answer["content"]}
    text = answer["content"]
    if text is not None:
        text = rng.choice(["", " ", "\n"]) + text.strip() + rng.choice(["", "\n\n"])
        message["content"] = [{"type": "text", "text": text}] if rng.random() < 0.3 else text
    elif rng.random() < 0.5:
        message["content"] = ""
    calls = []
    for call in answer.get("tool_calls", ()):
        given = json.loads(call["function"]["arguments"])
        items = [*given.items()]
        rng.shuffle(items)
        arguments = json.dumps(dict(items), ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 2]))
        call_id = call["id"] if rng.random() < 0.5 else f"other-{rng.randrange(10**9)}"
        calls.append({"type": "function", "id": call_id, "function": {"name": "look", "arguments": arguments}})
    if calls:
        message["tool_calls"] = calls
    if rng.random() < 0.3:
        message["reasoning_content"] = "I thought"
    return message


class Rewriting:
    """A program that sends everything back in other words of the same meaning, and now and then with another one.

    Attributes:
        parents: The call that each call continues, by the seed of the task; None for a new conversation.
    """

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls
        self.parents: dict[int, list[int | None]] = {}

    def __call__(self, task: dict[str, Any], endpoint: Any) -> float:
        rng, client = random.Random(task["seed"]), Client(endpoint)
        parents = self.parents[task["seed"]] = []
        pasts: list[tuple[int, list[Any]]] = []  # the index and the conversation after each call that may go on
        for number in range(self.num_calls):
            kind = rng.choice(["continue"] * 8 + ["new", "edit", "tools"]) if pasts else "new"
            parent, past = (None, []) if kind == "new" else pasts[-1] if rng.random() < 0.7 else rng.choice(pasts)
            messages = [*past]
            if kind == "edit":  # what the policy did not state
                place = next(k for k, one in enumerate(messages) if one["role"] == "assistant")
                messages = [*messages[:place], {"role": "assistant", "content": f"edited {number}"}]
            elif messages:
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": f"It is {number}."}
                    for call in messages[-1].get("tool_calls", ())
                ]
            if not messages or messages[-1]["role"] == "assistant":
                messages.append(user(f"go on with {number}"))
            parents.append(parent if kind == "continue" else None)
            offered = [TOOL, OTHER] if kind == "tools" else [TOOL]
            answer = client.chat(messages, tools=offered)["choices"][0]["message"]
            if kind != "tools":
                pasts.append((number, [*messages, rewritten(answer, rng)]))
        return 1.0


def check_exact(name: str, num_tasks: int, num_calls: int) -> None:
    """Play programs that rewrite what they send, and compare every recorded token."""
    tokenizer = TOKENIZER if name == "chatml" else tool_family(name)
    agent = CallingAgent(tokenizer, [1] if name.startswith(ONE_CALL_A_TURN) else [1, 1, 2])
    program = Rewriting(num_calls)
    config = {"max_steps_per_episode": num_calls + 1}
    tasks = [{"seed": seed} for seed in range(num_tasks)]
    rollouts = AgentProgramEnv(tokenizer, config, program=program).rollout(tasks, agent)
    output: dict[str, list[tuple[list[int], list[int], list[float]]]] = {}
    for session, *answer in agent.answers:
        output.setdefault(session, []).append(tuple(answer))  # type: ignore[arg-type]
    for one in rollouts:
        assert one.error is None
        answers, parents = output[one.session_id], program.parents[one.task_data["seed"]]
        assert len(one.turns) == len(answers) == num_calls
        for turn, (prompt, ids, logprobs), parent in zip(one.turns, answers, parents, strict=True):
            assert one.token_ids[turn.prompt_start : turn.start] == prompt
            assert one.token_ids[turn.start : turn.stop] == ids
            assert one.logprobs is not None
            assert one.logprobs[turn.start : turn.stop] == logprobs
            if parent is not None:
                known = [*answers[parent][0], *answers[parent][1]]
                assert prompt[: len(known)] == known
                assert len(prompt) > len(known)
        assert one.info["num_conversations"] == sum(parent is None for parent in parents)
        assert one.info["num_rejected_calls"] == one.info["num_undelivered_calls"] == 0


@pytest.mark.parametrize("name", ["chatml", "qwen2_5", "llama3_1"])
def test_every_call_is_recorded_exactly_however_its_history_was_written(name: str) -> None:
    check_exact(name, num_tasks=8, num_calls=15)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_ten_thousand_calls_are_recorded_exactly(name: str) -> None:
    check_exact(name, num_tasks=10_000 // len(LONG) // 25, num_calls=25)


def test_256_programs_at_once() -> None:
    env, agent = AgentProgramEnv(TOKENIZER, program=converse), RecordingAgent(TOKENIZER)
    rollouts = env.rollout([{"seed": seed} for seed in range(256)], agent)
    assert [one.error for one in rollouts if one.failed] == []
    assert {(one.final_reward, len(one.turns)) for one in rollouts} == {(2.0, 3)}
    check_recorded(rollouts, agent)
    assert agent.most > 32
    check_nothing_is_left()


def check_recorded(rollouts: Sequence[Any], agent: RecordingAgent) -> None:
    """Compare the tokens of every turn with those of the agent, whose answers to each session are in order."""
    output: dict[str, list[tuple[list[int], list[int]]]] = {}
    for session, prompt, ids, _ in agent.answers:
        output.setdefault(session, []).append((prompt, ids))
    for one in rollouts:
        for turn, (prompt, ids) in zip(one.turns, output.get(one.session_id, ()), strict=not one.failed):
            assert one.token_ids[turn.prompt_start : turn.start] == prompt
            assert one.token_ids[turn.start : turn.stop] == ids


def check_nothing_is_left() -> None:
    """Check that no session, program or task is left on the event loop."""

    async def left() -> tuple[Any, list[str]]:
        endpoint = await current_endpoint()
        return endpoint.sessions, [str(one) for one in asyncio.all_tasks() if one is not asyncio.current_task()]

    deadline = time.monotonic() + 30
    while run_coroutine(left()) != ({}, []) and time.monotonic() < deadline:  # such as the last response's task
        time.sleep(0.01)
    assert run_coroutine(left()) == ({}, [])
    gc.collect()
    # By type, since to look up the class of an object of torch may warn.
    assert [one for one in gc.get_objects() if type(one) in {Session, ProgramCall}] == []


@pytest.mark.parametrize("pool", [EnvThreadPool, EnvProcessPool])
def test_programs_play_in_pools(pool: Any) -> None:
    env = AgentProgramEnv(TOKENIZER, program=converse)
    tasks = [{"seed": seed} for seed in range(6)]
    alone = env.rollout(tasks, RecordingAgent(TOKENIZER, texts=["fine"]))
    with pool(2) as workers:
        for _ in range(2):
            agent = RecordingAgent(TOKENIZER, texts=["fine"])
            rollouts = env.rollout(tasks, agent, pool=workers)
            assert [one.token_ids for one in rollouts] == [one.token_ids for one in alone]
            assert [one.turn_rewards for one in rollouts] == [one.turn_rewards for one in alone]
            check_recorded(rollouts, agent)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_plays_with_an_endpoint_of_its_own() -> None:
    script = """
import os, sys
from program_client import RecordingAgent, converse
from agentsgym.envs.AgentProgram import AgentProgramEnv
from agentsgym.envs.AgentProgram.server import current_endpoint
from agentsgym.event_loop import run_coroutine
from agentsgym.testing import chat_tokenizer

async def url():
    return (await current_endpoint()).url

def play():
    env = AgentProgramEnv(chat_tokenizer(), program=converse)
    [one] = env.rollout([{"seed": 1}], RecordingAgent(env.tokenizer))
    os.write(1, f"{one.final_reward} {run_coroutine(url())}\\n".encode())

play()
pid = os.fork()
play()
if pid:
    os.waitpid(pid, 0)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.split()
    assert lines[::2] == ["2.0"] * 3
    assert len({*lines[1::2]}) == 2


KILLED = """
import json, os, socket, sys, time
host, _, port = os.environ["OPENAI_BASE_URL"].split("/")[2].partition(":")
task = json.load(open("task.json"))
messages = [{"role": "user", "content": f"go {task['seed']}"}]
for number in range(4):
    body = json.dumps({"model": "x", "messages": messages}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.0\\r\\nHost: {{host}}:{{port}}\\r\\nContent-Length: {len(body)}\\r\\n"
        f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\\r\\n\\r\\n"
    )
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + body)
    received = b""
    while part := connection.recv(65536):
        received += part
    answer = json.loads(received.partition(b"\\r\\n\\r\\n")[2])
    messages += [answer["choices"][0]["message"], {"role": "user", "content": f"on {{number}}"}]
    time.sleep(0.05)
"""


class Killing(AgentProgramEnv):
    """Kills the process groups of some programs, each at a random moment of its life."""

    program = (sys.executable, "-I", "-S", "-c", KILLED)
    pids: ClassVar[list[int]] = []

    async def _started(self, task_data: dict[str, Any], endpoint: Any) -> Any:
        running: Any = await super()._started(task_data, endpoint)
        if task_data["kill_after_s"] is not None:
            asyncio.get_running_loop().call_later(task_data["kill_after_s"], self._kill, running._group)
        return running

    def _kill(self, group: ProcessGroup) -> None:
        if group.pid is not None:
            self.pids.append(group.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group.pid, signal.SIGKILL)


@pytest.mark.long
def test_killed_programs_fail_or_are_graded_alone_and_leave_nothing() -> None:
    rng, agent = random.Random(0), RecordingAgent(TOKENIZER)
    tasks = [{"seed": seed, "kill_after_s": rng.uniform(0, 0.6) if seed % 6 else None} for seed in range(240)]
    before = {one.name for one in Path(tempfile.gettempdir()).glob("agentsgym-program-*")}
    rollouts = Killing(TOKENIZER).rollout(tasks, agent, max_concurrent=32)
    num_killed = 0
    for one in rollouts:
        if one.failed:
            assert "with exit code -9 without calling the policy" in str(one.error)
        elif one.info["success"]:
            assert (len(one.turns), one.final_reward) == (4, 1.0)
        else:
            assert (one.final_reward, one.stop_reason) == (0.0, StopReason.DONE)
        is_killed = one.failed or not one.info["success"]
        assert not (is_killed and one.task_data["kill_after_s"] is None)
        num_killed += is_killed
    assert num_killed > 50
    check_recorded(rollouts, agent)
    for pid in Killing.pids:
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)
    assert {one.name for one in Path(tempfile.gettempdir()).glob("agentsgym-program-*")} <= before
    check_nothing_is_left()


@pytest.mark.parametrize("most", [20, pytest.param(200, marks=pytest.mark.long)])
def test_stopped_endpoints_lose_the_programs_that_called_them_alone(most: int) -> None:
    rng, agent = random.Random(0), RecordingAgent(TOKENIZER)
    num_stops, is_over = 0, threading.Event()

    async def stop() -> None:
        await (await current_endpoint()).stop()

    def keep_stopping() -> None:
        nonlocal num_stops
        while num_stops < most and not is_over.wait(rng.uniform(0.02, 0.3)):
            run_coroutine(stop())
            num_stops += 1

    env, played = AgentProgramEnv(TOKENIZER, program=converse), list[Any]()
    stopping = threading.Thread(target=keep_stopping)
    stopping.start()
    while stopping.is_alive():
        tasks = [{"seed": seed} for seed in range(len(played), len(played) + 48)]
        played += env.rollout(tasks, agent, max_concurrent=16)
    stopping.join()
    after = env.rollout([{"seed": seed} for seed in range(16)], agent)
    assert num_stops == most
    assert [one.task_data["seed"] for one in played] == [*range(len(played))]
    check_recorded([*played, *after], agent)
    for one in (*played, *after):
        if one.failed:
            assert "the endpoint that the program calls was stopped" in str(one.error)
        else:
            assert (len(one.turns), one.final_reward) == (3, 2.0)
    assert most / 4 < sum(one.failed for one in played) < len(played)
    assert not any(one.failed for one in after)
    check_nothing_is_left()
