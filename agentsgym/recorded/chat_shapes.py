"""Convert chat messages in common formats, including OpenAI's, to this library's messages and actions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentsgym.errors import ConfigError
from agentsgym.texts import shown
from agentsgym.tokens.calls.values import MalformedCallError, tool_call
from agentsgym.types import Action, Message, ToolCall

ROLES: Final = ("system", "user", "assistant", "tool")
_SAME_ROLE: Final = {"developer": "system"}  # the name in OpenAI's reasoning models
_UNSUPPORTED_FIELDS: Final = ("function_call", "refusal", "audio")  # of OpenAI's, rendered by no chat template
_CALLS: Final = "tool_calls"


def parse_messages(messages: Any) -> tuple[list[Message], dict[int, Action]]:
    """Parse a conversation.

    Args:
        messages: Dicts with ``role`` and ``content``, which is a string, None, or a list of text parts. An assistant
            message may have ``tool_calls`` (arguments as an object or as JSON text) and ``reasoning_content`` (or
            ``reasoning``).

    Returns:
        The messages, without tool calls, and a dict from the index of each assistant message to its action.
    """
    if not _is_sequence(messages) or not messages:
        raise ConfigError(f"messages must be a list of at least one chat message, got {shown(messages)}")
    parsed: list[Message] = []
    actions: dict[int, Action] = {}
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        plain = _plain(message, where)
        parsed.append(plain)
        calls = [_call(call, f"{where}['{_CALLS}'][{n}]") for n, call in enumerate(_calls_of(message, where))]
        if plain["role"] == "assistant":
            actions[index] = Action(text=plain["content"], reasoning=plain.get("reasoning_content"), tool_calls=calls)
    return parsed, actions


def _plain(message: Any, where: str) -> Message:
    """Convert a message to this library's format, without its tool calls."""
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} must be a dict with 'role' and 'content', got {shown(message)}")
    given = cast("Mapping[str, Any]", message)
    role = given.get("role")
    if not isinstance(role, str) or (role := _SAME_ROLE.get(role, role)) not in ROLES:
        raise ConfigError(f"{where} must have one of the roles {', '.join(ROLES)}, got {shown(role)}")
    for name in _UNSUPPORTED_FIELDS:
        if not _is_empty(given.get(name)):
            raise ConfigError(
                f"{where} has the field {name!r}, which chat templates ignore: move its value to content or tool_calls"
            )
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
    """Convert message content to a string: None to an empty one, and a list of text parts to their concatenation."""
    if content is None:
        return ""
    if _is_sequence(content):
        texts: list[str] = []
        for index, part in enumerate(cast("Sequence[Any]", content)):
            text = _get(part, "text") if isinstance(part, Mapping) else part
            if not isinstance(text, str):
                given = shown(cast("object", part))
                raise ConfigError(
                    f"{where}[{index}] must be a text part such as {{'type': 'text', 'text': …}}, got {given}"
                )
            texts.append(_text(text, f"{where}[{index}]"))
        return "".join(texts)
    if not isinstance(content, str):
        raise ConfigError(f"{where} must be a string, a list of text parts, or None, got {shown(content)}")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} must be valid Unicode, got {shown(content)}") from error
    return content


def _get(value: Any, name: str) -> Any:
    """Return a dict's field; None if the value is not a dict or lacks the field."""
    return cast("Mapping[str, Any]", value).get(name) if isinstance(value, Mapping) else None


def _calls_of(message: Mapping[str, Any], where: str) -> Sequence[Any]:
    calls = message.get(_CALLS)
    if _is_empty(calls):
        return ()
    if not _is_sequence(calls) or message["role"] != "assistant":
        raise ConfigError(
            f"{where}['{_CALLS}'] must be a list, and only assistant messages may have it, got {shown(calls)}"
        )
    return cast("Sequence[Any]", calls)


def _call(call: Any, where: str) -> ToolCall:
    """Parse a tool call, with or without OpenAI's ``function`` wrapper; arguments are an object or JSON text."""
    function = _get(call, "function") or call
    arguments = _get(function, "arguments")
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        return tool_call(_get(function, "name"), {} if arguments is None else arguments, _get(call, "id"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{where} must have arguments that are valid JSON, got {shown(arguments)}: {error}"
        ) from error
    except MalformedCallError as error:
        raise ConfigError(f"{where} {error}, got {shown(call)}") from error


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, bool | str | Sequence | Mapping) and not value)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
