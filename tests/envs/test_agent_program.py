"""Programs that call the policy: what they send and receive, how they are rewarded, and how they end."""

import asyncio
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from program_client import Client, RecordingAgent, user

from agentsgym import StopReason
from agentsgym.envs.AgentProgram import AgentProgramEnv, ProgramOutcome
from agentsgym.envs.AgentProgram.calls import CallError
from agentsgym.envs.AgentProgram.exchange import CallTree
from agentsgym.errors import ConfigError
from agentsgym.testing import chat_tokenizer

TOKENIZER = chat_tokenizer()
TASKS: list[dict[str, Any]] = [{"seed": 1}]


def play(
    program: Any, config: Any = None, *, texts: Any = (), tasks: Any = TASKS, num_rollouts: int = 1, **options: Any
) -> Any:
    """Roll out a program and return its rollouts."""
    grade = options.pop("grade", None)
    env = AgentProgramEnv(TOKENIZER, config, program=program, grade=grade)
    return env.rollout(tasks, RecordingAgent(TOKENIZER, texts=texts), num_rollouts, **options)


def conversation(task: Any, endpoint: Any) -> float:
    """Three calls, each of which continues the last one."""
    client, messages = Client(endpoint), [user("go")]
    for number in range(3):
        messages += [client.speak(*messages), user(f"on {number}")]
    return 2.0


async def coroutine(task: Any, endpoint: Any) -> float:
    return await asyncio.to_thread(conversation, task, endpoint)


COMMAND = [
    sys.executable,
    "-c",
    """
import json, os, sys, urllib.request
def say(text):
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    body = json.dumps({"model": "x", "messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(sys.argv[1], json.load(open("task.json"))["seed"], say("hello"), say("again"))
sys.exit(int(sys.argv[2]))
""",
    "{name}",
    "{code}",
]


@pytest.mark.parametrize("program", [conversation, coroutine])
def test_each_call_is_a_turn_with_the_tokens_that_were_sampled(program: Any) -> None:
    env = AgentProgramEnv(TOKENIZER, program=program)
    agent = RecordingAgent(TOKENIZER)
    [one] = env.rollout(TASKS, agent)
    assert one.stop_reason is StopReason.DONE
    assert one.final_reward == 2.0
    assert one.turn_rewards == [0.0, 0.0, 2.0]
    assert one.info["num_calls"] == 3
    assert one.info["num_conversations"] == 1
    for turn, (_, prompt, ids, logprobs) in zip(one.turns, agent.answers, strict=True):
        assert one.token_ids[turn.prompt_start : turn.start] == prompt
        assert one.token_ids[turn.start : turn.stop] == ids
        assert one.logprobs is not None
        assert one.logprobs[turn.start : turn.stop] == logprobs
        assert turn.exact
        assert turn.policy_version == 3
    assert [message["role"] for message in one.messages] == ["user", "assistant"] * 3


def test_a_command_finds_the_endpoint_and_its_task_and_is_graded_by_its_exit_code() -> None:
    tasks = [{"name": "Ada", "code": 0, "seed": 5}, {"name": "Bob", "code": 3, "seed": 6}]
    seen: list[ProgramOutcome] = []
    env = AgentProgramEnv(TOKENIZER, program=COMMAND)
    good, bad = env.rollout(tasks, RecordingAgent(TOKENIZER, texts=["fine"]))
    assert (good.final_reward, good.info["success"]) == (1.0, True)
    assert (bad.final_reward, bad.info["success"]) == (0.0, False)

    def by_output(task: Any, outcome: ProgramOutcome) -> tuple[float, dict[str, Any]]:
        seen.append(outcome)
        assert outcome.folder is not None
        assert (outcome.folder / "task.json").exists()
        return float(task["name"] in outcome.output), {"success": True}

    [graded] = play(COMMAND, tasks=tasks[:1], grade=by_output, texts=["fine"])
    assert seen[0].output.split() == ["Ada", "5", "fine", "fine"]
    assert graded.final_reward == 1.0
    assert not seen[0].folder.exists()  # type: ignore[union-attr]


def test_calls_are_rewarded_by_id_by_header_by_function_and_late() -> None:
    ids, endpoints = list[str](), list[Any]()

    def program(task: Any, endpoint: Any) -> None:
        client = Client(endpoint)
        endpoints.append(endpoint)
        for number in range(4):
            headers = {"x_agentsgym_reward": '{"pace": 0.5}'} if number == 2 else {}  # of the call before it
            ids.append(client.chat([user(f"go {number}")], headers)["id"])
        assert client.post("/v1/reward", {"call": ids[0], "reward": 1})[0] == 200
        endpoint.reward(0.25, ids[2])

        def late() -> None:
            assert client.post("/v1/reward", {"call": ids[3], "reward": {"right": 2.0}, "final": True})[0] == 200

        threading.Timer(0.2, late).start()

    [one] = play(program, {"reward_timeout_s": 20.0})
    assert one.turn_rewards == [1.0, 0.5, 0.25, 2.0]
    assert [turn.components for turn in one.turns] == [None, {"pace": 0.5}, None, {"right": 2.0}]
    assert one.final_reward == 3.75
    with pytest.raises(CallError, match="the rewards are final once the program has ended"):
        endpoints[0].reward(1.0)


def test_a_reward_that_is_not_a_number_is_rejected() -> None:
    answers: list[tuple[int, Any]] = []

    def program(task: Any, endpoint: Any) -> None:
        client = Client(endpoint)
        client.speak(user("go"))
        for body in (
            {"reward": "much"},
            {"reward": {"": 1}},
            {"rewards": 1},
            {},
            {"reward": 1, "call": 3},
            {"reward": 1, "call": "x"},
            [1],
        ):
            answers.append(client.post("/v1/reward", body))

    [one] = play(program)
    assert [status for status, _ in answers] == [400] * 5 + [404, 400]
    assert "finite number" in answers[0][1]["error"]["message"]
    assert one.final_reward == 0.0


@pytest.mark.parametrize("kind", ["raises", "no call", "crashes after a call", "hangs"])
def test_a_broken_program_fails_its_own_episode_alone(kind: str) -> None:
    def program(task: Any, endpoint: Any) -> float:
        if task["broken"]:
            if kind == "no call":
                return 1.0
            if kind != "raises":
                Client(endpoint).speak(user("go"))
            if kind == "hangs":
                threading.Event().wait(10)
            raise ValueError("my bug")
        return conversation(task, endpoint)

    tasks = [{"broken": True}, {"broken": False}]
    broken, good = play(program, tasks=tasks, turn_timeout_s=2.0)
    assert good.final_reward == 2.0
    assert broken.failed
    expected = {"no call": "without calling the policy", "hangs": "turn_timeout_s"}.get(kind, "ValueError: my bug")
    assert expected in broken.error
    # Whether the turn of a step that took too long is recorded depends on what ends first.
    assert len(broken.turns) in {"crashes after a call": {1}, "hangs": {0, 1}}.get(kind, {0})


def test_nothing_is_left_of_a_command_that_hangs_with_children() -> None:
    before = {one.name for one in Path(tempfile.gettempdir()).glob("agentsgym-program-*")}
    hang = """
import subprocess, time
child = subprocess.Popen(["sleep", "300"])
open(sys.argv[3], "w").write(str(child.pid))
time.sleep(300)
"""
    script = COMMAND[2].replace("sys.exit(int(sys.argv[2]))", hang)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pid"
        command = [sys.executable, "-c", script, "a", "0", str(file)]
        [one] = play(command, turn_timeout_s=3.0)
        assert one.failed
        pid = int(file.read_text())
    assert not _is_running(pid)
    assert {one.name for one in Path(tempfile.gettempdir()).glob("agentsgym-program-*")} <= before


def _is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_a_program_learns_that_its_prompt_is_too_long_and_may_go_on() -> None:
    statuses: list[Any] = []

    def program(task: Any, endpoint: Any) -> float:
        client = Client(endpoint)
        client.speak(user("go"))
        status, body = client.post("/v1/chat/completions", {"model": "x", "messages": [user("long " * 200)]})
        statuses.append((status, body["error"]["code"]))
        client.speak(user("shorter"))
        return 1.0

    [one] = play(program, {"max_trajectory_tokens": 120})
    assert statuses == [(400, "context_length_exceeded")]
    assert len(one.turns) == 2
    assert one.info["num_rejected_calls"] == 1
    assert one.stop_reason is StopReason.DONE


def test_an_episode_without_turns_left_ends_the_program() -> None:
    statuses: list[int] = []

    def program(task: Any, endpoint: Any) -> float:
        client = Client(endpoint)
        for _ in range(5):
            statuses.append(client.post("/v1/chat/completions", {"model": "x", "messages": [user("go")]})[0])
        return 1.0

    [one] = play(program, {"max_steps_per_episode": 2})
    assert statuses == [200, 200, 403, 403, 403]
    assert one.stop_reason is StopReason.MAX_TURNS
    assert (len(one.turns), one.final_reward) == (2, 1.0)


def test_coroutines_share_an_event_loop_and_end_with_their_episodes() -> None:
    loops: list[Any] = []
    left: list[int] = []

    async def program(task: Any, endpoint: Any) -> float:
        loops.append(asyncio.get_running_loop())
        await asyncio.to_thread(Client(endpoint).speak, user("go"))
        try:
            await asyncio.Event().wait()
        finally:
            left.append(task["seed"])

    for seed in range(2):
        [one] = play(program, {"max_steps_per_episode": 5}, tasks=[{"seed": seed}], turn_timeout_s=0.5)
        assert one.failed
    assert loops[0] is loops[1]
    assert left == [0, 1]


async def endless(task: Any, endpoint: Any) -> float:
    """Calls until an error is raised, in a conversation that grows."""
    client, messages = Client(endpoint), [user("go")]
    while True:
        messages += [await asyncio.to_thread(client.speak, *messages), user("on")]


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"max_steps_per_episode": 3}, StopReason.MAX_TURNS), ({"max_trajectory_tokens": 90}, StopReason.MAX_TOKENS)],
)
def test_a_program_that_raises_at_the_end_of_its_budget_is_truncated(config: Any, reason: StopReason) -> None:
    outcomes: list[ProgramOutcome] = []
    [one] = play(endless, config, texts=["left"], grade=lambda task, outcome: outcomes.append(outcome) or 0.5)
    assert (one.stop_reason, one.error, one.final_reward) == (reason, None, 0.5)
    assert len(one.turns) >= 3
    assert [outcome.is_complete for outcome in outcomes] == [False]


def test_a_program_whose_first_prompt_is_too_long_fails() -> None:
    [one] = play(endless, {"max_trajectory_tokens": 5})
    assert one.failed
    assert "context_length_exceeded" in one.error


def test_stop_texts_cut_the_sampled_tokens_and_the_conversation_continues() -> None:
    def program(task: Any, endpoint: Any) -> float:
        client = Client(endpoint)
        answer = client.chat([user("go")], stop=["STOP"], logprobs=True)
        [choice] = answer["choices"]
        assert choice["message"]["content"] == "left "
        assert choice["finish_reason"] == "stop"
        client.speak(user("go"), choice["message"], user("on"))
        return 1.0

    agent = RecordingAgent(TOKENIZER, texts=["left STOP right"])
    [one] = AgentProgramEnv(TOKENIZER, program=program).rollout(TASKS, agent)
    first, second = one.turns
    sampled = agent.answers[0][2]
    kept = one.token_ids[first.start : first.stop]
    assert sampled[: len(kept)] == kept
    assert TOKENIZER.decode(kept) == "left STOP"
    assert (second.prompt_start, one.info["num_conversations"]) == (0, 1)


def test_several_answers_are_turns_with_one_prompt() -> None:
    def program(task: Any, endpoint: Any) -> float:
        answer = Client(endpoint).chat([user("go")], n=3, max_tokens=2)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        return 1.0

    [one] = play(program)
    assert len(one.turns) == 3
    prompts = [one.token_ids[turn.prompt_start : turn.start] for turn in one.turns]
    assert prompts[0] == prompts[1] == prompts[2]
    assert all(turn.stop - turn.start <= 2 for turn in one.turns)


def test_programs_that_wait_for_each_other_are_answered() -> None:
    first_is_answered = threading.Event()

    def program(task: Any, endpoint: Any) -> float:
        client = Client(endpoint)
        if task["number"]:
            assert first_is_answered.wait(30)
        client.speak(user("go"))
        first_is_answered.set()
        return 1.0

    both = play(program, tasks=[{"number": 0}, {"number": 1}])
    assert [one.final_reward for one in both] == [1.0, 1.0]


def test_many_programs_are_answered_in_batches() -> None:
    env, agent = AgentProgramEnv(TOKENIZER, program=conversation), RecordingAgent(TOKENIZER)
    rollouts = env.rollout([{"seed": k} for k in range(48)], agent)
    assert {one.final_reward for one in rollouts} == {2.0}
    assert agent.most > 8
    sessions = {session for session, *_ in agent.answers}
    assert len(sessions) == 48


def test_calls_form_a_tree() -> None:
    def program(task: Any, endpoint: Any) -> None:
        client = Client(endpoint)
        plan = client.chat([user("plan the trip")])
        message = plan["choices"][0]["message"]
        client.speak(user("you are a helper"), user(message["content"]))  # an agent that receives the answer
        again = [client.speak(user("plan the trip"), message, user("shorter")) for _ in range(2)]  # and a retry
        client.chat([user("something else")], {"x_agentsgym_parent": plan["id"]})
        client.speak(user("plan the trip"), message, user("shorter"), again[1], user("thanks"))
        client.speak(user("good bye"))

    texts = [f"a long enough answer {number}" for number in range(7)]
    [one] = play(program, texts=texts)
    assert [turn.parent for turn in one.turns] == [None, 0, 0, 0, 0, 3, None]
    assert one.info["num_conversations"] == 4
    assert len({turn.prompt_start for turn in one.turns}) == 7  # a branch copies what it continues
    for turn in one.turns[2:4]:
        first = one.turns[0]
        whole = one.token_ids[first.prompt_start : first.stop]
        assert one.token_ids[turn.prompt_start : turn.prompt_start + len(whole)] == whole


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "needs a program"),
        ({"program": []}, "needs a program"),
        ({"program": ["a", 1]}, "needs a program"),
        ({"program": conversation, "grade": 3}, "grade must be a function"),
        ({"program": conversation, "env_config": {"reward_timeout_s": -1}}, "reward_timeout_s"),
        ({"program": conversation, "env_config": {"episodes_per_trial": 2}}, "episodes_per_trial"),
    ],
)
def test_bad_settings_are_named(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        AgentProgramEnv(TOKENIZER, **given)


class Talker(AgentProgramEnv):
    """A program that is a method."""

    async def program(self, task: Any, endpoint: Any) -> str:
        return (await asyncio.to_thread(Client(endpoint).speak, user("go")))["content"]

    async def _grade(self, task_data: Any, outcome: ProgramOutcome) -> dict[str, float]:
        return {"length": float(len(outcome.output))}


def test_a_subclass_has_its_own_program_and_grade() -> None:
    [one] = Talker(TOKENIZER).rollout(TASKS, RecordingAgent(TOKENIZER, texts=["four"]))
    assert one.final_reward == 4.0
    assert one.turns[0].components == {"length": 4.0}


def test_a_call_follows_the_one_whose_tool_calls_it_repeats_but_not_one_whose_argument_names_it_contains() -> None:
    tree, task = CallTree(), user("Which temperature is it?")
    call = {"type": "function", "id": "call00000", "function": {"name": "measure", "arguments": {"temperature": ""}}}
    answer: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert tree.add("0", [task], answer, None, None) is None
    assert tree.add("1", [user("What temperature was it?")], user("I do not know."), None, None) is None
    handed: Any = [{"role": "system", "content": "Be an expert."}, task, answer]
    assert tree.add("2", handed, user("Warm."), None, None) == 0
    result: Any = {"role": "tool", "content": "21", "tool_call_id": "call00000"}
    assert tree.add("3", [user("Go on."), result], user("Warm."), None, None) == 0
