"""One vLLM server: its metadata, and requests for single answers, with token ids as input and output."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.agents.vllm.sampling import Sampled
from agentsgym.errors import AgentError, import_extra
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from aiohttp import ClientSession

CONNECT_S: Final = 10.0
ANSWER_S: Final = 30.0  # for metadata requests, even under load
IDLE_S: Final = 3.0  # how long an unused connection is kept; the server closes it after 5 s
_BUSY: Final = frozenset({408, 429, 500, 502, 503, 504})
_MIN_LOGPROB: Final = -9999.0  # JSON has no infinity: vLLM writes this for an unknown value
_MAX_SHOWN: Final = 1000  # characters of a response in an error message


class TransientError(Exception):
    """A request got no answer, for a reason that may be transient.

    Attributes:
        is_connection: Whether the server could not be reached, or closed the connection: its process may be gone.
    """

    def __init__(self, cause: str, *, is_connection: bool) -> None:
        super().__init__(cause)
        self.is_connection = is_connection


def open_session(num_connections: int) -> ClientSession:
    """Open a session on the running event loop, with at most this many connections; the caller closes it."""
    aiohttp = import_extra("aiohttp", "vllm")
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=num_connections, keepalive_timeout=IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
    )


class VLLMServer:
    """One server, as used by one rank.

    Attributes:
        url: Base URL, without ``/v1``.
        model: The name of its model in requests.
        adapter: The name of the adapter in requests; empty if it has none.
        root: Path or name of the model that it loaded.
        context: Maximum number of tokens of prompt and answer together; None until it is read.
        version: Weight version that the last push set; None if it does not support weight versions.
        step: Optimizer step of its weights; None before the first push.
        can_send: Event that is cleared to hold back requests while weights are pushed.
        lost: Why no more requests are sent to it; empty if it is in use.
        num_sessions: Number of sessions assigned to it.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.model, self.adapter, self._previous, self.root = "", "", "", ""
        self.context: int | None = None
        self.version: str | None = None
        self.step: int | None = None
        self.can_send = asyncio.Event()
        self.can_send.set()
        self.lost = ""
        self.num_sessions = 0
        self.num_open = Counter[str]()

    async def read_model(self, session: ClientSession) -> None:
        """Read its model and its context length."""
        answer = await self._get(session, "/v1/models")
        models: Any = answer.get("data") if answer is not None else None
        if not isinstance(models, list) or not models or "id" not in models[0]:
            raise TransientError(
                f"its response to /v1/models is not that of a vLLM server: {shown(answer)}", is_connection=False
            )
        model = cast("dict[str, Any]", models[0])
        self.model, self.root = str(model["id"]), str(model.get("root") or model["id"])
        context = model.get("max_model_len")
        self.context = context if isinstance(context, int) else None

    async def encode(self, session: ClientSession, text: str) -> list[int] | None:
        """Encode a text with the server's tokenizer, without special tokens; None if it has no such endpoint."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        status, answer = await self._post(session, "/tokenize", body, ANSWER_S)
        return _json(answer).get("tokens") if status == 200 else None

    async def read_version(self, session: ClientSession) -> str | None:
        """Read its weight version; None if it is up but does not support weight versions.

        Raises:
            TransientError: The server does not respond.
        """
        answer = await self._get(session, "/weight_info")
        if answer is None:
            await self._get(session, "/health")
            return None
        return str(answer.get("weight_version"))

    async def set_version(self, session: ClientSession, version: str) -> bool:
        """Set its weight version; return False if it does not support them (before vLLM 0.31)."""
        status, _ = await self._post(session, "/update_weight_version", {"new_version": version}, ANSWER_S)
        return status == 200

    async def read_config(self, session: ClientSession) -> Mapping[str, Any]:
        """Read its configuration; empty if it was started without ``VLLM_SERVER_DEV_MODE=1``."""
        return (await self._get(session, "/server_info?config_format=json") or {}).get("vllm_config", {})

    async def load_adapter(self, session: ClientSession, folder: str) -> str:
        """Let it load an adapter named as its folder, and forget the last but one; return why it cannot, or ""."""
        body = {"lora_name": folder.rpartition("/")[2], "lora_path": folder}
        status, content = await self._post(session, "/v1/load_lora_adapter", body, 20 * ANSWER_S)
        if status != 200:
            advice = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and access to that folder"
            return f"it cannot load {folder} (status {status}: {_message(content)}): {advice}"
        if self._previous:
            await self._post(session, "/v1/unload_lora_adapter", {"lora_name": self._previous}, ANSWER_S)
        self._previous = self.adapter
        await self.set_version(session, body["lora_name"])
        return ""

    async def switch(self, session: ClientSession, command: str) -> bool:
        """Pause or resume it; return False if it does not support the command."""
        status, content = await self._post(session, f"/{command}", {}, ANSWER_S)
        if status not in (200, 404, 405):
            raise TransientError(f"/{command} returned status {status}: {_message(content)}", is_connection=False)
        return status == 200

    async def complete(
        self, session: ClientSession, prompt: list[int], max_tokens: int, fields: Mapping[str, Any]
    ) -> Sampled:
        """Sample one answer, once requests are no longer held back.

        A request sent while the server is paused would be sampled with the new weights but recorded with the old step.
        """
        await self.can_send.wait()
        step, adapter = self.step, self.adapter
        body = {"model": adapter or self.model, **fields, "prompt": prompt, "max_tokens": max_tokens}
        self.num_open += Counter([adapter])
        try:
            status, content = await self._post(session, "/v1/completions", {**body, "return_token_ids": True}, None)
        finally:
            self.num_open -= Counter([adapter])
        if status != 200:
            cause = f"status {status}: {_message(content)}"
            if status in _BUSY or (status == 404 and adapter):  # restarted, it no longer has the adapter
                raise TransientError(cause, is_connection=status == 404)
            raise AgentError(f"the vLLM server at {self.url} refused a request: {cause}")
        answer = _json(content)
        choices: Any = answer.get("choices")
        choice: Any = cast("list[Any]", choices)[0] if isinstance(choices, list) and choices else {}
        ids, reason = choice.get("token_ids"), choice.get("finish_reason")
        if reason == "abort":
            raise TransientError("it aborted the request", is_connection=False)
        if reason not in ("stop", "length") or not isinstance(ids, list):
            raise AgentError(f"the response of the vLLM server at {self.url} is malformed: {shown(choice or answer)}")
        if choice.get("prompt_token_ids") != prompt:
            raise AgentError(
                f"the vLLM server at {self.url} responded to a different prompt from the one that was sent"
            )
        logprobs: Any = choice.get("logprobs")
        if logprobs is not None:
            values: list[Any] = logprobs["token_logprobs"]
            logprobs = [math.nan if value is None or value <= _MIN_LOGPROB else float(value) for value in values]
        return Sampled(token_ids=cast("list[int]", ids), logprobs=logprobs, step=step)

    async def _get(self, session: ClientSession, path: str) -> Mapping[str, Any] | None:
        """GET a path and return its JSON, {} if the body is empty; None if the server has no such path."""
        status, content = await self._request(session.get(self.url + path), ANSWER_S)
        if status in (404, 405):
            return None
        if status != 200:
            raise TransientError(f"{path} returned status {status}: {_message(content)}", is_connection=False)
        return _json(content) if content else {}

    async def _post(
        self, session: ClientSession, path: str, body: Mapping[str, Any], limit_s: float | None
    ) -> tuple[int, bytes]:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        return await self._request(session.post(self.url + path, data=data, headers=headers), limit_s)

    async def _request(self, request: Any, limit_s: float | None) -> tuple[int, bytes]:
        """Send a request; return the status and the content of the response."""
        try:
            async with asyncio.timeout(limit_s), request as response:
                return response.status, await response.read()
        except TimeoutError as error:
            raise TransientError("it did not respond in time", is_connection=True) from error
        except (import_extra("aiohttp", "vllm").ClientError, OSError) as error:
            raise TransientError(f"{type(error).__name__}: {sentence_of(error)}", is_connection=True) from error


def _json(content: bytes) -> Mapping[str, Any]:
    try:
        answer: Any = json.loads(content)
    except ValueError:
        answer = None
    if not isinstance(answer, Mapping):
        raise TransientError(f"the response is not a JSON object: {shown(content[:_MAX_SHOWN])}", is_connection=False)
    return cast("Mapping[str, Any]", answer)


def _message(content: bytes) -> str:
    """Return the message of an error response, from vLLM's JSON where possible."""
    try:
        error: Any = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, Mapping) else error)[:_MAX_SHOWN]  # pyright: ignore[reportUnknownArgumentType]
    except (ValueError, KeyError, TypeError):
        return content[:_MAX_SHOWN].decode(errors="replace") or "(empty body)"
