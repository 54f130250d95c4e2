"""The endpoint: who may call it, what it survives, and that nothing is logged or left."""

import asyncio
import http.client
import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from program_client import Client, RecordingAgent, user
from sandbox_game import wait_until

from agentsgym.envs.AgentProgram import AgentProgramEnv, connections, server
from agentsgym.envs.AgentProgram.calls import Reply
from agentsgym.envs.AgentProgram.server import PolicyEndpoint, current_endpoint
from agentsgym.envs.AgentProgram.session import Session
from agentsgym.event_loop import agents_loop, run_coroutine
from agentsgym.testing import chat_tokenizer
from agentsgym.types import Action

ROOT = Path(__file__).parents[2]
TOKENIZER = chat_tokenizer()
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "policy", "messages": [user("go")]}


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    found: list[Any] = []
    loop = agents_loop()
    loop.set_exception_handler(lambda _, context: found.append(context))
    with caplog.at_level(logging.INFO):
        yield
    run_coroutine(asyncio.sleep(0))
    loop.set_exception_handler(None)
    assert found == []
    assert [one.getMessage() for one in caplog.records if not one.name.startswith("agentsgym.envs.play")] == []


class Served:
    """An endpoint with one session, whose calls are answered unless ``answers`` is cleared."""

    def __init__(self) -> None:
        self.endpoint = PolicyEndpoint()
        self.answers, self.num_answered, self.num_undelivered = threading.Event(), 0, 0
        self.answers.set()
        run_coroutine(self._start())
        self.host = self.endpoint.url.removeprefix("http://")
        self.port = int(self.host.rpartition(":")[2])

    async def _start(self) -> None:
        await self.endpoint.start()
        self.session = self.endpoint.open()
        self._policy = asyncio.ensure_future(self._answer(self.session))

    async def _answer(self, session: Session) -> None:
        while call := await session.next_call():
            while not self.answers.is_set():
                await asyncio.sleep(0.001)
            self.num_undelivered += not call.answer(Reply(call_id=call.call_id, text="fine"))
            self.num_answered += 1

    def close(self) -> None:
        run_coroutine(self._close())

    async def _close(self) -> None:
        self._policy.cancel()
        await self.endpoint.stop()

    def request(self, method: str = "POST", path: str = CHAT, body: Any = BODY, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        given = {"Authorization": f"Bearer {self.session.key}"}
        given |= {name.replace("_", "-"): text for name, text in headers.items()}
        try:
            connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body), given)
            response = connection.getresponse()
            self.headers = response.headers
            return response.status, response.read().decode()
        finally:
            connection.close()

    def head(self, *lines: str, method: str = "POST", path: str = CHAT, version: str = "1.1") -> bytes:
        """The head of a request, without its last empty line."""
        key = f"Authorization: Bearer {self.session.key}"
        return "".join(
            f"{line}\r\n" for line in (f"{method} {path} HTTP/{version}", f"Host: {self.host}", key, *lines)
        ).encode()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def send(self, *parts: bytes, ends: bool = False) -> bytes:
        """Send parts on one connection, and return what comes back until the endpoint closes it."""
        with self.connect() as connection:
            for part in parts:
                connection.sendall(part)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            return rest_of(connection)

    def works(self) -> bool:
        return self.request()[0] == 200


def rest_of(connection: socket.socket) -> bytes:
    received = bytearray()
    try:
        while part := connection.recv(2**16):
            received += part
    except ConnectionResetError:
        pass
    return bytes(received)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


def error_of(answer: tuple[int, str]) -> tuple[int, str]:
    return answer[0], json.loads(answer[1])["error"]["message"]


# Who may call it


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": ""},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer sk-wrong"},
        {"Authorization": "Basic c2s6"},
        {"Authorization": "Bearer ", "x_api_key": "sk-wrong"},
        {"Authorization": "Bearer \xe9"},
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/reward", "/v1/none"])
def test_a_wrong_key_is_rejected_on_every_path(served: Served, path: str, headers: Any) -> None:
    assert error_of(served.request(path=path, **headers)) == (401, "the API key is not that of a running session")


def test_both_headers_of_keys_are_read_and_a_finished_session_is_unknown(served: Served) -> None:
    assert served.request(Authorization="", x_api_key=served.session.key)[0] == 200
    run_coroutine(_forget(served))
    assert served.request()[0] == 401


async def _forget(served: Served) -> None:
    served.session.close("the episode is over")
    served.endpoint.forget(served.session)


def test_a_call_after_the_end_of_the_episode_is_rejected(served: Served) -> None:
    async def close() -> None:
        served.session.close("the episode is over")

    run_coroutine(close())
    status, answer = served.request()
    assert (status, json.loads(answer)["error"]["code"]) == (403, "episode_over")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "localhost", "evil.example:{port}", "127.0.0.1:1", ""])
def test_other_host_names_are_rejected(served: Served, host: str) -> None:
    assert error_of(served.request(Host=host.format(port=served.port)))[0] == 403
    assert served.request(Host=f"LOCALHOST:{served.port}")[0] == 200


def test_two_host_names_and_none_are_rejected(served: Served) -> None:
    two = served.send(served.head("Host: evil.example", "Connection: close") + b"\r\n")
    none = served.send(f"POST {CHAT} HTTP/1.0\r\nx-api-key: {served.session.key}\r\n\r\n".encode())
    assert two.startswith(b"HTTP/1.1 400 ")
    assert none.startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("origin", ["null", "http://localhost:3000", "http://127.0.0.1:{port}"])
def test_web_pages_are_rejected(served: Served, origin: str) -> None:
    given = origin.format(port=served.port)
    assert error_of(served.request(Origin=given)) == (403, "requests from web pages are rejected")
    assert served.request("OPTIONS", Origin=given, Access_Control_Request_Method="POST")[0] == 403
    assert "access-control-allow-origin" not in served.headers


# What it answers


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/chat/completions/", "/v1/embeddings", "/v1/../v1/reward", "//", "/%C3%A9"]
)
def test_an_unknown_path_is_an_error_of_the_api(served: Served, path: str) -> None:
    status, answer = served.request(path=path)
    error = json.loads(answer)["error"]
    assert (status, error["type"]) == (404, "invalid_request_error")
    assert "there is nothing at this path" in error["message"]
    status, answer = served.request(path="/v1/messages/batches")
    assert (status, json.loads(answer)["type"]) == (404, "error")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "WHATEVER"])
def test_other_methods_are_errors_of_the_api(served: Served, method: str) -> None:
    assert error_of(served.request(method)) == (405, f"{method} requests are not answered at this path")
    assert served.headers["allow"] == "POST"
    assert served.request("HEAD") == (405, "")
    assert error_of(served.request("POST", "/v1/models"))[0] == 405
    assert json.loads(served.request("GET", "/v1/models")[1])["data"][0]["id"] == "policy"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"\x00",
        b"[]",
        b"3",
        b'{"model": NaN}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"messages": ' + b"[" * 90 + b"]" * 90 + b"}",
        b'{"model": "x", "messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/reward"])
def test_every_body_that_is_wrong_is_a_sentence(served: Served, path: str, body: bytes) -> None:
    status, sentence = error_of(served.request(path=path, body=body))
    assert status == 400
    assert len(sentence) < 400
    assert served.works()


def test_a_body_that_is_too_large_is_rejected(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_BODY_BYTES", 200_000)
    fits = {**BODY, "user": "x" * 190_000}
    assert served.request(body=fits)[0] == 200
    large = json.dumps({**BODY, "user": "x" * 300_000}).encode()
    assert error_of(served.request(body=large)) == (413, "the body must not be larger than 200000 bytes")
    chunk = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
    chunked = served.head("Transfer-Encoding: chunked", "Connection: close") + b"\r\n"
    assert b" 413 " in served.send(chunked, *[chunk] * 8, b"0\r\n\r\n")
    announced = served.head(f"Content-Length: {10**12}", "Connection: close") + b"\r\n"
    assert b" 413 " in served.send(announced, b"x" * 300_000)
    assert served.works()


def test_http_1_0_and_pipelined_requests_are_answered(served: Served) -> None:
    body = json.dumps(BODY).encode()
    request = served.head(f"Content-Length: {len(body)}") + b"\r\n" + body
    last = served.head(f"Content-Length: {len(body)}", "Connection: close") + b"\r\n" + body
    assert served.send(request, request + request[:40], request[40:] + last).count(b"HTTP/1.1 200 ") == 4
    old = served.head(f"Content-Length: {len(body)}", version="1.0") + b"\r\n" + body
    assert served.send(old).startswith(b"HTTP/1.1 200 ")
    assert served.num_answered == 5


def test_what_is_not_http_ends_only_its_connection(served: Served) -> None:
    body = json.dumps(BODY).encode()
    whole = served.head(f"Content-Length: {len(body)}") + b"\r\n" + body
    for parts in (
        (b"",),
        (b"\x16\x03\x01\x00\xa5\r\n\r\n",),
        (b"GET\r\n\r\n",),
        (b"GET / HTTP/9.9\r\n\r\n",),
        (b"\0" * 100_000,),
        (served.head("X: " + "x" * 100_000) + b"\r\n",),
        (served.head("Content-Length: -1") + b"\r\n",),
        (served.head("Content-Length: 5", "Content-Length: 6") + b"\r\n",),
        (served.head("Content-Length: 5", "Transfer-Encoding: chunked") + b"\r\n0\r\n\r\n",),
        (served.head("Transfer-Encoding: chunked") + b"\r\nzz\r\n",),
        (served.head("Upgrade: websocket", "Connection: Upgrade") + b"\r\n",),
        (served.head("Content-Length: 50") + b"\r\n{",),
        (whole, b"\xff\xff\xff\r\n\r\n"),
        (served.head("Transfer-Encoding: chunked", path="/none") + b"\r\n", b"zz\r\nzz\r\n"),
    ):
        served.send(*parts, ends=True)
        assert served.works()


def test_a_chunk_that_is_invalid_after_the_answer_ends_its_connection(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(served.head("Transfer-Encoding: chunked", path="/none") + b"\r\n")
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (404, None)
        connection.sendall(b"zz\r\n")
        assert rest_of(connection) == b""
    assert served.works()


# Clients that are slow, and those that go away


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SLOW_S", 0.05)
    monkeypatch.setattr(connections, "_SLOW_S", 0.05)


@pytest.mark.usefixtures("_soon")
def test_slow_clients_are_disconnected_whatever_they_have_sent_before(served: Served) -> None:
    body = json.dumps(BODY).encode()
    whole = served.head(f"Content-Length: {len(body)}") + b"\r\n" + body
    assert served.send() == b""
    assert served.send(served.head()) == b""
    assert served.send(b"P") == b""
    with served.connect() as connection:
        connection.sendall(whole)
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert json.loads(response.read())["object"] == "chat.completion"
        connection.sendall(b"P")  # the beginning of the next request
        assert rest_of(connection) == b""
    slow = served.send(served.head("Content-Length: 50") + b"\r\n{")
    assert b" 408 " in slow  # and the connection is closed without the rest of the body
    assert b"the body was not received within 0.05 s" in slow


@pytest.mark.usefixtures("_soon")
def test_a_client_that_waits_for_a_slow_answer_is_not_disconnected(served: Served) -> None:
    served.answers.clear()
    threading.Timer(0.3, served.answers.set).start()
    assert served.request()[0] == 200


def test_connections_are_limited_and_idle_ones_do_not_stay(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MAX_CONNECTIONS", 50)
    monkeypatch.setattr(connections, "_SLOW_S", 0.3)
    idle = [served.connect() for _ in range(50)]
    try:
        assert served.send(served.head() + b"\r\n") == b""
        assert {rest_of(one) for one in idle} == {b""}
    finally:
        for one in idle:
            one.close()
    assert served.works()


def _abort(connection: socket.socket) -> None:
    """Close a connection with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


@pytest.mark.parametrize("end", [socket.socket.close, _abort])
def test_a_call_whose_client_has_gone_is_dropped_or_undelivered(served: Served, end: Any) -> None:
    body = json.dumps(BODY).encode()
    whole = served.head(f"Content-Length: {len(body)}") + b"\r\n" + body
    served.answers.clear()
    first, second = served.connect(), served.connect()
    first.sendall(whole)
    queue, unanswered = served.session._queue, served.session._unanswered
    wait_until(lambda: len(unanswered) == 1 and not queue)  # the policy has the first call
    second.sendall(whole)
    wait_until(lambda: len(queue) == 1)
    for one in (first, second):
        end(one)
    wait_until(lambda: not unanswered)
    served.answers.set()
    assert served.works()
    assert (served.num_answered, served.num_undelivered) == (2, 1)


@pytest.mark.parametrize("size", [0, 20, 10**6])
def test_a_client_that_goes_away_within_its_body_leaves_nothing(served: Served, size: int) -> None:
    with served.connect() as connection:
        connection.sendall(served.head(f"Content-Length: {10**6 + 1}") + b"\r\n" + b" " * size)
    assert served.works()
    assert served.num_answered == 1


def test_a_client_whose_time_is_up_tries_again_and_rewards_once() -> None:
    tried = threading.Semaphore(0)

    class Slow(RecordingAgent):
        def act(self, requests: Any) -> list[Action]:
            if len(self.answers) == 1:
                assert tried.acquire(timeout=30)
                assert tried.acquire(timeout=30)
            return super().act(requests)

    def program(task: Any, endpoint: Any) -> float:
        def note(request: Any) -> None:
            tried.release()

        http_client = openai.DefaultHttpxClient(event_hooks={"request": [note]})
        client = openai.OpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=5, http_client=http_client
        )
        with client:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "go"}])
            tried.acquire()
            client.with_options(timeout=0.5).chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "on"}], extra_headers={server.REWARD_HEADER: "1"}
            )
        return 0.0

    [one] = AgentProgramEnv(TOKENIZER, program=program).rollout([{"seed": 1}], Slow(TOKENIZER))
    assert not one.failed
    assert one.turn_rewards[0] == 1.0
    assert one.info["num_undelivered_calls"] >= 1
    assert one.info["num_calls"] == len(one.turns) == 2 + one.info["num_undelivered_calls"]
    assert sum(one.turn_rewards) == 1.0


# How it ends


def test_stopping_it_fails_the_live_episodes_alone_and_the_next_rollout_starts_another() -> None:
    def program(task: Any, endpoint: Any) -> float:
        client = Client(endpoint)
        client.speak(user("go"))
        if task["stops"]:
            asyncio.run_coroutine_threadsafe(_stop(), endpoint.loop).result()
            with pytest.raises(ConnectionError):
                client.speak(user("on"))
        return 1.0

    async def _stop() -> None:
        await (await current_endpoint()).stop()

    env = AgentProgramEnv(TOKENIZER, program=program)
    tasks = [{"stops": False}, {"stops": True}, {"stops": False}]
    before, stopped, after = env.rollout(tasks, RecordingAgent(TOKENIZER), max_concurrent=1)
    assert (before.final_reward, after.final_reward) == (1.0, 1.0)
    assert stopped.failed
    assert "the endpoint that the program calls was stopped" in str(stopped.error)
    assert len(stopped.turns) == 1


def test_stopping_it_answers_the_calls_that_wait(served: Served) -> None:
    served.answers.clear()
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(served.request) for _ in range(4)]
        wait_until(lambda: len(served.session._unanswered) == 4)
        run_coroutine(served.endpoint.stop())
        for one in calls:
            assert error_of(one.result()) == (403, "the endpoint that the program calls was stopped")
    with pytest.raises(ConnectionRefusedError):
        served.connect()


SCRIPT = """
import http.client, socket, sys, threading
from agentsgym.envs.AgentProgram import AgentProgramEnv
from agentsgym import ScriptedAgent

kept = []

def program(task, endpoint):
    host, port = endpoint.base_url.split("/")[2].split(":")
    for _ in range(3):
        kept.append(socket.create_connection((host, int(port))))
    kept[0].sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x")
    connection = http.client.HTTPConnection(host, int(port))
    body = b'{"model": "policy", "messages": [{"role": "user", "content": "go"}]}'
    connection.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer " + endpoint.api_key})
    print(connection.getresponse().status)
    kept.append(connection)
    return 1.0

def hangs(task, endpoint):
    threading.Event().wait()

env = AgentProgramEnv(program=program)
print(env.rollout([{"seed": 1}], ScriptedAgent(["fine"], repeat_last=True))[0].final_reward)
if sys.argv[1] == "live":
    playing = threading.Thread(
        target=AgentProgramEnv(program=hangs).rollout, args=([{"seed": 1}], ScriptedAgent(["x"])), daemon=True
    )
    playing.start()
    playing.join(0.5)
if sys.argv[1] == "error":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(("how", "code"), [("normal", 0), ("error", 3), ("live", 0)])
def test_nothing_is_printed_when_the_process_ends_with_open_connections(how: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "200\n1.0\n", "")
