"""A vLLM server without vLLM: real HTTP, the paths that trainers use, scripted answers, and ways to break."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.torch import load_file

Script = Callable[[list[int]], list[int]]


class StubServer:
    """What it was called, what its weights are marked with, and how it is to fail.

    ``faults`` are used up one a completion: a status, or ``"hang up"``; ``"hang"`` keeps a request without an answer.
    """

    def __init__(self, script: Script, *, context: int = 4096, knows_marks: bool = True, port: int = 0) -> None:
        self.script, self.context, self.knows_marks, self.port = script, context, knows_marks, port
        self.root = "org/tiny"
        self.encode: Callable[[str], list[int]] | None = None
        self.version = "default"
        self.completions: list[dict[str, Any]] = []
        self.faults: deque[Any] = deque()
        self.seconds = 0.0
        self.hangs: set[str] = set()  # paths that never answer
        self.num_hung_up = 0
        self.knows_pauses = True
        self.config: dict[str, Any] = {}  # vLLM's
        self.loads_adapters = True
        self.adapters: dict[str, dict[str, Any]] = {}  # their tensors, by name
        self.events: list[str] = []  # pauses, marks and resumptions, in order
        self.num_open = self.most_open = 0
        self._loop: asyncio.AbstractEventLoop
        self._running: asyncio.Event
        self._runner: web.AppRunner | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin, or begin again as a new process would: with the weights of its checkpoint."""
        self.version, self.adapters = "default", {}
        self._running = asyncio.Event()
        self._running.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)

    def stop(self) -> None:
        """Die: the port is closed, and so is every connection."""
        if self._runner is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self._runner = None

    async def _serve(self) -> None:
        app = web.Application(middlewares=[self._hanging])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        if self.knows_marks:
            app.router.add_get("/weight_info", self._weight_info)
            app.router.add_post("/update_weight_version", self._mark)
        if self.knows_pauses:
            app.router.add_post("/pause", self._pause)
            app.router.add_post("/resume", self._resume)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        assert self._runner is not None
        for connection in list(self._runner.server.connections if self._runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    @web.middleware
    async def _hanging(self, request: web.Request, handler: Any) -> Any:
        if request.path in self.hangs:
            await asyncio.sleep(60)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "root": self.root, "max_model_len": self.context}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        if self.encode is None:
            return web.json_response({"error": "no tokenizer"}, status=400)
        return web.json_response({"tokens": self.encode(text), "max_model_len": self.context})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"vllm_config": self.config})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.loads_adapters:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.adapters[body["lora_name"]] = load_file(Path(body["lora_path"], "adapter_model.safetensors"))
        return web.json_response({})

    async def _unload(self, request: web.Request) -> web.Response:
        self.adapters.pop((await request.json())["lora_name"], None)
        return web.json_response({})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _mark(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        self.events.append("mark")
        return web.json_response({"success": True})

    async def _pause(self, request: web.Request) -> web.Response:
        self.events.append(f"pause {request.query['mode']}, clear_cache={request.query.get('clear_cache')}")
        self._running.clear()
        return web.json_response({})

    async def _resume(self, _: web.Request) -> web.Response:
        self.events.append("resume")
        self._running.set()
        return web.json_response({})

    async def _complete(self, request: web.Request) -> Any:
        body = await request.json()
        self.completions.append(body)
        fault = self.faults.popleft() if self.faults else None
        if fault == "hang up":
            request.transport.abort()
            return web.Response()
        if body["model"] not in ("tiny", *self.adapters):
            fault = 404
        if isinstance(fault, int):
            return web.json_response({"error": {"message": f"scripted {fault}"}}, status=fault)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(60 if fault == "hang" else self.seconds)
            await self._running.wait()
        except asyncio.CancelledError:
            self.num_hung_up += 1
            raise
        finally:
            self.num_open -= 1
        return web.json_response(fault if isinstance(fault, dict) else self._answer(body))

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = ended(self.script(body["prompt"]), body.get("stop_token_ids", []), body["max_tokens"])
        is_ended = ids[-1] in body.get("stop_token_ids", [])
        choice = {
            "index": 0,
            "text": "",
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "finish_reason": "stop" if is_ended else "length",
            "logprobs": {"token_logprobs": [-0.5] * len(ids), "tokens": [], "top_logprobs": []},
        }
        return {"object": "text_completion", "choices": [choice]}


def ended(answer: list[int], stops: list[int], max_tokens: int) -> list[int]:
    """Cut an answer as vLLM does: behind its first stop token, and at its budget."""
    ends = [place for place, token in enumerate(answer) if token in stops]
    return answer[: min([max_tokens, *(place + 1 for place in ends)])]


@contextmanager
def stub_server(script: Script, **options: Any) -> Iterator[StubServer]:
    """A server that is there until the block is left."""
    server = StubServer(script, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def stub_servers(script: Script, count: int = 2) -> Iterator[list[StubServer]]:
    """Several of them."""
    with ExitStack() as stack:
        yield [stack.enter_context(stub_server(script)) for _ in range(count)]
