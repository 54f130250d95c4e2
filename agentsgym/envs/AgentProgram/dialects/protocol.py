"""What a dialect does: bodies of requests in, :class:`CallRequest` out, and replies back into bodies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from agentsgym.envs.AgentProgram.calls import CallError, CallRequest, Reply
from agentsgym.types import Message

Conversations = Callable[[str], Sequence[Message] | None]
"""Returns the conversation that ended with the reply of this ``call_id``, the reply included; None if unknown."""


class Dialect(ABC):
    """One API; each is a module-level object without state.

    Attributes:
        path: The path of its endpoint, such as ``"/v1/chat/completions"``.
    """

    path: ClassVar[str]

    @abstractmethod
    def parse(self, body: Mapping[str, Any], conversations: Conversations) -> CallRequest:
        """Check the parsed JSON body of a request and convert it.

        Raises:
            CallError: A value is missing, has the wrong type, or is not supported; the message describes a valid value.
        """

    @abstractmethod
    def respond(self, request: CallRequest, replies: Sequence[Reply], created: int) -> dict[str, Any]:
        """Return the body of a response that is not streamed; ``created`` is in seconds since 1970."""

    @abstractmethod
    def stream(self, request: CallRequest, replies: Sequence[Reply], created: int) -> Iterator[str]:
        """Return the server-sent events of a response, each complete with its blank line."""

    def error(self, error: CallError) -> dict[str, Any]:
        """Return the body of an error, by default in the form of OpenAI's APIs."""
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
