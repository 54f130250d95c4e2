"""A stub of an OpenEnv server: its protocol, with answers that a test decides; no OpenEnv package is needed.

As a program it serves the game of :func:`echo`:  ``python openenv_stub.py PORT``.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

Answer = dict[str, Any] | str | bytes | None  # a message; text as it is; None hangs up
Game = Callable[[dict[str, Any]], Answer]  # one connection's: from what the client sends to what it is answered


def observation(fields: Mapping[str, Any] | None = None, reward: Any = None, done: Any = False, **more: Any) -> Answer:
    return {"type": "observation", "data": {"observation": dict(fields or {}), "reward": reward, "done": done, **more}}


def error(code: str, message: str = "", **more: Any) -> Answer:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def schema_of(*names: str, **types: str) -> dict[str, Any]:
    kinds = {**dict.fromkeys(names, "string"), **types}
    properties = {name: {"type": kind, "title": name} for name, kind in kinds.items()}
    inherited = {"metadata": {"type": "object"}}
    return {"type": "object", "properties": {**inherited, **properties}, "required": [*kinds]}


TEXT_GAME: dict[str, Any] = {"action": schema_of("message"), "observation": schema_of("text"), "state": {}}


class CountUp:
    """Counts what it is given; done at the third step. What it shows first is made from the seed."""

    def __init__(self) -> None:
        self.reported: list[dict[str, Any]] = []

    def __call__(self, message: dict[str, Any]) -> Answer:
        if message["type"] == "state":
            return {"type": "state", "data": {"step_count": len(self.reported)}}
        if message["type"] == "reset":
            self.reported.clear()
            return observation({"text": f"start {message['data'].get('seed')}"})
        self.reported.append(message["data"])
        return observation(
            {"text": f"{len(self.reported)}: {message['data'].get('message')}"},
            len(self.reported) / 4,
            len(self.reported) == 3,
        )


class Stub:
    """The server.

    Attributes:
        heard: All messages of all connections, each with the number of its connection, from 0.
        headers: The headers of all requests.
        most_live: The most connections that had a game at once.
    """

    def __init__(
        self,
        make_game: Callable[[], Game] = CountUp,
        schemas: Any = None,
        max_sessions: int = 64,
        status: HTTPStatus | None = None,
    ) -> None:
        self.make_game = make_game
        self.schemas = TEXT_GAME if schemas is None else schemas
        self.max_sessions, self.status = max_sessions, status
        self.heard: list[tuple[int, dict[str, Any]]] = []
        self.headers: list[Headers] = []
        self.num_connections = self.num_live = self.most_live = 0
        self._lock = threading.Lock()
        self.url = ""

    def of_type(self, kind: str) -> list[tuple[int, Any]]:
        """What was heard of one type: the number of the connection and the data."""
        return [(number, message.get("data")) for number, message in self.heard if message["type"] == kind]

    def answer_http(self, connection: ServerConnection, request: Request) -> Response | None:
        self.headers.append(request.headers)
        if self.status is not None:
            return connection.respond(self.status, "no")
        if request.path == "/ws":
            return None
        texts = {"/health": '{"status": "healthy"}', "/schema": json.dumps(self.schemas)}
        text = self.schemas if request.path == "/schema" and isinstance(self.schemas, str) else texts.get(request.path)
        return connection.respond(HTTPStatus.NOT_FOUND if text is None else HTTPStatus.OK, text or "nothing here")

    def play(self, connection: ServerConnection) -> None:
        with self._lock:
            number = self.num_connections
            self.num_connections += 1
            is_full = self.num_live >= self.max_sessions
            if not is_full:
                self.num_live += 1
                self.most_live = max(self.most_live, self.num_live)
        if is_full:
            full = error("CAPACITY_REACHED", "no", active_sessions=self.max_sessions, max_sessions=self.max_sessions)
            connection.send(json.dumps(full))
            return
        try:
            self._converse(number, connection)
        except ConnectionClosed:
            pass
        finally:
            with self._lock:
                self.num_live -= 1

    def _converse(self, number: int, connection: ServerConnection) -> None:
        game = self.make_game()
        for raw in connection:
            message = json.loads(raw)
            self.heard.append((number, message))
            if message["type"] == "close":
                return
            answer = game(message)
            if answer is None:
                connection.close_socket()
                return
            connection.send(answer if isinstance(answer, str | bytes) else json.dumps(answer))

    def server(self, port: int = 0) -> Server:
        return serve(self.play, "127.0.0.1", port, process_request=self.answer_http, close_timeout=1)

    @contextmanager
    def running(self) -> Iterator[Stub]:
        with self.server() as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            self.url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


if __name__ == "__main__":
    with Stub().server(int(sys.argv[1])) as program:
        print("listening", flush=True)
        program.serve_forever()
