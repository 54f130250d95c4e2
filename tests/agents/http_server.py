"""A real HTTP server on a thread, whose answers a function of the request gives, broken ones too."""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import exp, log
from typing import Any

from agentsgym import OpenAIAgent, TurnRequest
from agentsgym.seeding import derive_seed

KEY = "key-that-nobody-may-see"


@dataclass(frozen=True)
class Asked:
    """One request as it arrived; ``number`` counts from 0."""

    number: int
    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    arrived: float

    @property
    def output_last(self) -> str:
        return self.body["messages"][-1]["content"]


@dataclass(frozen=True)
class Reply:
    """What is sent back; of a cut one only so many bytes of the body, though all are announced; slowly if wanted."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    cut: int | None = None
    seconds_a_byte: float = 0.0

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


HANG_UP = Reply(b"")  # the connection is closed without a word


class Served:
    """What came in, and how many requests were open at once."""

    def __init__(self, answer: Callable[[Asked], Reply]) -> None:
        self.answer = answer
        self.url = ""
        self.requested: list[Asked] = []
        self.most_open = 0
        self.num_open = 0
        self.num_connections = 0
        self.lock = threading.Lock()

    def begin(self, handler: BaseHTTPRequestHandler) -> Asked:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            headers = {name.lower(): value for name, value in handler.headers.items()}
            requested = Asked(len(self.requested), handler.path, body, headers, time.monotonic())
            self.requested.append(requested)
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        return requested

    def end(self) -> None:
        with self.lock:
            self.num_open -= 1


class Handler(BaseHTTPRequestHandler):
    """Sends what ``served`` states, whole or broken."""

    protocol_version = "HTTP/1.1"  # connections stay open, as with real servers
    served: Served

    def setup(self) -> None:
        super().setup()
        with self.served.lock:
            self.served.num_connections += 1

    def do_POST(self) -> None:
        requested = self.served.begin(self)
        try:
            reply = self.served.answer(requested)
        finally:
            self.served.end()
        self.close_connection = reply is HANG_UP or reply.cut is not None
        if reply is HANG_UP:
            return
        self.send_response(reply.status)
        for name, value in {**reply.headers, "Content-Length": str(len(reply.content))}.items():
            self.send_header(name, value)
        self.end_headers()
        content = reply.content[: reply.cut]
        for piece in [bytes([byte]) for byte in content] if reply.seconds_a_byte else [content]:
            time.sleep(reply.seconds_a_byte)
            self.wfile.write(piece)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """Takes many connections at once, and takes no notice of a client that gave up."""

    block_on_close = False
    request_queue_size = 128  # of connections not taken yet; more are refused

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has given up is part of the tests."""


@contextmanager
def serving(answer: Callable[[Asked], Reply]) -> Iterator[Served]:
    """Serve until the block is left."""
    served = Served(answer)
    with Server(("127.0.0.1", 0), type("ItsHandler", (Handler,), {"served": served})) as server:
        served.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield served
        finally:
            server.shutdown()


def request(text: str = "hello", **fields: Any) -> TurnRequest:
    return TurnRequest(session_id=text, messages=[{"role": "user", "content": text}], token_ids=[], **fields)


def agent_of(served: Served, **options: Any) -> OpenAIAgent:
    """An agent that calls the server, and waits little before it tries again."""
    settings: Any = {"base_url": served.url, "backoff_s": 0.001, "max_retries": 2, **options}
    return OpenAIAgent("tiny", **settings)


@contextmanager
def calling(answer: Callable[[Asked], Reply], **options: Any) -> Iterator[tuple[OpenAIAgent, Served]]:
    """An agent and the server that it calls, until the block is left."""
    with serving(answer) as served, closing(agent_of(served, **options)) as agent:
        yield agent, served


def chat(text: str | None, *, finish_reason: str = "stop", usage: Any = None, **message: Any) -> Reply:
    """An answer of ``/chat/completions``."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish_reason}
    return Reply({"object": "chat.completion", "choices": [choice], "usage": usage})


class ToyModel:
    """Next tokens drawn by a hash of the whole context: another token anywhere before gives other probabilities."""

    def __init__(self, vocabulary: Sequence[int], end_id: int | None) -> None:
        self.vocabulary = vocabulary
        self.end_id = end_id

    def logprobs(self, context: Sequence[int]) -> dict[int, float]:
        draws = random.Random(derive_seed("toy", list(context)))
        weights = {token: draws.random() for token in draws.sample(list(self.vocabulary), 6)}
        if self.end_id is not None:
            weights[self.end_id] = draws.random()
        total = log(sum(map(exp, weights.values())))
        return {token: weight - total for token, weight in weights.items()}

    def sample(self, prompt: Sequence[int], max_tokens: int, stops: set[int]) -> tuple[list[int], list[float]]:
        draws = random.Random(derive_seed("draw", list(prompt)))
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < max_tokens and not (ids and ids[-1] in stops):
            choices = self.logprobs([*prompt, *ids])
            (token,) = draws.choices(list(choices), [exp(value) for value in choices.values()])
            ids.append(token)
            logprobs.append(choices[token])
        return ids, logprobs


def completion(model: ToyModel, decode: Callable[[list[int]], str], body: Mapping[str, Any]) -> Reply:
    """An answer of vLLM's ``/completions`` to a prompt of token ids."""
    prompt: list[int] = body["prompt"]
    stops = {*body.get("stop_token_ids", []), *([] if model.end_id is None else [model.end_id])}
    ids, logprobs = model.sample(prompt, body.get("max_tokens", 16), stops)
    stopped = ids[-1] in stops
    wants_ids = body.get("return_token_ids", False)
    reported = {
        "tokens": [decode([token]) for token in ids],
        "token_logprobs": logprobs,
        "text_offset": [],
        "top_logprobs": [],
    }
    choice = {
        "index": 0,
        "text": decode(ids[:-1] if stopped else ids),
        "logprobs": reported if body.get("logprobs") is not None else None,
        "finish_reason": "stop" if stopped else "length",
        "stop_reason": ids[-1] if stopped and ids[-1] != model.end_id else None,
        "token_ids": ids if wants_ids else None,
        "prompt_token_ids": prompt if wants_ids else None,
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    return Reply({"object": "text_completion", "choices": [choice], "usage": usage})
