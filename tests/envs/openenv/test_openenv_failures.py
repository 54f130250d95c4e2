"""What goes wrong with an OpenEnv server is a failed episode or a sentence before play, and never another game."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openenv_stub import CountUp, Stub, error, observation, schema_of
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection

from agentsgym import Action, ConfigError, EnvError, EnvProcessPool, ScriptedAgent, StopReason, Trajectory
from agentsgym.envs import OpenEnvEnv, OpenEnvServer
from agentsgym.envs.OpenEnv import connections
from agentsgym.envs.OpenEnv.conversion import UnreadableActionError, object_in
from agentsgym.envs.OpenEnv.wire import Connection

STUB = Path(__file__).parent / "openenv_stub.py"
UNCHECKED = {"check_seed": False, "check_capacity": False}
AS_TEXT = {"format": "text", "action": "message", "observation": "text"}


@pytest.fixture(autouse=True)
def quick_and_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports come again: what is remembered of a server is another one's."""
    monkeypatch.setattr(connections, "_checked", [])
    monkeypatch.setattr(connections, "_FULL_GRACE_S", 0.05)


class Faulty(CountUp):
    """Answers the step "bad" as a test demands; None hangs up."""

    answer: Any = None

    def __call__(self, message: dict[str, Any]) -> Any:
        return self.answer if message.get("data") == {"message": "bad"} else super().__call__(message)


def faulty(answer: Any) -> type[Faulty]:
    return type("OneFault", (Faulty,), {"answer": answer})


def play(
    stub: Stub, *texts: str, config: dict[str, Any] | None = None, num_rollouts: int = 1, **server: Any
) -> list[Trajectory]:
    env = OpenEnvEnv(None, {**UNCHECKED, **(config or {})}, server=OpenEnvServer(url=stub.url, **server))
    return env.rollout([{"seed": 1}], ScriptedAgent([*texts], repeat_last=True), num_rollouts)


def assert_refused(server: Any, problem: str, config: dict[str, Any] | None = None) -> None:
    """Nothing is played there, and one sentence states why."""
    with pytest.raises(ConfigError, match=problem):
        OpenEnvEnv(None, config, server=server).rollout([{"seed": 1}], ScriptedAgent(["a"]))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("no JSON {", r"responded to 'step' with invalid JSON: 'no JSON \{'"),
        (b"\xff\x00", "responded to 'step' with invalid JSON"),
        ("[" * 5000, "responded to 'step' with invalid JSON"),
        ("[1, 2]", r"returned an invalid response to 'step': \[1, 2\] \(does it use another protocol version\?\)"),
        ('{"type": "observation"}', "returned an invalid response to 'step'"),
        (observation(reward="much"), "returned an invalid response to 'step'"),
        (observation(done="no"), "returned an invalid response to 'step'"),
        ('{"type": "observation", "data": {"observation": [], "reward": 1}}', "returned an invalid response to 'step'"),
        ('{"type": "observation", "data": {"observation": {"text": ""}, "reward": NaN}}', "reward"),
        (
            error("SESSION_ERROR", "the game is gone"),
            r"could not create an environment: the game is gone \(SESSION_ERROR\)",
        ),
        (error("UNKNOWN_TYPE", "what?"), r"raised: what\? \(UNKNOWN_TYPE\)"),
        ({"type": "error", "data": "bad"}, "'bad'"),
        ({"type": "error"}, "None"),
        (None, "closed the connection during 'step'"),
    ],
)
def test_nonsense_fails_its_own_episode_and_no_other(answer: Any, problem: str) -> None:
    games: list[Any] = [faulty(answer), CountUp]
    with Stub(lambda: games.pop(0)() if games else CountUp()).running() as stub:
        one, other = play(stub, "bad", num_rollouts=2)
        num_connections = stub.num_connections
    assert one.stop_reason is StopReason.FAILED
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(one.error)
    assert other.final_reward == 1.5
    assert num_connections == 2  # nothing was opened again


def test_a_step_that_takes_too_long_is_given_up_and_its_late_answer_is_nobodys() -> None:
    class Slow(CountUp):
        def __call__(self, message: dict[str, Any]) -> Any:
            if message["type"] == "step":
                time.sleep(0.3)
            return super().__call__(message)

    with Stub(Slow).running() as stub:
        [one] = play(stub, "a", step_timeout_s=0.1)
        assert "did not respond to 'step' within 0.1 s; the connection was closed" in str(one.error)
        assert stub.num_connections == 1


def test_a_connection_that_broke_stays_broken() -> None:
    with Stub(faulty(None)).running() as stub:
        connection = Connection(OpenEnvServer(url=stub.url), stub.url)
        connection.reset({"seed": 1})
        for _ in range(2):
            with pytest.raises(EnvError, match="closed the connection during 'step'"):
                connection.step({"message": "bad"})
        assert stub.num_connections == 1


def test_a_game_that_is_over_or_not_begun_is_sent_no_step() -> None:
    with Stub().running() as stub:
        connection = Connection(OpenEnvServer(url=stub.url), stub.url)
        with closing(connection):
            for is_begun in (False, True):
                with pytest.raises(EnvError, match="the episode has ended or was not reset"):
                    connection.step({"message": "a"})
                if not is_begun:
                    connection.reset({})
                    assert [connection.step({"message": "a"})["done"] for _ in range(3)] == [False, False, True]
        assert len(stub.of_type("step")) == 3


def test_a_server_may_leave_out_what_is_not_there() -> None:
    bare = {"type": "observation", "data": {"observation": {"text": "hm"}}}
    with Stub(faulty(bare)).running() as stub:
        [one] = play(stub, "bad", "a")
    assert one.messages[2]["content"] == "hm"
    assert one.turn_rewards == [0.0, 0.25, 0.5, 0.75]


def test_a_game_that_is_done_at_its_reset_fails() -> None:
    def game(message: dict[str, Any]) -> Any:
        return observation(done=True) if message["type"] == "reset" else {"type": "state", "data": {}}

    with Stub(lambda: game).running() as stub:
        [one] = play(stub, "a")
        assert stub.num_live == 0
    assert "returned done=True from a reset" in str(one.error)


def test_an_action_that_is_refused_is_invalid() -> None:
    details = [{"loc": ["message"], "msg": "too short", "type": "x"}]
    with Stub(faulty(error("VALIDATION_ERROR", "Invalid message", errors=details))).running() as stub:
        [one] = play(stub, "bad", "a", config={"invalid_reward": -0.25})
    assert one.messages[2]["content"] == "That action was rejected. Invalid message: message: too short"
    assert [turn.invalid for turn in one.turns] == [True, False, False, False]
    assert one.turn_rewards == [-0.25, 0.25, 0.5, 0.75]


def test_a_game_that_raises_fails_the_episode_or_refuses_the_action() -> None:
    with Stub(faulty(error("EXECUTION_ERROR", "illegal move"))).running() as stub:
        [failed] = play(stub, "bad", "a")
        [refused] = play(stub, "bad", "a", config={"execution_error": "invalid"})
    assert "raised: illegal move (EXECUTION_ERROR)" in str(failed.error)
    assert refused.messages[2]["content"] == "That action was rejected. illegal move"
    assert refused.final_reward == 1.5


@pytest.mark.parametrize(
    ("make_stub", "problem"),
    [
        (lambda: Stub(status=HTTPStatus.UNAUTHORIZED), "HTTP status 401"),
        (lambda: Stub(schemas="<html>"), "with invalid JSON: b'<html>'"),
        (lambda: Stub(schemas="[]"), "with JSON that is not an object"),
        (lambda: Stub(schemas={"action": 3}), "must return the schema of its actions at /schema"),
        (lambda: Stub(schemas={"action": {"type": "array"}, "observation": {}}), "must be a JSON schema of the type"),
        (
            lambda: Stub(lambda: lambda _: error("FACTORY_ERROR", "no GPU")),
            r"could not create an environment: no GPU \(FACTORY_",
        ),
        (lambda: Stub(lambda: lambda _: error("UNKNOWN_TYPE", "state?")), r"does not support 'state': state\?"),
        (lambda: Stub(lambda: lambda _: '{"jsonrpc": "2.0"}'), "an invalid response"),
        (lambda: Stub(lambda: lambda _: None), "closed the connection during 'state'"),
    ],
)
def test_a_server_that_cannot_play_is_a_sentence_before_play(make_stub: Callable[[], Stub], problem: str) -> None:
    with make_stub().running() as stub:
        assert_refused(stub.url, problem)
        assert not stub.of_type("reset")


def test_no_server_at_all_is_a_sentence_before_play() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert_refused(url, rf"^the OpenEnv server at {url} cannot be reached: .*refused.*\(is it running")
    assert_refused(url, rf"^the OpenEnv server at {url} cannot be reached: .*refused", AS_TEXT)
    assert_refused(None, "requires a server")


def test_a_server_that_is_silent_is_not_waited_for() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        server = OpenEnvServer(url=f"ws://127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=0.1)
        assert_refused(server, r"did not respond within 0\.1 s", AS_TEXT)


def test_an_answer_in_drops_is_not_waited_for() -> None:
    class Drip(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(HTTPStatus.OK)
            self.end_headers()
            with suppress(OSError):  # the client is gone
                for _ in range(100):
                    self.wfile.write(b" ")
                    time.sleep(0.02)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Drip) as drip:
        threading.Thread(target=drip.serve_forever).start()
        server = OpenEnvServer(url=f"http://127.0.0.1:{drip.server_port}", connect_timeout_s=0.1)
        try:
            assert_refused(server, r"did not send a complete response within 0\.1 s")
        finally:
            drip.shutdown()


# Headers and settings


def test_headers_come_from_the_environment_and_are_written_down_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with Stub().running() as stub:
        server = OpenEnvServer(url=stub.url, headers={"Authorization": "Bearer ${STUB_TOKEN}", "X-Price": "$$3"})
        env = OpenEnvEnv(None, server=server)
        monkeypatch.delenv("STUB_TOKEN", raising=False)
        with pytest.raises(ConfigError, match="needs the environment variable STUB_TOKEN, which is not set"):
            env.rollout([{"seed": 1}], ScriptedAgent(["a"]))
        monkeypatch.setenv("STUB_TOKEN", "s3cret")
        [one] = env.rollout([{"seed": 1}], ScriptedAgent(["a"] * 3))
        assert {(one["Authorization"], one["X-Price"]) for one in stub.headers} == {("Bearer s3cret", "$3")}
    assert one.error is None
    assert b"s3cret" not in pickle.dumps(env)
    assert "s3cret" not in repr(server) + repr(env.interface) + repr(env.env_config)


@pytest.mark.parametrize("token", ["s3cret\n", "s3cret\r\nX-Evil: 1", "s3cret\u20ac"])
@pytest.mark.parametrize("config", [{}, AS_TEXT])
def test_a_header_that_cannot_be_sent_is_not_shown(
    token: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_TOKEN", token)
    server = OpenEnvServer(url="http://127.0.0.1:1", headers={"Authorization": "Bearer ${STUB_TOKEN}"})
    with pytest.raises(ConfigError, match=r"headers\['Authorization'\] must be one line of printable ASCII") as raised:
        OpenEnvEnv(None, config, server=server).rollout([{"seed": 1}], ScriptedAgent(["a"]))
    assert "s3cret" not in "".join(traceback.format_exception(raised.value))


def test_no_redirect_is_followed_with_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Redirecting(Stub):
        def answer_http(self, connection: ServerConnection, request: Request) -> Response | None:
            answer = super().answer_http(connection, request)
            if request.path == "/ws":
                answer = connection.respond(HTTPStatus.TEMPORARY_REDIRECT, "")
                answer.headers["Location"] = other.url.replace("http", "ws") + "/ws"
            return answer

    monkeypatch.setenv("STUB_TOKEN", "s3cret")
    with Stub().running() as other, Redirecting().running() as stub:
        server = OpenEnvServer(url=stub.url, headers={"X-Key": "${STUB_TOKEN}"})
        assert_refused(server, "with HTTP status 307: is it an OpenEnv server")
        assert not other.headers


@pytest.mark.parametrize(
    ("settings_of_server", "problem"),
    [
        ({}, "requires exactly one of url and command, got neither"),
        ({"url": "http://x", "command": ["x"]}, "requires exactly one of url and command, got both"),
        ({"url": "x:80"}, "OpenEnvServer.url must be a URL such as"),
        ({"url": "http://x:port"}, "OpenEnvServer.url must be a URL such as"),
        ({"url": "file:///etc/passwd"}, "OpenEnvServer.url must be a URL such as"),
        ({"url": "http://me:secret@x"}, "must not contain a user or a password"),
        ({"url": "http://x/?a=1"}, "must not have a query"),
        ({"command": "python server.py"}, "command must be a list"),
        ({"command": []}, "command must be a list"),
        ({"url": "http://x", "step_timeout_s": 0}, "step_timeout_s must be a positive number, got 0"),
        ({"url": "http://x", "headers": {"a": 3}}, "headers must be a dict of strings"),
        ({"url": "http://x", "headers": {"a b": "3"}}, "headers must be a dict with header names"),
        ({"url": "http://x", "max_message_bytes": 0}, "max_message_bytes must be a positive int"),
    ],
)
def test_settings_of_a_server_are_checked(settings_of_server: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        OpenEnvServer(**settings_of_server)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"action": "massage"}, "must be a field of the actions of .*, got 'massage'; did you mean 'message'"),
        ({"action": 3}, r"env_config\['action'\] must be a field's name"),
        ({"observation": ""}, r"env_config\['observation'\] must be"),
        ({"execution_error": "ignored"}, "execution_error"),
        ({"server": "http://localhost:1"}, r"not registered with register_server"),
    ],
)
def test_a_configuration_is_checked_before_play(config: dict[str, Any], problem: str) -> None:
    with Stub().running() as stub:
        assert_refused(None if "server" in config else stub.url, problem, config)


def test_text_that_could_be_any_of_several_fields_is_refused() -> None:
    with Stub(schemas={"action": schema_of("one", "two"), "observation": {}}).running() as stub:
        assert_refused(stub.url, "have the fields one, two: set env_config", {"format": "text"})


# A server that is started here


def started(*command: str, **options: Any) -> OpenEnvServer:
    return OpenEnvServer(command=[sys.executable, *command], **options)


def test_a_program_is_started_once_and_ends_with_the_environment() -> None:
    env = OpenEnvEnv(None, server=started(str(STUB), "{port}"))
    for _ in range(2):
        assert env.rollout([{"seed": 1}], ScriptedAgent(["a"] * 3), 2)[1].final_reward == 1.5
    url = pickle.loads(pickle.dumps(env))._known_url
    assert url.startswith("http://127.0.0.1:")
    other = OpenEnvEnv(None, AS_TEXT, server=url)
    assert other.rollout([{"seed": 1}], ScriptedAgent(["a"] * 3))[0].final_reward == 1.5
    env.close()
    assert_refused(url, "refused")


def test_a_program_ends_with_a_process_that_was_killed() -> None:
    script = f"""
import sys, time
from agentsgym.envs.OpenEnv.connections import LocalServer
from agentsgym.envs import OpenEnvServer
server = LocalServer(OpenEnvServer(command=[sys.executable, {str(STUB)!r}, "{{port}}"]))
print(server.port, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        socket.create_connection(("127.0.0.1", port)).close()
        process.kill()
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return
        except ConnectionResetError:  # it was accepted by a listener that is just closing
            pass
        time.sleep(0.05)
    pytest.fail("the server plays on")


@pytest.mark.parametrize("pool", [None, EnvProcessPool(1)], ids=["here", "processes"])
def test_a_program_that_ended_is_started_again_for_other_games(pool: EnvProcessPool | None) -> None:
    env = OpenEnvEnv(None, UNCHECKED, server=started(str(STUB), "{port}"))
    with closing(env), pool or nullcontext():
        assert env.rollout([{"seed": 1}], ScriptedAgent(["a"] * 3), pool=pool)[0].error is None
        process = env._connections._local._process
        process.kill()
        process.wait()
        assert env.rollout([{"seed": 1}], ScriptedAgent(["a"] * 3), pool=pool)[0].error is None


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        (OpenEnvServer(command=["no such program"]), "cannot be started: .*No such file"),
        (started("-c", "import sys; print('no', 'GPU'); sys.exit(3)"), "exited with code 3; it printed:\nno GPU"),
        (
            started("-c", "import time; time.sleep(60)", start_timeout_s=0.3),
            r"did not respond at http://127.0.0.1:\d+/health within 0.3 s: does it listen on .*printed nothing",
        ),
    ],
)
def test_a_program_that_does_not_serve_is_a_sentence(server: OpenEnvServer, problem: str) -> None:
    assert_refused(server, problem)


# Reading JSON out of what an agent answers


WORDS = st.text('a"é {}[]:\\\n', max_size=9)


@settings(max_examples=50)
@given(
    st.dictionaries(WORDS, st.recursive(st.none() | st.booleans() | st.integers() | WORDS, st.lists, max_leaves=5)),
    st.text('so: "[]}\n', max_size=9),
    WORDS,
    st.booleans(),
)
def test_the_object_is_found_wherever_it_stands(value: dict[str, Any], before: str, behind: str, fenced: bool) -> None:
    text = json.dumps(value).replace("`", "\\u0060")
    text = f"```json\n{text}\n```" if fenced else text
    assert object_in(f"{before}{text}{behind}", {}) == value


@pytest.mark.parametrize("text", ["", "up", "[1]", '{"a": ', "3", "{" * 20_000, '{"a": 1' + "[" * 20_000])
def test_what_holds_no_object_is_reported_to_the_agent(text: str) -> None:
    with pytest.raises(UnreadableActionError, match=r"Answer with one JSON object with the fields a, b\."):
        object_in(text, {"a": {}, "b": {}})


def test_an_empty_answer_is_invalid_and_never_sent() -> None:
    with Stub().running() as stub:
        [one] = play(stub, "<think>hm", " ", config={"error_allowance": 1})
        assert not stub.of_type("step")
    assert one.stop_reason is StopReason.INVALID


def test_calls_that_were_cut_off_are_not_made() -> None:
    schemas = {"action": schema_of("piece", "steps"), "observation": schema_of("text")}
    with Stub(schemas=schemas).running() as stub:
        env = OpenEnvEnv(None, {**UNCHECKED, "format": "tools"}, server=stub.url)
        cut = Action(text='<tool_call>{"name": "act"', finish_reason="length")
        [one] = env.rollout([{"seed": 1}], ScriptedAgent([cut], repeat_last=True))
        assert not stub.of_type("step")
    assert "cut off by the limit of a turn's length" in one.messages[2]["content"]
