"""The server: for its own page alone, GET alone, and a sentence for everything that goes wrong."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from stored import rollout, stored

from agentsgym import ConfigError, RolloutStore
from agentsgym.viewer.answers import Answers
from agentsgym.viewer.server import ViewerServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ViewerServer]:
    stored(tmp_path / "store", range(200))
    stored(tmp_path / "store", range(200, 300))
    answers = Answers(RolloutStore(tmp_path / "store"), limit=1000, mode="served")
    with ViewerServer(answers) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def requested(
    server: ViewerServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def refused(server: ViewerServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    status, _, body = requested(server, path, method, **headers)
    return status, json.loads(body)["error"]


def test_the_answers_are_those_of_python(server: ViewerServer) -> None:
    answers = server.answers
    wanted: dict[str, Any] = {
        "/data/list": answers.list(),
        "/data/rollout?row=7": answers.rollout(7),
        "/data/group?key=3": answers.group(3),
        "/data/turns": answers.turns(),
        "/data/search?text=TASK%2017": answers.search("TASK 17"),
    }
    for path, answer in wanted.items():
        status, headers, body = requested(server, path)
        assert status == 200
        assert headers["Content-Type"] == "application/json"
        assert json.loads(body) == json.loads(json.dumps(answer))
    assert answers.search("TASK 17")["rows"] == [17, *range(170, 180)]


def test_the_page_comes_with_its_policy_and_is_kept_nowhere(server: ViewerServer) -> None:
    status, headers, body = requested(server, "/")
    assert status == 200
    assert b'<body data-mode="served">' in body
    assert headers["Content-Security-Policy"].endswith("; frame-ancestors 'none'")
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    for name, text in {
        "Content-Type": "text/html; charset=utf-8",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
        "Cross-Origin-Resource-Policy": "same-origin",
    }.items():
        assert headers[name] == text
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "evil.example:{port}", "", "localhost"])
def test_another_name_than_its_own_is_refused(server: ViewerServer, host: str) -> None:
    for path in ("/", "/data/list"):
        status, output = refused(server, path, Host=host.format(port=server.server_port))
        assert status == 403
        assert "requests for any other host are rejected" in output


def test_its_own_names_are_answered_and_other_sites_get_no_data(server: ViewerServer) -> None:
    assert requested(server, "/data/turns", Host=f"localhost:{server.server_port}")[0] == 200
    assert refused(server, "/data/list", Sec_Fetch_Site="cross-site")[0] == 403
    assert requested(server, "/", Sec_Fetch_Site="cross-site")[0] == 200  # a link to it may be followed
    assert requested(server, "/data/turns", Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "WHATEVER"])
def test_nothing_but_get_is_answered(server: ViewerServer, method: str) -> None:
    assert refused(server, "/data/list", method) == (405, "only GET requests are supported")


def test_head_has_no_body(server: ViewerServer) -> None:
    status, _, body = requested(server, "/", "HEAD")
    assert (status, body) == (405, b"")


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/etc/passwd", 404, "there is no page at /etc/passwd"),
        ("/../../etc/passwd", 404, "there is no page at"),
        ("/data/", 404, "there is no page at /data/"),
        ("/data/rollout", 400, "row must be an integer from 0 to"),
        ("/data/rollout?row=-1", 400, "row must be an integer"),
        ("/data/rollout?row=%C2%B2", 400, "row must be an integer"),
        ("/data/rollout?row=999", 400, "rollout 999 is not among"),
        ("/data/rollout?row=99999999999999999999", 400, "row must be an integer"),
        ("/data/group?key=300", 400, "task group 300 is not among"),
        ("/data/search?" + "&".join("a=1" for _ in range(30)), 400, "the URL cannot be parsed"),
        ("/data/search?text=" + "x" * 20_000, 414, "the URL is too long"),
        ("/data/search?text=" + "x" * 70_000, 414, "URI Too Long"),  # in Python 3.11 and 3.12: Request-URI Too Long
    ],
)
def test_every_mistake_is_a_sentence(server: ViewerServer, path: str, status: int, message: str) -> None:
    found = refused(server, path)
    assert found[0] == status
    assert message.lower() in found[1].lower()


def test_what_is_no_http_ends_nothing(server: ViewerServer) -> None:
    for given in (b"\x16\x03\x01\x00\xa5\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
            connection.sendall(given)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    assert requested(server, "/")[0] == 200


def test_an_address_that_is_none_is_a_sentence(server: ViewerServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall(f"GET http://[::1/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"the URL cannot be parsed: Invalid IPv6 URL" in answer


def test_many_requests_at_once(server: ViewerServer) -> None:
    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda row: requested(server, f"/data/rollout?row={row % 300}"), range(600)))
    assert {status for status, _, _ in found} == {200}
    for row, (_, _, body) in enumerate(found):
        reported = json.loads(body)
        assert reported["row"] == row % 300
        assert reported["messages"][0]["content"] == f"task {row % 300}"


def test_a_part_that_vanishes_is_reported_and_the_rest_goes_on(server: ViewerServer, tmp_path: Path) -> None:
    sorted((tmp_path / "store").glob("*.parquet"))[0].unlink()
    status, output = refused(server, "/data/rollout?row=0")
    assert status == 410
    assert "can no longer be read" in output
    assert requested(server, "/data/rollout?row=299")[0] == 200
    assert requested(server, "/data/list")[0] == 200


def test_a_port_in_use_names_the_port_and_the_way_out(server: ViewerServer) -> None:
    with pytest.raises(ConfigError, match=rf"port {server.server_port} is in use: choose another --port"):
        ViewerServer(server.answers, server.server_port)
    with pytest.raises(ConfigError, match="a port must be a number from 0 to 65535, got 70000"):
        ViewerServer(server.answers, 70_000)


def test_it_listens_on_this_machine_alone(server: ViewerServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/"


def test_a_title_is_text(tmp_path: Path) -> None:
    folder = tmp_path / '<img src=x onerror="alert(1)">'
    with RolloutStore.writer(folder) as writer:
        writer.add(rollout(0))
    with ViewerServer(Answers(RolloutStore(folder), limit=1, mode="served")) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert b"<img" not in requested(serving, "/")[2]
        finally:
            serving.shutdown()
            thread.join()
