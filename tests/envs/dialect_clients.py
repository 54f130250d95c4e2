"""The official SDKs, connected to the dialects inside the process; replies come from a function."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from agentsgym.envs.AgentProgram.calls import CallError, CallRequest, Reply
from agentsgym.envs.AgentProgram.dialects.completions import CHAT, COMPLETIONS
from agentsgym.envs.AgentProgram.dialects.messages import MESSAGES
from agentsgym.envs.AgentProgram.dialects.responses import RESPONSES, carried_over
from agentsgym.envs.AgentProgram.dialects.shared import answer_message
from agentsgym.types import Message, ToolCall

CREATED = 1_700_000_000
BY_PATH = {dialect.path: dialect for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)}
LOOK = ToolCall(name="look", arguments={"at": "door", "times": 2}, id="call_1")
HELLO = Reply(
    call_id="7",
    text="Hello there",
    prompt_ids=(1, 2, 3),
    token_ids=(4, 5),
    token_texts=("Hello", " there"),
    logprobs=(-0.5, -0.25),
)
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "string", "description": "Where."}}}
SCHEMA = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}


@dataclass
class Served:
    """The four endpoints without a server: a transport answers each request with the replies of a function."""

    policy: Callable[[CallRequest], Sequence[Reply]]
    calls: list[CallRequest] = field(default_factory=list)
    conversations: dict[str, list[Message]] = field(default_factory=dict)

    def body(self, path: str, body: Mapping[str, Any]) -> tuple[int, str, bool]:
        """The status and the body of a response, and whether it is streamed."""
        dialect = BY_PATH[path]
        try:
            call = dialect.parse(body, self.conversations.get)
        except CallError as error:
            return error.status, json.dumps(dialect.error(error)), False
        replies = self.policy(call)
        self.calls.append(call)
        for reply in replies:
            self.conversations[reply.call_id] = carried_over(call, reply)
        if call.streams:
            return 200, "".join(dialect.stream(call, replies, CREATED)), True
        return 200, json.dumps(dialect.respond(call, replies, CREATED), allow_nan=False), False

    def client(self, sdk: Any, client: str = "OpenAI") -> Any:
        """A client of an SDK, which validates every response."""
        kinds: tuple[type[Any], ...] = sdk.DefaultHttpxClient.__mro__
        library = importlib.import_module(
            next(kind.__module__ for kind in kinds if "http" in kind.__module__).split(".")[0]
        )

        def handle(request: Any) -> Any:
            status, text, streams = self.body(request.url.path, json.loads(request.content))
            kind = "text/event-stream" if streams else "application/json"
            return library.Response(status, headers={"content-type": kind}, content=text.encode())

        base_url = "http://policy/v1" if client == "OpenAI" else "http://policy"
        return getattr(sdk, client)(
            api_key="none",
            base_url=base_url,
            max_retries=0,
            http_client=sdk.DefaultHttpxClient(transport=library.MockTransport(handle)),
            _strict_response_validation=True,
        )


def always(*replies: Reply) -> Served:
    """Endpoints that give the same replies to each request."""
    return Served(lambda call: replies)


texts = st.text(max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def turns(draw: st.DrawFn) -> list[tuple[Reply, list[str]]]:
    """The replies of a conversation, each with what is then answered: the results of its tool calls, or one text."""
    drawn: list[tuple[Reply, list[str]]] = []
    for number in range(draw(st.integers(1, 4))):
        calls = [
            ToolCall(name=name, arguments=arguments, id=f"call_{number}_{index}")
            for index, (name, arguments) in enumerate(
                draw(
                    st.lists(
                        st.tuples(st.sampled_from(["look", "go"]), st.dictionaries(texts, json_values, max_size=3)),
                        max_size=2,
                    )
                )
            )
        ]
        reasoning = draw(st.none() | st.text(min_size=1, max_size=12))
        reply = Reply(call_id=str(number), text=draw(texts), reasoning=reasoning, tool_calls=calls)
        drawn.append((reply, draw(st.lists(texts, min_size=max(1, len(calls)), max_size=max(1, len(calls))))))
    return drawn


def expected_messages(first: str, played: Sequence[tuple[Reply, Sequence[str]]]) -> list[Message]:
    """The messages of a conversation after all its turns."""
    messages: list[Message] = [{"role": "user", "content": first}]
    for reply, output in played:
        messages.append(answer_message(reply))
        results: list[Message] = [
            {"role": "tool", "content": text, "tool_call_id": str(call.id), "name": call.name}
            for call, text in zip(reply.tool_calls, output, strict=False)
        ]
        messages += results or [{"role": "user", "content": output[0]}]
    return messages
