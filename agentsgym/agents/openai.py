"""An agent that calls a model on an OpenAI-compatible server, with exact tokens if the server returns them.

Tool calls are converted to OpenAI's protocol, and parsed from a response.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from agentsgym.agents.base import AsyncAgent
from agentsgym.agents.openai_client import Client, RequestError
from agentsgym.agents.openai_server import Server
from agentsgym.agents.usage import Meter, Usage, as_mapping
from agentsgym.errors import AgentError, ConfigError, did_you_mean, import_extra
from agentsgym.event_loop import agents_loop, on_agents_loop, run_coroutine
from agentsgym.fields import is_dict, is_int, require
from agentsgym.texts import shown
from agentsgym.tokens.calls.values import MalformedCallError, malformed_call, tool_call, whole_json
from agentsgym.tokens.chat_format import ChatFormat
from agentsgym.types import MIN_LOGPROB, Action, Message, ToolCall, TurnRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def as_sent(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert a conversation to messages that every server accepts.

    The arguments of calls become JSON text, and a call and its result get the same id; a result without an id belongs
    to the first open call of its tool. A result without a call in the last assistant message (for example, because the
    call could not be parsed) becomes a user message, as servers require. Messages between the results of one assistant
    message are moved after the last result, since results must directly follow their calls.
    """
    sent: list[dict[str, Any]] = []
    behind = 0  # the index after the last assistant message and its results
    waiting: list[tuple[str, str]] = []  # id and tool of the calls that have no result yet
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "tool":
            given, name = message.get("tool_call_id"), message.get("name")
            found = [call for call in waiting if call[0] == given]
            if given is None:
                found = [call for call in waiting if name is None or call[1] == name]
            if not found:
                sent.append({"role": "user", "content": content})
                continue
            waiting.remove(found[0])
            sent.insert(behind, {"role": "tool", "tool_call_id": found[0][0], "content": content})
            behind += 1
            continue
        calls: list[dict[str, Any]] = []
        for number, call in enumerate(message.get("tool_calls") or () if role == "assistant" else ()):
            function = cast("Mapping[str, Any]", call.get("function", call))
            given = function.get("arguments", {})
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            fields = {"name": function["name"], "arguments": arguments}
            calls.append({"id": call.get("id") or f"call_{index}_{number}", "type": "function", "function": fields})
        sent.append({"role": role, "content": content, **({"tool_calls": calls} if calls else {})})
        if role == "assistant":
            waiting, behind = [(call["id"], call["function"]["name"]) for call in calls], len(sent)
    return sent


def calls_in(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """Parse the tool calls in a server's message; a call whose arguments cannot be parsed has an ``error``."""
    given: Any = message.get("tool_calls") or ()
    if not isinstance(given, list | tuple):
        raise RequestError(f"the response has tool_calls that are not a list: {shown(given)}")
    calls: list[ToolCall] = []
    for item in cast("Sequence[Any]", given):
        call = as_mapping(item)
        if not isinstance(call.get("function"), Mapping):
            raise RequestError(f"the response has a tool call without a function: {shown(item)}")
        function = as_mapping(call["function"])
        name, arguments, call_id = function.get("name"), function.get("arguments"), call.get("id")
        try:
            read = whole_json(arguments or "{}") if isinstance(arguments, str | None) else arguments
            calls.append(tool_call(name, read, call_id))
        except MalformedCallError as error:
            failed = malformed_call(error, name if isinstance(name, str) else "")
            calls.append(dataclasses.replace(failed, id=call_id if isinstance(call_id, str) else None))
    return tuple(calls)


__all__ = ["OpenAIAgent", "Usage"]

logger = logging.getLogger(__name__)
_OPTIONS = frozenset({
    "temperature", "top_p", "stop", "seed", "frequency_penalty", "presence_penalty", "logit_bias", "extra_body",
})  # fmt: skip
# Fields that the agent sets itself; with other values, it would misread the response.
_RESERVED = frozenset({
    "model", "messages", "prompt", "n", "best_of", "stream", "echo", "logprobs", "top_logprobs", "return_token_ids",
    "max_tokens", "max_completion_tokens", "tools",
})  # fmt: skip
# Statuses that depend on the key, the load or the server's health, and do not show what the server supports.
_INCONCLUSIVE_STATUSES = frozenset({None, 401, 403, 408, 409, 429, 500, 502, 503, 504})


class OpenAIAgent(AsyncAgent):
    """An agent whose answers come from an OpenAI-compatible server: vLLM, SGLang, llama.cpp, Ollama, or OpenAI itself.

    Each session waits only for its own answer. A request that fails for a transient reason (connection, timeout, status
    408, 409, 429 or 5xx, a malformed body) is retried, after the wait that the server requests, or with exponential
    backoff; a permanent failure is an :class:`AgentError` and fails only its session. If the server rejects the key or
    the model (401; 403 or 404 before its first answer; repeated 403 later), every session would fail, so the run ends
    with a :class:`ConfigError`, and the agent sends no further requests for a minute or until :meth:`finish`.

    **Exact tokens.** If the environment recorded the exact prompt (``request.token_ids``) and the server's
    ``/completions`` accepts and returns token ids (vLLM and SGLang do: ``return_token_ids``), the action has the
    sampled ids, including the end-of-turn id, with their log-probabilities; the environment must use the model's
    tokenizer. What the log-probabilities refer to depends on the server: vLLM returns those of the distribution that
    was sampled from only if it runs with ``--logprobs-mode processed_logprobs``, otherwise those before temperature is
    applied. Other servers return text, over ``/chat/completions``. Exact tokens include a model's reasoning; as text, a
    server may return it separately, and it is then ``Action.reasoning``.

    **Tools.** Requests to ``/chat/completions`` include the environment's tools, and the tool calls of an answer are in
    ``Action.tool_calls`` (vLLM needs ``--enable-auto-tool-choice`` and a ``--tool-call-parser``; calls that a server
    leaves in the text are parsed from it). An exact prompt already contains the tools.

    The agent works from any thread, and in a notebook. Its connections stay open until :meth:`close`, or until it is
    garbage-collected.

    Args:
        model: The model's name on the server.
        base_url: The server's URL, such as ``"http://localhost:8000/v1"``; if None, the value of ``OPENAI_BASE_URL``,
            or OpenAI's API if that is not set.
        api_key: The key, or a function that returns it; None for ``OPENAI_API_KEY``, which is sent only if ``base_url``
            is None too. A copy of the agent (``pickle``, ``copy.deepcopy``) does not contain the key: it uses
            ``OPENAI_API_KEY`` if ``base_url`` is None, and otherwise fails in its first turn. A function is copied.
        token_ids: Whether to request exact tokens: True requires them, False uses text, and ``"auto"`` sends a
            one-token request to find out whether the server returns them, and falls back to text.
        tokenizer: The model's tokenizer, used only with exact tokens: sampling then also stops at the end-of-turn token
            of its chat template, in addition to the server's own end tokens.
        max_tokens: Maximum tokens of an answer, including reasoning; the request's own budget applies if smaller.
        max_concurrency: Maximum number of open requests. Time spent waiting for a slot counts toward
            ``turn_timeout_s``.
        timeout_s: Maximum seconds per attempt, from sending to the last byte.
        max_retries: Maximum number of retries per request.
        backoff_s: Seconds before the first retry; doubled after each retry up to 30, and reduced by a random amount of
            up to a half.
        max_answer_bytes: Maximum decompressed bytes of a response; a longer one fails its session.
        price_per_million: Prices of a million input and a million output tokens, for ``usage.cost``.
        **options: ``temperature``, ``top_p``, ``stop``, ``seed``, ``frequency_penalty``, ``presence_penalty``,
            ``logit_bias``; and ``extra_body``, a dict of server-specific fields (``top_k``, ``chat_template_kwargs``,
            …). Options that are not set have the server's defaults.

    Raises:
        MissingDependencyError: The ``openai`` package is not installed.
        ConfigError: An option is unknown, invalid, or set by the agent itself, or there is no key for OpenAI's API.
        TemplateError: The tokenizer's chat template does not allow exact tokens.
    """

    def __init__(  # noqa: PLR0913  # keyword options that users know from other clients
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | Callable[[], str] | None = None,
        token_ids: Literal["auto"] | bool = "auto",
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_tokens: int = 1024,
        max_concurrency: int = 32,
        timeout_s: float = 120.0,
        max_retries: int = 5,
        backoff_s: float = 0.5,
        max_answer_bytes: int = 16_000_000,
        price_per_million: tuple[float, float] | None = None,
        **options: Any,
    ) -> None:
        """Check the arguments, which the class docstring describes; nothing is sent yet."""
        import_extra("openai", "openai")
        require("max_tokens", max_tokens, is_int(1), "an int of at least 1")
        require("token_ids", token_ids, lambda value: value in ("auto", True, False), "'auto', True or False")
        self.model = model
        self._max_tokens = max_tokens
        self._options = _request_fields(options)
        self._stop_token_ids = (
            sorted(ChatFormat.of(tokenizer, append=False).stop_token_ids) if tokenizer is not None else []
        )
        self._requires_ids = token_ids is True
        self._takes_schemas = True
        self._returns_ids: bool | None = False if token_ids is False else None  # None: not known yet
        self._server = Server(
            base_url=base_url,
            api_key=api_key,
            max_concurrency=max_concurrency,
            timeout_s=timeout_s,
            max_retries=max_retries,
            backoff_s=backoff_s,
            max_answer_bytes=max_answer_bytes,
        )
        self._meter = Meter(price_per_million)
        self._client: Client | None = None

    @property
    def usage(self) -> Usage:
        """Counts of requests and tokens, and their cost, since the agent was created."""
        return self._meter.usage

    def cache_name(self) -> str:
        """Return a text that is equal for agents with the same model, server and settings."""
        settings = json.dumps([self._options, self._max_tokens], sort_keys=True, default=str)
        return f"{type(self).__name__} {self._name} {settings}"

    async def aact(self, request: TurnRequest) -> Action:
        """Answer one turn.

        Raises:
            AgentError: The server returned no usable answer.
            ConfigError: The server rejects the key or the model, or exact tokens are required but not available.
        """
        return await on_agents_loop(self._answer_turn(request))

    def finish(self) -> None:
        """Clear a refusal by the server, so that the next turn is sent again."""
        client = self._client
        if client is not None:
            client.clear_refusal()

    def close(self) -> None:
        """Close the connections; the next turn opens them again."""
        client, self._client = self._client, None
        if client is not None and client.loop is agents_loop():
            run_coroutine(client.close())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    async def _answer_turn(self, request: TurnRequest) -> Action:
        client = self._client
        if client is None or client.loop is not asyncio.get_running_loop():
            client = self._client = Client(self._server, self._meter)
        self._meter.add(requests=1)
        try:
            is_exact = await self._is_exact(client, request)
            return await self._answer_by_schema(
                partial(self._answer_with_tokens if is_exact else self._answer_with_text, client), request
            )
        except RequestError as failure:
            self._meter.add(failures=1)
            if failure.is_refusal:
                remedy = self._server.remedy(failure.status)
                raise ConfigError(f"{self._name} refuses every request: {failure.cause}; check {remedy}") from None
            raise AgentError(f"{self._name} returned no usable response: {failure.cause}") from None

    @property
    def _name(self) -> str:
        return f"{shown(self.model)} at {self._server.url}"

    async def _is_exact(self, client: Client, request: TurnRequest) -> bool:
        if not request.token_ids:
            if self._requires_ids:
                raise ConfigError(
                    "token_ids=True requires an environment with a tokenizer: the request has no token ids"
                )
            return False
        if self._returns_ids is None:
            if client.probe is None or client.probe.done():
                client.probe = asyncio.ensure_future(self._probe(client, request.token_ids[0]))
                # If all waiters are canceled when the probe fails, asyncio would log an exception "never retrieved".
                client.probe.add_done_callback(lambda probe: probe.cancelled() or probe.exception())
            await asyncio.shield(client.probe)  # one request for all sessions that wait for it
        return bool(self._returns_ids)

    async def _probe(self, client: Client, token_id: int) -> None:
        """Find out by requesting one token whether the server returns its id."""
        try:
            choice = await client.post("completions", self._token_body([token_id], 1), _first_choice)
            reason = "" if isinstance(choice.get("token_ids"), list) else "the response has none"
        except RequestError as failure:
            if failure.status in _INCONCLUSIVE_STATUSES:
                raise
            reason = failure.cause
        if reason and self._requires_ids:
            raise ConfigError(f"token_ids=True, but {self._name} returns no token ids: {reason}")
        self._returns_ids = not reason
        if reason:
            logger.warning("%s returns no token ids (%s): its answers are recorded as text", self._name, reason)
        else:
            logger.info("%s returns exact token ids", self._name)

    async def _answer_by_schema(
        self, answer: Callable[[TurnRequest], Awaitable[Action]], request: TurnRequest
    ) -> Action:
        """Answer with the schema that the answer must match, unless the server rejects requests for that."""
        if request.answer_schema is None or not self._takes_schemas:
            return await answer(dataclasses.replace(request, answer_schema=None))
        try:
            return await answer(request)
        except RequestError as failure:
            if failure.status not in (400, 422):
                raise
            action = await answer(dataclasses.replace(request, answer_schema=None))
            if self._takes_schemas:
                text = "%s rejects the JSON schema of an answer (%s): answers are requested without it"
                logger.warning(text, self._name, failure.cause)
            self._takes_schemas = False
            return action

    async def _answer_with_tokens(self, client: Client, request: TurnRequest) -> Action:
        prompt, budget = list(request.token_ids), self._budget(request)

        def read(answer: Mapping[str, Any]) -> Action:
            choice = _first_choice(answer)
            ids: Any = choice.get("token_ids")
            if not isinstance(ids, list) or not ids or not all(type(token) is int for token in cast("list[Any]", ids)):
                raise RequestError(f"the response has no token ids: {shown(cast('object', ids))}")
            token_ids = cast("list[int]", ids)
            if len(token_ids) > budget:
                raise RequestError(f"the response has {len(token_ids)} tokens, more than the limit of {budget}")
            if choice.get("prompt_token_ids") not in (None, prompt):
                # Not retried: the server would cut or change the prompt again.
                raise RequestError("the response is for a different prompt from the one that was sent", status=422)
            text, logprobs = _text(choice.get("text")), _logprobs(choice, len(token_ids))
            reason = choice.get("finish_reason")
            if reason not in ("stop", "length"):
                raise RequestError(f"the response has an unknown finish reason: {shown(reason)}")
            return Action(
                text=text, token_ids=token_ids, logprobs=logprobs, agent_state=request.agent_state, finish_reason=reason
            )

        return await client.post("completions", {**_schema_fields(request), **self._token_body(prompt, budget)}, read)

    def _token_body(self, prompt: list[int], budget: int) -> dict[str, Any]:
        stops = {"stop_token_ids": self._stop_token_ids} if self._stop_token_ids else {}
        fixed = {"max_tokens": budget, "logprobs": 0, "return_token_ids": True}
        return {"model": self.model, "prompt": prompt, **stops, **self._options, **fixed}

    async def _answer_with_text(self, client: Client, request: TurnRequest) -> Action:
        def read(answer: Mapping[str, Any]) -> Action:
            choice = _first_choice(answer)
            message: Any = choice.get("message")
            if not isinstance(message, Mapping):
                raise RequestError(f"the response has no message: {shown(choice)}")
            content = cast("Mapping[str, Any]", message)
            if choice.get("finish_reason") == "content_filter" or content.get("refusal"):
                self._meter.add(refusals=1)
            is_cut = choice.get("finish_reason") == "length"
            thoughts = (content.get(name) for name in ("reasoning_content", "reasoning"))  # vLLM, SGLang and others
            return Action(
                text=_text(content.get("content")) or _text(content.get("refusal")),
                agent_state=request.agent_state,
                finish_reason="length" if is_cut else "stop",
                tool_calls=() if is_cut else calls_in(content),  # the last call may be cut off but look complete
                reasoning=next((thought for thought in thoughts if thought and isinstance(thought, str)), None),
            )

        budget = "max_completion_tokens" if self._server.is_openai else "max_tokens"
        tools = {"tools": list(request.tools)} if request.tools else {}
        fixed = {"model": self.model, "messages": as_sent(request.messages), budget: self._budget(request), **tools}
        return await client.post("chat", {**_schema_fields(request), **self._options, **fixed}, read)

    def _budget(self, request: TurnRequest) -> int:
        budget = request.max_new_tokens
        return self._max_tokens if budget is None else min(budget, self._max_tokens)


def _schema_fields(request: TurnRequest) -> dict[str, Any]:
    if request.answer_schema is None:
        return {}
    schema = {"name": "answer", "strict": True, "schema": request.answer_schema}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _request_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options and return them as fields of a request."""
    if unknown := sorted(options.keys() - _OPTIONS):
        hint = did_you_mean(unknown[0], {*_OPTIONS, *(OpenAIAgent.__init__.__kwdefaults__ or {})})
        raise ConfigError(
            f"{shown(unknown[0])} is not an option of OpenAIAgent (pass server-specific options in extra_body){hint}"
        )
    extra: Any = options.get("extra_body") or {}
    require("extra_body", extra, is_dict, "a dict of fields of the request")
    fields = cast("Mapping[str, Any]", extra)
    if reserved := sorted(_RESERVED & fields.keys()):
        raise ConfigError(f"extra_body must not contain {reserved}, which OpenAIAgent sets itself")
    return {**{name: value for name, value in options.items() if name != "extra_body"}, **fields}


def _first_choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    choices: Any = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise RequestError(f"the response has no choices: {shown(answer)}")
    return cast("Mapping[str, Any]", choices[0])


def _text(value: Any) -> str:
    """Check that a value is text; a missing value is an empty answer."""
    if value is None or isinstance(value, str):
        return value or ""
    raise RequestError(f"the response's content is not text: {shown(value)}")


def _logprobs(choice: Mapping[str, Any], num_tokens: int) -> Sequence[float] | None:
    given: Any = choice.get("logprobs")
    if given is None:
        return None
    values: Any = cast("Mapping[str, Any]", given).get("token_logprobs") if isinstance(given, Mapping) else None
    if not isinstance(values, list) or len(cast("list[Any]", values)) != num_tokens:
        raise RequestError(
            f"the response has {num_tokens} token ids, and its log-probabilities do not match them: "
            f"{shown(cast('object', given))}"
        )
    if not all(isinstance(value, int | float) for value in cast("list[Any]", values)):
        raise RequestError(f"the response has log-probabilities that are not numbers: {shown(cast('object', values))}")
    # JSON has no infinity: servers write -9999 for an unknown log-probability.
    return [float(value) if value >= MIN_LOGPROB else math.nan for value in cast("list[float]", values)]
