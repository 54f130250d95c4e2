"""Parse chat messages of any common shape, OpenAI's included, into this library's messages and actions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentsgym.errors import ConfigError
from agentsgym.texts import shown
from agentsgym.tokens.calls.values import MalformedCallError, call_of
from agentsgym.tokens.tool_messages import structured_calls
from agentsgym.types import Action, Message, ToolCall

ROLES: Final = ("system", "user", "assistant", "tool")
_SAME_ROLE: Final = {"developer": "system"}  # the name in OpenAI's reasoning models
_UNWRITTEN: Final = ("function_call", "refusal", "audio")  # in OpenAI's answers, but in no template
_CALLS: Final = "tool_calls"


def read_messages(messages: Any) -> tuple[list[Message], dict[int, Action]]:
    """Parse a conversation.

    Args:
        messages: Dicts with ``role`` and ``content``: a text, null, or parts of text. An answer may have ``tool_calls``
            (arguments as an object or as JSON text) and ``reasoning_content`` (or ``reasoning``).

    Returns:
        The messages, without calls, and the action of each answer by its index among them.

    Raises:
        ConfigError: There are no messages, or one is invalid; the error names its index.
    """
    if not _is_list(messages) or not messages:
        raise ConfigError(f"messages must be a list of at least one chat message, got {shown(messages)}")
    read: list[Message] = []
    actions: dict[int, Action] = {}
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        plain = _plain(message, where)
        read.append(plain)
        calls = [_call(one, f"{where}['{_CALLS}'][{n}]") for n, one in enumerate(_calls_of(message, where))]
        if plain["role"] == "assistant":
            actions[index] = Action(text=plain["content"], reasoning=plain.get("reasoning_content"), tool_calls=calls)
    return read, actions


def shown_messages(messages: Any, where: str) -> list[Message]:
    """Parse messages that only describe the tokens beside them: invalid calls are kept as written.

    Args:
        messages: The messages, as for :func:`read_messages`.
        where: The name of the messages in errors.

    Raises:
        ConfigError: A message has no valid role or content.
    """
    if not _is_list(messages):
        raise ConfigError(f"{where} must be a list of chat messages, got {shown(messages)}")
    return [shown_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def shown_message(message: Any, where: str) -> Message:
    """Parse one message as :func:`shown_messages` does."""
    plain, calls = _plain(message, where), _calls_of(message, where)
    try:
        read = structured_calls([_call(call, where) for call in calls], 0)
    except ConfigError:
        if not all(isinstance(_get(call, "function"), Mapping) for call in calls):
            raise  # a call that cannot be shown
        return {**plain, "tool_calls": calls}
    return {**plain, "tool_calls": read} if read else plain


def _plain(message: Any, where: str) -> Message:
    """Convert a message to this library's form, without calls."""
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} must be a dict with 'role' and 'content', got {shown(message)}")
    given = cast("Mapping[str, Any]", message)
    role = _SAME_ROLE.get(str(given.get("role")), given.get("role"))
    if role not in ROLES:
        raise ConfigError(f"{where} must have a role of {', '.join(ROLES)}, got {shown(given.get('role'))}")
    for name in _UNWRITTEN:
        if given.get(name):
            raise ConfigError(f"{where} has a {name!r}, which chat templates ignore: put it into content or tool_calls")
    plain: dict[str, Any] = {"role": role, "content": _text(given.get("content"), f"{where}['content']")}
    if role == "assistant":
        thought = next(
            (given[name] for name in ("reasoning_content", "reasoning") if given.get(name) is not None), None
        )
        if thought is not None:
            plain["reasoning_content"] = _text(thought, f"{where}['reasoning_content']")
    if role == "tool":
        plain |= {
            name: _text(given[name], f"{where}[{name!r}]")
            for name in ("tool_call_id", "name")
            if given.get(name) is not None
        }
    return cast("Message", plain)


def _text(content: Any, where: str) -> str:
    """Convert a content to one text; null is empty, and parts of text are concatenated."""
    if content is None:
        return ""
    if _is_list(content):
        texts: list[str] = []
        for index, part in enumerate(cast("Sequence[Any]", content)):
            text = _get(part, "text") if isinstance(part, Mapping) else part
            if not isinstance(text, str):
                given = shown(cast("object", part))
                raise ConfigError(f"{where}[{index}] must be a text part, {{'type': 'text', 'text': …}}, got {given}")
            texts.append(_text(text, f"{where}[{index}]"))
        return "".join(texts)
    if not isinstance(content, str):
        raise ConfigError(f"{where} must be a string, a list of text parts or null, got {shown(content)}")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} must be valid Unicode, got {shown(content)}") from error
    return content


def _get(value: Any, name: str) -> Any:
    """A field of a dict; None for any other value."""
    return cast("Mapping[str, Any]", value).get(name) if isinstance(value, Mapping) else None


def _calls_of(message: Mapping[str, Any], where: str) -> Sequence[Any]:
    calls = message.get(_CALLS)
    if not calls:
        return ()
    if not _is_list(calls) or message["role"] != "assistant":
        raise ConfigError(f"{where}['{_CALLS}'] must be a list, only in assistant messages, got {shown(calls)}")
    return cast("Sequence[Any]", calls)


def _call(call: Any, where: str) -> ToolCall:
    """Parse a call in OpenAI's form, with an object as arguments, or without the ``function`` wrapper."""
    function = _get(call, "function") or call
    arguments = _get(function, "arguments")
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        return call_of(_get(function, "name"), {} if arguments is None else arguments, _get(call, "id"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} must have arguments in JSON, got {shown(arguments)}: {error}") from error
    except MalformedCallError as error:
        raise ConfigError(f"{where} {error}, got {shown(call)}") from error


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
