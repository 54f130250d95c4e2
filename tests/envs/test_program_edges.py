"""Programs that misbehave: each fails alone, nothing hangs, and no text of a task is run as a script."""

import asyncio
import http.client
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_families import TRL_TEMPLATES, tokenizer_for
from program_client import Client, RecordingAgent, converse, user

from agentsgym import Action, StopReason, TurnRequest
from agentsgym.envs.AgentProgram import AgentProgramEnv
from agentsgym.envs.AgentProgram.exchange import CallTree, _stopped  # pyright: ignore[reportPrivateUsage]
from agentsgym.envs.AgentProgram.programs import RunningCommand
from agentsgym.errors import ConfigError, TaskError
from agentsgym.event_loop import run_coroutine
from agentsgym.judging.prompts import turn_question
from agentsgym.judging.rubric import Criterion
from agentsgym.processes import ProcessGroup
from agentsgym.testing import chat_tokenizer
from agentsgym.tiny import call_text

TOKENIZER, QWEN = chat_tokenizer(), tokenizer_for(TRL_TEMPLATES["qwen3"])


class Repeating(RecordingAgent):
    """Answers each prompt with tokens that depend on it alone."""

    def _answer(self, request: TurnRequest) -> Action:
        self.generator.seed(str(request.messages[-1]["content"]))
        return super()._answer(request)


def raising(error: Any) -> Any:
    def program(client: Client) -> float:
        client.speak(user("go"))
        raise error

    return program


async def odd_coroutine(task: Any, endpoint: Any) -> float:
    """Ends its own task in one of several ways."""
    await asyncio.to_thread(Client(endpoint).speak, user("go"))
    if task["kind"] == "cancels":
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(1)
    raise StopIteration


def odd_statuses(client: Client) -> float:
    for body in (None, [], {"messages": 3}, {"model": "m", "messages": []}):
        client.post("/v1/chat/completions", body)
    raise ValueError("no answer")


BAD: dict[str, Any] = {
    **{
        repr(error): raising(error)
        for error in (StopIteration(), StopAsyncIteration(), GeneratorExit(), KeyboardInterrupt(), SystemExit(1))
    },
    **{repr(error): raising(error) for error in (asyncio.CancelledError(), TimeoutError(), RecursionError())},
    "exception without text": raising(type("Odd", (Exception,), {"__str__": lambda _: 1 / 0})()),
    "next of nothing": lambda client: client.speak(user("go")) and next(iter(())),
    "no call": lambda client: 1.0,
    "bad bodies": odd_statuses,
    "an unknown call": lambda client: client.speak(user("go")) and client.post("/v1/reward", {"call": "x"})[1]["id"],
    "another key": lambda client: setattr(client, "key", "sk-other") or client.speak(user("go")),
    "a closed endpoint": lambda client: setattr(client, "host", "127.0.0.1:9") or client.speak(user("go")),
    "a stack": lambda client: BAD["a stack"](client) + 1.0,
    "a class": lambda client: client.speak(user("go")) and float.no_such_attribute,  # type: ignore[attr-defined]
}


def mixed(task: Any, endpoint: Any) -> float:
    return converse(task, endpoint) if "kind" not in task else BAD[task["kind"]](Client(endpoint))


def test_119_bad_programs_fail_alone_and_the_good_ones_sample_the_same_tokens() -> None:
    assert len(BAD) == 17
    good = [{"seed": seed} for seed in range(20)]
    bad = [{"seed": 100 + number, "kind": kind} for kind in BAD for number in range(7)]
    tasks = [task for pair in zip(bad, good * 6, strict=False) for task in pair]
    env = AgentProgramEnv(TOKENIZER, program=mixed)
    alone = env.rollout(good, Repeating(TOKENIZER))
    beside = env.rollout(tasks, Repeating(TOKENIZER), turn_timeout_s=60.0)
    assert [task["kind"] for task, one in zip(tasks, beside, strict=True) if one.failed != ("kind" in task)] == []
    expected = {one.seed: (one.token_ids, one.logprobs, one.turn_rewards) for one in alone}
    played = [one for one in beside if not one.failed]
    assert len(played) == 119
    assert all((one.token_ids, one.logprobs, one.turn_rewards) == expected[one.seed] for one in played)


@pytest.mark.parametrize("kind", ["stops", "cancels"])
def test_a_coroutine_that_ends_its_own_task_fails_alone(kind: str) -> None:
    [one] = AgentProgramEnv(TOKENIZER, program=odd_coroutine).rollout([{"kind": kind}], RecordingAgent(TOKENIZER))
    assert one.failed


CALL = """
import json, os, subprocess, sys, urllib.request
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = json.dumps({"model": "x", "messages": [{"role": "user", "content": "go"}]}).encode()
request = urllib.request.Request(url + "/chat/completions", body, {"Authorization": "Bearer " + key})
urllib.request.urlopen(request).read()
"""


def test_what_a_command_leaves_in_the_background_neither_delays_its_end_nor_outlives_it(tmp_path: Path) -> None:
    started, script = time.monotonic(), CALL
    for name in ("group", "session"):
        script += f"child = subprocess.Popen(['sleep', '300'], start_new_session={name == 'session'})\n"
        script += f"open({str(tmp_path / name)!r}, 'w').write(str(child.pid))\n"
    [one] = AgentProgramEnv(TOKENIZER, program=[sys.executable, "-c", script]).rollout([{}], RecordingAgent(TOKENIZER))
    assert (one.success, one.stop_reason) == (True, StopReason.DONE)
    assert time.monotonic() - started < 60
    if sys.platform == "linux":
        assert not [name for name in ("group", "session") if Path("/proc", (tmp_path / name).read_text()).exists()]


def test_a_command_ends_although_a_process_that_nothing_ends_keeps_its_output_open() -> None:
    """Where the system hands orphans to no supervisor: here, the command has none."""

    async def outcome() -> Any:
        script = "sleep 30 & echo $! >&2; echo out; exit 3"
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        process = await asyncio.create_subprocess_exec("sh", "-c", script, **pipes)
        folder = Path(tempfile.mkdtemp())
        group = ProcessGroup(["true"])
        group.start().wait()
        running = RunningCommand(folder, group, process)
        try:
            return await asyncio.wait_for(running.outcome, 20)
        finally:
            running.clean_up()

    ended = run_coroutine(outcome())
    os.kill(int(ended.errors), 9)
    assert (ended.output, ended.exit_code) == ("out\n", 3)


def test_the_errors_of_a_command_are_the_end_of_what_it_wrote() -> None:
    outcomes: list[Any] = []
    script = CALL + "sys.stderr.write('line\\n' * 400_000)\nraise SystemExit('the reason')"
    env = AgentProgramEnv(
        TOKENIZER, program=[sys.executable, "-c", script], grade=lambda _, outcome: outcomes.append(outcome) or 0.0
    )
    env.rollout([{}], RecordingAgent(TOKENIZER))
    assert outcomes[0].errors.endswith("the reason\n")
    assert len(outcomes[0].errors) == 2000


ARGUMENTS = "import sys; open(sys.argv[1], 'w').write(repr(sys.argv[2:]))\n"


def test_a_command_is_filled_in_one_pass_and_other_braces_stay(tmp_path: Path) -> None:
    task = {"question": "see {answer}", "answer": "42", "n": [1], "out": str(tmp_path / "arguments")}
    templates = ["{question}", "x{answer}{n}", "{{question}}", "{print $1}", '{"a": 1}', "{}", "{{answer"]
    program = [sys.executable, "-c", CALL + ARGUMENTS, "{out}", *templates]
    with pytest.raises(TaskError, match=r"names \{answer\}, which the task lacks.*did you mean 'answers'"):
        AgentProgramEnv(TOKENIZER, program=program).rollout(
            [task, {"answers": "42", "question": "", "out": "", "n": 1}], RecordingAgent(TOKENIZER)
        )
    AgentProgramEnv(TOKENIZER, program=program).rollout([task], RecordingAgent(TOKENIZER))
    expected = ["see {answer}", "x42[1]", "{question}", "{print $1}", '{"a": 1}', "{}", "{{answer"]
    assert (tmp_path / "arguments").read_text() == repr(expected)


Q = "say '{question}'"


@pytest.mark.parametrize(
    "program",
    [
        ["sh", "-c", Q],
        ["bash", "-lc", Q],
        ["/bin/bash", "-o", "pipefail", "-c", Q],
        ["sh", "-e", "-c", Q],
        ["zsh", "-ec", Q],
        ["env", "A=b", "dash", "-c", Q],
        ["env", "-i", "sh", "-c", Q],
        ["env", "-S", f"sh -c {Q}"],
        ["timeout", "5", "sh", "-c", Q],
        ["python", "-c", Q],
        ["/usr/bin/python3.11", "-u", "-c", Q],
        ["python3", f"-c{Q}"],
        ["perl", "-e", Q],
        ["perl", "-lane", Q],
        ["perl5.38", "-E", Q],
        ["ruby", "-e", Q],
        ["node", "-e", Q],
        ["node", "--eval", Q],
        ["node", f"--eval={Q}"],
        ["node", "-pe", Q],
        ["bash", f"-exec={Q}"],
        ["sh", "-c", "-x", Q],
        ["bash", "-c", "-o", "pipefail", "--", Q],
        ["sh", "-c", 'exec "$@"', "sh", "python", "-c", Q],
    ],
)
def test_a_key_in_a_script_of_an_interpreter_is_refused(program: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"\{question\} in a script or .*'my-agent', '\{question\}'.*\$1.*task\.json"):
        AgentProgramEnv(TOKENIZER, program=program)


@pytest.mark.parametrize(
    "program",
    [
        ["my-agent", "{question}"],
        ["my-agent", "-c", "{question}"],
        ["sh", "-c", 'my-agent "$1"', "sh", "{question}"],
        ["python", "agent.py", "-c", "{question}"],
        ["python3.12", "-u", "-m", "agent", "-e", "{question}"],
        ["sh", "-c", 'my-agent "$@"', "sh", "--question={question}"],
        ["python", "-c", "import my_agent", "--question={question}"],
        ["env", "A={question}", "my-agent"],
        ["sh", "-c", "awk '{print $1}' {{name}} task.json"],
        ["python", "-c", "print({'a': 1})"],
        ["python", "--", "{question}"],
        ["python", "agent.py", "{question}"],
        ["my-agent", "{name}", "{question}"],
    ],
)
def test_a_key_in_an_argument_is_right(program: list[str]) -> None:
    AgentProgramEnv(TOKENIZER, program=program).check_task({"question": "-cprint()", "name": "python"})


@pytest.mark.parametrize(
    ("program", "task"),
    [
        (["sh", "-c", "awk '{print $1}' task.json"], {"print $1": "-c"}),  # not an identifier
        (["python", "{file}"], {"file": "-cimport os"}),
        (["env", "-i", "python3", "-u", "{file}"], {"file": "-c import os"}),
        (["bash", "{file}", "{text}"], {"file": "-c", "text": "id"}),
        (["sh", "-c", "{{text}}", "sh", "perl", "{text}"], {"text": "-e1"}),
    ],
)
def test_a_value_that_is_a_script_or_an_option_is_refused(program: list[str], task: dict[str, str]) -> None:
    env = AgentProgramEnv(TOKENIZER, program=program)
    env.check_task(dict.fromkeys(task, "x") if "file" in task else {"text": "x"})
    with pytest.raises(TaskError, match=r"\} in a script or an option of an interpreter, .*put '--' before"):
        env.check_task(task)


def test_an_answer_that_was_not_delivered_gets_no_reward_of_the_outcome() -> None:
    go = threading.Event()

    class Slow(RecordingAgent):
        def act(self, requests: Any) -> list[Action]:
            if requests[0].messages[-1]["content"] == "slow":
                go.wait(30)
            return super().act(requests)

    def program(task: Any, endpoint: Any) -> float:
        client = Client(endpoint)
        client.speak(user("used"))
        client.timeout = 0.3
        with pytest.raises(TimeoutError):
            client.speak(user("slow"))
        time.sleep(0.2)
        go.set()
        return 1.0

    [one] = AgentProgramEnv(TOKENIZER, program=program).rollout([{}], Slow(TOKENIZER))
    assert (one.turn_rewards, one.info["num_undelivered_calls"]) == ([1.0, 0.0], 1)


def test_the_id_of_a_tool_call_in_a_text_identifies_it() -> None:
    tree = CallTree()
    call = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {}}}
    answer: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert tree.add("0", [user("Look.")], answer, None, None) is None
    assert tree.add("1", [user("Calling tools: [{'id': 'call00000'}]")], user("Warm."), None, None) == 0


@pytest.mark.parametrize("stop", ["END", "a"])
def test_a_stop_text_is_found_with_few_decodings(stop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chat_format = AgentProgramEnv(TOKENIZER, program=["x"])._format_with(())  # pyright: ignore[reportPrivateUsage]
    assert chat_format is not None
    text = "x" * 4000 + "END" + "y" * 4000
    ids = [one for letter in text for one in TOKENIZER(letter, add_special_tokens=False)["input_ids"]]
    decode, lengths = type(chat_format).decode, list[int]()
    counted = lambda self, some: lengths.append(len(some)) or decode(self, some)  # noqa: E731
    monkeypatch.setattr(type(chat_format), "decode", counted)
    action, found = _stopped(Action(text=text, token_ids=ids), [stop], chat_format)
    assert (found, len(action.token_ids or ())) == (("END", 4003) if stop == "END" else (None, len(ids)))
    assert sum(lengths) < 2 * len(ids)


@pytest.mark.parametrize(
    ("written", "content", "num_calls"),
    [
        (call_text("look", {"at": "STOP"}), call_text("look", {"at": "STOP"}).partition("STOP")[0], 0),
        (call_text("look", {"at": "door"}) + "Then STOP.", "Then", 1),
        ("<think>Hm.</think>Go. STOP", "Go.", 0),
        ("<think>Hm. STOP", "", 0),
    ],
)
def test_a_stop_text_is_not_returned_wherever_it_is(written: str, content: str, num_calls: int) -> None:
    schema = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    def program(task: Any, endpoint: Any) -> float:
        client = Client(endpoint)
        first = client.speak(user("go"), tools=[schema], stop=["STOP"])
        assert (first["content"], len(first.get("tool_calls", ()))) == (content, num_calls)
        results = [{"role": "tool", "content": "x", "tool_call_id": one["id"]} for one in first.get("tool_calls", ())]
        client.speak(user("go"), first, *(results or [user("on")]), tools=[schema])
        return 1.0

    [one] = AgentProgramEnv(QWEN, program=program).rollout([{}], RecordingAgent(QWEN, texts=[written]))
    assert (one.error, one.info["num_conversations"]) == (None, 1)
    first = one.turns[0]
    assert QWEN.decode(one.token_ids[first.start : first.stop]) == written[: written.index("STOP") + 4]


def test_a_completion_that_its_end_token_ended_is_continued_without_it() -> None:
    end = TOKENIZER.eos_token_id

    class Ending(RecordingAgent):
        def _answer(self, request: TurnRequest) -> Action:
            ids = [*TOKENIZER("well", add_special_tokens=False)["input_ids"], end]
            self.answers.append((request.session_id, [*request.token_ids], ids, []))
            return Action(text="well", token_ids=ids, logprobs=[-1.0] * len(ids))

    def program(task: Any, endpoint: Any) -> float:
        client, prompt = Client(endpoint), "go"
        for _ in range(3):
            status, body = client.post("/v1/completions", {"model": "x", "prompt": prompt})
            assert status == 200
            prompt += body["choices"][0]["text"] + " and"
        return 1.0

    agent = Ending(TOKENIZER)
    [one] = AgentProgramEnv(TOKENIZER, program=program).rollout([{}], agent)
    assert [turn.parent for turn in one.turns] == [None, 0, 1]
    assert one.info["num_conversations"] == 1
    _, before, ids, _ = agent.answers[0]
    assert agent.answers[1][1][: len(before) + len(ids) - 1] == [*before, *ids[:-1]]
    assert end not in agent.answers[2][1]


def test_models_and_counts_have_the_form_of_each_sdk() -> None:
    found: list[Any] = []

    def program(task: Any, endpoint: Any) -> float:
        ours = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        client, headers = Client(endpoint), {"x-api-key": endpoint.api_key, "anthropic-version": "2023-06-01"}
        found.extend([[one.id for one in ours.models.list()], ours.models.retrieve("policy").object])
        for path in ("/v1/models", "/v1/models/policy"):
            connection = http.client.HTTPConnection(client.host, timeout=30)
            connection.request("GET", path, headers=headers)
            found.append(json.loads(connection.getresponse().read()))
            connection.close()
        found.append(client.post("/v1/messages/count_tokens", {"model": "m", "messages": [user("go")]})[1])
        begun = {"model": "m", "messages": [user("go"), {"role": "assistant", "content": "{"}], "max_tokens": 9}
        assert client.post("/v1/messages/count_tokens", begun)[0] == 200
        status, body = client.post("/v1/messages", begun)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert "the last message must be the user's" in body["error"]["message"]
        client.speak(user("go"))
        return 1.0

    [one] = AgentProgramEnv(TOKENIZER, program=program).rollout([{}], RecordingAgent(TOKENIZER))
    assert one.error is None
    entry = {"id": "policy", "type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}
    whole = {"has_more": False, "first_id": "policy", "last_id": "policy", "data": [entry]}
    assert found == [["policy"], "model", whole, entry, {"input_tokens": one.turns[0].start}]


def test_a_judge_of_a_turn_sees_its_conversation_alone() -> None:
    def program(task: Any, endpoint: Any) -> float:
        client, first = Client(endpoint), [user("conversation A")]
        first += [client.speak(*first), user("more of A")]
        client.speak(user("conversation B"))
        client.speak(*first)
        return 1.0

    [one] = AgentProgramEnv(TOKENIZER, program=program).rollout([{}], RecordingAgent(TOKENIZER, texts=["fine", "good"]))
    asked = turn_question(one, 2, [Criterion("judge", "Good?")], reference=None, max_characters=4000)
    text = asked.messages[-1]["content"]
    assert "conversation A" in text
    assert "more of A" in text
    assert "conversation B" not in text


def test_white_space_makes_another_message_of_a_user_and_none_of_an_answer() -> None:
    def program(task: Any, endpoint: Any) -> float:
        client = Client(endpoint)
        answer = client.speak(user("go"))["content"]
        for first, second in (("go", f" {answer}\n"), (" go\n", answer)):
            client.speak(user(first), {"role": "assistant", "content": second}, user(f"on {first}"))
        return 1.0

    [one] = AgentProgramEnv(TOKENIZER, program=program).rollout([{}], RecordingAgent(TOKENIZER, texts=["four"]))
    assert one.info["num_conversations"] == 2
